"""Keeps an average of the weights on each rank, of the part of the weights that the rank holds.

Averages are computed element by element, so that no rank needs another's part. Weights of half precision have averages
of float32: an average moves by less than the last bit of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.model_init import named_tensors
from evener.components.sharded_tensor.local import local
from evener.components.sharded_tensor.shard_spec import ShardSpec, shard_spec
from evener.core.half_precision import widened
from evener.core.task.average import Average
from evener.core.text import counted, few
from evener.errors import ConfigurationError
from evener.nn.context import outside
from evener.nn.fqn import clean_name


class WeightAverage:
    """The average of a model's weights and floating-point buffers on this rank.

    Args:
        how: What to average. None keeps no average.
        model: The model, as it is divided over the ranks.
    """

    def __init__(self, how: Average | None, model: nn.Module) -> None:
        self.how, self._model = how, model
        self.updates = 0
        """Number of updates of the weights."""
        self.number = 0
        """Number of updates that were averaged. While it is 0, there is no average."""
        self._averages: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}
        if how is not None:
            from torch.distributed.checkpoint.state_dict import get_model_state_dict  # takes over a second

            with outside():
                kept = get_model_state_dict(model).keys()
            live = {name: value for name, value in self._live().items() if name in kept}
            self._averages = {name: widened(local(value.detach())).clone() for name, value in live.items()}
            first = {id(tensor): name for name, tensor in reversed(named_tensors(model).items())}
            tensors = named_tensors(model).items()
            self._names = {
                name: of for name, tensor in tensors if (of := first[id(tensor)]) in self._averages
            }

    def _live(self) -> dict[str, Tensor]:
        """Returns the model's floating-point tensors, each under its first name."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {
            clean_name(name): each for name, each in named if each.is_floating_point() or each.is_complex()
        }

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns this rank's part of each average, and the tensor of the model, by name."""
        live = self._live() if self._averages else {}
        return {name: (average, live[name]) for name, average in self._averages.items()}

    def _held(self) -> list[tuple[Tensor, Tensor]]:
        """Returns each average with this rank's part of the tensor of the model."""
        return [(average, local(tensor.detach())) for average, tensor in self.pairs().values()]

    @torch.no_grad()
    def updated(self) -> None:
        """Called after each update of the weights: averages them if it is their turn."""
        self.updates += 1
        if self.how is None or self.updates <= self.how.start:
            return
        if (self.updates - self.how.start) % self.how.every:
            return
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for average, value in self._held():
            of_kind = groups.setdefault((average.dtype, average.device), ([], []))
            of_kind[0].append(average)
            of_kind[1].append(value.to(average.dtype))
        for averages, values in groups.values():
            if self.number:
                self.how.update(averages, values, self.number)
            else:
                for average, value in zip(averages, values, strict=True):
                    average.copy_(value)
        self.number += 1

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which the model has the average in place of its weights. All ranks must enter and leave it
        together, when no rank computes. What a strategy holds of the weights beside them, it renews before the next
        forward pass, because they were written to."""
        with torch.no_grad():
            kept = [(value, value.clone()) for _, value in self._held()]
            for average, value in self._held():
                value.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for value, before in kept:
                    value.copy_(before)

    @property
    def words(self) -> str:
        """A description for the summary of a run; "" if there is none."""
        if self.how is None:
            return ""
        of = counted(self.updates, "update")
        return f"average of the weights: {self.how.words}; {self.number:,} averaged of {of}"

    def free(self) -> None:
        """Frees the averages."""
        self._averages, self._names = {}, {}

    # State

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the counts, the same on all ranks, and what is averaged. None if no average is kept."""
        if self.how is None:
            return None
        return {"updates": self.updates, "number": self.number, "how": self.how.words}

    def load_state_dict(self, state: Mapping[str, Any] | None, steps: int) -> None:
        """Takes over saved counts. If there are none, averaging begins after ``steps`` steps."""
        self.updates, self.number = (state["updates"], state["number"]) if state else (steps, 0)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averages of this rank, under all names of each weight."""
        return {name: self._averages[of] for name, of in self._names.items()}

    @torch.no_grad()
    def load(self, found: Mapping[str, Tensor], cut: Callable[[Tensor, ShardSpec], Tensor] | None) -> None:
        """Takes over saved averages. Copies them. Without any, the averages stay as they are.

        Args:
            cut: Cuts this rank's piece out of a whole tensor. None if ``found`` holds pieces.

        Raises:
            ConfigurationError: If averages are missing.
        """
        lacking = sorted(self._averages.keys() - found.keys()) if found else []
        if lacking:
            raise ConfigurationError(
                f"the checkpoint lacks the average of {few(lacking)}: it is of another model"
            )
        pieces = {name: shard_spec(tensor) for name, tensor in named_tensors(self._model).items()}
        for name, average in self._averages.items() if found else ():
            piece = pieces[name]
            average.copy_(cut(found[name], piece) if cut is not None and piece is not None else found[name])
