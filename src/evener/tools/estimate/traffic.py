"""Records the operators and messages of a rank in a step that is taken without other ranks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from evener.torch_internals.dispatch import DispatchMode, device_asked, named_arguments, wraps
from evener.torch_internals.process_groups import group_among
from evener.torch_internals.storages import memory_of

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
_ALLOCATE = ("empty", "new_empty", "_unsafe_view", "resize_", "set_")
"""Begins of the names of operators that neither read nor write."""
_OVERWRITE = ("copy_", "fill_", "zero_")
"""Operators that do not read the tensor into which they write."""
CONVOLUTIONS = "float32 convolutions"
"""Convolutions in float32, for which PyTorch chooses by itself whether a card computes them in TF32."""
_SELECT = ("embedding", "index", "index_select", "gather")


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
        self._ranks: dict[dist.ProcessGroup, tuple[int, ...]] = {}
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self.messages.clear()
        self.operators = 0
        """The number of operators of the passes, each of which a device is given by itself."""
        self.flops = Counter[str]()
        """Floating-point operations of products, convolutions and attention, by the type in which they are computed.
        Convolutions in float32 are ``CONVOLUTIONS``."""
        self.moved = 0
        """Bytes that the operators of the passes read and write."""
        self.is_updating = False
        """True from the begin of the optimizer's step on."""

    def updating(self, *_: Any) -> None:
        """Ends the passes. It is a hook for the optimizer's step."""
        self.is_updating = True

    def add(self, kind: str, ranks: tuple[int, ...], nbytes: int) -> None:
        """Adds a message, unless it is one of a rank with itself."""
        if len(ranks) > 1 and nbytes:
            self.messages.append(Message(kind, ranks, nbytes))

    def add_of_group(self, kind: str, group: dist.ProcessGroup, nbytes: int) -> None:
        """Adds a collective operation over the ranks of a group."""
        if group not in self._ranks:
            self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        self.add(kind, self._ranks[group], nbytes)


class OperatorCalls(DispatchMode):
    """Adds PyTorch's own collective operations to the traffic, and counts operators."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(wraps, types)):
            return NotImplemented
        if (device := device_asked(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            kind = next((kind for word, kind in _KINDS.items() if name.strip("_").startswith(word)), None)
            group = group_among(args) if kind is not None else None
            if kind is not None and group is not None:
                self._traffic.add_of_group(kind, group, max(_nbytes(part) for part in (*args, found)))
        elif not (func.is_view or namespace == "prim" or self._traffic.is_updating):
            self._traffic.operators += 1
            self._traffic.flops += _flops(func, args, kwargs, found)
            self._traffic.moved += _nbytes_moved(func, args, kwargs, found)
        return found


def _flops(func: Any, args: Any, kwargs: Any, found: Any) -> Counter[str]:
    name = func.overloadpacket.__name__
    if name.startswith("_scaled_dot_product"):
        flops = _flops_of_attention(named_arguments(func, args, kwargs), name.endswith("_backward"))
    elif (count := flop_registry.get(func.overloadpacket)) is not None:
        flops = count(*args, **kwargs, out_val=found)
    else:
        return Counter()
    dtype = next((each.dtype for each in args if isinstance(each, Tensor)), torch.float32)
    if dtype.is_complex:  # of two complex numbers, a product takes four of real ones
        flops, dtype = 4 * flops, dtype.to_real()
    is_convolution = dtype == torch.float32 and "convolution" in name
    return Counter({CONVOLUTIONS if is_convolution else str(dtype).removeprefix("torch."): flops})


def _flops_of_attention(given: dict[str, Any], backward: bool) -> int:
    """Counts two products in forward, and five in backward, which makes the scores again. Kernels leave out the half of
    the scores that a causal mask hides. PyTorch's own counter counts it, and knows no attention on the CPU."""
    query, key, value = given["query"], given["key"], given["value"]
    *heads, length, width = query.shape
    scores: int = math.prod(heads) * length * key.shape[-2] * (width + value.shape[-1])
    return scores * (5 if backward else 2) // (2 if given.get("is_causal") else 1)


def _nbytes_moved(func: Any, args: Any, kwargs: Any, found: Any) -> int:
    """Returns the bytes that an operator reads and writes. What selects rows reads no others."""
    name = func.overloadpacket.__name__
    if name.startswith(_ALLOCATE):
        return 0
    read = (args[1:] if name in _OVERWRITE else args, kwargs)
    return _nbytes(found) + _nbytes(found if name in _SELECT else read)


def _nbytes(tree: Any) -> int:
    """Returns the bytes of all tensors in a tree of tuples, lists and dictionaries."""
    if isinstance(tree, Tensor):
        return sum(part.nbytes for part in memory_of(tree))
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return 0
    return sum(map(_nbytes, tree))
