"""The strategy ``tensor``: divides layers over ranks that compute the same samples; each has a part of the features.

For a model whose layers are too wide for one device, or which takes too long for one sample there. The plan
(:mod:`evener.strategies.tensor.plan`) names the divided layers; :mod:`evener.nn.tensor_parallel` computes them::

              embed          up              down         head
    rank 0    words 0..5  ─▶ columns 0..6 ─▶ rows 0..6 ─▶ words 0..5
                          │                │            │              whole, and alike on all ranks, where lines meet
    rank 1    words 6..10 ─▶ columns 7..12 ─▶ rows 7..12 ─▶ words 6..10

A rank's shard of a layer and the shard's gradient belong to that rank alone. Whole weights get the same gradient on
every rank, but for rounding; all ranks take the bits of the first. A check proves the plan: in the first step the
gradients are compared, so that a layer that takes a part for the whole is found before anything is updated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.components import gradients
from evener.components.checks.embeddings import EMBEDDINGS
from evener.components.sharded_tensor.shard_spec import ShardSpec, set_shard_spec, take_attributes
from evener.core.task.task import call_model
from evener.data.division import by_weights
from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError, TaskError
from evener.hardware.async_read import Readout, ReadyValue, is_late, read
from evener.nn.collectives_no_grad import largest
from evener.nn.dropout import Dropout
from evener.nn.fqn import clean_name
from evener.nn.head_parallel_attention import DividedAttention, divide_heads
from evener.nn.rng import draw_apart
from evener.nn.tensor_parallel import VOCABULARY, LengthDivision, VocabularyLinear, divide_layer
from evener.nn.tensor_parallel_conv1d import column_kinds, row_kinds
from evener.nn.vocabulary_loss import VocabularyParallelCrossEntropy
from evener.strategies.base import Strategy
from evener.strategies.ddp import summing
from evener.strategies.features import ReplicatedGradSync
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.steppers.plain import Plain
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.synchronizer import Synchronizer
from evener.strategies.tensor.first_samples import Found, tried
from evener.strategies.tensor.plan import LayerPlan, TensorPlan, derived_of, plan_of
from evener.strategies.tensor.regions import RECURRENT, obstacle, width
from evener.strategies.tensor.sequence_parallel import divide_positions, in_terms_of
from evener.strategies.tensor.stand_ins import arrange
from evener.strategies.tensor.trace import output_layer
from evener.torch_internals.modules import AnyBatchNorm, own_buffers, own_parameters

__all__ = ["TensorParallel", "TensorPlan", "plan_of"]

AXIS = "tensor"
"""Mesh axis over which layers are divided."""


@dataclass(frozen=True)
class TensorParallel(Strategy):
    """Divides layers by features, heads, channels or words. Fixed weights of ``balance`` set the ranks' parts of them.

    Raises:
        TaskError: If nothing can be divided, a module cannot be divided as planned, or a shared weight is not divided
            alike
            in all its layers.
        ConfigurationError: If the plan cannot be read, or a rank gets no part of a layer.
    """

    plan: str | None = None
    """``NAME=WORD,NAME=WORD`` (:mod:`evener.strategies.tensor.plan`). None derives the plan, and rank 0 prints it."""
    sequence: bool = False
    """Whether norms, dropout and residual sums beside divided layers are derived to compute some of the positions."""

    divides_model: ClassVar[bool] = True
    axis: ClassVar[str] = AXIS
    combines: ClassVar[tuple[str, ...]] = ("pipeline", "data", "shard", "context")
    output: ClassVar[str | None] = None
    """Layer that makes the scores of the task's loss. Set on the object that :meth:`prepared` returns."""
    tried: ClassVar[Found] = ((), {})
    """Result of running the model on the first samples. Set on the object that :meth:`prepared` returns."""

    def for_own_loop(self) -> Strategy:
        return self

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        if settings.compression is not None:
            raise ConfigurationError(
                f"strategy 'tensor' sends no gradients that {settings.compression!r} could compress; leave it out"
            )
        return Layout({AXIS: world_size})

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        task, found = learner.task, replace(self)
        if (
            isinstance(task.loss, nn.CrossEntropyLoss | VocabularyParallelCrossEntropy)
            and task.forward is call_model
        ):
            object.__setattr__(found, "output", output_layer(model))
        if self.plan is None or "auto" in (entry.strip() for entry in self.plan.split(",")):
            object.__setattr__(found, "tried", tried(model, learner, derived_of(model), AXIS))
        return found

    def plan_for(self, model: nn.Module) -> TensorPlan:
        """Returns the plan that divides a model."""
        return plan_of(model, self.plan, self.sequence, self.output, self.tried[0])

    def describe(self, model: nn.Module) -> str:
        """Returns the plan for a model as text, a line for each module."""
        found = self.plan_for(model)
        words = f"{len(found.uses)} modules of {type(model).__name__} are divided:\n{found.describe()}"
        return "\n".join([words, *(f"  {line}" for line in _left_whole(model, self.tried[1]))])

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        # A separate process group keeps messages of forward and backward apart from gradient buckets.
        group = mesh.new_group(AXIS)
        if group is not None:
            if self.plan is None and mesh.rank == 0:
                print(self.describe(model), file=sys.stderr, flush=True)
            plan = self.plan_for(model)
            _check_axes(plan, mesh)
            _Division(model, group, _weights(mesh, settings), mesh.index(AXIS)).divide(plan)
        return normalize_together(model, mesh)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return self.around(learner, summing(learner))

    def around(self, learner: Learner, inner: Synchronizer) -> Synchronizer:
        return TensorParallelGradSync(learner, inner)

    def stepper(self, learner: Learner) -> Stepper:
        return Plain(learner)


def _left_whole(model: nn.Module, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each layer that the plan leaves whole, with the reason. Equal blocks share one line."""
    alike = {re.sub(r"\b\d+\b", "*", name): reason for name, reason in reasons.items()}
    yield from (f"{name} is left whole: {reason}" for name, reason in alike.items())
    for name, module in model.named_modules():
        if isinstance(module, RECURRENT):
            yield f"{clean_name(name) or 'the model'} is left whole: {obstacle(module)}"


def _check_axes(plan: TensorPlan, mesh: Mesh) -> None:
    """Raises ConfigurationError if the plan divides positions and the mesh has an axis ``pipeline`` or ``context``."""
    axis = next((axis for axis in ("pipeline", "context") if mesh.degree(axis) > 1), None)
    if axis is not None and "sequence" in plan.words.values():
        raise ConfigurationError(
            f"strategy 'tensor' divides positions by sequence, which does not go together with the axis {axis!r}: "
            "leave sequence out, or that axis"
        )


def _weights(mesh: Mesh, settings: StrategySettings) -> Sequence[float]:
    """Returns the ranks' parts: those of the settings, unless they divide samples on this mesh; else equal parts."""
    degree, given = mesh.degree(AXIS), settings.weights
    return given if given is not None and mesh.data.degree == 1 and len(given) == degree else [1.0] * degree


Place = tuple[nn.Module, str]
"""Module, and the name of its parameter or buffer."""


class _Division:
    """Cuts a model as a plan says.

    Args:
        model: Changed in place.
        group: Ranks that divide it.
        weights: Proportions of the ranks' parts.
        index: Index of this rank.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, weights: Sequence[float], index: int) -> None:
        self._model, self._group, self._weights, self._index = model, group, weights, index
        self._modules = {clean_name(name): module for name, module in model.named_modules()}
        self._slices: dict[Place, ShardSpec] = {}
        self._made: dict[str, LengthDivision] = {}
        self._read: dict[str, LengthDivision] = {}

    def divide(self, plan: TensorPlan) -> None:
        """Divides all modules of the plan."""
        for name, use in plan.uses.items():
            if use.word not in ("whole", "sequence"):
                getattr(self, f"_{use.word}")(name or "the model", self._modules[name], use)
        self._check_runs()
        self._check_tied()
        self._cut()
        arrange(plan.regions, self._modules, self._read, self._index)
        divide_positions(self._modules, plan, self._group, self._index)
        for module in self._model.modules():
            _slowly(module)

    def _parts(self, name: str, length: int, unit: int = 1) -> LengthDivision:
        counts = by_weights(length // unit, self._weights)
        if 0 in counts:
            runs = f" in runs of {unit}" if unit > 1 else ""
            raise ConfigurationError(
                f"{name} has {length} features, heads, channels or words{runs} to divide in the parts "
                f"{list(self._weights)}, which leave rank {counts.index(0)} of {len(counts)} without one: use at most "
                f"{length // unit} ranks and no part that is too small, or leave it out of plan="
            )
        edges = accumulate((count * unit for count in counts), initial=0)
        return LengthDivision(
            self._group, tuple(map(range, *zip(*pairwise(edges), strict=True))), self._index
        )

    def _say(self, module: nn.Module, name: str, dim: int, parts: LengthDivision, blocks: int = 1) -> None:
        """Records that a tensor is to be cut, if the module has it."""
        if own_parameters(module).get(name) is not None or own_buffers(module).get(name) is not None:
            self._slices[module, name] = ShardSpec(AXIS, dim, parts.pieces, self._index, blocks=blocks)

    def _colwise(self, name: str, layer: nn.Module, use: LayerPlan) -> None:
        parts = self._made[name] = self._parts(name, width(layer)[1] // use.blocks, use.unit)
        for held, dim in divide_layer(layer, column_kinds(layer), parts, name).held.items():
            self._say(layer, held, dim, parts, use.blocks)

    def _rowwise(self, name: str, layer: nn.Module, use: LayerPlan) -> None:
        parts = self._read[name] = self._parts(name, width(layer)[0], use.unit)
        for held, dim in divide_layer(layer, row_kinds(layer), parts, name).held.items():
            self._say(layer, held, dim, parts)

    def _vocabulary(self, name: str, layer: nn.Module, use: LayerPlan) -> None:
        words = layer.num_embeddings if isinstance(layer, EMBEDDINGS) else width(layer)[1]
        parts = self._parts(name, words)
        for held, dim in divide_layer(layer, VOCABULARY, parts, name).held.items():
            self._say(layer, held, dim, parts)

    def _heads(self, name: str, attention: nn.Module, use: LayerPlan) -> None:
        assert isinstance(attention, nn.MultiheadAttention)
        heads = self._parts(name, attention.num_heads)
        features = self._parts_of_heads(heads, attention.head_dim)
        divide_heads(attention, heads, name)
        for held, (dim, blocks) in DividedAttention.held.items():
            self._say(attention, held, dim, features, blocks)
        self._say(attention.out_proj, "weight", 1, features)

    def _parts_of_heads(self, heads: LengthDivision, features: int) -> LengthDivision:
        pieces = tuple(range(piece.start * features, piece.stop * features) for piece in heads.pieces)
        return LengthDivision(self._group, pieces, self._index)

    def _between(self, name: str, module: nn.Module, use: LayerPlan) -> None:
        parts = self._parts(name, use.length, use.unit)
        if isinstance(module, Dropout):
            module.part = (use.dim, use.length, parts.local_length)
        elif isinstance(module, AnyBatchNorm):
            for held in ("weight", "bias", "running_mean", "running_var"):
                self._say(module, held, 0, parts)
        else:
            draw_apart(module, self._index)

    def _check_runs(self) -> None:
        """Raises TaskError if a rowwise layer reads other features than the colwise layers beside it make."""
        for name, wanted in self._read.items():
            parent = name.rpartition(".")[0]
            beside = {
                column: made
                for column, made in self._made.items()
                if column.rpartition(".")[0] == parent and made.whole == wanted.whole
            }
            if beside and wanted not in beside.values():
                raise TaskError(
                    f"{name} reads {wanted.sizes} of {wanted.whole} features on the ranks, and "
                    f"{' and '.join(beside)} make {next(iter(beside.values())).sizes}: give colwise and rowwise the "
                    "same UNIT"
                )

    def _check_tied(self) -> None:
        names = {module: name for name, module in self._modules.items()}
        for places in self._holders().values():
            slices = {self._slices.get(place) for place in places}
            if len(slices) > 1:
                shown = " and ".join(f"{names[module]}.{name}" for module, name in places)
                raise TaskError(
                    f"{shown} are one weight, and the plan does not divide it alike under all of its names: divide an "
                    "embedding and the output layer that has its weight both as vocabulary, or leave them out of plan="
                )

    def _holders(self) -> Mapping[nn.Parameter, list[Place]]:
        found: dict[nn.Parameter, list[Place]] = {}
        for module in self._model.modules():
            for name, parameter in own_parameters(module).items():
                if parameter is not None:
                    found.setdefault(parameter, []).append((module, name))
        return found

    def _cut(self) -> None:
        made: dict[Tensor, nn.Parameter] = {}
        for (module, name), piece in self._slices.items():
            whole = own_parameters(module).get(name)
            if whole is None:
                buffer = own_buffers(module)[name]
                assert buffer is not None
                own_buffers(module)[name] = set_shard_spec(piece.part(buffer), piece)
            else:
                if whole not in made:
                    made[whole] = _piece(whole, piece)
                own_parameters(module)[name] = made[whole]


def _piece(whole: nn.Parameter, piece: ShardSpec) -> nn.Parameter:
    part = nn.Parameter(piece.part(whole.detach()), whole.requires_grad)
    return set_shard_spec(take_attributes(part, vars(whole)), piece)


def _slowly(module: nn.Module) -> None:
    """Keeps PyTorch's transformer layers off their fused kernel for evaluation, which would take shards for whole
    weights. The kernel is not used if these two attributes are set so."""
    divided = any(isinstance(inner, DividedAttention) for inner in module.modules())
    if isinstance(module, nn.TransformerEncoderLayer) and divided:
        module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder) and divided:
        module.use_nested_tensor = False


class TensorParallelGradSync(ReplicatedGradSync):
    """Extends :class:`~evener.strategies.features.ReplicatedGradSync` by a check of the plan, and by sums over
    positions.

    In the first step it compares the gradients of whole parameters, which must agree but for rounding between ranks
    that compute the same samples. On a GPU the result is known a step later. Gradients of parameters that each rank
    used with its own positions are summed. A loss that can use divided scores is told how they are divided.
    """

    def __init__(self, learner: Learner, inner: Synchronizer) -> None:
        super().__init__(learner, AXIS, inner)
        self._compared: list[nn.Parameter] | None = None
        self._alike: Readout = ReadyValue(torch.ones(0))
        self._terms = in_terms_of(learner.model)
        self._loss = learner.task.loss
        if isinstance(self._loss, VocabularyParallelCrossEntropy):
            self._loss.divide(_scores_apart(learner.model))

    def close(self) -> None:
        super().close()
        if isinstance(self._loss, VocabularyParallelCrossEntropy):
            self._loss.divide(None)

    def _share_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        self._judge()
        given = [p for p in self._whole(parameters) if p.grad is not None]
        whole = [p for p in given if p not in self._terms]
        self._sum(gradients.values(p) for p in given if p in self._terms)
        if self._compared is not None or self._group is None or not whole:
            super()._share_whole(whole)
            return
        before = [gradients.values(parameter).clone() for parameter in whole]
        super()._share_whole(whole)
        apart = largest(_apart(whole, before), self._group)
        self._compared, self._alike = whole, read(1 - apart)
        if not is_late(apart.device):
            self._judge()

    def _judge(self) -> None:
        alike, self._alike = self._alike.values(), ReadyValue(torch.ones(0))
        if not all(alike):
            assert self._compared is not None
            name = self._learner.names[self._compared[alike.index(0.0)]]
            raise TaskError(
                f"the gradients of {name} differ between ranks that compute the same samples, so that somewhere a "
                "part of the features is taken for all of them, or ranks draw different random numbers: a colwise "
                "layer whose features go elsewhere than into a rowwise one, or dropout between them that the plan "
                "does not name. Leave the layer out of the plan"
            )


def _apart(whole: Sequence[nn.Parameter], before: Sequence[Tensor]) -> Tensor:
    """Returns for each parameter 1 if its gradient differs from ``before`` by more than rounding, else 0."""
    now = [gradients.values(parameter) for parameter in whole]
    total = nn.utils.get_total_norm(now)
    moved = torch.stack([(a - b).norm().to(total) for a, b in zip(now, before, strict=True)])
    apart: Tensor = moved > torch.finfo(total.dtype).eps ** 0.5 * total
    return apart.float()


def _scores_apart(model: nn.Module) -> LengthDivision | None:
    """Has the model's output layer leave its scores divided in training, and returns the division. Returns None if
    there is no such layer, or several are divided differently."""
    layers = [module for module in model.modules() if isinstance(module, VocabularyLinear)]
    found = {layer.parts for layer in layers}
    if len(found) != 1:
        return None
    for layer in layers:
        layer.stays_divided = True
    return found.pop()
