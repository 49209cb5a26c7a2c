"""Records the operators and messages of a rank in a step that is taken without other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from evener.components.tree_spec import taken_apart
from evener.torch_internals.dispatch import DispatchMode, wraps
from evener.torch_internals.process_groups import group_among

_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Message:
    """One message, or one collective operation."""

    kind: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast`` or ``send``."""
    ranks: tuple[int, ...]
    """The ranks that take part."""
    nbytes: int
    """Bytes of the whole tensor: of all ranks' parts together, where each has a part."""


class Traffic:
    """Collects the messages of a rank."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.operators = 0
        """The number of operators, each of which a device is given by itself."""
        self.flops = 0
        """Floating-point operations of products and convolutions."""

    def clear(self) -> None:
        """Begins anew."""
        self.messages.clear()
        self.operators = self.flops = 0

    def add(self, kind: str, ranks: tuple[int, ...], nbytes: int) -> None:
        """Adds a message, unless it is one of a rank with itself."""
        if len(ranks) > 1 and nbytes:
            self.messages.append(Message(kind, ranks, nbytes))

    def add_of_group(self, kind: str, group: dist.ProcessGroup, nbytes: int) -> None:
        """Adds a collective operation over the ranks of a group."""
        self.add(kind, tuple(dist.get_process_group_ranks(group)), nbytes)


class OperatorCalls(DispatchMode):
    """Adds PyTorch's own collective operations to the traffic, and counts operators."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(wraps, types)):
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        self._traffic.operators += not func.is_view
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self._traffic.flops += count(*args, **(kwargs or {}), out_val=found)
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            kind = next((kind for word, kind in _KINDS.items() if name.strip("_").startswith(word)), None)
            group = group_among(args) if kind is not None else None
            if kind is not None and group is not None:
                self._traffic.add_of_group(kind, group, max(_nbytes(part) for part in (*args, found)))
        return found


def _nbytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in taken_apart(tree)[1])
