"""The model's ``forward``, which runs the stage that is at hand and no more.

``Task.forward`` calls the model as it does on one device, and may do something with its inputs and outputs. On the rank
of the last stage the call returns; on others it ends where the stage does, and what follows it is not reached::

    outputs = task.forward(model, inputs)    ─▶  model(...)  ─▶  stage 0: its calls ─▶ the values to hand on, raised
                                                                 last:    its calls ─▶ outputs, returned
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import fx, nn

from evener.errors import ConfigurationError
from evener.strategies.staged.cutting import Stages, run
from evener.strategies.staged.tracing import inputs_of
from evener.types import Forward, Tree


class StageEndedError(BaseException):
    """A stage has run, of which the values are handed on. No Exception, which the code around the model may catch."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__("a stage of the pipeline has ended")
        self.values = values


class CalledError(BaseException):
    """The model was called with these arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the model was called")
        self.arguments = arguments


class StagedForward:
    """Takes the place of the ``forward`` of the model of ``stages``."""

    def __init__(self, stages: Stages, owners: dict[str, set[int]]) -> None:
        self.stages, self.owners = stages, owners
        """For each parameter and buffer that is used, the places on the axis where it is."""
        self.refusal: str | None = None
        """What this rank found wrong with the task in a step, which all ranks then raise together."""
        self._signature = inspect.signature(stages.model.forward)
        graphs = {training: stages.graph(training) for training in (True, False)}
        self._inputs = {mode: inputs_of(graph, self._signature) for mode, graph in graphs.items()}
        self._at_hand: tuple[int, tuple[Any, ...]] | None = None

    @cached_property
    def _interpreters(self) -> dict[bool, fx.Interpreter]:
        """Made when they are needed, since strategies of other axes may put other modules in the place of some."""
        stages = self.stages
        return {
            training: fx.Interpreter(stages.model, graph=stages.graph(training)) for training in (True, False)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._at_hand is None:
            raise ConfigurationError(
                "the model is divided into stages of a pipeline, and can be called neither by itself nor twice for a "
                "batch: take steps with engine.step(batch) or evener.fit, and outputs from engine.predict and "
                "engine.evaluate; a loop that calls the model itself needs another strategy, such as 'ddp'"
            )
        (number, received), self._at_hand = self._at_hand, None
        training = self.stages.model.training
        stage = self.stages.stage(number, training)
        known: dict[fx.Node, Any] = dict(zip(stage.received, received, strict=True))
        bound = arguments_of(self._signature, args, kwargs)
        known |= {node: bound[name] for node, name in self._inputs[training].items()}
        found = run(stage, self._interpreters[training], known)
        if number < len(self.stages) - 1:
            raise StageEndedError(found)
        return found

    def run(self, number: int, received: tuple[Any, ...], forward: Forward, inputs: Tree) -> Any:
        """What the stage hands on; from the last one the outputs that ``forward`` makes of the model's.

        Args:
            received: From the stage before.
        """
        self._at_hand = number, received
        try:
            outputs = forward(self.stages.model, inputs)
        except StageEndedError as ended:
            return ended.values
        finally:
            self._at_hand = None
        if number < len(self.stages) - 1:
            raise ConfigurationError(
                "Task.forward does not call the model, or not as one: a pipeline needs it called once for each batch"
            )
        return outputs


def arguments_of(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """By the names of parameters, those that were not given with their defaults."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def called_with(model: nn.Module, forward: Forward, inputs: Tree) -> dict[str, Any]:
    """The arguments with which ``forward`` calls the model.

    Raises:
        ConfigurationError: If it does not call it.
    """
    signature = inspect.signature(model.forward)

    def called(*args: Any, **kwargs: Any) -> Any:
        raise CalledError(arguments_of(signature, args, kwargs))

    with in_place_of_forward(model, called):
        try:
            forward(model, inputs)
        except CalledError as found:
            return found.arguments
    raise ConfigurationError("Task.forward does not call the model, which a pipeline needs it to do")


@contextmanager
def in_place_of_forward(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """``function`` is called for the model's ``forward``."""
    model.forward = function
    try:
        yield
    finally:
        del model.forward
