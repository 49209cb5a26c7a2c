"""Trees of tensors sent from stage to stage, each form of them told once in words."""

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
"""A tree of what is sent, with holes for tensors."""


class Post:
    """Sends and receives what crosses cuts; each form of it is told once."""

    def __init__(self, mesh: Mesh, axis: str, device: torch.device) -> None:
        self.index, self.degree = mesh.index(axis), mesh.degree(axis)
        self._line, self._device = line_along(mesh, axis, device), device
        self._forms: dict[Any, Form] = {}

    def send(self, key: Any, tree: Any, to: int) -> None:
        """Sends a tree.

        Args:
            key: What the form of the tree follows from, or begins with None if nothing is known to tell it.

        Raises:
            ConfigurationError: If it had another form before.
        """
        form, tensors = taken_apart(tree)
        if key[0] is None or key not in self._forms:
            self._line.tell(form, to)
            self._forms[key] = form
        elif self._forms[key] != form:
            raise ConfigurationError(
                f"what stage {key[-1]} of the pipeline sends was {self._forms[key]} for inputs of the same shapes, and "
                f"is {form} now: it must follow from the shapes of the inputs. Cut the model elsewhere (cut=)"
            )
        self._line.send(tensors, to)

    @property
    def runs_ahead(self) -> bool:
        """Whether receiving may begin before what comes is needed."""
        return self._line.runs_ahead

    def receive(self, key: Any, source: int) -> Any:
        """The form of the next tree of that rank, and its tensors without gradient."""
        return self.begin(key, source)()

    def begin(self, key: Any, source: int) -> Callable[[], Any]:
        """Begins to receive, if the form is known; the function that it gives waits for what :meth:`receive` gives."""
        if key[0] is None or key not in self._forms:
            return partial(self._heard, key, source)
        return self._rooms(self._forms[key], source)

    def _heard(self, key: Any, source: int) -> Any:
        self._forms[key] = self._line.hear(source)
        return self._rooms(self._forms[key], source)()

    def _rooms(self, form: Form, source: int) -> Callable[[], Any]:
        rooms = [hole.room(self._device) for hole in holes_in(form)]
        under_way = self._line.receive(rooms, source)

        def come() -> Any:
            self._line.wait(under_way)
            return form, rooms

        return come

    @property
    def nbytes(self) -> int:
        """Of the largest message so far."""
        return max((sum(hole.nbytes for hole in holes_in(form)) for form in self._forms.values()), default=0)

    def one_way(self, nbytes: int) -> float:
        """Seconds for which a message of so many bytes to a neighbour is on its way. A collective call."""
        return self._line.one_way(nbytes)

    def finish(self) -> None:
        """All that was sent has come."""
        self._line.finish()
