"""What grains cost (`--exact bits`): forward and backward of 64 samples, cut into grains, beside one batch of 64.

Five networks, one CPU thread, float32, in turns; times are those of the processor, which other programs disturb less.
This is the worst case, one rank with the whole batch: a rank whose share is one grain loses nothing. `benchmarks.bits`
measures what the exact sum costs beside that.

python -m benchmarks.bits_grains [--turns 21]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.drawn import rand, randint
from benchmarks.results import Table, Value, cell, record, spread

SAMPLES = 64
GRAINS = (64, 32, 16, 8, 4)


class Recurrent(nn.Module):
    """An LSTM whose last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(16, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, steps: Tensor) -> Tensor:
        classes: Tensor = self.last(self.cells(steps)[0][:, -1])
        return classes


class Words(nn.Module):
    """A transformer over 64 words, causal, which predicts each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 128), nn.Parameter(torch.zeros(64, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.last = nn.Linear(128, 64)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        hidden = self.layers(self.words(words) + self.places, mask, is_causal=True)
        logits: Tensor = self.last(hidden)
        return logits.transpose(1, 2)


@dataclass(frozen=True)
class Network:
    """A model with 64 samples for it."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def _conv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    )


def networks() -> list[Network]:
    classes = randint(10, (SAMPLES,))
    rows, images, words = rand(SAMPLES, 64), rand(SAMPLES, 3, 32, 32), randint(64, (SAMPLES, 64))
    return [
        Network("MLP", lambda: _mlp(256), rows, classes),
        Network("wide MLP", lambda: _mlp(1228), rows, classes),
        Network("convolutions", _conv, images, classes),
        Network("transformer of 4 layers, 64 words", Words, words, words.roll(-1, 1)),
        Network("LSTM, 16 steps", Recurrent, rand(SAMPLES, 16, 16), classes),
    ]


def passes(model: nn.Module, inputs: Tensor, targets: Tensor, grain: int) -> None:
    """Forward and backward of all samples, grain after grain. The gradients of each are taken, as of a block of one
    grain, and not added up by autograd: `benchmarks.bits` has the sum in place of that."""
    for part, wanted in zip(inputs.split(grain), targets.split(grain), strict=True):
        nn.functional.cross_entropy(model(part), wanted, reduction="sum").backward()
        model.zero_grad()


def measured(network: Network, turns: int) -> dict[int, list[float]]:
    """For each grain the processor's seconds of all turns."""
    torch.manual_seed(0)
    model, found = network.model(), {grain: list[float]() for grain in GRAINS}
    for turn in range(turns + 2):
        for grain, seconds in found.items():
            began = time.thread_time()
            passes(model, network.inputs, network.targets, grain)
            if turn >= 2:  # the first two choose kernels and take memory
                seconds.append(time.thread_time() - began)
    return found


def row(network: Network, found: dict[int, list[float]]) -> list[Value]:
    """The median of each size in milliseconds, with the ratios of turns beside each other."""
    size = sum(parameter.numel() for parameter in network.model().parameters())
    cells: list[Value] = [f"{network.name} ({size / 1e3:,.0f} k)"]
    for seconds in found.values():
        ratios = [b / a for a, b in zip(found[SAMPLES], seconds, strict=True)]
        about = {"ratio": statistics.median(ratios), "spread": spread(ratios)}
        cells.append(cell(1e3 * statistics.median(seconds), "ms", **about))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    columns = ["network (parameters)", "one batch", *(f"grains of {grain}" for grain in GRAINS[1:])]
    rows = (row(network, measured(network, arguments.turns)) for network in networks())
    record("bits_grains", "64 samples on one rank", Table(columns, rows, "CPU time over that of one batch"))


if __name__ == "__main__":
    main()
