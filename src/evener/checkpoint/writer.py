"""Writing a checkpoint while training goes on.

::

    every rank, main thread   copy what this rank writes ─┬─ next step ─ next step ─ ... ─ finish: what became of it
    every rank, a thread                                  └─ write ─ checksums ─┐
    rank 0, its thread                                                          └─ publish, remove old ones

The copies are made into memory that is kept from one save to the next, on the CPU: a rank needs room there for what it
writes a second time. Without the copies (``wait``) nothing goes on meanwhile. The ranks talk over a group of their own,
and tell each other after each part whether it went well, so that all learn of a failure of any.
"""

from __future__ import annotations

import io
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from evener.checkpoint.dcp_planner import Piece, PieceSaver, quiet
from evener.checkpoint.run_mark import MARK, UNMARKED, Identity, write_mark
from evener.checkpoint.tensor_index import INDEX, PICKLE, IndexWriter
from evener.components.sharded_tensor.shard_spec import Slice
from evener.components.state_dict import Held
from evener.core.os_errors import words
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
    """None for one rank alone."""
    rank: int = 0

    def gather(self, value: Any) -> list[Any]:
        """What every rank passed."""
        return [value] if self.group is None else all_gather(value, self.group)

    def together(self, act: Callable[[], Any], place: Path) -> list[Any]:
        """Does a part of the work on every rank, and gives what all of them got.

        Args:
            place: The directory that is written to.

        Raises:
            CheckpointError: On all ranks, if it failed on one.
        """
        found, wrong = None, {}
        try:
            found = act()
        except CheckpointException as error:  # of all ranks
            wrong = {rank: said(failure) for rank, (failure, _) in error.failures.items()}
            if self.rank in error.failures:
                wrong[self.rank] = _reason(error.failures[self.rank][0], place, self.rank)
        except Exception as error:  # other ranks wait to hear of it
            wrong = {self.rank: _reason(error, place, self.rank)}
        rows = self.gather((found, wrong))
        told = {rank: reason for _, of_all in rows for rank, reason in of_all.items()}
        told |= {rank: own[rank] for rank, (_, own) in enumerate(rows) if rank in own}
        for rank, reason in sorted(told.items()):
            raise CheckpointError(f"rank {rank} could not write it: {reason}")
        return [result for result, _ in rows]


def _reason(error: BaseException, place: Path, rank: int) -> str:
    """Why writing failed. PyTorch's writer does not say what the operating system said: it is asked once more."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    cause = cause or _shortage(place, rank)
    return words(cause) if isinstance(cause, OSError) else said(error)


def _shortage(place: Path, rank: int) -> OSError | None:
    """What the operating system says to a longer file of this rank; None if nothing."""
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
    """Memory for copies on the CPU, kept from one save to the next."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, key: str, value: Tensor) -> Tensor:
        kept = self._kept.get(key)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            with made_as(UNCOUNTED):  # of the host's memory, and not of what training takes
                kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._kept[key] = kept
        return kept.copy_(value.detach(), non_blocking=value.is_cuda)


class _Write(threading.Thread):
    """A save under way. Of a daemon: nothing waits for one that hangs when the process ends."""

    def __init__(self, act: Callable[[], None], target: Path, step: int) -> None:
        super().__init__(name="evener-checkpoint", daemon=True)
        self._act, self.target_path, self.step = act, target, step
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self.error = error


class Saver:
    """Writes the checkpoints of a run, one at a time. All ranks call its methods together.

    Args:
        session: The ranks; it is known only when there is something to save.
    """

    def __init__(self, session: Session, mesh: Mesh) -> None:
        self._session, self._mesh = session, mesh
        self._group: dist.ProcessGroup | None = None
        self._copies = _Copies()
        self._writing: _Write | None = None

    def save(
        self,
        held: Held,
        rest: Mapping[str, Any],
        steps: int,
        directory: Path,
        keep: folder.Keep,
        wait: bool = True,
        identity: Identity = UNMARKED,
    ) -> Path:
        """Writes the state after ``steps`` steps; a run that is killed meanwhile leaves the one before.

        Args:
            wait: Returns when it is written; otherwise :meth:`finish` tells what became of it.
            identity: The run that the checkpoint is of.

        Returns:
            The directory that the checkpoint has, or will have.

        Raises:
            CheckpointError: On all ranks, if it could not be written, or if the one before could not.
        """
        self.finish()
        directory = directory.absolute()  # code of the user's may change to another while it is written
        target = directory / folder.name_of(steps)
        writers = Writers(self._writers(), self._session.rank)
        tensors = {key: self._copied(key, value, wait) for key, value in self._own(held, writers)}
        accelerators.synchronize(self._session.device)
        leftovers = _serialized({"format": folder.FORMAT, "ranks": self._session.world_size, **rest}, held)
        mark = {**identity.as_plain(), "steps": steps}
        write = _Write(lambda: _write(tensors, leftovers, mark, target, writers, keep), target, steps)
        if wait:
            with self._session.watchdog.together(_WHAT, steps):
                write.run()
            self._raise(write)
        else:
            write.start()
            self._writing = write
        return target

    def _writers(self) -> dist.ProcessGroup | None:
        if self._group is None and self._session.world_size > 1:
            with self._session.watchdog.wait("start of the group that saves"):
                self._group = connected(dist.new_group(backend="gloo", timeout=_PATIENCE))
        return self._group

    def _own(self, held: Held, writers: Writers) -> Iterator[tuple[str, Piece | Tensor]]:
        """What this rank writes."""
        found = [(key, value, held.slice_of(name, value)) for key, name, value in held.tensors()]
        whole = "\n".join(key for key, _, piece in found if piece is None)
        alike = len(set(writers.gather(zlib.crc32(whole.encode())))) == 1  # else each holds what others lack
        for key, value, piece in found:
            if (piece is None and not alike) or _is_first(self._mesh, piece):
                yield key, Piece.of(value, piece)
        yield f"random/{self._session.rank}", randomness.drawn(self._session.device)

    def _copied(self, key: str, value: Piece | Tensor, wait: bool) -> Piece | Tensor:
        if wait:
            return value
        return (
            value.on(self._copies.of(key, value.held))
            if isinstance(value, Piece)
            else self._copies.of(key, value)
        )

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a save under way that it failed."""
        return self._writing is not None and not self._writing.is_alive() and self._writing.error is not None

    def finish(self) -> Path | None:
        """Waits for the save under way; returns its directory.

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
        """Nothing will be saved any more. A save under way, which other ranks have left, has a little time to end: it
        is not to publish its checkpoint after a later one."""
        self._end()
        self._copies = _Copies()

    def _end(self) -> _Write | None:
        write, self._writing = self._writing, None
        if write is not None:
            write.join(GRACE_SECONDS)
        return write

    def close(self) -> None:
        """Gives the group back. A save under way has a little time to end."""
        write = self._end()
        if self._group is not None and (write is None or not write.is_alive()):
            destroy(self._group)
            self._group = None


def _is_first(mesh: Mesh, piece: Slice | None) -> bool:
    """Whether no rank before this one holds the same."""
    return all(mesh.index(axis) == 0 for axis in AXES if piece is None or axis not in piece.axes)


def _serialized(rest: Mapping[str, Any], held: Held) -> bytes:
    buffer = io.BytesIO()
    torch.save({**rest, **_leftovers(held)}, buffer)
    return buffer.getvalue()


def _leftovers(held: Held) -> dict[str, Any]:
    """What is no dense tensor: of the model, of the optimizer's state, and its groups."""
    kept = {key for key, _, _ in held.tensors()}
    model = {name: value for name, value in held.model.items() if f"model/{name}" not in kept}
    state = {
        name: {key: value for key, value in entries.items() if f"optimizer/{name}/{key}" not in kept}
        for name, entries in held.optimizer["state"].items()
    }
    return {"model": model, "optimizer": held.optimizer | {"state": state}}


# Parts of the writing, each on all ranks


def _write(
    tensors: Mapping[str, Piece | Tensor],
    rest: bytes,
    mark: Mapping[str, Any],
    target: Path,
    writers: Writers,
    keep: folder.Keep,
) -> None:
    partial, first = folder.partial_of(target), writers.rank == 0
    try:
        writers.together(lambda: _prepare(target, rest, mark) if first else None, partial)
        writers.together(lambda: _write_tensors(tensors, partial, writers), partial)
        found = writers.together(lambda: _sums(partial, writers.rank), partial)
        writers.together(lambda: sums.write(partial, _merged(found)) if first else None, partial)
        writers.together(lambda: folder.publish(target, keep) if first else None, partial)
    except CheckpointError:
        if first and folder.is_marked(partial):
            folder.remove(partial)
        raise


def _prepare(target: Path, rest: bytes, mark: Mapping[str, Any]) -> None:
    partial = folder.partial_of(target)
    folder.refuse_to_replace(partial, target)
    folder.remove(partial)
    _make(folder.fresh_partial_of(target), mark).rename(partial)
    with (partial / folder.REST).open("wb") as file:
        file.write(rest)
        file.flush()
        os.fsync(file.fileno())


def _make(place: Path, mark: Mapping[str, Any]) -> Path:
    """Makes a directory that has its mark before it gets the name by which others know it."""
    place.mkdir(parents=True)
    try:
        write_mark(place, mark)
    except OSError:
        folder.remove(place)
        raise
    return place


def _write_tensors(tensors: Mapping[str, Piece | Tensor], partial: Path, writers: Writers) -> None:
    with quiet():
        state_dict_saver.save(
            dict(tensors),
            storage_writer=IndexWriter(partial),
            planner=PieceSaver(),
            process_group=writers.group,
            no_dist=writers.group is None,
        )


def _sums(partial: Path, rank: int) -> dict[str, tuple[int, int]]:
    """Of the files that this rank wrote."""
    own = [*partial.glob(f"__{rank}_*")]
    if rank == 0:
        own += [partial / MARK, partial / folder.REST, partial / INDEX, partial / PICKLE]
    return {path.name: sums.sum_of(path) for path in own}


def _merged(found: list[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    return {name: entry for rows in found for name, entry in rows.items()}
