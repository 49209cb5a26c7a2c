"""Memory that cannot be known before a run, and why."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from evener.errors import ConfigurationError
from evener.files import PACKAGE

_OF_OTHERS = (str(Path(torch.__file__).parent), str(PACKAGE), "<")


class UnknownMemoryError(ConfigurationError):
    """Memory cannot be known before the run. The run itself may be right."""


def unknown_by_error(error: Exception) -> UnknownMemoryError:
    """Returns the error of an estimate in which the task's own code failed, as it may on tensors without values: it
    calls NumPy, or an operator that does not tell the shape of its result."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{each.filename}:{each.lineno}" for each in frames if not each.filename.startswith(_OF_OTHERS)]
    place = f" at {lines[-1]}" if lines else ""
    return UnknownMemoryError(
        "memory cannot be known before the run: an estimate takes steps on tensors that have shapes and no values, "
        f"and they failed{place} with {type(error).__name__}: {str(error).rstrip('.')}. A custom operator tells "
        "its shapes by register_fake; else measure memory in a run"
    )
