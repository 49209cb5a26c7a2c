"""PyTorch's own all-reduce, and the selection of NCCL's algorithm.

NCCL chooses an algorithm for each message by its own cost model. ``NCCL_ALGO`` overrides it, but NCCL reads the
variable only when it creates a communicator: in the first collective of a process group, or in
``init_process_group`` if that gets a ``device_id``. So the choice is a context manager around the *creation* of a
group, not an argument of the call::

    with nccl_algorithm("Tree"):
        group = dist.new_group(backend="nccl")
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)      # creates the communicator
    all_reduce = Native(group)

Inside one machine, NCCL's ``Tree`` is a chain: its double binary tree runs between machines only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from evener.collectives.base import AllReduce, NativeWork, Work, start_native
from evener.core.process_variables import variable_set
from evener.errors import ConfigurationError

NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree")


class Native(AllReduce):
    """PyTorch's own all-reduce over the group's backend: NCCL on GPUs, gloo on CPUs.

    Its waits end after the timeout of the *process group*.
    """

    name = "native"

    def start(self, tensor: Tensor) -> Work:
        return NativeWork(tensor, start_native(tensor, self.group), self.roll_call)


@contextmanager
def nccl_algorithm(name: str | None) -> Iterator[None]:
    """Sets ``NCCL_ALGO=name`` for communicators that are created inside; None leaves the environment as it is.

    Raises:
        ConfigurationError: NCCL has no all-reduce of that name.
    """
    if name is None:
        yield
        return
    known = {algorithm.lower(): algorithm for algorithm in NCCL_ALGORITHMS}
    if name.lower() not in known:
        raise ConfigurationError(f"NCCL has no all-reduce {name!r}; it has {', '.join(NCCL_ALGORITHMS)}")
    with variable_set("NCCL_ALGO", known[name.lower()]):
        yield
