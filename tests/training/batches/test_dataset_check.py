from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from evener.core.config.run_config import RunConfig
from evener.distributed.environment import detect
from evener.errors import ConfigurationError, DataError
from evener.training.batches.dataset_check import difference
from evener.training.engine import Engine
from tests import tasks


class Changes(Dataset[Any]):
    """Samples that are changed by ``how``."""

    def __init__(self, how: str) -> None:
        self.data, self.how, self.reads = tasks.plain().train, how, 0
        self.samples = [f"{n}.png" for n in range(len(self.data))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        drawn = {
            "same": lambda: index,
            "function": lambda: index,
            "torch": lambda: torch.rand(()).item(),
            "numpy": lambda: np.random.rand(),
            "random": random.random,
            "rank": lambda: detect().rank * (index > 20),
            "state": lambda: self.reads,
        }[self.how]()
        inputs, targets = self.data[index]
        names = ["a", (lambda: 0) if self.how == "function" else None]
        return {"x": inputs + drawn, "names": names, "label": targets}


def told(how: str, check: str) -> tuple[str, bool]:
    """What was said, and whether the generators are where they were."""
    torch.manual_seed(detect().rank)
    np.random.seed(3)
    random.seed(3)
    before = torch.get_rng_state(), np.random.rand(), random.random()
    torch.manual_seed(detect().rank)
    np.random.seed(3)
    random.seed(3)
    task = tasks.replace(tasks.plain(), train=Changes(how), evaluate=None)
    words = ""
    try:
        with Engine(task, RunConfig(device="cpu", check_data=check, dtype="float64")):
            pass
    except DataError as error:
        words = str(error)
    return words, (np.random.rand(), random.random()) == before[1:]


@pytest.mark.parametrize(
    ("how", "check", "pieces"),
    [
        ("same", "exact", None),
        ("function", "exact", ("of the training set cannot be compared", "cannot be pickled")),
        (
            "torch",
            "exact",
            ("training set", "reads it again", "draw from the index", "--check-data augmented"),
        ),
        ("numpy", "exact", ("reads it again", "--check-data augmented")),
        ("random", "augmented", None),
        ("torch", "augmented", None),
        ("rank", "exact", (".png) is another one on rank 1 than on rank 0", "nothing but its index")),
        ("rank", "augmented", ("on rank 1 than on rank 0",)),
        ("state", "augmented", ("when rank 0 reads it again", "nothing but its index")),
    ],
)
def test_samples_that_are_not_the_same_are_found(
    ranks: Any, how: str, check: str, pieces: tuple[str, ...] | None
) -> None:
    for words, kept in ranks(2).run(told, how, check):
        assert kept
        if pieces is None:
            assert words == ""
        for piece in pieces or ():
            assert piece in words


def test_the_first_difference_is_told() -> None:
    same = [["a", "b"], ["a", "b"]]
    assert difference([same, same]) is None
    assert difference([same, [["a", "b"], ["a", "c"]]]) == (1, "is another one when rank 1 reads it again")
    others = [["x", "b"], ["x", "b"]]
    assert difference([same, others]) == (0, "is another one on rank 1 than on rank 0")
    assert difference([same, others], shared=False) is None


def test_a_stream_has_no_indices() -> None:
    class Items(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.zeros(6), torch.tensor(0))])

    task = tasks.replace(tasks.plain(), train=Items(), evaluate=None)
    with pytest.raises(ConfigurationError, match="is iterable, and has no indices"):
        Engine(task, RunConfig(device="cpu", check_data="exact", steps=1))
