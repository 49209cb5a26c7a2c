"""Writes a checkpoint while training continues.

::

    every rank, main thread   copy what this rank writes ─┬─ next step ─ next step ─ ... ─ finish: what became of it
    every rank, a thread                                  └─ write ─ checksums ─┐
    rank 0, its thread                                                          └─ publish, remove old ones

The copies go into CPU memory that is kept from one save to the next: a rank needs memory there for a second copy of
what it writes. With ``wait`` there are no copies, and training waits. The ranks communicate over a process group of
their own. After each part they tell each other if it succeeded, so that all learn of any failure.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from evener.checkpoint import checksums as sums
from evener.checkpoint import layout as folder
from evener.checkpoint import rng_state as randomness
from evener.checkpoint.dcp_planner import PieceSaver, ShardPiece, quiet
from evener.checkpoint.run_mark import MARK, UNMARKED, Identity, write_mark
from evener.checkpoint.tensor_index import INDEX, PICKLE, IndexWriter
from evener.components.sharded_tensor.shard_spec import ShardSpec
from evener.components.state_dict import OF_REPLICAS, HeldState
from evener.core import elsewhere
from evener.core.os_errors import os_error_behind, os_error_message
from evener.core.plain_values import serialized
from evener.core.text import said
from evener.distributed.hosts import all_gather, connected, destroy
from evener.distributed.mesh import AXES, Mesh
from evener.distributed.session import Session
from evener.distributed.signals import GRACE_SECONDS
from evener.errors import CheckpointError
from evener.hardware import accelerators
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import UNCOUNTED

_WHAT = "writing a checkpoint"
_PROBE_BYTES = 1 << 20
_PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class Writers:
    """The ranks that write a checkpoint together."""

    group: dist.ProcessGroup | None = None
    """None if there is only one rank."""
    rank: int = 0
    hosts: tuple[str, ...] = ()
    """The host of each rank, if each host has a directory of its own. Empty if all ranks write to the same one."""

    @property
    def leads(self) -> bool:
        """True if this rank makes the directory and publishes in it: one rank in each directory."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank if self.hosts else self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks. A collective call."""
        return [value] if self.group is None else all_gather(value, self.group)

    def together(self, act: Callable[[], Any], place: Path, doing: str = "write") -> list[Any]:
        """Does a part of the work on every rank, and returns the results of all ranks. A collective call.

        Args:
            place: The directory that is written to.

        Raises:
            CheckpointError: On all ranks, if it failed on one.
        """
        found, wrong = None, {}
        try:
            found = act()
        except CheckpointException as error:  # has the errors of all ranks
            wrong = {rank: said(failure) for rank, (failure, _) in error.failures.items()}
            if self.rank in error.failures:
                wrong[self.rank] = _reason(error.failures[self.rank][0], place, self.rank)
        except Exception as error:  # the other ranks must learn of it
            wrong = {self.rank: _reason(error, place, self.rank)}
        rows = self.gather((found, wrong))
        reasons = {rank: reason for _, of_all in rows for rank, reason in of_all.items()}
        reasons |= {rank: own[rank] for rank, (_, own) in enumerate(rows) if rank in own}
        for rank, reason in sorted(reasons.items()):
            raise CheckpointError(f"rank {rank} could not {doing} it: {reason}")
        return [result for result, _ in rows]


def _reason(error: BaseException, place: Path, rank: int) -> str:
    """Returns why writing failed. PyTorch's writer hides the operating system's error, so it is provoked once more."""
    cause = os_error_behind(error) or _shortage(place, rank)
    return said(error) if cause is None else os_error_message(cause)


def _shortage(place: Path, rank: int) -> OSError | None:
    """Returns the operating system's error when a file of this rank is made longer, or None if there is none. Leaves
    files alone that are in no directory of Evener's own.
    """
    if not folder.is_marked(place):
        return None
    own = sorted(place.glob(f"__{rank}_*"), key=lambda path: path.stat().st_size)
    if not own:
        return None
    try:
        with own[-1].open("ab") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(own[-1])
        return error
    return None


class _Copies:
    """CPU memory for copies, kept from one save to the next."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy_of(self, key: str, value: Tensor) -> Tensor:
        kept = self._kept.get(key)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            with made_as(UNCOUNTED):  # host memory that is not counted for training
                kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._kept[key] = kept
        return kept.copy_(value.detach(), non_blocking=value.is_cuda)


class _Write(threading.Thread):
    """The thread of a save. A daemon, so that the process can end while a save hangs."""

    def __init__(self, act: Callable[[], None], target: Path, step: int, device: torch.device) -> None:
        super().__init__(name="evener-checkpoint", daemon=True)
        self._act, self.target_path, self.step, self._device = act, target, step, device
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            accelerators.set_current(self._device)  # torch's writer looks at that
            self._act()
        except BaseException as error:
            self.error = error


class Saver:
    """Writes the checkpoints of a run, one at a time. All ranks must call its methods together.

    Args:
        session: The session of ranks. Its process group for saving is created at the first save.
    """

    def __init__(self, session: Session, mesh: Mesh) -> None:
        self._session, self._mesh = session, mesh
        self._group: dist.ProcessGroup | None = None
        self._copies = _Copies()
        self._writing: _Write | None = None
        self._hosts: tuple[str, ...] = ()
        self.upload: Callable[[Path, Writers], str] | None = None
        """Called by the thread on all ranks when a checkpoint is published: takes it elsewhere from its directory, and
        returns what went wrong."""
        self.not_uploaded = ""
        """Why the last checkpoint was not uploaded; on all ranks, after :meth:`finish`."""

    def save(
        self,
        held: HeldState,
        rest: Mapping[str, Any],
        steps: int,
        directory: Path,
        keep: folder.Keep,
        wait: bool = True,
        identity: Identity = UNMARKED,
    ) -> Path:
        """Writes the state after ``steps`` steps. If the run is killed meanwhile, the previous checkpoint stays.

        Args:
            wait: Whether to return only when it is written. Otherwise :meth:`finish` reports the result.
            identity: The run that the checkpoint belongs to.

        Returns:
            The directory that the checkpoint has, or will have.

        Raises:
            CheckpointError: On all ranks, if this or the previous checkpoint could not be written.
            ConfigurationError: If it would hold what could not be read again.
        """
        self.finish()
        directory = directory.absolute()  # user code may change the working directory meanwhile
        target = directory / folder.name_of(steps)
        writers = self._writers()
        tensors = {key: self._copied(key, value, wait) for key, value in self._own(held, writers)}
        accelerators.synchronize(self._session.device)
        about = {"format": folder.FORMAT, "ranks": self._session.world_size}
        leftovers = serialized({**about, **rest, **held.leftovers(writers.gather)})
        mark = {**identity.as_plain(), "steps": steps}

        def act() -> None:
            _write(tensors, leftovers, mark, target, writers, keep)
            if self.upload is not None:
                self.not_uploaded = self.upload(directory, writers)

        write = _Write(act, target, steps, self._session.device)
        if wait:
            with self._session.watchdog.together(_WHAT, steps):
                write.run()
            self._raise(write)
        else:
            write.start()
            self._writing = write
        return target

    def upload_again(self, directory: Path) -> None:
        """Uploads the last checkpoint once more, if that failed. A collective call."""
        if self.upload is not None and self.not_uploaded:
            with self._session.watchdog.together(_WHAT):
                self.not_uploaded = self.upload(directory.absolute(), self._writers())

    def _writers(self) -> Writers:
        if self._group is None and self._session.world_size > 1:
            with self._session.watchdog.wait("start of the group that saves"):
                self._group = connected(dist.new_group(backend="gloo", timeout=_PATIENCE))
        writers = Writers(self._group, self._session.rank)
        if self.upload is not None and not self._hosts:
            self._hosts = tuple(writers.gather(elsewhere.host_name()))
        return replace(writers, hosts=self._hosts)

    def _own(self, held: HeldState, writers: Writers) -> Iterator[tuple[str, ShardPiece | Tensor]]:
        """Yields what this rank writes."""
        found = [
            (key, value, held.shard_spec(name, value, key.startswith("optimizer/")))
            for key, name, value in held.tensors()
        ]
        whole = "\n".join(key for key, _, piece in found if piece is None)
        alike = len(set(writers.gather(zlib.crc32(whole.encode())))) == 1  # else ranks hold different tensors
        for key, value, piece in found:
            differs = not alike if piece is None else key.rpartition("/")[2].startswith(OF_REPLICAS)
            if differs or _is_first(self._mesh, piece):  # what several ranks give is written once
                yield key, ShardPiece.from_tensor(value, piece)
        yield f"random/{self._session.rank}", randomness.drawn(self._session.device)

    def _copied(self, key: str, value: ShardPiece | Tensor, wait: bool) -> ShardPiece | Tensor:
        if wait:
            return value
        return (
            value.on(self._copies.copy_of(key, value.held))
            if isinstance(value, ShardPiece)
            else self._copies.copy_of(key, value)
        )

    @property
    def has_failed(self) -> bool:
        """True if this rank knows that its current save has failed."""
        return self._writing is not None and not self._writing.is_alive() and self._writing.error is not None

    def finish(self) -> Path | None:
        """Waits for the current save; returns its directory, or None if there is no save.

        Raises:
            CheckpointError: On all ranks, if it could not be written.
        """
        write, self._writing = self._writing, None
        if write is None:
            return None
        with self._session.watchdog.together(_WHAT, write.step):
            write.join()
        self._raise(write)
        return write.target_path

    def _raise(self, write: _Write) -> None:
        if isinstance(write.error, CheckpointError):
            raise CheckpointError(f"{write.target_path} was not saved: {write.error}") from None
        if write.error is not None:
            with self._session.watchdog.explained():
                raise write.error

    def give_up(self) -> None:
        """Ends saving for good, after other ranks have left. Waits a little for a current save.

        That save must not publish its checkpoint after a later one.
        """
        self._end()
        self._copies = _Copies()

    def _end(self) -> _Write | None:
        write, self._writing = self._writing, None
        if write is not None:
            write.join(GRACE_SECONDS)
        return write

    def close(self) -> None:
        """Destroys the process group, after waiting a little for a current save."""
        write = self._end()
        if self._group is not None and (write is None or not write.is_alive()):
            destroy(self._group)
            self._group = None


def _is_first(mesh: Mesh, piece: ShardSpec | None) -> bool:
    """Returns True if no lower rank holds the same piece."""
    return all(mesh.index(axis) == 0 for axis in AXES if piece is None or axis not in piece.axes)


# Parts of the writing, each on all ranks


def _write(
    tensors: Mapping[str, ShardPiece | Tensor],
    rest: bytes,
    mark: Mapping[str, Any],
    target: Path,
    writers: Writers,
    keep: folder.Keep,
) -> None:
    partial, leads = folder.partial_of(target), writers.leads
    own_rest = rest if writers.rank == 0 else None
    try:
        writers.together(lambda: _prepare(target, own_rest, mark) if leads else None, partial)
        writers.together(lambda: _write_tensors(tensors, partial, writers), partial)
        found = writers.together(lambda: _sums(partial, writers.rank), partial)
        writers.together(lambda: sums.write(partial, _merged(found)) if leads else None, partial)
        writers.together(lambda: folder.publish(target, keep) if leads else None, partial)
    except CheckpointError:
        if leads and folder.is_marked(partial):
            folder.remove(partial)
        raise


def _prepare(target: Path, rest: bytes | None, mark: Mapping[str, Any]) -> None:
    partial = folder.partial_of(target)
    folder.refuse_to_replace(partial, target)
    folder.remove(partial)
    _make(folder.fresh_partial_of(target), mark).rename(partial)
    if rest is None:
        return
    with (partial / folder.REST).open("wb") as file:
        file.write(rest)
        file.flush()
        os.fsync(file.fileno())


def _make(place: Path, mark: Mapping[str, Any]) -> Path:
    """Makes a marked directory under a temporary name. The caller renames it when the mark is there."""
    place.mkdir(parents=True)
    try:
        write_mark(place, mark)
    except OSError:
        folder.remove(place)
        raise
    return place


def _write_tensors(tensors: Mapping[str, ShardPiece | Tensor], partial: Path, writers: Writers) -> None:
    with quiet():
        state_dict_saver.save(
            dict(tensors),
            storage_writer=IndexWriter(partial),
            planner=PieceSaver(),
            process_group=writers.group,
            no_dist=writers.group is None,
        )


def _sums(partial: Path, rank: int) -> dict[str, tuple[int, int]]:
    """Returns the checksums of the files that this rank wrote."""
    own = [*partial.glob(f"__{rank}_*")]
    if rank == 0:
        own += [partial / MARK, partial / folder.REST, partial / INDEX, partial / PICKLE]
    return {path.name: sums.sum_of(path) for path in own}


def _merged(found: list[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    return {name: entry for rows in found for name, entry in rows.items()}
