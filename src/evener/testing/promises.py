"""How a battery says that a promise is broken."""

from __future__ import annotations

from torch import Tensor

from evener.errors import EvenerError


class ConformanceError(EvenerError, AssertionError):
    """A part breaks a promise of its interface; says which, and on what input."""


def broken(name: str, promise: str, seen: str) -> ConformanceError:
    """The error for the part ``name``."""
    return ConformanceError(f"{name} breaks its promise: {promise}. {seen}")


def difference(tensor: Tensor, expected: Tensor, what: str) -> str | None:
    """The first element that is not as expected, in words."""
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
