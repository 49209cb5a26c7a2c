"""What shares of the cost of a batch (``Task.cost``) bring against shares of samples, where samples are very unequal.

    python -m benchmarks.cost_shares [--turns 20] [--steps 10] [--batch-size 32]

Texts have from 10 to 2,000 tokens, lognormal with a median of 120. The texts of a rank are put one behind the other, so
that its time is a line of its tokens and there is no padding. Two ranks train the same batches in turns, each contender
from the same seed: equal ranks with equal shares, and ranks of which one runs at half its speed (``throttle``) with
shares by speed. Ratios below 1 are faster than shares by samples.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import evener
from benchmarks.contenders import Work, ours
from benchmarks.drawn import randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import record
from evener.distributed.session import Session

SAMPLES, VOCABULARY, WIDTH = 2048, 256, 96
WARM_UP = 40
"""Steps before anything is measured, in which shares by speed find their place."""


def texts() -> list[Tensor]:
    """Tokens ``(T,)`` of each text."""
    drawn = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0))
    lengths = (120 * drawn.exp()).clamp(10, 2000).int().tolist()
    return list(randint(VOCABULARY, (sum(lengths),)).split(lengths))


def joined(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The texts one behind the other, and the token after each, both ``(T,)``."""
    return torch.cat([text[:-1] for text in items]), torch.cat([text[1:] for text in items])


def model() -> nn.Module:
    """From each token to scores of the next, ``(T, VOCABULARY)``."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, VOCABULARY),
    )


def compare(turns: int, steps: int, batch_size: int) -> dict[str, dict[str, Timing]]:
    data = texts()
    work = Work("texts", model, data, batch_size)  # type: ignore[arg-type]
    by_samples = {"collate": joined}
    by_cost = {**by_samples, "cost": [len(text) for text in data]}
    kinds = {
        "two equal ranks, equal shares": {"balance": "equal"},
        "two ranks, one at half its speed, shares by speed": {"balance": "auto", "throttle": "1,0.5"},
    }
    with Session(device="cpu") as session:
        return {
            name: take_turns(
                {
                    "by samples": ours(by_samples, **settings),
                    "by cost": ours(by_cost, **settings),
                },
                work,
                session,
                turns,
                steps,
                WARM_UP,
            )
            for name, settings in kinds.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    found = evener.launch(
        compare, arguments.turns, arguments.steps, arguments.batch_size, processes=2, device="cpu"
    )[0]
    record("cost_shares", "two CPU ranks", table(found, "by samples"))


if __name__ == "__main__":
    main()
