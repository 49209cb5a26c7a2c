"""A private table of DTensor: what an operator does that PyTorch divides wrongly.

``item()`` of a DTensor that is a sum or a norm of shards returns that of this rank's shard, without a word: the
placement says that it is a part of a sum, and the operator does not look at it. ``_op_dispatcher._custom_op_handlers``
holds the operators that DTensor treats by themselves; there is no public way to add one.

Tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def replace_item(item: Callable[[DTensor], Any]) -> Callable[[], None]:
    """Has ``item()`` of DTensors call ``item``. Returns a function that restores it."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._local_scalar_dense.default
    before = handlers.get(operator)
    handlers[operator] = lambda _, args, __: item(args[0])

    def restore() -> None:
        if before is None:
            handlers.pop(operator, None)
        else:
            handlers[operator] = before

    return restore
