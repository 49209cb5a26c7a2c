"""Ratings of items by users, with embeddings whose gradients are sparse.

An item of the dataset is ``((user, item), rating)``: a tuple of inputs becomes the model's positional arguments.

    python examples/recommendation.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener

USERS, ITEMS, RATINGS = 200, 100, 2000


class Pairs(TensorDataset):
    """Items ``((user, item), rating)``."""

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        user, item, rating = super().__getitem__(index)
        return (user, item), rating


class Factors(nn.Module):
    """The rating is the product of a user's and an item's vector."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, 8, sparse=True)
        self.items = nn.Embedding(ITEMS, 8, sparse=True)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(1)


def ratings() -> Pairs:
    generator = torch.Generator().manual_seed(0)
    taste, kind = torch.randn(USERS, generator=generator), torch.randn(ITEMS, generator=generator)
    users = torch.randint(USERS, (RATINGS,), generator=generator)
    items = torch.randint(ITEMS, (RATINGS,), generator=generator)
    return Pairs(users, items, taste[users] * kind[items])


def task() -> evener.Task:
    return evener.Task(
        name="ratings",
        model=Factors,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.05),
        train=ratings(),
        batch_size=100,
        epochs=5,
    )


if __name__ == "__main__":
    print(f"last loss {evener.fit(task, processes=1).summary.final_loss:.3f}")
