from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, TensorDataset

from evener.data import prefetch
from evener.data.batch import Batch
from evener.data.copy_stream import CopyStream, pinned
from evener.data.loader import Loader
from evener.data.prefetch import CopyOnSideStream
from evener.data.rounds import Rounds
from evener.data.sampler import Order
from evener.data.sections import SectionBatch, Sections
from tests.streams import META, StreamError, Streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """The meta device has streams."""
    monkeypatch.setitem(prefetch.DELIVERIES, "meta", CopyOnSideStream)
    found = Streams()
    with found.patched():
        yield found


def loader_of(size: int = 40, **options: Any) -> Loader:
    data = TensorDataset(torch.arange(float(size)), torch.arange(size))
    given: dict[str, Any] = {"batch_size": 4, "device": "meta"} | options
    return Loader(data, Order(size, seed=1), **given)


def used(batch: Batch) -> Tensor:
    return torch.stack([(part.inputs * part.targets).sum() for part in batch.micro_batches])


def halved(leaf: Any) -> Any:
    return leaf / 2


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch": 2}, {"convert": halved}, {"piece": lambda m: m.rows(0, 1)}]
)
def test_a_step_uses_a_batch_after_its_copy_and_the_host_waits_for_none(
    streams: Streams, options: dict[str, Any]
) -> None:
    with streams.watched():
        ids = []
        for batch in loader_of(**options):
            used(batch)
            assert batch.on_host is not None
            assert not batch.on_host.micro_batches[0].inputs.is_meta
            ids += [part.samples.tolist() for part in batch.micro_batches]
            del batch
    plain = loader_of(**options | {"device": "cpu"})
    assert ids == [part.samples.tolist() for batch in plain for part in batch.micro_batches]
    assert streams.copies == 2 * len(ids)


def test_what_a_gpu_would_do_too_early_is_found(streams: Streams) -> None:
    """Of the stand-in itself: it sees what the code must not do."""
    copies = CopyStream(META)
    there: list[Tensor] = []

    def copy(move: Any) -> Tensor:
        there.append(move(torch.ones(3)))
        return there[0]

    with streams.watched():
        arrive = copies.start(copy)
        with pytest.raises(StreamError, match="not written yet"):
            there[0] + 1
        arrive() + 1
    with streams.watched(), copies._stream, pytest.raises(StreamError, match="the host waits"):
        torch.ones(3).to(META, non_blocking=True)


def used_and_freed(streams: Streams) -> None:
    copies, there = CopyStream(META), list[Tensor]()
    with streams.watched():
        copies.start(lambda move: there.append(move(torch.ones(3))))
        streams.computing.wait_stream(copies._stream)
        there.pop() + 1


def test_memory_that_is_used_again_too_early_is_found(streams: Streams) -> None:
    with pytest.raises(StreamError, match="not recorded"):
        used_and_freed(streams)


def test_two_batches_are_on_their_way_while_one_is_trained_on(streams: Streams) -> None:
    """One of them is the engine's, which asks one step early."""
    with streams.watched():
        loader = loader_of()
        assert loader.lookahead == 1
        for step in range(8):
            upcoming = next(loader)
            assert streams.copies == 2 * (step + 2)
            used(upcoming)
            del upcoming


def test_rounds_are_read_two_passes_ahead_for_nobody_asks_early(streams: Streams) -> None:
    loader = loader_of(rounds=Rounds(replicas=1, sync_every=5, batch_size=4), batch_size=20)
    assert loader.lookahead == 2
    with streams.watched():
        for number, batch in enumerate(next(loader).passes):  # type: ignore[attr-defined]
            assert streams.copies == 2 * (number + 3)
            used(batch)
            del batch


def test_ranges_are_copied_beside_and_none_is_read_that_is_not_leased(streams: Streams) -> None:
    loader = loader_of(rounds=Sections(batches=5, batch_size=4, ranks=1, micro_batch=3))
    section = next(loader)
    assert isinstance(section, SectionBatch)
    assert section.plan is not None
    assert section.reader is not None
    assert loader.lookahead == 0
    asked = []
    section.reader.begin(section.plan, lambda: asked.append(1))
    with streams.watched():
        for start in (0, 7):
            section.reader.lease(start, range(start, start + 7))
            passes = section.reader.read()
            assert [len(each.micro_batches[0].samples) for each in passes] == [3, 3, 1]
            for each in passes:
                used(each)
            del passes, each
        assert streams.copies == 2 * 6
    assert not asked


class OnDevice(Dataset[Any]):
    """Items that a stream of the device has to make first."""

    def __init__(self) -> None:
        self._rows = torch.ones(8, 2, device=META)

    def __len__(self) -> int:
        return 8

    def gather_batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows * len(samples), samples


def test_what_the_data_set_has_on_the_device_is_converted_when_it_is_made(streams: Streams) -> None:
    with streams.watched():
        for batch in Loader(OnDevice(), Order(8), batch_size=4, device="meta", convert=halved):
            batch.micro_batches[0].inputs.sum()
            del batch


class Bag:
    """An object of the user's with tensors inside, that says only how it moves."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def to(self, device: torch.device) -> Bag:
        return Bag(self.rows.pin_memory().to(device, non_blocking=True) * 1)


def test_tensors_inside_of_objects_are_kept_until_the_step_is_over(streams: Streams) -> None:
    with streams.watched():
        bag = CopyStream(META).start(lambda move: move(Bag(torch.ones(3))))()
        bag.rows.sum()
        del bag


def test_a_packed_sequence_moves(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    there = CopyStream(META).start(lambda move: move(pack_sequence([torch.ones(3), torch.ones(2)])))()
    assert isinstance(there, PackedSequence)
    assert there.data.is_meta


def test_values_that_are_no_tensors_pass(streams: Streams) -> None:
    copy = CopyStream(META, lambda leaf: leaf)
    assert copy.start(lambda move: [move("text"), move(None), move(3)])() == ["text", None, 3]


@pytest.mark.parametrize(
    "rows",
    [
        torch.arange(4.0).expand(3, 4),
        torch.arange(9.0).unfold(0, 4, 2),
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.empty(0, 3),
    ],
    ids=["expanded", "windows", "channels last", "every second column", "none"],
)
def test_tensors_of_any_strides_are_pinned_and_arrive(streams: Streams, rows: Tensor) -> None:
    with streams.watched():
        on_host = pinned(rows)
        assert torch.equal(on_host, rows)
        assert on_host.is_pinned()
        assert pinned(on_host) is on_host
        there = CopyStream(META).start(lambda move: move(rows))()
        assert there.shape == rows.shape
        assert there.stride() == rows.to(META).stride()


def test_a_batch_for_which_there_is_no_room_waits_on_the_host(streams: Streams) -> None:
    with streams.watched():
        loader = loader_of()
        used(next(loader))
        streams.full = 1
        order = [next(loader).micro_batches[0].samples.tolist() for _ in range(3)]
        assert streams.full == 0
        assert streams.copies == 2 * 5
    with loader_of(device="cpu") as plain:
        next(plain)
        assert order == [next(plain).micro_batches[0].samples.tolist() for _ in range(3)]


def test_a_batch_for_which_there_is_no_room_when_it_is_needed_is_an_error(streams: Streams) -> None:
    with streams.watched():
        loader = loader_of()
        next(loader)
        streams.full = 3
        next(loader)
        with pytest.raises(torch.OutOfMemoryError):
            next(loader)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_whole_though_their_memory_is_used_again(workers: int) -> None:
    """The device is many batches behind, and frees what it has not read yet."""
    size = 64 * 200
    rows = torch.arange(float(size)).repeat_interleave(1024).view(size, 1024)
    loader = Loader(
        TensorDataset(rows, torch.arange(size)), Order(size), batch_size=64, device="cuda", workers=workers
    )
    matrix, sums = torch.rand(2048, 2048, device="cuda"), []
    for batch in loader:
        for _ in range(4):
            matrix = (matrix @ matrix).clamp(0, 1)
        (part,) = batch.micro_batches
        sums.append((part.inputs.mean(1) - part.targets).abs().max() + 0 * matrix[0, 0])
        del part, batch
    assert float(torch.stack(sums).max()) == 0


@pytest.mark.gpu
def test_the_host_goes_on_before_a_gpu_has_copied() -> None:
    loader = Loader(
        TensorDataset(torch.rand(640, 1024), torch.arange(640)), Order(640), batch_size=64, device="cuda"
    )
    next(loader)
    matrix = torch.rand(4096, 4096, device="cuda")
    for _ in range(50):
        matrix = (matrix @ matrix).clamp(0, 1)
    busy = torch.cuda.current_stream().record_event()
    next(loader)
    assert not busy.query()


@pytest.mark.gpu
def test_memory_of_the_host_is_pinned_once() -> None:
    data = TensorDataset(torch.rand(1280, 1024), torch.arange(1280))
    loader = Loader(data, Order(1280), batch_size=64, device="cuda")
    pinned = []
    for _ in loader:
        torch.cuda.synchronize()
        pinned.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert pinned[0]
    assert len(set(pinned[4:])) == 1
