"""Prepared loops of a DataLoader of a stream, or of shards: the training of one device, also after a resume."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import evener
from evener.errors import ConfigurationError, EvenerError
from tests.training.prepare.running import Loop, Weights, prepared, rows, with_settings

SIZE = 58


class Stream(IterableDataset[Any]):
    """Divides itself among workers. Shuffles with torch's default generator, as a plain loop may."""

    def __init__(self) -> None:
        self.rows = list(rows(SIZE))
        self.began = 0

    def _numbers(self) -> list[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return list(range(first, SIZE, step))

    def __iter__(self) -> Iterator[Any]:
        self.began += 1
        return (self.rows[number] for number in self._numbers())


class Shuffled(Stream):
    def _numbers(self) -> list[int]:
        return torch.randperm(SIZE).tolist()  # type: ignore[no-any-return]


class Stateful(Stream):
    """Notes how many it yielded in this process."""

    yielded = 0

    def __init__(self) -> None:
        super().__init__()
        self.at = self.begins_at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begins_at = self.begins_at, 0
        for number in self._numbers()[self.at :]:
            self.at += 1
            type(self).yielded += 1
            yield self.rows[number]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["at"]


class Forgetful(Stateful):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["at"] + 1


class OfRank(Stream):
    """Divides itself by rank, which evener.prepare does too."""

    def _numbers(self) -> list[int]:
        return list(range(dist.get_rank() if dist.is_initialized() else 0, SIZE, 2))


def loop_of(is_prepared: bool, loader: Any) -> Loop:
    torch.manual_seed(7)
    loop = Loop(is_prepared)
    loop.loader = evener.prepare(loader) if is_prepared else loader
    return loop


def train(loop: Loop, stop: int | None = None, steps: int = 0, path: str = "") -> Weights:
    """Two epochs, or to ``stop``."""
    parts = {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader}
    for _ in range(getattr(loop.loader, "epoch", 0), 2):
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step()
            steps += 1
            if steps == stop:
                evener.save(path, **parts)
                return loop.weights()
    return loop.weights()


def loader_of(kind: type[Stream], **options: Any) -> DataLoader[Any]:
    """Ranks of tests would start a worker by importing everything anew."""
    context = {"multiprocessing_context": "fork"} if options.get("num_workers") else {}
    return DataLoader(kind(), batch_size=6, **context, **options)


def whole(is_prepared: bool, kind: type[Stream], **options: Any) -> Weights:
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        return train(loop_of(is_prepared, loader_of(kind, **options)))


def assert_close(found: Weights, wanted: Weights) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "options"), [(Stream, {}), (Stream, {"drop_last": True}), (Stateful, {})])
def test_a_loop_of_a_stream_is_that_of_one_device(ranks: Any, kind: Any, options: dict[str, Any]) -> None:
    reference = whole(False, kind, **options)
    for found in ranks(2).run(prepared, lambda _: whole(True, kind, **options), balance="3,1"):
        assert_close(found, reference)


def test_workers_divide_a_stream_as_on_one_device(ranks: Any) -> None:
    reference = whole(False, Stream, num_workers=2)
    for found in ranks(2).run(prepared, lambda _: whole(True, Stream, num_workers=2), balance="1,2"):
        assert_close(found, reference)


def test_a_stream_that_draws_is_the_same_on_all_ranks(ranks: Any) -> None:
    with with_settings():
        reference = whole(True, Shuffled)
    for found in ranks(3).run(prepared, lambda _: whole(True, Shuffled), balance="1,0,2"):
        assert_close(found, reference)


def saved(path: str, kind: Any, resume: bool, workers: int, stop: int = 8) -> tuple[Weights, int]:
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        loop = loop_of(True, loader_of(kind, num_workers=workers))
        if not resume:
            return train(loop, stop, path=path), 0
        evener.load(path, model=loop.model, optimizer=loop.optimizer, loader=loop.loader)
        kind.yielded = 0
        return train(loop), getattr(kind, "yielded", 0)


def resumed(path: str, kind: Any, workers: int) -> tuple[Weights, int]:
    with warnings.catch_warnings():  # a stream that is read again is right, too, but told
        warnings.simplefilter("error", UserWarning)
        return saved(path, kind, True, workers)


@pytest.mark.parametrize(("kind", "workers"), [(Stream, 0), (Shuffled, 0), (Stateful, 0), (Stateful, 2)])
def test_a_loop_of_a_stream_goes_on_from_a_file_on_another_number_of_ranks(
    ranks: Any, tmp_path: Path, kind: Any, workers: int
) -> None:
    path = str(tmp_path / "loop.pt")
    with with_settings():
        reference = whole(True, kind, num_workers=workers)
    ranks(2).run(prepared, lambda _: saved(path, kind, False, workers), balance="2,1")
    for found, yielded in ranks(3).run(prepared, lambda _: resumed(path, kind, workers), balance="1,0,2"):
        assert_close(found, reference)
        if kind is Stateful and not workers:
            assert yielded == SIZE - 42 + SIZE  # one batch before the place, and the next epoch


def test_a_state_that_is_not_exact_is_told_and_the_stream_read_again(tmp_path: Path) -> None:
    path = str(tmp_path / "loop.pt")
    with with_settings():
        reference = whole(True, Stream)
        saved(path, Forgetful, False, 0)
    with (
        with_settings(),
        pytest.warns(UserWarning, match="does not lead to the sample that came next before"),
    ):
        assert_close(saved(path, Forgetful, True, 0)[0], reference)


def test_another_number_of_workers_is_refused_within_an_epoch(tmp_path: Path) -> None:
    path = str(tmp_path / "loop.pt")
    with with_settings():
        saved(path, Stateful, False, 0)
    with with_settings(), pytest.raises(ConfigurationError, match="saved with 1 workers, and has 2 now"):
        saved(path, Stateful, True, 2)


def said() -> str:
    try:
        whole(True, OfRank)
    except EvenerError as error:
        return str(error)
    return ""


def test_a_stream_that_divides_itself_by_rank_is_refused(ranks: Any) -> None:
    for message in ranks(2).run(prepared, lambda _: said()):
        assert "the ranks are not working on the same batch" in message


def of_shards(is_prepared: bool, path: str = "", stop: int | None = None, resume: bool = False) -> Weights:
    table = list(rows(SIZE))
    data = evener.ShardedDataset(
        [0, 20, 45], lambda first: iter(table[first : {0: 20, 20: 45}.get(first)]), together=2
    )
    loop = loop_of(is_prepared, DataLoader(data, batch_sampler=data.batch_sampler(6)))
    if resume:
        evener.load(path, model=loop.model, optimizer=loop.optimizer, loader=loop.loader)
    return train(loop, stop, path=path)


def test_a_loop_of_shards_goes_on_from_a_file(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "loop.pt")
    reference = of_shards(False)
    ranks(2).run(prepared, lambda _: of_shards(True, path, 7), balance="2,1")
    for found in ranks(3).run(prepared, lambda _: of_shards(True, path, resume=True), balance="1,0,2"):
        assert_close(found, reference)
