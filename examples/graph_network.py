"""Graphs of unequal sizes: does a graph have a triangle? A batch is one large graph whose parts are not connected.

A rank's graphs are joined by the collate function, so that a rank with fewer or smaller graphs has less to do. The loss
is a mean over graphs, whoever computes them: `--balance` may divide them anyhow. The strategy is `ddp`: the model is
small, and what takes time is the samples.

    python examples/graph_network.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import evener

GRAPHS, DEGREES = 600, 8

Joined = dict[str, Tensor]


class Graphs(Dataset[tuple[Tensor, Tensor]]):
    """Items are a matrix of edges (n, n) and whether the graph has a triangle."""

    def __len__(self) -> int:
        return GRAPHS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        n = int(torch.randint(5, 12, (), generator=generator))
        upper = (torch.rand(n, n, generator=generator) < 1.6 / n).triu(1)
        edges = (upper | upper.T).float()
        return edges, ((edges @ edges @ edges).trace() > 0).long()


def join(items: list[tuple[Tensor, Tensor]]) -> tuple[Joined, Tensor]:
    """One graph of all, with the number of its graph for each node; and the targets (N)."""
    sizes = torch.tensor([len(edges) for edges, _ in items])
    edges = torch.block_diag(*(edges for edges, _ in items))
    owner = torch.repeat_interleave(torch.arange(len(items)), sizes)
    joined = {"pairs": edges.nonzero().T, "owner": owner, "degree": edges.sum(1).long()}
    return joined, torch.stack([target for _, target in items])


class Messages(nn.Module):
    """Each node adds up what its neighbors say, as in Xu et al., "How powerful are graph neural networks?", 2019."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        heard = torch.zeros_like(x).index_add(0, pairs[0], x[pairs[1]])
        out: Tensor = x + self.mlp(x + heard)
        return out


class GraphNetwork(nn.Module):
    """Scores (N, 2) of the graphs; the keys of the inputs are its arguments."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.start = nn.Embedding(DEGREES, width)
        self.layers = nn.ModuleList(Messages(width) for _ in range(3))
        self.out = nn.Linear(width, 2)

    def forward(self, pairs: Tensor, owner: Tensor, degree: Tensor) -> Tensor:
        x = self.start(degree.clamp(max=DEGREES - 1))
        for layer in self.layers:
            x = layer(x, pairs)
        graphs = x.new_zeros(int(owner[-1]) + 1, x.shape[1]).index_add(0, owner, x)
        scores: Tensor = self.out(graphs)
        return scores


def task() -> evener.Task:
    return evener.Task(
        name="triangles",
        model=GraphNetwork,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        train=torch.utils.data.Subset(Graphs(), range(500)),
        evaluate=torch.utils.data.Subset(Graphs(), range(500, GRAPHS)),
        metrics={"accuracy": evener.accuracy},
        collate=join,
        batch_size=50,
        epochs=12,
    )


if __name__ == "__main__":
    summary = evener.fit(task, processes=2, balance="2,1").summary
    print(f"accuracy {summary.metrics['accuracy']:.3f}")
