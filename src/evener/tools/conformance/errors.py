"""Errors and helpers of the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from evener.errors import EvenerError


class ConformanceError(EvenerError, AssertionError):
    """Raised if a part breaks a promise of its interface. Says which promise, and on what input."""


def broken(name: str, promise: str, seen: str) -> ConformanceError:
    """Returns the error for a broken promise of the part ``name``."""
    return ConformanceError(f"{name} breaks its promise: {promise}. {seen}")


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Adds ``what`` as a note to any error raised inside, such as the input that a part was given."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def difference(tensor: Tensor, expected: Tensor, what: str) -> str | None:
    """Describes the first element that is not as expected. Returns None if shape, dtype and all elements are."""
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return (
            f"{what}: is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        )
    wrong = (tensor != expected).reshape(-1)
    if not wrong.any():
        return None
    place = int(wrong.int().argmax())
    values = tensor.reshape(-1)[place].item(), expected.reshape(-1)[place].item()
    return (
        f"{what}: {int(wrong.sum())} elements are wrong, the first at {place}: {values[0]}, not {values[1]}"
    )
