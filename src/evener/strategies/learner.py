"""The learner: a task's model and optimizer on one rank, set up by a strategy. It holds the code that all strategies
share: the update with clipping and penalty, whole tensors, and state by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.components import gradients
from evener.components import model_init as model
from evener.components import state_dict as state
from evener.components.activation_checkpoint.forward import Blocks
from evener.components.amp.grad_scaler import LossScale
from evener.components.buffer_snapshot import BufferSnapshot
from evener.components.clipping import Clipping
from evener.components.compile import Graphs
from evener.components.cuda_graphs.replays import Replays, replica_of
from evener.components.delayed_hooks import DelayedHooks
from evener.components.exact_sum.gradients import ExactGradients
from evener.components.loose_buffers import LooseBuffers
from evener.components.memory_limits.limits import Room
from evener.components.offload.offload import OffloadState
from evener.components.optim.eight_bit import stepping
from evener.components.optim.fused import clear_gradients, lay_out
from evener.components.optim.whole_updates import OwnershipTerms, WholeUpdates
from evener.components.penalty import add_penalty
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.components.trainable import TrainableParameters
from evener.components.weight_average import WeightAverage
from evener.core.task.task import Task
from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.data.rounds import Rounds
from evener.data.sections import Sections
from evener.distributed.mesh import DataAxis, Mesh
from evener.distributed.session import Session
from evener.hardware.async_read import Readout, ReadyValue
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import stopwatch
from evener.nn.context import Scope, scope
from evener.nn.fqn import clean_name
from evener.strategies.data_group import group_of_passes
from evener.strategies.interfaces import (
    BatchSlicer,
    MemoryWatch,
    StepOutcome,
    Stepper,
    StoredReplicas,
    StrategySettings,
)
from evener.strategies.synchronizer import Synchronizer
from evener.strategies.timing import WorkTimer

Portion = Callable[[Any, "Learner"], Any]


class Learner:
    """Holds the model, the optimizer, the stepper and the synchronizer of one rank. Made by
    :func:`evener.strategies.base.set_up`.

    Args:
        portion: Maps a data set and the learner to the data set with each item reduced to what this rank needs.
    """

    mesh: Mesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    synchronizer: Synchronizer
    stepper: Stepper
    cut: BatchSlicer
    graphs: Graphs
    """The compiled modules of the model."""
    replays: Replays | None = None
    """The CUDA graphs of forward and backward. None if they are off."""
    watch: MemoryWatch
    """Measures the memory use of the rank's device."""
    room: Room
    """The free memory of the rank's device, and its limit."""
    recomputed: Blocks
    """The blocks of the model that are recomputed in backward (activation checkpointing)."""
    offloaded: OffloadState
    """State that is offloaded from the device, and the optimizer updates of offloaded parameters."""
    trained: TrainableParameters
    """The trained parameters, at the start and now."""
    average: WeightAverage
    """The average of the weights, if the task asks for one."""
    exact: ExactGradients | None = None
    """Sums gradients to the same bits on any division, if the settings ask for it. The synchronizer sets it."""
    ownership = OwnershipTerms()
    """The weights that the optimizer updates as wholes, and what the ranks can do."""
    whole_updates: WholeUpdates | None = None
    """Updates weights as wholes if the optimizer must have them so. None if pieces are updated."""
    rounds: Rounds | Sections | None = None
    """How the training is divided into rounds of local steps, or sections. None if all ranks meet in each step."""
    replicas: StoredReplicas | None = None
    """The replicas whose state differs from the model's, for a strategy of local steps."""
    first_step_checks: list[Callable[[Callable[[Any], list[Any]]], None]]
    """Checks that run once, after the first update, with a function that gathers an object from every rank."""

    def __init__(
        self, name: str, task: Task, session: Session, settings: StrategySettings, portion: Portion
    ) -> None:
        self.name = name
        """The name of the strategy in records."""
        self.task, self.session, self.settings = task, session, settings
        self.scale = LossScale() if settings.precision.is_scaled else None
        """The loss scale. None if the precision needs none."""
        self.work_timer = WorkTimer(stopwatch(session.device), settings.throttle, session.rank)
        self.penalty: Readout = ReadyValue(0.0)
        """The value of the task's penalty in the last update."""
        self.penalty_soundness: Readout = ReadyValue(0.0)
        """A number that is not finite if the gradient of the penalty is not."""
        self.may_leave_out = False
        """True if an update may be skipped, so that buffers must be saved before each step."""
        self.left_out = False  # True if the update of the last step was skipped
        self._snapshot = BufferSnapshot()
        self.updating: int | None = None
        """The last step whose update has begun. None before the first."""
        self.updated_early: set[Tensor] = set()
        """Parameters that were updated during the last backward pass."""
        self.when_drawn: Callable[[int], None] = lambda step: None
        """Called with the number of the step when this rank has drawn all its random numbers: if `holds_all`."""
        self.clipping = Clipping(settings.clip_norm, exact=settings.bits is not None)
        self.has_shared_buffers = False
        """True if loose buffers have been copied from one rank to all others."""
        self._step, self._portion, self._hooks = 0, portion, DelayedHooks(lambda p: self.names[p])
        self._portions: dict[int, Any] = {}  # by id(): the task's own data sets live as long as the learner

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next backward pass; 1 if the precision needs none."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def data(self) -> DataAxis:
        """The assignment of ranks to the parts of a batch."""
        return self.mesh.data

    @cached_property
    def replica(self) -> nn.Module:
        """The model with its loss, wrapped for training by the synchronizer."""
        return self.synchronizer.wrap(replica_of(self.replays, self.model, self.task))

    # Data

    def portion(self, dataset: Any) -> Any:
        """Returns the data set with each item reduced to what this rank needs. Caches those of the task."""
        if id(dataset) in self._portions:
            return self._portions[id(dataset)]
        portion = self._portion(dataset, self)
        if dataset is self.task.train or dataset is self.task.evaluate:
            self._portions[id(dataset)] = portion
        return portion

    def give_up(self) -> nn.Module:
        """Releases the data sets, the offloaded state and the task. Returns the wrapped model; the learner cannot train
        afterwards.

        DDP's reducer refers to its hook and through it to this learner, in C++ where Python's garbage collector cannot
        see it. If the learner still referred to DDP, neither would ever be freed.
        """
        self._portions.clear()
        self.offloaded.close()
        if self.replays is not None:
            self.replays.close()
        del self.task
        self.synchronizer.let_go()
        replica: nn.Module = self.__dict__.pop("replica", self.model)
        return replica

    @property
    def convert(self) -> Callable[[Any], Any] | None:
        """Converts floating-point tensors of a batch to the data type of the run. None if they keep their types."""
        dtype = self.settings.dtype
        return None if dtype is None else partial(model.as_floating, dtype=dtype)

    def outputs(self, micro: MicroBatch) -> Tree:
        """Returns the model's outputs in evaluation."""
        with self.synchronizer.forward():
            return self.cut.whole(self.stepper.outputs(micro), micro)

    def micro_scope(self, micro: MicroBatch, step: int) -> AbstractContextManager[Scope]:
        """Returns a context that tells modules of :mod:`evener.nn` which samples this rank and the others compute."""
        self.session.watchdog.moved()
        group, seed = lambda: self.data_group, self.settings.seed
        return scope(micro.samples, step, seed, micro.weight, group, micro.sequence)

    @cached_property
    def data_group(self) -> ProcessGroup | None:
        """The group of the ranks that compute the parts of a batch; see :mod:`evener.strategies.data_group`."""
        meets = self.rounds is None or self.rounds.meets
        return group_of_passes(self.mesh, self.session, "" if meets else self.name)

    # The update

    def update(
        self, forget: Iterable[str] = (), step: int = 0, passes: Callable[[], bool] = lambda: True
    ) -> None:
        """Clips the gradients, steps the optimizer and clears the gradients. All ranks must call this together.

        Args:
            forget: Names of parameters that got no gradient on any rank.
            step: The number of the step.
            passes: Called when all gradients are complete. If it returns False, the update is skipped.
        """
        for name in (without := tuple(forget)):
            self.parameter(name).grad = None
        if self.trained.thawed:
            self.synchronizer.sum_thawed(without)
        self._hooks.call(lambda _: None)
        if self.stepper.updates:
            self.updating = step
            if not passes():
                self._leave_out()
        else:
            self.apply_gradients(step, passes)
        self.end_update(step)

    def end_update(self, step: int) -> None:
        """Called after an update, with the number of its step. All ranks must call this together."""
        self.synchronizer.updated(step)
        self.room.over()
        while self.first_step_checks:
            self.first_step_checks.pop(0)(self.session.control.gather_objects)
        self.graphs.check(step, self.session.control.gather_objects)

    def apply_gradients(
        self,
        step: int,
        passes: Callable[[], bool] = lambda: True,
        held: tuple[Iterable[nn.Parameter], nn.Module] | None = None,
    ) -> None:
        """Adds the penalty, clips, steps the optimizer and clears the gradients, as :meth:`update` does.

        Args:
            held: The parameters that the optimizer updates, and a model that has them, if they are not the model's.
        """
        if self.scale is not None:
            gradients.scale(self.names, 1 / self.scale.value)
        parameters, holder = held or (self.model.parameters(), self.model)
        if self.task.penalty is not None:
            self.penalty, self.penalty_soundness = add_penalty(
                self.task.penalty, holder, self.mesh, self.unsound
            )
        if passes():
            self.updating = step
            if self.exact is not None:
                self.exact.commit()
            self.clipping(parameters, self.mesh)
            lay_out(self.optimizer)
            with named_range("optimizer"), stepping(self.optimizer, self.session.device):
                step_all = self.offloaded.step_of(self.optimizer)
                step_all() if self.whole_updates is None else self.whole_updates.step(step_all)
            clear_gradients(self.optimizer)
        else:
            self._leave_out()

    def start_afresh(self) -> None:
        """Drops the gradients of an unfinished step after a state was loaded. A collective call."""
        self._clear_gradients()
        self.synchronizer.updated(0)

    def _clear_gradients(self) -> None:
        """Clears the gradients of all parameters, also of those that the optimizer does not hold."""
        for parameter in self.names:
            parameter.grad = None

    def _leave_out(self) -> None:
        """Skips the update: clears the gradients and restores the buffers that the forward pass changed."""
        self.clipping.norm, self.left_out = None, True
        self._clear_gradients()
        self._snapshot.restore()

    def has_drawn(self) -> None:
        """Called by the synchronizer before it sends the last gradients of the step."""
        self.when_drawn(self._step)

    def undo(self, step: int) -> None:
        """Undoes the passes of ``step``, which may be taken again, if its buffers were saved."""
        if self._snapshot.step == step:
            self._clear_gradients()
            self._snapshot.restore()

    def parameter(self, name: str) -> nn.Parameter:
        """Returns the parameter with that name."""
        return self._parameters[name]

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return {clean_name(name): p for name, p in self.model.named_parameters(remove_duplicate=False)}

    @cached_property
    def names(self) -> dict[nn.Parameter, str]:
        """Maps each parameter to its first name in the model."""
        return {p: clean_name(name) for name, p in self.model.named_parameters()}

    @cached_property
    def names_in_order(self) -> list[str]:
        """The names in the order of :attr:`names`."""
        return list(self.names.values())

    @cached_property
    def unsound(self) -> gradients.Unsound:
        """Records which of this rank's own gradients are not finite."""
        return gradients.Unsound(self.names.values(), not self.settings.lean)

    @cached_property
    def all_gradients(self) -> gradients.AllGradients:
        """Checks the gradients of all parameters, as :meth:`look_at` does some."""
        return gradients.AllGradients(self.names, self.unsound)

    def look_at(self, parameters: Iterable[nn.Parameter]) -> Readout:
        """Returns a number that is finite if the gradients of ``parameters`` are. Otherwise :attr:`unsound` records the
        parameter."""
        given = list(parameters)
        found = [gradient for p in given if (gradient := p.grad) is not None]
        return self.unsound.of_these(found, lambda: gradients.named((self.names[p], p) for p in given)())

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        """Runs this rank's part of a step; see :meth:`Stepper.run`. Adds what is the same for all steppers."""
        self.unsound.found.clear()
        self._step, self.left_out = step, False
        follows, early = self.synchronizer.follows, self.settings.update_in_backward
        has_changed = self.trained.update(self.name, follows, early)
        self.trained.clear_never_updated()
        self.watch.begin(batch)
        if (limits := self.settings.limits) is not None:
            self.room.allow(limits.limit_for(self.session.rank, step))
        if self.may_leave_out:
            self._snapshot = BufferSnapshot(self.model, step)
        try:
            with self._hooks.until_update(lambda: self.synchronizer.hooked_in(len(batch.micro_batches))):
                outcome = self.stepper.run(batch, divisor, step)
        except BaseException:
            self._clear_gradients()  # a caller that goes on must not find gradients of the failed step
            raise
        self.synchronizer.passed(outcome.totals)
        outcome.unsound, outcome.memory = tuple(self.unsound.found), self.watch.end(batch)
        outcome.changes, outcome.has_changed = self.trained.changes, has_changed
        return outcome

    def check_weights(self, steps: int) -> None:
        """Raises DivergenceError on all ranks if a trained weight of any rank is not finite after ``steps`` steps. Such
        weights must never be saved or reported. All ranks must call this together."""
        rows = self.session.control.exchange([gradients.first_bad_weight(self.names)]).wait()
        gradients.check_weights([int(place) for (place,) in rows], self.names_in_order, steps)

    @cached_property
    def loose_buffers(self) -> LooseBuffers:
        """The buffers that a forward pass may change and that nothing keeps equal across ranks."""
        return LooseBuffers(self.model, self.data.is_whole)

    # The model as one device would hold it

    def tensors(self) -> dict[str, Tensor]:
        """Returns all parameters and buffers, whole, under all their names. All ranks must call this together."""
        return {name: self.whole(each, each) for name, each in model.named_tensors(self.model).items()}

    def whole(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Returns ``value``, shaped as ``parameter``, as one device would hold it. Collective if that is divided."""
        return piece.gather(value, self.mesh) if (piece := shard_spec(parameter)) else value

    def state_dict(self) -> dict[str, Any]:
        """Returns weights and optimizer state by name: whole copies on the CPU. All ranks must call this together."""
        whole = state.whole(self.held_state(), self.mesh)
        return whole if self.replicas is None else self.replicas.gathered(whole)

    def held_state(self) -> state.HeldState:
        """Returns the state that this rank holds, by name."""
        held = state.held(self.model, self.optimizer, self.average.tensors())
        return held if self.replicas is None else self.replicas.held(held)

    def load_held(self, found: Mapping[str, Any], cut: state.Cut | None = None) -> None:
        """Loads a state whose tensors are those of this rank, or whole ones from which ``cut`` takes this rank's.

        Raises:
            ConfigurationError: If the state belongs to another model or optimizer.
        """
        state.load_state(self.model, self.optimizer, found, cut, self.offloaded.load)
        self.average.load(found.get("average", {}), cut)
        if self.replicas is not None:
            self.replicas.load(found["optimizer"]["state"], cut)

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Loads a state returned by :meth:`state_dict`, as :meth:`load_held` does. The given tensors are copied."""
        self.load_held(found, lambda value, piece: piece.part(value))

    def close(self) -> None:
        """Frees the resources of the strategy."""
        self.__dict__.pop("replica", None)
        if hasattr(self, "synchronizer"):
            self.synchronizer.close()
        if hasattr(self, "mesh"):
            self.mesh.close()
