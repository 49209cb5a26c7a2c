"""A lane whose copies arrive as late as they may: when somebody waits for them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from evener.components.offload.copy_stream import AtOnce
from evener.components.offload.host_storage import Files, Outside
from evener.core.config.offload import Offload
from evener.torch_internals.dispatch import DispatchMode
from evener.torch_internals.storages import address


class Kept:
    """A tensor of which the memory is not kept alive, as a device's is not by a copy that is on its way; that of a room
    outside is, by the pool."""

    def __init__(self, tensor: Tensor, outside: Outside) -> None:
        storage = tensor.untyped_storage()
        if outside.holds(tensor):
            self._room = outside._rooms.tensor(outside._there[address(storage)])
            storage = self._room.untyped_storage()
        self._storage: weakref.ref[UntypedStorage] = weakref.ref(storage)
        self._form = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        storage = self._storage()
        assert storage is not None, "memory was freed while a copy from it or to it was on its way"
        dtype, offset, shape, stride = self._form
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class Copies(DispatchMode):
    """Copies are noted, and not made."""

    def __init__(self, queue: deque[tuple[Kept, Kept]], outside: Outside) -> None:
        super().__init__()
        self._queue, self._outside = queue, outside

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            self._queue.append((Kept(args[0], self._outside), Kept(args[1], self._outside)))
            return args[0]
        return function(*args, **(kwargs or {}))


class Late:
    """One after the other, and none before it is waited for."""

    outside: Outside

    def __init__(self) -> None:
        self._queue = deque[tuple[Kept, Kept]]()
        self._done = 0

    @contextmanager
    def lane(self) -> Iterator[None]:
        with Copies(self._queue, self.outside):
            yield

    def mark(self) -> int:
        return self._done + len(self._queue)

    def wait(self, mark: int) -> None:
        while self._done < mark:
            into, source = self._queue.popleft()
            self._done += 1
            into.tensor().copy_(source.tensor())


def late(device: torch.device, asked: Offload) -> Outside:
    """Memory outside of the host's, as it is outside of a GPU's."""
    assert asked.directory is not None
    lane = Late()
    lane.outside = Outside(Files(asked.directory), lane, apart=True)
    return lane.outside


def files(directory: Path, apart: bool = False) -> Outside:
    """Files, and copies that arrive late if the files are apart."""
    if apart:
        return late(torch.device("cpu"), Offload(frozenset({"optimizer"}), directory))
    return Outside(Files(directory), AtOnce(), apart=False)
