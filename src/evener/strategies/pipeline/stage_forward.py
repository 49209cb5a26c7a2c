"""Replaces the model's ``forward`` by one that runs a single stage.

``Task.forward`` calls the model as it does on one device, and may do something with its inputs and outputs. On the rank
of the last stage the call returns. On others it ends with the stage, and the code after the call does not run::

    outputs = task.forward(model, inputs)    ─▶  model(...)  ─▶  stage 0: its calls ─▶ the values to hand on, raised
                                                                 last:    its calls ─▶ outputs, returned
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from evener.core.types import Forward, Tree
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout
from evener.nn.context import current
from evener.strategies.pipeline.remote_weights import Away, whole_forms
from evener.strategies.pipeline.stage_code import function_of
from evener.strategies.pipeline.stage_replay import Replay
from evener.strategies.pipeline.stages import Stages
from evener.strategies.pipeline.tracing import fixed_of, inputs_of


class StageEndedError(BaseException):
    """Raised at the end of a stage, with the values to hand on. Not an Exception, which code around might catch."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__("a stage of the pipeline has ended")
        self.values = values


class CalledError(BaseException):
    """Raised when the model is called, with the arguments of the call."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the model was called")
        self.arguments = arguments


class StagedForward:
    """Takes the place of the ``forward`` of the model of ``stages``."""

    def __init__(self, stages: Stages, owners: dict[str, set[int]]) -> None:
        self.stages, self.owners = stages, owners
        """``owners``: for each used parameter and buffer, the places on the axis that use it."""
        self.away: Sequence[Away] = ()
        """Weights of which this rank has an empty shard."""
        self.refusal: str | None = None
        """Reason why this rank rejects the task in this step, or None. All ranks then raise it together."""
        self.totals: Sequence[Readout] = ()
        """Summed loss terms of the step, on the rank of the last stage."""
        self._signature = inspect.signature(stages.model.forward)
        self._run: Callable[..., Any] = (_Tried if stages.is_tried else _Read)(stages, self._signature)
        self._at_hand: tuple[int, tuple[Any, ...]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._at_hand is None:
            raise ConfigurationError(
                "the model is divided into stages of a pipeline, and can be called neither by itself nor twice for a "
                "batch: take steps with engine.step(batch) or evener.fit, and outputs from engine.predict and "
                "engine.evaluate; a loop that calls the model itself needs another strategy, such as 'ddp'"
            )
        (number, received), self._at_hand = self._at_hand, None
        scope = current()
        if received and scope is not None:
            scope.follow(received[-1])
        with whole_forms(self.away):
            found = self._run(number, received[:-1], args, kwargs)
        if number < len(self.stages) - 1:
            raise StageEndedError((*found, {} if scope is None else scope.calls()))
        return found

    def run(self, number: int, received: tuple[Any, ...], forward: Forward, inputs: Tree) -> Any:
        """Runs a stage. Returns the values to hand on; for the last stage, the outputs that ``forward`` makes of the
        model's. Raises ConfigurationError if ``forward`` does not call the model.

        Args:
            received: Values from the stage before.
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


class _Read:
    """Runs stages of a model whose code was read."""

    def __init__(self, stages: Stages, signature: inspect.Signature) -> None:
        self._stages, self._signature = stages, signature
        graphs = {training: stages.graph(training) for training in (True, False)}
        self._inputs = {mode: inputs_of(graph, signature) for mode, graph in graphs.items()}
        self._functions: dict[tuple[int, bool], Callable[..., Any]] = {}
        self._example, self._fixed = stages.example, fixed_of(stages.model, stages.example) or {}

    def __call__(self, number: int, received: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        model, bound = self._stages.model, arguments_of(self._signature, args, kwargs)
        self._check_fixed(bound)
        inputs = [bound[name] for name in self._inputs[model.training].values()]
        return self._function(number, model.training)(model, *inputs, *received)

    def _check_fixed(self, bound: dict[str, Any]) -> None:
        """Raises ConfigurationError if an argument that decides which way the code goes is another than it was."""
        for name, was in self._fixed.items():
            value = bound.get(name)
            if type(value) is not type(was) or value != was:
                _refuse_other(self._stages, name, was, value)
        for name, value in bound.items():
            if value is None and self._example.get(name) is not None:
                _refuse_other(self._stages, name, self._example[name], value)

    def _function(self, number: int, training: bool) -> Callable[..., Any]:
        key = number, training
        if key not in self._functions:
            stage = self._stages.stage(number, training)
            self._functions[key] = function_of(stage, list(self._inputs[training]))
        return self._functions[key]


def _refuse_other(stages: Stages, name: str, was: Any, now: Any) -> NoReturn:
    kind = type(stages.model).__name__
    raise ConfigurationError(
        f"{kind}.forward is given {name}={_shown(now)}, and was given {_shown(was)} when its code was read to cut it "
        f"into stages, which may decide what it calls: give {name} the same value in all batches, or name the list of "
        "blocks (--strategy-option blocks=NAME), with which the code runs again in each step"
    )


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)[:80]


class _Tried:
    """Runs stages of a model whose calls were found by running it."""

    def __init__(self, stages: Stages, signature: inspect.Signature) -> None:
        self._model = stages.model
        own = stages.model.forward
        self._replays = {training: Replay(stages, training, own) for training in (True, False)}

    def __call__(self, number: int, received: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        return self._replays[self._model.training].run(number, received, args, kwargs)


def arguments_of(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns all arguments by parameter name, with the defaults of those that were not given."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def called_with(model: nn.Module, forward: Forward, inputs: Tree) -> dict[str, Any]:
    """Returns the arguments with which ``forward`` calls the model.

    Raises:
        ConfigurationError: If ``forward`` does not call the model.
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
    """Replaces the model's ``forward`` by ``function`` inside the block."""
    before = vars(model).get("forward")
    model.forward = function
    try:
        yield
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before
