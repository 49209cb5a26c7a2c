"""Carries out in a thread what another all-reduce carries out in the call.

Through shared memory the sum is there when the call returns: as a hook of DDP it holds up backward for as long as the
copying takes. That is right where every core has a rank to compute for, as copying would take the core from
another's backward. Where ranks leave cores idle, this wrapper lets backward go on.
"""

from __future__ import annotations

from torch import Tensor

from evener.collectives.base import AllReduce, Promised, Work
from evener.collectives.worker import Worker


class Background(AllReduce):
    """Makes the calls of ``inner`` return at once; they are carried out in order. Owns ``inner``."""

    def __init__(self, inner: AllReduce) -> None:
        super().__init__(inner.group, inner.timeout_seconds)
        self.name = inner.name
        self._inner = inner
        self._worker = Worker(f"evener all-reduce {inner.name}")

    @property
    def exact(self) -> bool:
        return self._inner.exact

    def start(self, tensor: Tensor) -> Work:
        return Promised(self._worker.submit(lambda: self._run(tensor)))

    def _run(self, tensor: Tensor) -> Tensor:
        self._inner(tensor).wait()
        return tensor

    def close(self) -> None:
        self._worker.close()
        self._inner.close()
