"""What ``evener.print`` shows of rank 0 is compared with what it would show of others."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import evener
from evener.training.prepare.printed import PrintedTexts, numbers_of
from tests.training.prepare.running import model_of, rows, with_settings


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Test set: Average loss: 2.3188, Accuracy: 3/60 (5%)", ["2.3188", "3", "60", "5"]),
        (
            "| epoch 1 | 5/14 batches | lr 20.00 | ms/batch 5.22 | loss 4.17",
            ["1", "5", "14", "20.00", "4.17"],
        ),
        ("Epoch: [0][10/50]\tTime  0.106 ( 0.206)\tData  0.001 ( 0.01)\tLoss 6.9", ["0", "10", "50", "6.9"]),
        ("iter 0: loss 4.1e-3, time 532.11ms", ["0", "4.1e-3"]),
        ("12:04:33 step 4, 3.2 it/s, ETA 0:00:12, 1234 samples/s, 3.1GB", ["4"]),
        ("complete in 0m 12s on cuda:1, pid 4711", []),
    ],
)
def test_times_are_no_numbers_of_the_training(text: str, numbers: list[str]) -> None:
    assert numbers_of(text) == numbers


def loop(kind: str) -> list[str]:
    """The messages of two epochs of evaluation."""
    with with_settings(balance="2,1"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss, loader, model = evener.prepare(
            nn.CrossEntropyLoss(), DataLoader(rows(12), batch_size=6), model_of()
        )
        for epoch in range(3):
            right, began = 0, time.perf_counter() + evener.rank()
            with torch.no_grad():
                for x, y in loader:
                    value = loss(model(x), y)
                    found, known = (
                        (model(x).argmax(1), y) if kind == "own" else evener.gather((model(x).argmax(1), y))
                    )
                    right += (found == known).sum().item() + 5 * len(known)
            if kind == "one" and evener.is_main():
                evener.print(f"epoch {epoch}, {evener.rank()}")
            else:
                evener.print("epoch", epoch, value, f"{right}/60 in {time.perf_counter() - began:.1f} s")
        evener.barrier()
        return [str(each.message) for each in caught]


def test_numbers_of_one_rank_are_told_once(ranks: Any) -> None:
    first, second = ranks(2).run(loop, "own")
    assert len(first) == 1, first
    assert all(part in first[0] for part in ("test_printed.py:", "/60", "evener.gather")), first
    assert second == []


@pytest.mark.parametrize("kind", ["all", "one"])
def test_numbers_of_all_ranks_times_and_prints_of_one_rank_are_not(ranks: Any, kind: str) -> None:
    assert ranks(2).run(loop, kind) == [[], []]


def test_lines_that_were_told_are_not_compared_again() -> None:
    """Nor those of one rank alone. Others are."""
    printed, others = PrintedTexts(), PrintedTexts()
    asked: list[Any] = []

    def compared() -> None:
        said = [printed._texts, others._texts]
        checksums = [printed.checksum, others.checksum]

        def gather(_: Any) -> Any:
            asked.append(said)
            return said

        others.compare(checksums, lambda _: said, 1)
        printed.compare(checksums, gather, 0)

    for printer, number in ((printed, 1), (others, 2)):
        printer.note("a.py", 1, ["loss", number])
    printed.note("a.py", 2, [5])
    with pytest.warns(UserWarning, match="of rank 0, and those of rank 1 are others: 'loss 1' and 'loss 2'"):
        compared()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in (3, 4):
            printed.note("a.py", 1, [number])
            printed.note("a.py", 2, [number])
            printed.note("a.py", 3, [number])
            others.note("a.py", 3, [number])
            compared()
    assert len(asked) == 1
