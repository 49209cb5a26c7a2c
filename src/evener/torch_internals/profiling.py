"""Private names of torch.profiler: whether one records, and an option to record all threads.

- ``torch.autograd.profiler._is_profiler_enabled`` is True while a profiler records. PyTorch itself asks it where a
  range would cost time. The public functions do not tell whether somebody else has started a profiler.
- ``_ExperimentalConfig`` has ``profile_all_threads``. Without it a profiler records the thread that started it and
  those of autograd, but not those that sum gradients or compute on further devices.

``KINETO_LOG_LEVEL`` is an environment variable of Kineto, which otherwise writes a line at every start and stop.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import os
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler

_NO_INFO = "99"


def is_profiling() -> bool:
    """Returns True while a profiler of PyTorch records in this process."""
    return profiler._is_profiler_enabled


def all_threads() -> dict[str, Any]:
    """Returns the options of ``torch.profiler.profile`` that record all threads, without log lines and without the
    warning of torch 2.11 that events of further cycles are cleared."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _NO_INFO)
    return {"experimental_config": _ExperimentalConfig(profile_all_threads=True), "acc_events": True}
