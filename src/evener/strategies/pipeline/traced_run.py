"""Finds the calls of a model whose code cannot be read, by running it on the first samples and observing it.

The result has the same form as that of reading, so that it is cut in the same way: the calls of modules in order, each
with the calls whose values reach it, by whatever code lies between. That code itself is not recorded; every stage runs
it again (:mod:`evener.strategies.pipeline.stage_replay`)::

    def forward(self, words):                                 embed
        x = self.embed(words); n = self.ask(x)          ─▶    blocks.0   needs embed, reads place
        for block in self.blocks:                             blocks.1   needs blocks.0
            x = block(x + self.place)                         head       needs blocks.1
        return self.head(x)
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.components.tree_spec import taken_apart
from evener.data.batch import cloned, detached, map_leaves
from evener.errors import EvenerError, TaskError
from evener.hardware import accelerators
from evener.nn.context import outside
from evener.strategies.pipeline.module_calls import Answer, answered
from evener.strategies.pipeline.side_effects import (
    WeightsKept,
    changed_words,
    changes,
    nothing_changed,
    places_of,
    state_of,
    tensors_kept,
)
from evener.strategies.pipeline.tracing import Arguments, above, in_mode
from evener.strategies.pipeline.trial_weights import Bodies
from evener.strategies.pipeline.value_flow import Flow
from evener.torch_internals.autograd import function_around, without_checkpoints
from evener.torch_internals.modules import own_buffers, own_parameters

Unseen = Callable[[], AbstractContextManager[None]]


class TracedCalls(fx.Graph):
    """Graph of module calls. Its nodes are ordered and linked as in a graph that was read, but it cannot be run."""

    leaves: tuple[str, ...] = ()
    """Modules whose calls were observed."""
    overwrites_inputs = False
    """True if the code around modules writes into the model's inputs."""
    parting: frozenset[int] = frozenset()
    """Numbers of calls at which no stage can begin: it would run an activation checkpoint of earlier stages again."""


OVERWRITTEN = "overwritten"
"""Key in the ``meta`` of a node: True if the code around modules writes into the result of the call."""


@dataclass(frozen=True)
class Rehearsal:
    """A model with example arguments, to be run outside training, with one module's weights in memory at a time."""

    model: nn.Module
    """Whole model, perhaps on the meta device; it stays unchanged."""
    leaves: tuple[str, ...]
    """Modules whose calls are intercepted."""
    arguments: Arguments
    device: torch.device
    """Device on which the model runs."""
    dtype: torch.dtype | None
    """Dtype of floating numbers; None leaves them."""

    @contextmanager
    def stage(self) -> Iterator[Callable[..., Any]]:
        """Yields a function that runs the model. It takes an answer for module calls, the model's arguments, and a
        context in which a module's weights are allocated before its call is answered."""
        bodies = Bodies(self.model, self.device, self.dtype)
        leaves = {name: self.model.get_submodule(name) for name in self.leaves}

        def run(answer: Answer, given: Arguments, unseen: Unseen = nullcontext) -> Any:
            def with_weights(name: str, *call: Any) -> Any:
                with ExitStack() as undo:
                    with unseen():
                        undo.enter_context(bodies.full(leaves[name]))
                    return answer(name, *call)

            bound = inspect.BoundArguments(signature, OrderedDict(given))
            with answered(leaves, with_weights):
                return self.model.forward(*bound.args, **bound.kwargs)

        signature = inspect.signature(self.model.forward)
        with outside(), accelerators.generators_kept(self.device), bodies.light():
            yield run

    def inputs(self) -> Arguments:
        """Returns a copy of the arguments, because a model may write into them."""
        copied: Arguments = map_leaves(cloned, self.arguments)
        return copied

    def fewer(self) -> Arguments:
        """Returns a copy with half of the samples: tensors with as many rows as the first tensor are cut."""
        tensors = taken_apart(self.arguments)[1]
        rows = len(tensors[0]) if tensors and tensors[0].ndim else 0

        def cut(leaf: Any) -> Any:
            has_rows = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == rows
            return leaf[: max(1, rows // 2)].clone() if has_rows else leaf

        found: Arguments = map_leaves(cut, self.arguments)
        return found


def try_both(rehearsal: Rehearsal) -> dict[bool, fx.Graph]:
    """Returns the calls of the model in training (True) and in evaluation (False).

    Raises:
        TaskError: If the model cannot be run, calls no module, or does something that would get lost on several ranks;
            the
            message has the reason.
    """
    found: dict[bool, fx.Graph] = {}
    for training in (True, False):
        with in_mode(rehearsal.model, training):
            found[training] = _tried(rehearsal)
    return found


def _tried(rehearsal: Rehearsal) -> TracedCalls:
    name = type(rehearsal.model).__name__
    try:
        with rehearsal.stage() as run, nothing_changed(rehearsal.model, _around(rehearsal)):
            with WeightsKept(places_of(rehearsal.model.named_parameters())):
                fewer = _called_for(run, rehearsal.fewer())
                run(_Noting(), rehearsal.inputs())  # the model makes whatever it makes once and keeps
            inputs, kept = rehearsal.inputs(), _Kept(rehearsal)
            flow = Flow(_places(rehearsal.model), inputs, kept.places)
            with flow, without_checkpoints(flow.checkpoint):
                outputs = run(flow.call, inputs, flow.unseen)
            needed = flow.ended(outputs)
            kept.check(flow)
    except EvenerError:
        raise
    except Exception as error:
        raise TaskError(f"{name}.forward could not be run on the first samples: {error}") from error
    names = [call.name for call in flow.calls]
    if fewer is not None and fewer != names:
        raise TaskError(
            f"{name}.forward calls {len(names)} modules for some samples and {len(fewer)}, or others, for half: "
            "a pipeline needs the same calls for all. Put what chooses between modules into a block of its own"
        )
    if not flow.calls:
        raise TaskError(f"{name}.forward calls none of its modules")
    return _written_down(flow, needed, rehearsal.leaves)


class _Noting:
    """Answers calls by making them, and records their names.

    Raises:
        TaskError: At a call within an ``autograd.Function``: the result has no gradient there, and a stage would hand
            it on like that.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        around = function_around()
        if around is not None:
            raise TaskError(
                f"the code around the blocks calls {name} within {around.__name__}.forward, an autograd.Function, "
                "where results have no gradients, which stages of a pipeline need: call it outside; for activation "
                "checkpointing use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self.names.append(name)
        found = forward(*args, **kwargs)
        return map_leaves(detached, found)


def _called_for(run: Callable[..., Any], inputs: Arguments) -> list[str] | None:
    """Returns the names of the called modules. Returns None if the model does not accept so few samples."""
    noting = _Noting()
    try:
        run(noting, inputs)
    except EvenerError:
        raise
    except Exception:
        return None
    return noting.names


class _Kept:
    """What modules around blocks keep in their attributes from one run to the next."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._modules = [rehearsal.model.get_submodule(name) for name in sorted(_around(rehearsal))]
        self._before = [state_of(module) for module in self._modules]
        named = [
            (n, name, t) for n, each in enumerate(self._modules) for name, t in tensors_kept(each).items()
        ]
        self._names = {f"{n}.{name}": (n, name) for n, name, _ in named}
        self.places = places_of((f"{n}.{name}", tensor) for n, name, tensor in named)
        """A key of each tensor that is kept, by the address of its memory."""

    def check(self, flow: Flow) -> None:
        """Raises TaskError if the run has used what was kept before, and changed it; or has changed anything else."""
        used, written = ({self._names[key] for key in keys} for keys in (flow.kept_used, flow.kept_written))
        for number, (module, before) in enumerate(zip(self._modules, self._before, strict=True)):
            changed = set(changes(before, state_of(module)))
            plain = {key for key in changed if not isinstance(before.get(key), Tensor | None)}
            weights = changed & (own_buffers(module).keys() | own_parameters(module).keys())
            grown = {key for key in changed if key not in before and "[" in key}
            stale = {key for n, key in used if n == number and key in changed}
            into = {key for n, key in written if n == number}
            for key in sorted(plain | weights | grown | stale | into):
                raise TaskError(changed_words(module, key))


def _around(rehearsal: Rehearsal) -> frozenset[str]:
    """Returns the names of the modules around those whose calls are intercepted."""
    return frozenset({"", *(place for leaf in rehearsal.leaves for place in above(leaf))})


def _places(model: nn.Module) -> dict[int, str]:
    """Returns the name of each parameter and buffer by the address of its memory."""
    return places_of((*model.named_parameters(), *model.named_buffers()))


def _written_down(flow: Flow, needed: set[int], leaves: tuple[str, ...]) -> TracedCalls:
    graph = TracedCalls()
    graph.leaves, graph.overwrites_inputs = leaves, flow.overwrites_inputs
    graph.parting = frozenset(n for n in range(len(flow.calls) + 1) if flow.parts_checkpoint(n, needed))
    weights: dict[str, fx.Node] = {}
    read: list[fx.Node] = []
    calls: list[fx.Node] = []

    def weight(name: str) -> fx.Node:
        if name not in weights:
            weights[name] = graph.create_node("get_attr", name)
        return weights[name]

    for number, call in enumerate(flow.calls):
        # The stage that makes this call also runs the code up to the next call, and all code before.
        read += [
            weight(name)
            for name, before in flow.reads.items()
            if before == number + 1 or before == number == 0
        ]
        own = [weight(name) for name in sorted(call.reads)]
        args = dict.fromkeys([*(calls[value] for value in sorted(call.needs)), *read, *own])
        calls.append(graph.create_node("call_module", call.name, tuple(args)))
        calls[-1].meta[OVERWRITTEN] = call.overwritten
    graph.output((*(calls[value] for value in sorted(needed)), *read))
    return graph
