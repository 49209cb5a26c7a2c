"""ZeRO-3 on PyTorch's FSDP2: divides parameters, gradients and optimizer state over the ranks that divide the samples.

Each rank keeps an equal part of every parameter's rows, with the gradient and the optimizer's state of that part. A
unit of the model (:mod:`evener.strategies.sharded.units`) is whole on a rank only while it is at work::

    rank 0    rows 0 1 ─┐              ┌─▶ unit, samples 0 1 2 ─▶ its gradients ─┐         ┌─▶ rows 0 1 ─▶ optimizer
                        ├─ all_gather ─┤                                         ├─ sum ───┤
    rank 1    rows 2   ─┘              └─▶ unit, samples 3 4   ─▶ its gradients ─┘         └─▶ rows 2   ─▶ optimizer

FSDP2 gathers, frees and sums. Evener changes three things.

*Sums.* FSDP2 averages gradients; here they are summed, over ``shard`` and then, part by part, over further axes.

*Missing gradients.* A parameter that a rank's samples did not use counts as zero in the sum. Hooks on the gathered
weights record which parameters were used. A parameter that no rank used ends without a gradient, as on one device.

*Scalars.* A parameter without dimensions has no rows: every rank keeps it, and its gradient is summed after backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from evener.collectives.base import AllReduce
from evener.collectives.registry import make
from evener.components.model_init import marks_kept
from evener.components.sharded_tensor.local import is_divided
from evener.components.sharded_tensor.shard_spec import ShardSpec, set_shard_spec, shard_spec, take_attributes
from evener.data.batch import map_leaves
from evener.distributed.mesh import DIVIDING_TERMS, Layout, Mesh
from evener.errors import ConfigurationError, TaskError
from evener.hardware.async_read import Readout, is_late
from evener.strategies.after_backward import PostBackwardSum
from evener.strategies.base import Strategy
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.reducer import is_apart
from evener.strategies.sharded.exchange_order import Gather, Scatter, Turns
from evener.strategies.sharded.fsdp_needs import (
    around_passes,
    check_layers,
    check_types,
    device_mesh,
    outputs_shown,
    refusal_explained,
    to_host,
)
from evener.strategies.sharded.ownership import chunks
from evener.strategies.sharded.sharded_reads import reads_explained, refuse_substitutes
from evener.strategies.sharded.units import (
    Place,
    divided_places,
    fills_unused,
    is_unit,
    nbytes_of_units,
    units_of,
)
from evener.strategies.sharded.write_check import refuse_writes
from evener.strategies.single import NoSync
from evener.strategies.steppers.plain import Plain
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.synchronizer import Synchronizer

AXIS = "shard"
"""Mesh axis over which rows are divided."""


@dataclass(frozen=True)
class Fsdp(Strategy):
    """Gives every rank an equal part of each parameter, its gradient and its optimizer state.

    Raises:
        ConfigurationError: If settings name an all-reduce, compression or bucket size, or ``wrap`` names no module.
        TaskError: If FSDP2 cannot shard a parameter of the model; the message names it.
    """

    wrap: str | None = None
    """Names of the modules that are gathered one by one, separated by commas; ``*`` stands for any part of a name
    between two dots. An empty text gathers the whole model at once. None selects the repeated blocks."""
    reshard: bool = True
    """Whether whole weights are freed after forward and gathered again for backward: less memory, more messages."""
    offload: bool = False
    """Whether the shards stay in host memory. The optimizer then also runs there."""

    name: ClassVar[str] = "sharded"
    divides_model: ClassVar[bool] = True
    axis: ClassVar[str] = AXIS
    combines: ClassVar[tuple[str, ...]] = ("data", "context", "tensor")

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        given = {
            "allreduce": settings.all_reduce,
            "compress": settings.compression,
            "bucket_mb": settings.bucket_bytes,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigurationError(
                    f"strategy {self.label!r} sums gradients where PyTorch's FSDP2 does, for which there is no "
                    f"{name}: leave it out"
                )
        return Layout({AXIS: world_size})

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        group, model = mesh.group(AXIS, use="sharding"), normalize_together(model, mesh)
        if group is None:
            return model
        check_layers(model)
        if settings.weight_type is not None:
            with marks_kept(model):
                model.to(settings.weight_type)
        check_types(model)
        if not all(p.is_contiguous() for p in model.parameters()):  # FSDP2 takes no channels_last
            with marks_kept(model):
                model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        for parameter in model.parameters():
            if not parameter.is_contiguous():  # nor transposed weights
                parameter.data = parameter.data.contiguous()
        before = {n: (shard_spec(p), {**vars(p)}) for n, p in model.named_parameters(remove_duplicate=False)}
        self._shard(model, device_mesh(group, mesh.device_type))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if is_divided(parameter):
                (outer, attributes), rows = before[name], chunks(len(parameter), group.size())
                piece = ShardSpec(AXIS, 0, rows, mesh.index(AXIS), within=outer)
                set_shard_spec(take_attributes(parameter, attributes), piece)
        return model

    def _shard(self, model: nn.Module, over: DeviceMesh) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # takes over a second

        pinned = over.device_type != "cpu"
        policy = CPUOffloadPolicy(pin_memory=pinned) if self.offload else OffloadPolicy()
        scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
        units = units_of(model, self.wrap)
        for name, unit in [*reversed(units.items()), ("", model)]:
            with refusal_explained(name or "the model"), outputs_shown(unit):
                fully_shard(
                    unit,
                    mesh=over,
                    reshard_after_forward=self.reshard,
                    offload_policy=policy,
                    ignored_params=scalars,
                )

    def synchronizer(self, learner: Learner) -> Synchronizer:
        if not is_unit(learner.model):
            return NoSync(learner)
        if self.offload and learner.session.device.type != "cpu":
            to_host(learner.model, learner.session.device)
        return self.sums(learner)

    def sums(self, learner: Learner) -> FsdpSum:
        """Returns the synchronizer of a model that is divided."""
        return FsdpSum(learner)

    def stepper(self, learner: Learner) -> Stepper:
        return Plain(learner)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.Rprop):
            raise ConfigurationError(
                "Rprop chooses elements by masks, which the DTensors of PyTorch's FSDP2 do not take: use "
                f"strategy {self.label!r} with zero=2, which has weights as plain tensors, or another optimizer"
            )
        for group in optimizer.param_groups:
            kinds = {is_divided(parameter) for parameter in group["params"]}
            together = group.get("foreach") or group.get("fused")
            on_host = all(parameter.device.type == "cpu" for parameter in group["params"])
            if len(kinds) == 2 and (together or (together is None and not on_host)):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} steps many parameters at once, but scalar parameters are whole and "
                    "others divided, which cannot be mixed: give it foreach=False, or make the scalars a group of "
                    "their own"
                )


def _whole(places: Sequence[Place]) -> Iterator[tuple[str, Tensor]]:
    return ((name, held[key]) for held, key, name in places)


class FsdpSum(PostBackwardSum):
    """Records what FSDP2 gathers and sums, and sums the gradients of whole parameters after backward.

    Args:
        apart: True to sum over the axis of the shards only, and not over other axes of the mesh.
    """

    words, exchanges_in_passes, follows = "reduce-scatter of FSDP2", True, False
    gathers_in_passes = True

    def __init__(self, learner: Learner, apart: bool = False) -> None:
        mesh, axes = learner.mesh, (AXIS,) if apart else DIVIDING_TERMS
        together = mesh.group(*axes)
        assert together is not None
        super().__init__(learner, together)
        self._others = mesh.group(*(axis for axis in axes if axis != AXIS), use="sharding")
        self._units: dict[str, Any] = {n: m for n, m in learner.model.named_modules() if is_unit(m)}
        self._turns = Turns([name or "the model" for name in self._units], together)
        self._used: set[str] = set()
        self._owned: list[list[nn.Parameter]] = []
        """This rank's part of the parameters of each unit."""
        self._gathered: dict[str, set[Tensor]] = {name: set() for name in self._units}
        self._given: dict[str, list[tuple[str, Tensor]]] = {name: [] for name in self._units}
        self._sound: list[Readout] = []
        self._stepping = False
        self._forwards = 0
        """The number of forward passes of which backward is still to come."""
        self._handles: list[RemovableHandle] = []
        self._handles_at_first: list[RemovableHandle] = []
        for number, unit in enumerate(self._units.values()):
            self._take_over(number, unit)
        self._watch(learner.model)

    @cached_property
    def bucket_nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the two largest units: one is gathered while another computes."""
        return sum(sorted(nbytes_of_units(self._units.values()))[-2:])

    def _summed_by(self) -> AllReduce:
        return make("native", self._group, self._learner.session.timeout_seconds)

    def _take_over(self, number: int, unit: Any) -> None:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(Gather(self._turns, number))
        look = partial(self._look, list(self._units)[number])
        scatter = Scatter(self._turns, number, self._others, look, self._work_done)
        unit.set_custom_reduce_scatter(scatter)

    def _watch(self, model: nn.Module) -> None:
        for name, unit in self._units.items():
            places = list(divided_places(unit, self._learner.names))
            self._owned.append([held[key] for held, key, _ in places])
            self._handles += refuse_substitutes(name, unit, places)
            self._handles.append(unit.register_forward_pre_hook(partial(self._note_uses, name, places)))
            self._handles += refuse_writes(unit, partial(_whole, places), self._learner.name)
            if not fills_unused(unit):
                self._handles.append(unit.register_forward_hook(partial(self._fill_later, name)))
        for name, module in model.named_modules():
            if name and any(True for _ in module.parameters()):
                refuse = partial(self._refuse_before_model, name)
                self._handles_at_first.append(module.register_forward_pre_hook(refuse))
        self._handles += around_passes(model, self._begin, self._end)

    # Hooks

    def _begin(self, model: nn.Module, _: Any) -> None:
        _remove(self._handles_at_first)
        self._turns.start(f"forward, training {model.training}, gradients {torch.is_grad_enabled()}")

    def _end(self, *_: Any) -> None:
        self._turns.ended()
        if torch.is_grad_enabled():
            self._forwards += 1
        else:
            self.free_gathered()
        trained = [any(each.requires_grad for each in owned) for owned in self._owned]
        self._turns.start(f"backward of {self._forwards} forward passes, training {trained}")

    def _refuse_before_model(self, name: str, *_: Any) -> None:
        raise TaskError(
            f"{name} is called outside of the model's own forward, in which its sharded weights are gathered: call the "
            "model itself, in Task.forward or in the loop, and have its forward do all that needs weights"
        )

    def _note_uses(self, unit: str, places: Sequence[Place], *_: Any) -> None:
        """Registers hooks on the weights, which are whole now. They tell that a weight got a gradient, and which.
        Casts that autocast keeps of an earlier pass are dropped: backward would reach them after FSDP2's sum."""
        torch.clear_autocast_cache()
        for held, key, name in places:
            weight = held[key]
            if weight.requires_grad and weight not in self._gathered[unit]:
                self._gathered[unit].add(weight)
                self._handles.append(weight.register_hook(partial(self._note_use, name)))
                note = partial(self._note_gradient, unit, name)
                self._handles.append(weight.register_post_accumulate_grad_hook(note))

    def _fill_later(self, unit: str, _: nn.Module, __: Any, output: Any) -> None:
        """Fills the gradients of unused weights with zeros as soon as backward reaches the unit's output."""
        map_leaves(partial(self._fill_at, unit), output)

    def _fill_at(self, unit: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _: self._fill(unit))  # type: ignore[no-untyped-call]

    def _fill(self, unit: str) -> None:
        for weight in self._gathered[unit]:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def _note_use(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # as from a function that returns no gradient for a weight
            self._used.add(name)

    def _note_gradient(self, unit: str, name: str, weight: Tensor) -> None:
        if weight.grad is not None and not is_late(weight.device):
            self._given[unit].append((name, weight.grad))

    def _look(self, unit: str, flat: Tensor) -> None:
        """Checks the gradients that this rank adds to a unit's sum for numbers that are not finite. On a GPU no single
        gradients are kept for a check by name, because FSDP2 is to free that memory."""
        self._sound.append(self._learner.unsound.of_flat(flat, lambda: self._given[unit]))
        self._given[unit].clear()

    def _work_done(self) -> None:
        if self._stepping:
            self._learner.work_timer.work_done()

    def gathered(self, tensor: Tensor) -> bool:
        return any(tensor in weights for weights in self._gathered.values())

    def free_gathered(self) -> None:
        self._forwards = 0
        for unit in self._units.values():
            unit.reshard()

    # A step

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self._stepping = True
        try:
            with reads_explained(self._units):
                yield
        finally:
            self._stepping = False
        self._turns.ended()
        self._forwards = 0

    def forward(self) -> AbstractContextManager[None]:
        return reads_explained(self._units)

    def complete(self) -> tuple[str, ...]:
        self._learner.work_timer.work_done()
        self.free_gathered()
        missing = tuple(self._unused(p for p in self._learner.names if p.requires_grad))
        whole = self._trained
        self._sound.append(self._learner.look_at(whole))
        self._sum(whole)
        return missing

    def _unused(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """Returns the names of the parameters to which this rank gave no gradient, and forgets the recorded uses."""
        names = {p: self._learner.names[p] for p in parameters if p.numel()}
        present = self._learner.updated_early | {p for p in names if p.grad is not None}
        absent = [n for p, n in names.items() if p not in present or (is_apart(p) and n not in self._used)]
        self._used -= set(names.values())
        return absent

    def completes_in_backward(self, parameter: nn.Parameter) -> bool:
        return is_apart(parameter)

    def unused(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        return self._unused(parameters)

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        return self._learner.names[parameter] in self._used

    def soundness(self) -> tuple[Readout, ...]:
        found, self._sound = tuple(self._sound), []
        return found

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums the gradients of whole parameters. Backward has already summed those of sharded parameters."""
        self.check_known(parameters)
        self.free_gathered()
        names = {self._learner.names[p]: p for p in parameters if p.requires_grad}
        whole = {name: p for name, p in names.items() if not is_apart(p)}
        sound = all(math.isfinite(number.value()) for number in self.soundness())
        self._learner.look_at(whole.values())
        for name in self.absent_everywhere(self._unused(names.values()), None if sound else "a unit"):
            names[name].grad = None
            whole.pop(name, None)
        self._sum(whole.values())

    def close(self) -> None:
        _remove(self._handles_at_first)
        _remove(self._handles)
        self._gathered.clear()
        super().close()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
