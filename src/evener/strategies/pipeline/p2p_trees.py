"""Sends trees of tensors from stage to stage. The form of a tree is sent once, and its tensors every time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from evener.components.tree_spec import holes_in, taken_apart
from evener.distributed.mesh import Mesh
from evener.errors import ConfigurationError
from evener.strategies.pipeline.p2p import line_along

Form = Any
"""Tree with holes in the place of tensors."""


class P2PTrees:
    """Sends and receives the trees that cross cuts, along ``axis`` of the mesh."""

    def __init__(self, mesh: Mesh, axis: str, device: torch.device) -> None:
        self.index, self.degree = mesh.index(axis), mesh.degree(axis)
        self._line, self._device = line_along(mesh, axis, device), device
        self._forms: dict[Any, Form] = {}

    def send(self, key: Any, tree: Any, to: int) -> None:
        """Sends a tree to rank ``to`` of the axis.

        Args:
            key: Determines the form of the tree. If it begins with None, the form is sent every time.

        Raises:
            ConfigurationError: If the tree of this key had another form before.
        """
        form, tensors = taken_apart(tree)
        if key[0] is None or key not in self._forms:
            self._line.send_object(form, to)
            self._forms[key] = form
        elif self._forms[key] != form:
            raise ConfigurationError(
                f"what stage {key[-1]} of the pipeline sends was {self._forms[key]} for inputs of the same shapes, and "
                f"is {form} now: it must follow from the shapes of the inputs. Cut the model elsewhere (cut=)"
            )
        self._line.send(tensors, to)

    @property
    def runs_ahead(self) -> bool:
        """True if receiving may begin before the result is needed."""
        return self._line.runs_ahead

    def receive(self, key: Any, source: int) -> Any:
        """Returns the form of the next tree of rank ``source``, and its tensors, which have no gradient."""
        return self.begin(key, source)()

    def begin(self, key: Any, source: int) -> Callable[[], Any]:
        """Begins to receive, if the form is known. The returned function waits, and returns what :meth:`receive`
        does."""
        if key[0] is None or key not in self._forms:
            return partial(self._heard, key, source)
        return self._rooms(self._forms[key], source)

    def _heard(self, key: Any, source: int) -> Any:
        self._forms[key] = self._line.receive_object(source)
        return self._rooms(self._forms[key], source)()

    def _rooms(self, form: Form, source: int) -> Callable[[], Any]:
        rooms = [hole.room(self._device) for hole in holes_in(form)]
        under_way = self._line.receive(rooms, source)

        def receive() -> Any:
            self._line.wait(under_way)
            return form, rooms

        return receive

    @property
    def nbytes(self) -> int:
        """Bytes of the largest message so far."""
        return max((sum(hole.nbytes for hole in holes_in(form)) for form in self._forms.values()), default=0)

    def one_way(self, nbytes: int) -> float:
        """Returns the seconds that a message of ``nbytes`` takes to a neighbour. All ranks must call this together."""
        return self._line.one_way(nbytes)

    def finish(self) -> None:
        """Waits until everything that was sent has arrived."""
        self._line.finish()
