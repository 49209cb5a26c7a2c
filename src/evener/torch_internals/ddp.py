"""Private names of DistributedDataParallel: its buckets, its buffer broadcast, and parameters that it ignores.

- ``_get_ddp_logging_data`` returns bucket sizes. It is the only view of the reducer's collectives, which run in C++.
- ``_rebuild_buckets`` rebuilds the buckets before the second forward pass, in the order of gradients. C++ reads that
  order from the memory of a tensor, and a fake tensor has none. ``_ddp_init_helper`` makes the first buckets, with
  ``_compute_bucket_assignment_by_size``.
- ``_distributed_broadcast_coalesced`` is the method that broadcasts buffers. The option that turns this off is public,
  but torch 2.13 renamed it.
- ``_ddp_init_helper`` is also what makes the reducer, the C++ object that holds the process group. Where the reducer is
  the last that holds it, its end waits for gloo's threads with Python's lock, and a thread that still frees the context
  of the last sum waits for that lock.
- ``_set_params_and_buffers_to_ignore_for_model`` names the parameters that DDP ignores. DDP has no option for it.
- :data:`MARKED_TWICE` is in the message of the reducer about a parameter whose gradient comes twice in a step. The
  reducer looks before it changes anything.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BROADCAST_BUFFERS = "_distributed_broadcast_coalesced"
"""The method of DDP that broadcasts buffers before a forward pass."""

MARKED_TWICE = "mark a variable ready only once"

_HELD = "_evener_group"


def logged(model: DistributedDataParallel) -> Mapping[str, Any]:
    """Returns the logging data of the reducer: ``bucket_sizes`` and, after first steps, ``rebuilt_bucket_sizes``."""
    found: Mapping[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return found


def leave_out(module: nn.Module, names: Sequence[str]) -> None:
    """Makes DDP, which will wrap ``module``, neither compare nor sum the parameters of these names."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]


def no_buffer_broadcast() -> dict[str, Any]:
    """Returns the option that turns off the buffer broadcast, under its current name: torch warns about the old one."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


class _Group:
    """Holds a process group. A copy or pickle is a plain object: a model that a script saves needs no Evener later."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()


@contextmanager
def groups_freed_last() -> Iterator[None]:
    """Makes the models that DDP wraps in the block free their process group after their reducer.

    Python's own object of a group lets go of Python's lock while the group's threads end, and the reducer does not
    (pytorch/pytorch#56297): a rank that is done would never end. Attributes are freed in their order.
    """
    init: Any = DistributedDataParallel._ddp_init_helper

    def holding(model: Any, *args: Any, **options: Any) -> None:
        init(model, *args, **options)
        model.__dict__.pop(_HELD, None)
        model.__dict__[_HELD] = _Group(model.process_group)

    with mock.patch.object(DistributedDataParallel, "_ddp_init_helper", holding):
        yield


@contextmanager
def buckets_kept() -> Iterator[None]:
    """Keeps DDP from rebuilding its buckets during the block.

    The first buckets are those that it would rebuild if gradients came in the reverse order of the parameters. Of
    itself, DDP begins with one bucket for all parameters, which it only uses in the first step.
    """
    init: Any = DistributedDataParallel._ddp_init_helper
    assign = dist._compute_bucket_assignment_by_size

    def with_buckets(model: Any, *args: Any, **options: Any) -> None:
        def assigned(tensors: list[Any], _: Any, sparse: list[bool], *rest: Any) -> Any:
            buckets, limits = assign(tensors[::-1], [model.bucket_bytes_cap], sparse[::-1], *rest)
            last = len(tensors) - 1
            return [[last - place for place in bucket] for bucket in reversed(buckets)], limits[::-1]

        with mock.patch.object(dist, "_compute_bucket_assignment_by_size", assigned):
            init(model, *args, **options)

    with (
        mock.patch.object(dist.Reducer, "_rebuild_buckets", return_value=False),
        mock.patch.object(DistributedDataParallel, "_ddp_init_helper", with_buckets),
    ):
        yield
