"""A task's model and optimizer on one rank, as a strategy has set them up.

Everything that does not depend on the strategy is here, once: the update with its clipping and penalty, the whole
tensors of a divided model, and its state by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.collectives.executor.subgroup import subgroup
from evener.components import gradients
from evener.components import model_init as model
from evener.components import state_dict as state
from evener.components.activation_checkpoint.forward import Blocks
from evener.components.amp.grad_scaler import LossScale
from evener.components.amp.policy import Named
from evener.components.compile import Graphs
from evener.components.memory_limits.limits import Room
from evener.components.model_with_loss import Replica
from evener.components.offload.offload import Offloaded
from evener.components.optim.eight_bit import stepping
from evener.components.optim.fused import lay_out
from evener.components.sharded_tensor.shard_spec import slice_of
from evener.components.sharded_tensor.summon_full import undivided
from evener.components.trainable import Trained
from evener.core.phase_marks import marked
from evener.core.task.task import Task
from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.distributed.hosts import destroy
from evener.distributed.mesh import DIVIDING_TERMS, DataAxis, Mesh
from evener.distributed.session import Session
from evener.errors import DivergenceError
from evener.hardware.async_read import Here, Readout, read
from evener.hardware.timers import stopwatch, waiting
from evener.nn.batch_norm import BatchNorm
from evener.nn.context import Scope, scope
from evener.nn.fqn import clean_name
from evener.strategies.interfaces import Cut, Settings, StepOutcome, Stepper, Synchronizer, Watch
from evener.strategies.timing import Pace
from evener.torch_internals.module_tensors import own_buffers
from evener.torch_internals.version import version

Portion = Callable[[Any, "Learner"], Any]


class Learner:
    """What trains. Made by :func:`evener.strategies.base.set_up`.

    Args:
        portion: From a data set and the learner, the data set with no more of each item than this rank needs.
    """

    mesh: Mesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    synchronizer: Synchronizer
    stepper: Stepper
    cut: Cut
    graphs: Graphs
    """What of the model is compiled."""
    watch: Watch
    """Follows the memory of its device."""
    room: Room
    """The memory of its device."""
    recomputed: Blocks
    """Blocks of the model that are computed again in backward."""
    offloaded: Offloaded
    """What is outside of the device's memory, and the updates of what may be."""
    trained: Trained
    """Which parameters are, at first and now."""
    precision_of: Named
    """Modules with a precision of their own."""

    def __init__(self, name: str, task: Task, session: Session, settings: Settings, portion: Portion) -> None:
        self.name = name
        """What records call the strategy."""
        self.task, self.session, self.settings = task, session, settings
        self.scale = LossScale() if settings.precision.is_scaled else None
        """Of the loss; None where it needs none."""
        self.pace = Pace(stopwatch(session.device), settings.throttle, session.rank)
        self.penalty: Readout = Here(0.0)
        """The task's penalty in the last update."""
        self.penalty_soundness: Readout = Here(0.0)
        """Not finite if the gradient of the penalty is not."""
        self.may_leave_out = False
        """Whether updates may be left out, so that buffers have to be remembered."""
        self._remembered: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        self._remembered_of: int | None = None
        self.updating: int | None = None
        """The last step whose update was begun."""
        self.updated_early: set[Tensor] = set()
        """Parameters that were updated before the backward pass of the last step was over."""
        self.when_drawn: Callable[[int], None] = lambda step: None
        """Called with each step when this rank has drawn all its random numbers, before it gives its last gradients to
        others; by a synchronizer that can tell."""
        self.clipping = gradients.Clipping(settings.clip_norm)
        self.has_shared_buffers = False
        """Whether loose buffers went from one rank to all."""
        self._step = 0
        self._portion = portion
        self._portions: dict[int, Any] = {}  # of the task's own data sets, which live as long

    @property
    def data(self) -> DataAxis:
        """Who computes which part of a batch."""
        return self.mesh.data

    @cached_property
    def replica(self) -> nn.Module:
        """The model with its loss, as it is called in training."""
        return self.synchronizer.wrap(Replica(self.model, self.task.exact_loss(), self.task.forward))

    # Data

    def portion(self, dataset: Any) -> Any:
        """The data set with no more of each item than this rank needs."""
        if id(dataset) in self._portions:
            return self._portions[id(dataset)]
        portion = self._portion(dataset, self)
        if dataset is self.task.train or dataset is self.task.evaluate:
            self._portions[id(dataset)] = portion
        return portion

    def give_up(self) -> nn.Module:
        """Nothing will be read any more, built or trained; returns what was called in place of the model.

        DDP's reducer refers to its hook and so to this learner, which Python cannot see: if the learner referred to
        DDP, neither would ever be freed.
        """
        self._portions.clear()
        self.offloaded.close()
        del self.task
        self.synchronizer.let_go()
        replica: nn.Module = self.__dict__.pop("replica", self.model)
        return replica

    def place(self, batch: Batch) -> Batch:
        """The batch in the floating type of the run."""
        dtype = self.settings.dtype
        return batch if dtype is None else batch.map(lambda leaf: _as_floating(leaf, dtype))

    def own(self, batch: Batch) -> Batch:
        """What of the batch this rank trains on, where the terms of a sample are divided."""
        if type(self.cut) is Cut:
            return batch
        own = dataclasses.replace(batch, micro_batches=[self.cut.trained(m) for m in batch.micro_batches])
        return own if batch.on_host is None else dataclasses.replace(own, on_host=self.own(batch.on_host))

    def outputs(self, micro: MicroBatch) -> Tree:
        """The model's outputs, in evaluation."""
        with self.synchronizer.forward():
            return self.cut.whole(self.stepper.outputs(micro), micro)

    def micro_scope(self, micro: MicroBatch, step: int) -> AbstractContextManager[Scope]:
        """Tells the modules of :mod:`evener.nn` which samples are being computed, and by whom the others."""
        self.session.watchdog.moved()
        group, seed = lambda: self.data_group, self.settings.seed
        return scope(micro.samples, step, seed, micro.weight, group, micro.sequence)

    @cached_property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that compute the parts of a batch, for what a loss or a layer of the user's own sends.

        A group of its own: what backward sends in it may come before or after a bucket of gradients. It is made by
        these ranks together when it is first asked for; None where that is this rank alone.
        """
        ranks = self.mesh.group(*DIVIDING_TERMS)
        if ranks is None:
            return None
        with waiting(), marked("start of a process group"):
            made = subgroup(ranks, range(ranks.size()), self.session.group_timeout.total_seconds())
        assert made is not None
        self.mesh.own(partial(destroy, made))
        return made

    # The update

    def update(
        self, forget: Iterable[str] = (), step: int = 0, passes: Callable[[], bool] = lambda: True
    ) -> None:
        """Clips, steps the optimizer and clears the gradients; ``forget`` names parameters without any gradient.

        Args:
            passes: Asked when all gradients are there; if it says no, the update is left out.
        """
        for name in (without := tuple(forget)):
            self.parameter(name).grad = None
        if self.trained.thawed:
            self.synchronizer.sum_thawed(without)
        if self.scale is not None:
            gradients.scale(self.names, 1 / self.scale.value)
        self._add_penalty()
        if passes():
            self.updating = step
            self.clipping(self.model.parameters(), self.mesh)
            lay_out(self.optimizer)
            with stepping(self.optimizer, self.session.device):
                self.offloaded.update()
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self._leave_out()
        self.synchronizer.updated(step)
        self.room.over()
        self.precision_of.check(self.session.control.gather_objects)
        self.offloaded.check(self.session.control.gather_objects)
        self.graphs.check(step, self.session.control.gather_objects)

    def _remember_buffers(self, step: int) -> None:
        """As they are now is how they will be if the update of ``step`` is left out."""
        self._remembered_of = step
        self._remembered = [
            (held, name, buffer, buffer.clone())
            for held in map(own_buffers, self.model.modules())
            for name, buffer in held.items()
            if buffer is not None
        ]

    def start_afresh(self) -> None:
        """Forgets a step that was begun, after another state has been taken up. A collective call."""
        self._clear_gradients()
        self.synchronizer.updated(0)

    def _clear_gradients(self) -> None:
        """Those too that the optimizer does not have."""
        for parameter in self.names:
            parameter.grad = None

    @torch.no_grad()
    def _leave_out(self) -> None:
        """Nothing is left of the step: neither its gradients nor what its forward pass wrote."""
        self.clipping.norm = None
        self._clear_gradients()
        for held, name, buffer, value in self._remembered:
            held[name] = buffer.copy_(value)

    def has_drawn(self) -> None:
        """The last gradients of the step are about to be given to other ranks."""
        self.when_drawn(self._step)

    def undo(self, step: int) -> None:
        """Leaves nothing of ``step``, if it was begun, and not updated yet."""
        if self._remembered_of == step:
            self._leave_out()

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that name."""
        return self._parameters[name]

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return {clean_name(name): p for name, p in self.model.named_parameters(remove_duplicate=False)}

    @cached_property
    def names(self) -> dict[nn.Parameter, str]:
        """The first name of each parameter."""
        return {p: clean_name(name) for name, p in self.model.named_parameters()}

    @cached_property
    def names_in_order(self) -> list[str]:
        """Those of :attr:`names`."""
        return list(self.names.values())

    @cached_property
    def unsound(self) -> gradients.Unsound:
        """What of this rank's own gradients is not finite, where a synchronizer has it looked at."""
        return gradients.Unsound(self.names.values())

    def look_at(self, parameters: Iterable[nn.Parameter]) -> Readout:
        """A number that is finite if the gradients of ``parameters`` are; else :attr:`unsound` knows which."""
        given = list(parameters)
        found = [p.grad for p in given if p.grad is not None]
        return self.unsound.of_these(found, lambda: gradients.named((self.names[p], p) for p in given)())

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        """This rank's part of a step, up to its gradients; see :meth:`Stepper.run`."""
        self.unsound.found.clear()
        self._step = step
        has_changed = self.trained.look(
            self.name, self.synchronizer.follows, self.settings.update_in_backward
        )
        self.watch.begin(batch)
        if self.settings.limits is not None:
            self.room.allow(self.settings.limits.of(self.session.rank, step))
        if self.may_leave_out:
            self._remember_buffers(step)
        try:
            outcome = self.stepper.run(batch, self._scaled(divisor), step)
        except BaseException:
            self._clear_gradients()  # of whoever goes on, none would be of his own step
            raise
        outcome.unsound, outcome.memory = tuple(self.unsound.found), self.watch.end(batch)
        outcome.changes, outcome.has_changed = self.trained.changes, has_changed
        return outcome

    def _scaled(self, divisor: Callable[[], float]) -> Callable[[], float]:
        if self.scale is None:
            return divisor
        scale = self.scale.value
        return lambda: divisor() / scale

    def _add_penalty(self) -> None:
        """Adds the gradient of the task's penalty: after the exchange, alike on all ranks, so that it counts once."""
        if self.task.penalty is not None:
            with undivided(self.model, self.mesh):
                term = self.task.penalty(self.model)
                self.penalty = read(term)
                term.backward()  # type: ignore[no-untyped-call]
                found = [(clean_name(name), p) for name, p in self.model.named_parameters()]
                self.penalty_soundness = read(self.unsound.of(gradients.named(found)).tensor)

    def check_weights(self, steps: int) -> None:
        """Raises DivergenceError on all ranks alike if a trained weight of one is not finite: such weights are never
        saved or reported. A collective call."""
        rows = self.session.control.exchange([gradients.first_bad_weight(self.names)]).wait()
        for rank, (place,) in enumerate(rows):
            if place:
                raise DivergenceError(
                    f"after step {steps - 1} the weight {list(self.names.values())[int(place) - 1]} is not finite on "
                    f"rank {rank}, though its gradient was: the update went too far. Nothing of it was saved. Try a "
                    "lower learning rate or clip_norm"
                )

    # Buffers

    @cached_property
    def _loose_buffers(self) -> list[tuple[nn.Module, str]]:
        """Buffers that training may write and nothing keeps equal; those of an exact BatchNorm are so by themselves,
        unless several ranks compute the same samples and may round differently."""
        return [
            (module, name)
            for module in self.model.modules()
            if not (isinstance(module, BatchNorm) and module.is_exact and self.data.is_whole)
            for name, buffer in own_buffers(module).items()
            if isinstance(buffer, Tensor)
        ]

    def loose_buffers(self) -> list[Tensor]:
        """As they are now: a forward pass may have put another tensor in a buffer's place."""
        found = [own_buffers(module)[name] for module, name in self._loose_buffers]
        return [buffer for buffer in found if buffer is not None]

    def buffer_versions(self) -> list[tuple[int, int]]:
        """Differs after a forward pass that wrote to a loose buffer."""
        return [(id(buffer), version(buffer)) for buffer in self.loose_buffers()]

    # The model as one device would hold it

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers under all their names, whole; all ranks call it together."""
        named = model.named_tensors(self.model)
        return {name: self.whole(tensor, tensor) for name, tensor in named.items()}

    def whole(self, value: Tensor, parameter: Tensor) -> Tensor:
        """``value``, of the shape of ``parameter``, as one device would hold it.

        A collective call where the parameter is divided.
        """
        piece = slice_of(parameter)
        return piece.gather(value, self.mesh) if piece else value

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer by name, whole and on the CPU, as copies, which any strategy takes up.

        A collective call.
        """
        return state.whole(state.held(self.model, self.optimizer), self.mesh)

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave; the caller's tensors stay its own.

        Raises:
            ConfigurationError: If it is of another model or optimizer.
        """
        state.take(
            self.model, self.optimizer, found, lambda value, piece: piece.part(value), self.offloaded.load
        )

    def close(self) -> None:
        """Gives back what the strategy owns."""
        self.__dict__.pop("replica", None)
        if hasattr(self, "synchronizer"):
            self.synchronizer.close()
        if hasattr(self, "mesh"):
            self.mesh.close()


def _as_floating(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(model.in_type(leaf, dtype)) if isinstance(leaf, Tensor) else leaf
