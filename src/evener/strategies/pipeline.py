"""The model cut into stages, one or several a rank; micro-batches pass through them one after the other.

::

    rank 0    embed, blocks 0-2     F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1    blocks 3-5            .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2    blocks 6-7, head      .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      the loss is here

Every rank keeps the whole tree of modules with all of its names, but of a weight that another rank's stage uses it
holds an empty piece: state by name, clipping, penalties and checkpoints follow from that. A pipeline is as fast as its
slowest stage, so that the model is cut by what its layers take, measured, and by how fast the ranks are.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from evener.balance.partition import partition_layers
from evener.borrowed.layers import AnyBatchNorm
from evener.borrowed.module_tensors import own_parameters
from evener.data.batch import map_leaves
from evener.data.collate import collate_pairs, collate_with
from evener.errors import ConfigurationError, EvenerError
from evener.nn.experts import Experts
from evener.runtime.mesh import Layout, Mesh
from evener.strategies.afterwards import summing_afterwards
from evener.strategies.base import Strategy
from evener.strategies.features import check_elementwise
from evener.strategies.learner import Learner
from evener.strategies.model import in_type
from evener.strategies.parts import Settings, Stepper, Synchronizer
from evener.strategies.slices import Slice, mark, slice_of
from evener.strategies.staged.costs import measure
from evener.strategies.staged.cutting import Stages, layers_of, words_of
from evener.strategies.staged.drawing import Drawing
from evener.strategies.staged.running import StagedForward, called_with
from evener.strategies.staged.schedule import order_of
from evener.strategies.staged.stepper import PipelineStepper
from evener.strategies.staged.synchronizer import AroundStages
from evener.strategies.staged.tracing import Arguments, read_both

AXIS = "pipeline"
_ALIKE = 1.15
"""Ranks whose times differ by less are taken as equally fast."""
_LOOKS_AT_SAMPLES = (AnyBatchNorm, Experts)
"""Layers whose result depends on several samples together, so that a micro-batch must not be cut."""


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Stages of the model on the ranks of the axis ``pipeline``.

    Raises:
        ConfigurationError: For options that cannot be, and a model that cannot be cut so.
    """

    schedule: str = "1f1b"
    """``gpipe``, ``1f1b``, ``interleaved`` or ``zero-bubble``."""
    microbatches: int | None = None
    """Into how many micro-batches a step is cut at least, if it has so many samples; None is two for each rank."""
    cut: str | None = None
    """Modules at which the second and each further stage begins, ``blocks.2,blocks.5``; None for the best."""
    stages_per_rank: int = 1
    """For ``interleaved`` and ``zero-bubble``."""
    balance: str = "time"
    """How the model is cut: by the measured ``time`` of its layers and ranks, or into ``equal`` numbers of layers."""
    memory: str | None = None
    """The most bytes of weights that each rank's stages may have, ``4e9,1e9``; ``-`` for any, None for any on all."""

    axis: ClassVar[str] = AXIS
    divides_model: ClassVar[bool] = True
    combines: ClassVar[tuple[str, ...]] = ("data", "tensor")
    sums_in_backward: ClassVar[bool] = False
    example: ClassVar[Arguments | None] = None
    """What the model's ``forward`` gets, of a few samples; of an object that is prepared."""

    def __post_init__(self) -> None:
        if self.stages_per_rank < 1:
            raise ConfigurationError(f"stages_per_rank is {self.stages_per_rank}; it must be at least 1")
        order_of(self.schedule, 2, 2 * self.stages_per_rank, 2)
        if self.balance not in ("time", "equal"):
            raise ConfigurationError(f"balance is {self.balance!r}; a model is cut by 'time' or 'equal'")
        if self.microbatches is not None and self.microbatches < 1:
            raise ConfigurationError(f"microbatches is {self.microbatches}; it must be at least 1")
        _limits(self.memory)

    def layout(self, world_size: int, settings: Settings) -> Layout:
        return Layout({AXIS: world_size})

    # The cut

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        ranks = learner.mesh.degree(AXIS)
        example = _example(model, learner, self._wanted(ranks))
        cut = self.cut
        if cut is None:
            graph = read_both(model, example, ())[True]
            cut = self._best_cut(model, graph, example, learner)
        found = replace(self, cut=cut)
        object.__setattr__(found, "example", example)
        return found

    def _wanted(self, ranks: int) -> int:
        return self.microbatches or 2 * ranks

    def _best_cut(
        self, model: nn.Module, graph: fx.Graph, example: dict[str, Any] | None, learner: Learner
    ) -> str:
        layers, ranks = layers_of(graph), learner.mesh.degree(AXIS)
        stages = ranks * self.stages_per_rank
        speeds, seconds = [1.0] * ranks, [1.0] * len(layers)
        if self.balance == "time":
            times = _measured(model, graph, example, learner)
            seconds = [sum(row[layer] for row in times) / len(times) for layer in layers]
            speeds = _speeds(times, learner)
        weights = learner.settings.weights
        if weights is not None and learner.data.degree == 1 and len(weights) == ranks:
            speeds = list(weights)
        limits = self._limits(ranks)
        of_stages = [(speeds[stage % ranks], limits[stage % ranks]) for stage in range(stages)]
        return words_of(layers, _partition(model, layers, seconds, of_stages))

    def _limits(self, ranks: int) -> list[float]:
        """The most bytes of weights of one of the stages of each rank."""
        found = _limits(self.memory) if self.memory is not None else [math.inf] * ranks
        if len(found) != ranks:
            raise ConfigurationError(
                f"memory {self.memory!r} has {len(found)} limits for {ranks} ranks of the axis 'pipeline': give one "
                "for each"
            )
        return [limit / self.stages_per_rank for limit in found]

    # The model

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: Settings) -> nn.Module:
        ranks = mesh.degree(AXIS)
        cut = self.cut
        count = ranks * self.stages_per_rank
        if cut is None:
            layers = layers_of(read_both(model, self.example, ())[True])
            cut = words_of(layers, _partition(model, layers, [1.0] * len(layers), [(1.0, math.inf)] * count))
        stages = Stages(model, cut, count, self.example)
        rank_of = [stage % ranks for stage in range(count)]
        stages.check_apart(rank_of)
        owners = {name: {rank_of[stage] for stage in users} for name, users in stages.users().items()}
        forward = StagedForward(stages, owners)
        _leave_to_owners(model, owners, mesh)
        model.forward = forward
        return model

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return self.around(learner, summing_afterwards(learner))

    def around(self, learner: Learner, inner: Synchronizer) -> Synchronizer:
        return AroundStages(learner, AXIS, staged(learner), inner)

    def stepper(self, learner: Learner) -> Stepper:
        together = any(isinstance(module, _LOOKS_AT_SAMPLES) for module in learner.model.modules())
        wanted = 1 if together else self._wanted(learner.mesh.degree(AXIS))
        return PipelineStepper(learner, AXIS, staged(learner), self.schedule, wanted)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_elementwise(optimizer, "pipeline")


def staged(learner: Learner) -> StagedForward:
    """What the model of a learner of this strategy runs."""
    found: Any = learner.model.forward
    assert isinstance(found, StagedForward)
    return found


def draw(learner: Learner) -> Drawing:
    """The last step, predicted and measured, with its bubble: ``print(draw(engine.learner))``. A collective call.

    Times are those of the host, which on a GPU is not what computes.
    """
    stepper = learner.stepper
    if not isinstance(stepper, PipelineStepper):
        raise ConfigurationError(f"strategy {learner.name!r} has no pipeline that could be drawn")
    rows = learner.session.control.gather_objects(stepper.timed)
    if not all(rows):
        raise ConfigurationError("there is no step yet that could be drawn")
    return Drawing(stepper.order, tuple(tuple(rows[rank]) for rank in learner.mesh.ranks(AXIS)))


def _leave_to_owners(model: nn.Module, owners: dict[str, set[int]], mesh: Mesh) -> None:
    """Of a weight that one place on the axis uses, all others keep an empty piece."""
    degree, index = mesh.degree(AXIS), mesh.index(AXIS)
    names = {parameter: name for name, parameter in model.named_parameters()}
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            users = owners.get(names[parameter], set())
            if len(users) == 1 and parameter.ndim and len(parameter):
                made.setdefault(parameter, _part(parameter, min(users), degree, index))
                own_parameters(module)[key] = made[parameter]


def _part(parameter: nn.Parameter, owner: int, degree: int, index: int) -> nn.Parameter:
    rows = len(parameter)
    pieces = tuple(
        range(0, rows)
        if place == owner
        else range(rows if place > owner else 0, rows if place > owner else 0)
        for place in range(degree)
    )
    piece = Slice(AXIS, 0, pieces, index, within=slice_of(parameter))
    own = parameter.detach().narrow(0, piece.own.start, len(piece.own)).clone()
    return mark(nn.Parameter(own, parameter.requires_grad), piece)


def _limits(text: str | None) -> list[float]:
    try:
        return [math.inf if part.strip() == "-" else float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigurationError(
            f"memory is {text!r}; write the bytes of each rank's weights, such as 4e9,1e9, and - for any"
        ) from None


def _partition(
    model: nn.Module,
    layers: Sequence[str],
    seconds: Sequence[float],
    of_stages: Sequence[tuple[float, float]],
) -> list[range]:
    """The layers of each stage; none for one whose speed is 0.

    Args:
        of_stages: The speed of each, and the most bytes of weights that it may have.
    """
    working = [stage for stage, (speed, _) in enumerate(of_stages) if speed]
    if len(layers) < len(working):
        raise ConfigurationError(
            f"{type(model).__name__} calls {len(layers)} modules one after the other ({', '.join(layers)}), which "
            f"cannot be cut into {len(working)} stages: use fewer ranks, or divide it into more modules"
        )
    speeds, limits = zip(*(of_stages[stage] for stage in working), strict=True)
    nbytes = [sum(p.nbytes for p in model.get_submodule(layer).parameters()) for layer in layers]
    found = iter(partition_layers(seconds, speeds, None, nbytes, limits))
    pieces = [range(0, 0)]
    for stage in range(len(of_stages)):
        following = pieces[-1].stop
        pieces.append(next(found) if stage in working else range(following, following))
    return pieces[1:]


# What the layers take


def _example(model: nn.Module, learner: Learner, pieces: int) -> dict[str, Any] | None:
    """The arguments of ``forward`` for as many samples as a micro-batch may have; None if there are no samples."""
    task = learner.task
    count = max(2, task.batch_size // pieces)
    items = list(itertools.islice(_items(task.train), count))
    if not items:
        return None
    numbers = range(len(items))
    inputs, _ = (
        collate_with(task.collate, items, numbers, "the training set")
        if task.collate
        else collate_pairs(items, numbers, "the training set")
    )
    dtype, device = learner.settings.dtype, learner.session.device

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype and in_type(leaf, dtype))

    return called_with(model, task.forward, map_leaves(moved, inputs))


def _items(dataset: Any) -> Any:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return iter(dataset)
    return (dataset[index] for index in range(len(dataset)))


def _measured(
    model: nn.Module, graph: fx.Graph, example: dict[str, Any] | None, learner: Learner
) -> list[dict[str, float]]:
    """For each rank of the world, the seconds of each layer there; by their weights if they cannot be measured.

    All ranks come to the same cut by the same times, also where several have the same place on the axis.
    """
    session = learner.session
    try:
        own = measure(model, graph, example or {}, session.device, learner.settings.dtype)
    except EvenerError:
        raise
    except Exception as error:
        own = {}
        warnings.warn(
            f"the layers' times could not be measured ({type(error).__name__}: {error}); the model is cut by the "
            "numbers of their weights. Name the cut yourself (cut=) if that is not right",
            stacklevel=2,
        )
    rows = session.control.gather_objects(own)
    if all(rows):
        return rows
    weights = {
        layer: 1.0 + sum(p.numel() for p in model.get_submodule(layer).parameters())
        for layer in layers_of(graph)
    }
    return [weights] * session.world_size


def _speeds(times: Sequence[dict[str, float]], learner: Learner) -> list[float]:
    """Of each place on the axis, relative to the fastest; of several ranks at one place the slowest counts."""
    mesh, throttle = learner.mesh, learner.settings.throttle
    took = [sum(row.values()) for row in times]
    fastest = min(took)
    found: dict[int, float] = {}
    for rank, seconds in enumerate(took):
        speed = 1.0 if seconds < _ALIKE * fastest else fastest / seconds
        factor = throttle.factor(0, rank) if throttle is not None else 1.0
        place = mesh.layout.place(rank)[AXIS]
        found[place] = min(found.get(place, 1.0), speed * factor)
    return [found[place] for place in sorted(found)]
