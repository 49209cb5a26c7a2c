"""Replays forward and backward of batches of known shapes, and makes sure that this trains the same model.

The third batch of a shape is recorded. Four things keep a replay from computing something else in silence:

1. Before it is recorded, a pass runs operator by operator: what a graph cannot repeat is refused by name (`unfit`).
2. What that pass changes in Python is refused, and changed back (`host_state`, `pass_state`).
3. Before each replay, what the pass reads in Python must be as it was; else all graphs are dropped.
4. In the 1st, 2nd, 4th, 8th ... replay and in each 1000th the eager pass computes the step, and the replay runs beside
   it, for comparison (`comparison`). If the first one of a graph differs, the run goes on without graphs. If a later
   one differs, steps in between are in doubt, and the run ends.

Only forward and backward up to this rank's own gradients are replayed. Sums over ranks, checks, clipping and the
optimizer's step are as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.cuda_graphs.comparison import difference
from evener.components.cuda_graphs.host_state import HostState
from evener.components.cuda_graphs.own_leaves import own_leaves
from evener.components.cuda_graphs.pass_state import PassState, host_draws
from evener.components.cuda_graphs.recorded_pass import Pass, RecordedPass, ReplayedPass, gradients_of
from evener.components.cuda_graphs.recorder import RECORDERS, Recorder
from evener.components.cuda_graphs.shapes import GraphCache, UnknownShapeError, shape_of
from evener.components.cuda_graphs.unfit import (
    OperatorWatch,
    ScopeWatch,
    UnfitError,
    hooked_module,
    leaves_of,
)
from evener.components.model_with_loss import Replica
from evener.core.task.task import Task
from evener.data.batch import MicroBatch, cloned
from evener.errors import DivergenceError
from evener.nn.context import Scope, current, resumed
from evener.nn.fqn import clean_name
from evener.torch_internals.autograd import after_backward, version
from evener.torch_internals.dispatch import mode_is_active

CHECKED_EVERY = 1000
"""Replays of a graph after which it is compared at the latest."""


def is_compared(number: int) -> bool:
    """Returns True if the replay with this number, from 1, is compared with an eager pass."""
    return number & (number - 1) == 0 or number % CHECKED_EVERY == 0


class Replays:
    """The graphs of one rank.

    Args:
        reason: Why there are none; "" if there may be some.
        roots: Returns what a pass reads in Python, by the name that messages give it: the model as ``""``, and the
            loss.
        communicates: Returns True if a layer or the loss has communicated with other ranks.
        slowed: Called in a step that takes longer because a graph is recorded or compared.
        norms: True if the graphs compute the largest element of each gradient as well, for :meth:`known_norms`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        reason: str,
        roots: Callable[[], dict[str, Any]],
        communicates: Callable[[], bool] = lambda: False,
        slowed: Callable[[], None] = lambda: None,
        norms: bool = False,
    ) -> None:
        self.reason = reason
        self.recorded = self.replayed = self.passes = 0
        self.notes: list[str] = []
        """Messages that the user has not been told yet."""
        self._model, self._device, self._roots = model, device, roots
        self._communicates, self._slowed, self._norms = communicates, slowed, norms
        self._recorder: Recorder | None = None
        self._graphs: GraphCache[RecordedPass] = GraphCache()
        self._state: HostState | None = None
        self._last: RecordedPass | None = None
        self._trained: dict[nn.Parameter, str] = {}
        self._lent: set[int] = set()
        self._handles: list[Any] = []
        self._told_change = False

    @property
    def words(self) -> str:
        """What became of the graphs, for the record of the run."""
        if not self.replayed:
            return f"no CUDA graphs: {self.reason or 'no shape of batch has come often enough'}"
        later = f"; none any more: {self.reason}" if self.reason else ""
        return f"{self.recorded} CUDA graphs, replayed in {self.replayed:,} of {self.passes:,} passes{later}"

    def run(self, micro: MicroBatch, eager: Pass) -> Tensor:
        """Returns the summed loss of a micro-batch, with a node of autograd, by a replay if that is possible.

        Raises:
            DivergenceError: In backward, if a graph has computed something else than the eager pass.
        """
        self.passes += 1
        scope = current()
        if self.reason or scope is None or not self._is_usual(micro):
            return eager(micro)
        self._keep_lent()
        if self._last is not None and self._last.is_kept:
            self._give_up("the optimizer or something else keeps gradients beyond their step", scope.step)
            return eager(micro)
        self._forget_changed(scope.step)
        recorded = self._graph_for(micro, eager, scope)
        if recorded is None:
            return eager(micro)
        recorded.replays += 1
        if is_compared(recorded.replays):
            return self._compared(recorded, micro, eager, scope.step)
        self._last = recorded
        self.replayed += 1
        recorded.unchecked += 1
        total: Tensor = ReplayedPass.apply(recorded, micro, *recorded.parameters)  # type: ignore[no-untyped-call]
        return total

    def known_norms(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Returns the largest absolute value of each gradient, if these are the gradients of the last pass as its graph
        left them, and it computed such norms. None otherwise. The next replay overwrites them."""
        return None if self._last is None else self._last.norms_of(gradients)

    def close(self) -> None:
        """Frees the graphs and their memory."""
        self._graphs.clear()
        self._recorder = self._state = self._last = None
        self._drop_handles()

    def _is_usual(self, micro: MicroBatch) -> bool:
        """Returns False for a pass that is special, or runs under something that must see its operators."""
        autocasts = torch.is_autocast_enabled(self._device.type)
        is_apart = micro.weight != 1 or micro.sequence is not None
        is_watched = mode_is_active() or torch.is_anomaly_enabled()
        return torch.is_grad_enabled() and not (is_apart or is_watched or autocasts)

    def _graph_for(self, micro: MicroBatch, eager: Pass, scope: Scope) -> RecordedPass | None:
        """Returns the graph for a micro-batch, which may be recorded now, or None if there is none."""
        try:
            shape = shape_of((micro.inputs, micro.targets), self._device)
        except UnknownShapeError as error:
            self._give_up(f"the batch holds {error}, and a graph takes tensors on {self._device}", scope.step)
            return None
        found = self._graphs.find(shape)
        if found is None and self._graphs.is_due(shape):
            found = self._recorded(micro, eager, scope)
            if found is not None:
                self._graphs.keep(shape, found)
        return found

    # Recording

    def _recorded(self, micro: MicroBatch, eager: Pass, scope: Scope) -> RecordedPass | None:
        """Records the pass of a micro-batch. Leaves no trace in the model. Returns None if it cannot be recorded."""
        self._slowed()
        self._drop_handles()
        before, state = PassState(self._model, self._device), self._state
        watch = ScopeWatch(scope.samples, scope.step, scope.seed, scope.weight, scope.group, scope.sequence)
        named = {p: clean_name(name) for name, p in self._model.named_parameters() if p.requires_grad}
        try:
            state = state or HostState(self._roots())
            self._recorder = recorder = self._recorder or RECORDERS[self._device.type](self._device)
            with resumed(watch):
                written = self._try_out(micro, eager, list(named), state, recorder)
                with own_leaves(self._model, list(named)) as leaves:
                    found = RecordedPass(micro, eager, list(named), leaves, recorder, written, self._norms)
        except Exception as error:  # the eager pass, which follows, raises what is not the graph's fault
            self._give_up(_first_line(error), scope.step)
            return None
        finally:
            if state is not None:
                state.restore()
            before.restore()
        self.recorded += 1
        self._state, self._trained = state, named
        self._lent.update(each.data_ptr() for each in found.gradients)
        return found

    def _try_out(
        self,
        micro: MicroBatch,
        eager: Pass,
        trained: list[nn.Parameter],
        state: HostState,
        recorder: Recorder,
    ) -> list[Tensor]:
        """Runs a pass that is watched, and that warms libraries up for the recording. Returns the buffers whose version
        it has raised.

        Raises:
            UnfitError: If the pass cannot be recorded.
        """
        if hooked := hooked_module(self._model) or state.hook():
            raise UnfitError(f"{hooked} has hooks, which a replay would not call as an eager pass does")
        if self._communicates():
            raise UnfitError("a layer or the loss communicates with other ranks")
        buffers = {each.untyped_storage().data_ptr() for each in self._model.buffers()}
        memory = {each.untyped_storage().data_ptr(): name for name, each in state.tensors}
        kept = {address: name for address, name in memory.items() if address not in buffers}
        versions = {each: version(each) for each in self._model.buffers()}
        drawn, copied = host_draws(self._device), micro.map(cloned)
        with (
            own_leaves(self._model, trained) as leaves,
            recorder.warming_up(),
            OperatorWatch(self._device, kept),
        ):
            total = eager(copied)
            if not leaves_of(total) <= set(leaves):
                raise UnfitError(
                    "backward gives a gradient to a tensor that is no parameter of the model, or that is read past "
                    "the module that has it"
                )
            gradients_of(total, leaves, torch.ones_like(total))
        if change := state.change():
            raise UnfitError(f"forward or backward changes {change}, which a replay would not")
        if drawn != host_draws(self._device):
            raise UnfitError("forward or backward draws random numbers on the host, which a replay would not")
        return [each for each, before in versions.items() if version(each) != before]

    # Comparing

    def _compared(self, recorded: RecordedPass, micro: MicroBatch, eager: Pass, step: int) -> Tensor:
        """Returns the loss of the eager pass, and runs a replay beside it. Compares them when backward is over."""
        assert self._state is not None
        if hooked := self._state.hook():
            self._give_up(f"{hooked} has a hook on its gradient, which comparisons would not see past", step)
            return eager(micro)
        self._slowed()
        self._drop_handles()
        before, given = PassState(self._model, self._device), micro.map(cloned)
        first = {"the loss": recorded.forward(given), **PassState(self._model, self._device).buffers}
        before.restore()
        try:
            total = eager(micro)
        except torch.OutOfMemoryError as error:  # the graphs hold the activations of a pass, too
            self._give_up(_first_line(error), step)
            before.restore()
            return eager(micro)
        # The hooks must not hold the graph that holds them: it would live until Python collects garbage.
        found, loss = dict[str, Tensor](), total.detach()
        self._handles = [
            p.register_hook(partial(found.__setitem__, name))  # type: ignore[no-untyped-call]
            for p, name in self._trained.items()
        ]

        @torch.no_grad()
        def begin(start: Tensor) -> None:
            after = PassState(self._model, self._device)
            replay = first | self._copies(recorded, start)
            before.restore()
            again = {"the loss": recorded.forward(given), **PassState(self._model, self._device).buffers}
            again |= self._copies(recorded, start)
            after.restore()
            known = {"the loss": loss, **after.buffers}
            after_backward(lambda: finish(known, replay, again))

        def finish(known: dict[str, Tensor], replay: dict[str, Tensor], again: dict[str, Tensor]) -> None:
            self._drop_handles()
            gradients = {f"the gradient of {name}": found.get(name) for name in self._trained.values()}
            self._judge(recorded, difference(known | gradients, replay, again), step)

        total.register_hook(begin)  # type: ignore[no-untyped-call]
        return total

    def _copies(self, recorded: RecordedPass, start: Tensor) -> dict[str, Tensor]:
        """Runs a recorded backward. Returns copies of the gradients by name."""
        pairs = zip(recorded.parameters, recorded.backward(start), strict=True)
        return {f"the gradient of {self._trained[p]}": gradient.clone() for p, gradient in pairs}

    def _judge(self, recorded: RecordedPass, found: str, step: int) -> None:
        if not found:
            recorded.unchecked, recorded.sound_at = 0, step
            return
        wrong = f"in step {step} a CUDA graph and the eager pass differ in {found}"
        if doubtful := [each for each in self._graphs.graphs() if each.unchecked]:
            sound = min(each.sound_at for each in doubtful)
            raise DivergenceError(
                f"{wrong}. Steps after step {sound} may have computed with what forward has read in Python when it was "
                "recorded, such as a clock or a schedule: go on from a checkpoint before, without cuda_graphs"
            )
        self._give_up(f"{wrong}, for example because forward depends on something in Python", step)

    # Changes

    def _forget_changed(self, step: int) -> None:
        """Drops all graphs if what they have read in Python has changed. New ones may be recorded later."""
        change = self._state.change() if self._state is not None else ""
        if change:
            self._graphs.clear()
            self._state = None
            if not self._told_change:
                self._told_change = True
                self.notes.append(f"CUDA graphs are recorded anew: {change} has changed before step {step}")

    def _give_up(self, reason: str, step: int) -> None:
        """Drops all graphs for the rest of the run, and says why."""
        self.reason = reason
        self.notes.append(f"no CUDA graphs from step {step} on: {reason}")
        self.close()

    def _keep_lent(self) -> None:
        """Copies gradients that are still in the memory of a graph, as in a step of several micro-batches."""
        for parameter in self._trained:
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() in self._lent:
                parameter.grad = gradient.clone()

    def _drop_handles(self) -> None:
        """Removes the hooks of a comparison."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class ReplayedReplica(Replica):
    """The model with its loss, whose passes ``replays`` may replay."""

    def __init__(self, replays: Replays, *parts: Any) -> None:
        super().__init__(*parts)
        self._replays = replays

    def forward(self, micro: MicroBatch) -> Tensor:
        return self._replays.run(micro, super().forward)


def replica_of(replays: Replays | None, model: nn.Module, task: Task) -> Replica:
    """Returns the model with the task's loss, replayed if ``replays`` are given."""
    kind = Replica if replays is None else partial(ReplayedReplica, replays)
    return kind(model, task.exact_loss(), task.forward)


def _first_line(error: Exception) -> str:
    """Returns the error in one line. If ending the recording failed as well, that is the error before."""
    cause = error.__context__ or error
    line = next(iter(str(cause).splitlines()), "")
    return line if isinstance(cause, UnfitError) else f"{type(cause).__name__}: {line}"
