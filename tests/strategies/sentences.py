"""Tasks of sequences, whose models look at other positions in attention alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import evener
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.strategies.context.context import ContextParallel
from evener.tools.verify import Trajectory, record
from evener.training.engine import Engine

WORDS, WIDTH, HEADS, SAMPLES, LONGEST = 11, 6, 3, 21, 15
PADDING = -100


class Block(nn.Module):
    """Attention by Evener's function, with fewer heads of keys, of which those of padding are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // HEADS)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.norm(x)
        k, v = self.kv(y)[:, None].chunk(2, -1)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed = evener.nn.attention(q, k, v, causal=True, key_padding=hidden)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """The embedding is the head too."""

    def __init__(self, block: Any = Block) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LONGEST, WIDTH))
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = words < 0
        x = self.embed(words.clamp(min=0)) + self.place[evener.nn.positions(words.shape[1])]
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(x)


class Ordinary(nn.Module):
    """As models that know nothing of Evener do it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.mixed = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mixed(mixed.transpose(1, 2).flatten(2))


class Layered(nn.Module):
    """A layer of torch, under masks of the piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        output: Tensor = self.layer(x, causal, hidden)
        return output


class Multi(nn.Module):
    """Attention of torch to both sides, sequence first, repeated in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, kdim=WIDTH, vdim=WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        normal: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = checkpoint(self._mixed, normal, hidden, use_reentrant=False)
        return x + mixed

    def _mixed(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attend(x, x, x, key_padding_mask=hidden)[0].transpose(0, 1)


class Dropping(Ordinary):
    """By sample and position: before positions are run together, and after."""

    def __init__(self) -> None:
        super().__init__()
        self.apart, self.together = evener.nn.Dropout(0.3), evener.nn.Dropout(0.4)
        self.channels = evener.nn.Dropout1d(0.2)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = super().forward(self.apart(x), hidden)
        x = x + self.together(x.flatten(0, 1)).view_as(x)
        return self.channels(x.transpose(1, 2)).transpose(1, 2)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")


def count(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def whole_right(outputs: Tensor, targets: Tensor) -> evener.Sum:
    """A metric of whole sequences, that pieces could not have."""
    best = (outputs.argmax(-1) == targets) | (targets == PADDING)
    return evener.Sum(best.double().mean(1).square().sum(), len(targets))


def pad(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*items, strict=True)
    return (
        pad_sequence(list(inputs), batch_first=True, padding_value=-1),
        pad_sequence(list(targets), batch_first=True, padding_value=PADDING),
    )


def task(model: Any = Model, shortest: int = 2, **changed: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(WORDS, (1 + shortest + n * 5 % 9,), generator=generator) for n in range(SAMPLES)]
    data = [(text[:-1], text[1:]) for text in texts]
    usual: dict[str, Any] = {
        "model": model,
        "loss": evener.loss(total=total, count=count),
        # The true gradient of a bias of keys is zero, which AdamW would divide by its own size.
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "train": data,
        "evaluate": data[:11],
        "metrics": {"whole": whole_right},
        "collate": pad,
        "batch_size": 5,
        "epochs": 3,
        "name": "context",
    }
    return Task(**(usual | changed))


def ordinary() -> Task:
    return task(lambda: Model(Ordinary))


def layered() -> Task:
    return task(lambda: Model(Layered), shortest=6)  # one position a rank would not tell a mask


def dropping() -> Task:
    return task(lambda: Model(Dropping))


def multi() -> Task:
    return task(lambda: Model(Multi), collate=pad_all)  # BatchNorm counts padding too


def penalised() -> Task:
    return task(
        penalty=lambda model: 0.1 * sum((p.norm() for p in model.parameters()), start=torch.zeros(()))
    )


def pad_all(items: Any) -> Any:
    """To one length, as predictions must be; items of inputs alone have a number for a target."""
    words, targets = zip(*items, strict=True)
    full = [F.pad(text, (0, LONGEST - len(text)), value=-1) for text in words]
    if not isinstance(targets[0], Tensor):
        return torch.stack(full), torch.tensor(targets)
    return torch.stack(full), torch.stack([F.pad(t, (0, LONGEST - len(t)), value=PADDING) for t in targets])


@dataclass(frozen=True)
class Ulysses(ContextParallel):
    method: str = "ulysses"
    order: str = "contiguous"


def trajectory(
    name: str, environment: Environment | None = None, module: str = __name__, **settings: Any
) -> Trajectory:
    """A run of a task of this module, or of another."""
    usual: dict[str, Any] = {"dtype": "float64", "device": "cpu", "steps": 5, "strategy": "context"}
    return record(f"{module}:{name}", None, RunConfig(**(usual | settings)), environment)


def evaluated(**settings: Any) -> tuple[dict[str, float], Any]:
    usual: dict[str, Any] = {"strategy": "context", "device": "cpu", "dtype": "float64", "steps": 2}
    whole = task(collate=pad_all)
    with Engine(whole, RunConfig(**(usual | settings))) as engine:
        for batch in engine.batches():
            engine.step(batch)
        metrics = engine.evaluate()
        data: Any = engine.task.train
        everywhere: Any = engine.predict(data, everywhere=True)
        inputs: Any = [words for words, _ in data]
        assert torch.equal(everywhere, engine.predict(inputs, targets=False, everywhere=True))  # type: ignore[arg-type]
        return metrics, everywhere
