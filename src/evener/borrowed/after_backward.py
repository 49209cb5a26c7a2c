"""A function that autograd calls when the backward pass at hand is over: ``Variable._execution_engine.queue_callback``.

DistributedDataParallel and FSDP end their backward passes by it; no public name does.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd import Variable


def when_backward_is_over(function: Callable[[], None]) -> None:
    """Has ``function`` called once, on the thread that went backward. To be called within a backward pass."""
    Variable._execution_engine.queue_callback(function)
