"""Named ranges in the trace of torch.profiler: ``evener::forward``, ``evener::all_reduce bucket 3``.

They are made only while a profiler records, whoever started it, so that they cost a run nothing. Marks of the watchdog
(:mod:`evener.distributed.watchdog.phase`) and of waits (`evener.hardware.timers.waiting`) are ranges, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from evener.torch_internals.profiling import is_profiling

PREFIX = "evener::"
_NO_RANGE: AbstractContextManager[object] = nullcontext()


def named_range(*words: object) -> AbstractContextManager[object]:
    """Returns a context that is a range in the trace, named by these words and numbers. It does nothing if no profiler
    records."""
    return record_function(PREFIX + " ".join(map(str, words))) if is_profiling() else _NO_RANGE
