"""Detects user code that asks for a GPU by itself.

Evener moves models and batches to the devices, so that user code never needs ``.cuda()``. Without a GPU such a call
raises a PyTorch error that does not explain this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evener.errors import TaskError

_PHRASES = (
    "Torch not compiled with",
    "PyTorch is not linked with support for",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "torch.cuda.is_available() is False",
    "invalid device ordinal",
    "Cannot re-initialize CUDA in forked subprocess",
)


def asks_for_device(error: BaseException) -> bool:
    """Returns True if PyTorch raised this error because the process does not have the requested device."""
    return isinstance(error, AssertionError | RuntimeError) and any(
        phrase in str(error) for phrase in _PHRASES
    )


def way_out(who: str, error: BaseException) -> str:
    """Returns the message for the user if ``who`` (a function, a dataset) asked for a device."""
    return (
        f"{who} asks for a device by itself, which this process does not have ({str(error).splitlines()[0]}); leave "
        "placement to Evener: remove .cuda() and .to(device) there, and the model and the batches are moved to each "
        "rank's device"
    )


@contextmanager
def explaining_placement(who: str) -> Iterator[None]:
    """Converts errors of code in the block that asks for a missing device; other errors pass unchanged.

    Raises:
        TaskError: If the block asked for a device that the process does not have. Chained to the original error.
    """
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if not asks_for_device(error):
            raise
        raise TaskError(way_out(who, error)) from error
