"""Runs a stage of a model whose code cannot be read: the code runs again, and modules of other stages are not called.

::

    stage 0    embed ✓  blocks.0 ✓  blocks.1 → here it stops             ✓ called
    stage 1    embed ○  blocks.0 ←  blocks.1 ✓  norm ✓  head ✓           ← what came of it   ○ nobody's business

The values that a later stage needs of an earlier one are handed on from stage to stage. Every other result of an
earlier module is replaced by a tensor of the same shape without numbers (NaN, or 0 for integers), because the code
around modules may ask for shapes. Passing such a tensor to a module raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from evener.components.tree_spec import taken_apart
from evener.data.batch import cloned, map_leaves
from evener.errors import ConfigurationError
from evener.strategies.pipeline.module_calls import answered
from evener.strategies.pipeline.stages import Stage, Stages
from evener.strategies.pipeline.traced_run import OVERWRITTEN, TracedCalls


@dataclass(frozen=True)
class TensorForm:
    """Shape and dtype of a tensor that is not handed on."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def to(self, *_: object) -> TensorForm:
        """Returns itself. The method makes the form a leaf of trees."""
        return self

    def made(self, device: torch.device) -> Tensor:
        """Returns a tensor of this form, filled with NaN, or with 0 for integers."""
        kind = self.dtype
        nothing = torch.nan if kind.is_floating_point or kind.is_complex else 0
        return torch.full(self.shape, nothing, dtype=kind, device=device)


Forms = tuple[Any, ...]
"""Forms of all values that calls have returned so far."""


class _StoppedError(BaseException):
    """Raised when the next module belongs to a later stage. Not an Exception, which code around modules might catch."""


class Replay:
    """Runs the stages of a model whose calls were found by running it, for one mode.

    Args:
        training: Whether the mode is training, not evaluation.
        forward: The model's own ``forward``.
    """

    def __init__(self, stages: Stages, training: bool, forward: Callable[..., Any]) -> None:
        self._stages, self._training, self._forward = stages, training, forward
        graph = stages.graph(training)
        assert isinstance(graph, TracedCalls)
        self._graph = graph

    @cached_property
    def _leaves(self) -> Mapping[str, nn.Module]:
        return {name: self._stages.model.get_submodule(name) for name in self._graph.leaves}

    @cached_property
    def _calls(self) -> list[tuple[fx.Node, int]]:
        """All calls of modules, each with its stage."""
        stages = [self._stages.stage(number, self._training) for number in range(len(self._stages))]
        return [
            (node, number)
            for number, stage in enumerate(stages)
            for node in stage.calls
            if node.op == "call_module"
        ]

    def run(self, number: int, received: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        """Runs stage ``number``. Returns the values to hand on; for the last stage, the model's outputs.

        Raises:
            ConfigurationError: If the model's code calls other modules than in the trial run.
        """
        last = number == len(self._stages) - 1
        stage = self._stages.stage(number, self._training)
        run = _Run(self._calls, stage, number, received, self._device)
        if not last and not any(node.op == "call_module" for node in stage.calls):
            return run.handed_on()
        if self._graph.overwrites_inputs and len(self._stages) > 1:
            args, kwargs = map_leaves(cloned, (args, kwargs))
        try:
            with answered(self._leaves, run.called):
                found = self._forward(*args, **kwargs)
        except _StoppedError:
            return run.handed_on()
        run.check_complete(type(self._stages.model).__name__)
        return found if last else run.handed_on()

    @cached_property
    def _device(self) -> torch.device:
        return next(self._stages.model.parameters()).device


class _Run:
    """One run of a stage on one micro-batch."""

    def __init__(
        self,
        calls: list[tuple[fx.Node, int]],
        stage: Stage,
        number: int,
        received: tuple[Any, ...],
        device: torch.device,
    ) -> None:
        self._calls, self._stage, self._number, self._device = calls, stage, number, device
        *values, forms = received if received else ((),)
        self._values: dict[fx.Node, Any] = dict(zip(stage.received, values, strict=True))
        self._forms: list[Any] = list(forms)
        self._made: list[Tensor] = []
        """Stand-in tensors, which hold no numbers."""
        self._next = 0

    def called(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answers a module call of the code around modules."""
        place = self._next
        node, stage = self._calls[place] if place < len(self._calls) else (None, self._number)
        if node is None or node.target != name:
            self._refuse(name, node)
        if stage > self._number:
            raise _StoppedError
        self._next += 1
        if stage < self._number:
            return self._came(node, place)
        self._check((args, kwargs), name)
        found = forward(*args, **kwargs)
        self._keep(node, found)
        return found

    def _came(self, node: fx.Node, place: int) -> Any:
        if node not in self._values:
            return map_leaves(self._filled, self._forms[place])
        found = self._values[node]
        self._keep(node, found)
        return found

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, TensorForm):
            return leaf
        self._made.append(leaf.made(self._device))
        return self._made[-1]

    def _keep(self, node: fx.Node, found: Any) -> None:
        """Keeps a result for later stages. It is copied if the code around modules writes into it."""
        if node in self._stage.handed_on:
            self._values[node] = map_leaves(cloned, found) if node.meta[OVERWRITTEN] else found
        if self._next > len(self._forms):
            self._forms.append(map_leaves(_form, found))

    def _check(self, given: Any, name: str) -> None:
        if self._made and any(tensor is made for tensor in taken_apart(given)[1] for made in self._made):
            raise ConfigurationError(
                f"{name} is given what a module of an earlier stage returned, and was not when the model was tried on "
                f"the first samples: the code around the blocks goes another way for these. {_WAYS}"
            )

    def _refuse(self, name: str, node: fx.Node | None) -> NoReturn:
        expected = "nothing more" if node is None else node.target
        raise ConfigurationError(
            f"the model calls {name}, and called {expected} there when it was tried on the first samples, by which it "
            f"was cut into stages. {_WAYS}"
        )

    def check_complete(self, model: str) -> None:
        """Raises ConfigurationError if the code ended before all calls were made."""
        if self._next < len(self._calls):
            raise ConfigurationError(
                f"{model}.forward ended before it called {self._calls[self._next][0].target}, which it called when it "
                f"was tried on the first samples. {_WAYS}"
            )

    def handed_on(self) -> tuple[Any, ...]:
        """Returns the values to hand on, and the forms of everything that was returned so far."""
        return (*(self._values[node] for node in self._stage.handed_on), tuple(self._forms))


_WAYS = (
    "A pipeline needs the same calls for all samples: put what chooses between modules into a block of its own "
    "(--strategy-option blocks=), or use another strategy, such as 'sharded'"
)


def _form(leaf: Any) -> Any:
    return TensorForm(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
