"""Trees of tensors sent from stage to stage, each form of them told once in words."""

from __future__ import annotations

from typing import Any

import torch

from evener.errors import ConfigurationError
from evener.runtime.mesh import Mesh
from evener.strategies.staged.messages import Line
from evener.strategies.staged.parcel import holes_in, taken_apart

Form = Any
"""A tree of what is sent, with holes for tensors."""


class Post:
    """Sends and receives what crosses cuts; each form of it is told once."""

    def __init__(self, mesh: Mesh, axis: str, device: torch.device) -> None:
        self.index, self.degree = mesh.index(axis), mesh.degree(axis)
        self._line, self._device = Line(mesh, axis, device), device
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

    def receive(self, key: Any, source: int) -> Any:
        """The next tree of that rank, its tensors without gradient; and its form."""
        if key[0] is None or key not in self._forms:
            self._forms[key] = self._line.hear(source)
        form = self._forms[key]
        rooms = [hole.room(self._device) for hole in holes_in(form)]
        self._line.receive(rooms, source)
        return form, rooms

    def finish(self) -> None:
        """All that was sent has come."""
        self._line.finish()
