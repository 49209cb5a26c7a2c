"""PyTorch's own all-reduce, and how to tell NCCL which algorithm to run.

NCCL chooses an algorithm for each message by a cost model of its own. ``NCCL_ALGO`` overrides it, but NCCL
reads the variable only when a communicator is made: with the first collective of a process group, or in
``init_process_group`` where that is given a ``device_id``. So the choice is a context manager around the
*making* of a group, not an argument of the call::

    with nccl_algorithm("Tree"):
        group = dist.new_group(backend="nccl")
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)      # makes the communicator
    all_reduce = Native(group)

Inside one machine, NCCL's ``Tree`` is a chain: its double binary tree runs between machines only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from evener.collectives.base import AllReduce, NativeWork, Work, start_native
from evener.errors import ConfigurationError

NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree")


class Native(AllReduce):
    """PyTorch's own all-reduce over the group's backend: NCCL on GPUs, gloo on CPUs; sparse tensors too.

    Its waits end after the timeout that the *process group* was made with.
    """

    name = "native"

    def start(self, tensor: Tensor) -> Work:
        return NativeWork(tensor, start_native(tensor, self.group), self.roll_call)


@contextmanager
def nccl_algorithm(name: str | None) -> Iterator[None]:
    """``NCCL_ALGO=name`` for communicators that are made inside; None leaves the environment as it is.

    Raises:
        ConfigurationError: NCCL has no all-reduce of that name.
    """
    if name is None:
        yield
        return
    known = {algorithm.lower(): algorithm for algorithm in NCCL_ALGORITHMS}
    if name.lower() not in known:
        raise ConfigurationError(f"NCCL has no all-reduce {name!r}; it has {', '.join(NCCL_ALGORITHMS)}")
    before = os.environ.get("NCCL_ALGO")
    os.environ["NCCL_ALGO"] = known[name.lower()]
    try:
        yield
    finally:
        if before is None:
            del os.environ["NCCL_ALGO"]
        else:
            os.environ["NCCL_ALGO"] = before
