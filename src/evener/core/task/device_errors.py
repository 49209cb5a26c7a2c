"""Code of the user's that asks for a GPU by itself, told from other errors.

Models and data are placed by Evener, so ``.cuda()`` is never needed in them. Where there is no GPU it ends in an error
of PyTorch's that says nothing of that.
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
    """Whether this is what PyTorch raises where a device is asked for that this process does not have."""
    return isinstance(error, AssertionError | RuntimeError) and any(
        phrase in str(error) for phrase in _PHRASES
    )


def way_out(who: str, error: BaseException) -> str:
    """What to tell the user whose ``who`` (a function, a dataset) asked for a device."""
    return (
        f"{who} asks for a device by itself, which this process does not have ({str(error).splitlines()[0]}); leave "
        "placement to Evener: remove .cuda() and .to(device) there, and the model and the batches are moved to each "
        "rank's device"
    )


@contextmanager
def explaining_placement(who: str) -> Iterator[None]:
    """Turns such an error of the code inside into one that says so; all others pass as they are.

    Raises:
        TaskError: Chained to the error.
    """
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if not asks_for_device(error):
            raise
        raise TaskError(way_out(who, error)) from error
