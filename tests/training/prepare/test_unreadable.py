"""A sample that cannot be read, in a loop of the user's own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import evener
from evener.errors import DataError
from tests.training.prepare.running import with_settings

BAD = 9


class Files(Dataset[Any]):
    def __init__(self, error: Exception) -> None:
        self._error = error
        self.files = [f"{index}.png" for index in range(24)]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            raise self._error
        return torch.zeros(2)


def read(error: Exception, workers: int) -> None:
    model = torch.nn.Linear(2, 1)
    kind = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader: Any = DataLoader(Files(error), batch_size=8, **kind)
    with with_settings():
        for inputs in evener.prepare(model, loader)[1]:
            model(inputs)


class Unsendable(Dataset[Any]):
    """Its second item is, or raises, what no process can send to another."""

    def __init__(self, raises: bool) -> None:
        self._raises = raises

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        class LocalError(Exception):
            pass

        if index and self._raises:
            raise LocalError("no luck")
        return LocalError if index else torch.zeros(2)


@pytest.mark.parametrize(
    ("raises", "words"), [(True, "LocalError: no luck"), (False, "sent a batch.*local object")]
)
def test_what_a_worker_cannot_send_is_told(raises: bool, words: str) -> None:
    kind: Any = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": list}
    loader: Any = DataLoader(Unsendable(raises), batch_size=1, **kind)
    with with_settings(), pytest.raises(RuntimeError, match=f"(?s){words}"):
        list(evener.prepare(torch.nn.Linear(2, 1), loader)[1])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(2)


@pytest.mark.parametrize("dataset", [[0, 1], Stream()], ids=["map", "stream"])
def test_a_kept_worker_that_dies_between_two_passes_is_told(dataset: Any) -> None:
    kind: Any = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    loader: Any = DataLoader(dataset, **kind)
    with with_settings():
        passes = evener.prepare(torch.nn.Linear(2, 1), loader)[1]
        before = {child.pid for child in multiprocessing.active_children()}
        assert len(list(passes)) == 2
        (worker,) = {child.pid for child in multiprocessing.active_children()} - before
        assert worker is not None
        kill(worker)
        with pytest.raises(
            DataError, match=rf"DataLoader worker \(pid {worker}\) was killed by signal SIGKILL"
        ):
            next(iter(passes))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_keeps_its_class_and_names_the_sample(workers: int) -> None:
    with pytest.raises(OSError, match="a torn file") as caught:
        read(OSError("a torn file"), workers)
    assert "failed while reading sample 9 (9.png)" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_does_not_end_a_pass_unseen(workers: int) -> None:
    with pytest.raises(DataError, match=r"reading sample 9 \(9.png\) raised StopIteration"):
        read(StopIteration(), workers)
