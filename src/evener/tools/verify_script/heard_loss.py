"""A prepared loss whose values are recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from evener.torch_internals.compiling import outside_of_graphs


class Listener(Protocol):
    """Records the values of losses."""

    def inside(self) -> AbstractContextManager[None]:
        """Context of what is part of a loss."""

    def heard(self, value: Any) -> None:
        """Called with the value of a loss."""


class HeardLoss:
    """Wraps a loss and records its values.

    Args:
        loss: The function that is called.
        made: The prepared loss, which provides all other attributes.
        recorder: Records the values.
    """

    def __init__(self, loss: Any, made: Any, recorder: Listener) -> None:
        self._loss, self._made, self._recorder = loss, made, recorder

    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._loss, nn.Module):  # moves its class weights
            self._loss.to(next((each.device for each in args if isinstance(each, Tensor)), "cpu"))
        with self._recorder.inside():
            value = self._loss(*args, **kwargs)
        self._recorder.heard(value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up before __init__
            raise AttributeError(name)
        return getattr(self._made, name)
