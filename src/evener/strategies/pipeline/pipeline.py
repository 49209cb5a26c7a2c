"""The strategy ``pipeline``: cuts the model into stages, one or several per rank, and sends micro-batches through them.

::

    rank 0    embed, blocks 0-2     F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1    blocks 3-5            .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2    blocks 6-7, head      .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      the loss is here

Every rank keeps the whole module tree with all of its names. A weight that only another rank's stage uses is an empty
shard here. State dicts by name, clipping, penalties and checkpoints follow from that. A pipeline is as fast as its
slowest stage, so the model is cut by the measured times of its layers and by the speeds of the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, fx, nn

from evener.components.amp.policy import own_forward
from evener.components.model_init import in_type
from evener.components.sharded_tensor.shard_spec import ShardSpec, set_shard_spec, shard_spec, take_attributes
from evener.core.config.recompute import Recompute
from evener.data.batch import map_leaves
from evener.data.fetch import first_inputs
from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError
from evener.nn.experts import Experts
from evener.strategies.after_backward import summing_afterwards
from evener.strategies.base import Strategy
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.pipeline.auto_partition import (
    StageRanks,
    measured,
    own_limits,
    partition,
    seconds_and_speeds,
    seconds_per_byte,
)
from evener.strategies.pipeline.call_list import calls_of
from evener.strategies.pipeline.drawing import Drawing
from evener.strategies.pipeline.remote_weights import Away
from evener.strategies.pipeline.schedule import order_of
from evener.strategies.pipeline.stage_forward import StagedForward, called_with
from evener.strategies.pipeline.stages import (
    NOTHING,
    Stages,
    layers_of,
    parts_batch_norm,
    parts_checkpoint,
    words_of,
)
from evener.strategies.pipeline.stepper import PipelineStepper
from evener.strategies.pipeline.synchronizer import PipelineGradSync
from evener.strategies.pipeline.traced_run import TracedCalls
from evener.strategies.pipeline.tracing import Arguments
from evener.strategies.synchronizer import Synchronizer
from evener.torch_internals.modules import AnyBatchNorm, own_parameters

AXIS = "pipeline"
_REFUSED = 1e9
"""Seconds that a cut counts which is refused afterwards, so that it is chosen only if there is no other."""
_LOOKS_AT_SAMPLES = (AnyBatchNorm, Experts)
"""Layers whose result depends on several samples together: a micro-batch must not be cut."""


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Runs stages of the model on the ranks of the axis ``pipeline``.

    Raises:
        ConfigurationError: If an option has an invalid value, or the model cannot be cut as the options say.
    """

    schedule: str = "1f1b"
    """``gpipe``, ``1f1b``, ``interleaved`` or ``zero-bubble``."""
    microbatches: int | None = None
    """Least number of micro-batches per step, if it has so many samples. None gives two per rank."""
    cut: str | None = None
    """Modules at which the second and each further stage begins: ``blocks.2,blocks.5``. None finds the best cut."""
    blocks: str | None = None
    """Name of the list of blocks between which the model is cut, such as ``transformer.h``. None finds the lists."""
    stages_per_rank: int = 1
    """Number of stages per rank; more than one for ``interleaved`` and ``zero-bubble`` only."""
    balance: str = "time"
    """Way to cut the model: by the measured ``time`` of its layers and ranks, or into ``equal`` numbers of layers."""
    memory: str | None = None
    """Most bytes of weights per rank, such as ``4e9,1e9``; ``-`` for no limit. None allows half of each rank's device
    memory, because gradients need as much again."""

    axis: ClassVar[str] = AXIS
    divides_model: ClassVar[bool] = True
    combines: ClassVar[tuple[str, ...]] = ("data", "shard", "context", "tensor")
    sums_in_backward: ClassVar[bool] = False
    example: ClassVar[Arguments | None] = None
    """Example arguments of the model's ``forward``, of a few samples. Set on the result of :meth:`prepared`."""
    tried: ClassVar[dict[bool, fx.Graph] | None] = None
    """Graphs of a model whose code cannot be read, by training mode. Set on the result of :meth:`prepared`."""

    def __post_init__(self) -> None:
        if self.stages_per_rank < 1:
            raise ConfigurationError(f"stages_per_rank is {self.stages_per_rank}; it must be at least 1")
        order_of(self.schedule, 2, 2 * self.stages_per_rank, 2)
        if self.balance not in ("time", "equal"):
            raise ConfigurationError(f"balance is {self.balance!r}; a model is cut by 'time' or 'equal'")
        if self.microbatches is not None and self.microbatches < 1:
            raise ConfigurationError(f"microbatches is {self.microbatches}; it must be at least 1")
        _limits(self.memory)

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        return Layout({AXIS: world_size})

    # The cut

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        ranks = learner.mesh.degree(AXIS)
        example = _example(model, learner, self._wanted(ranks))
        graphs = calls_of(model, example, learner, _named(self.cut), self.blocks)
        cut = self.cut if self.cut is not None else self._best_cut(model, graphs[True], example, learner)
        found = replace(self, cut=cut)
        object.__setattr__(found, "example", example)
        if isinstance(graphs[True], TracedCalls):
            object.__setattr__(found, "tried", graphs)
        return found

    def _wanted(self, ranks: int) -> int:
        return self.microbatches or 2 * ranks

    def _best_cut(
        self, model: nn.Module, graph: fx.Graph, example: dict[str, Any] | None, learner: Learner
    ) -> str:
        layers, ranks = layers_of(graph), learner.mesh.degree(AXIS)
        speeds, seconds, crossing = [1.0] * ranks, [1.0] * len(layers), [0.0] * (len(layers) - 1)
        if self.balance == "time" and layers:
            rows = measured(model, graph, example, learner)
            seconds, speeds = seconds_and_speeds(rows, learner, AXIS)
            each = seconds_per_byte(learner, AXIS)
            crossing = [each * nbytes for nbytes in rows[0].crossing]
        for refused in (parts_batch_norm(graph, model), parts_checkpoint(graph)):
            crossing = [each + _REFUSED * is_so for each, is_so in zip(crossing, refused, strict=True)]
        weights = learner.settings.weights
        if weights is not None and learner.data.degree == 1 and len(weights) == ranks:
            speeds = [weight / max(weights) for weight in weights]
        given = StageRanks(tuple(speeds), tuple(self._limits(learner))).of_stages(
            ranks * self.stages_per_rank
        )
        return words_of(layers, partition(model, layers, seconds, crossing, *given))

    def _limits(self, learner: Learner) -> list[float]:
        """Returns the most bytes of weights for each rank of the axis."""
        ranks = learner.mesh.degree(AXIS)
        if self.memory is None:
            return own_limits(learner, AXIS)
        found = _limits(self.memory)
        if len(found) != ranks:
            raise ConfigurationError(
                f"memory {self.memory!r} has {len(found)} limits for {ranks} ranks of the axis 'pipeline': give one "
                "for each"
            )
        return found

    # The model

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        ranks = mesh.degree(AXIS)
        cut, count = self.cut, ranks * self.stages_per_rank
        assert cut is not None, "prepared() has found one"
        stages = Stages(model, cut, count, self.example, self.tried)
        rank_of = [stage % ranks for stage in range(count)]
        stages.check_apart(rank_of)
        owners = {name: {rank_of[stage] for stage in users} for name, users in stages.users().items()}
        forward = StagedForward(stages, owners)
        forward.away = _leave_to_owners(model, owners, mesh)
        model.forward = forward
        return model

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return self.around(learner, summing_afterwards(learner))

    def around(self, learner: Learner, inner: Synchronizer) -> Synchronizer:
        return PipelineGradSync(learner, AXIS, staged(learner), inner)

    def stepper(self, learner: Learner) -> Stepper:
        together = any(isinstance(module, _LOOKS_AT_SAMPLES) for module in learner.model.modules())
        wanted = 1 if together else self._wanted(learner.mesh.degree(AXIS))
        return PipelineStepper(learner, AXIS, staged(learner), self.schedule, wanted)

    def check_recompute(self, asked: Recompute) -> None:
        if self.schedule == "zero-bubble":
            raise ConfigurationError(
                f"recompute={asked.text}: schedule zero-bubble takes backward in two parts, and each would compute the "
                "blocks again: use schedule=1f1b or interleaved"
            )


def staged(learner: Learner) -> StagedForward:
    """Returns the staged ``forward`` of the learner's model."""
    found = own_forward(learner.model)
    assert isinstance(found, StagedForward)
    return found


def draw(learner: Learner) -> Drawing:
    """Returns a drawing of the last step, predicted and measured, with its bubble: ``print(draw(engine.learner))``. All
    ranks must call this together. Times are those of the host; on a GPU these are not the times of the computation.
    Raises ConfigurationError if the strategy is not a pipeline, or no step has run yet."""
    stepper = learner.stepper
    if not isinstance(stepper, PipelineStepper):
        raise ConfigurationError(f"strategy {learner.name!r} has no pipeline that could be drawn")
    control, post = learner.session.control, stepper.place.post
    rows = control.gather_objects((stepper.timed, post.nbytes))
    if not all(timed for timed, _ in rows):
        raise ConfigurationError("there is no step yet that could be drawn")
    message = max(control.gather_objects(post.one_way(max(nbytes for _, nbytes in rows))))
    return Drawing(stepper.order, tuple(tuple(rows[rank][0]) for rank in learner.mesh.ranks(AXIS)), message)


def _leave_to_owners(model: nn.Module, owners: dict[str, set[int]], mesh: Mesh) -> list[Away]:
    """Replaces every weight that one place on the axis uses by a shard, which is empty at all other places. Returns the
    weights of which this rank has an empty shard."""
    degree, index = mesh.degree(AXIS), mesh.index(AXIS)
    names = {parameter: name for name, parameter in model.named_parameters()}
    made: dict[Tensor, nn.Parameter] = {}
    away: list[Away] = []
    for module in model.modules():
        for key, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            users = owners.get(names[parameter], set())
            if len(users) == 1 and parameter.ndim and len(parameter):
                piece = made.setdefault(parameter, _part(parameter, min(users), degree, index))
                own_parameters(module)[key] = piece
                if index not in users:
                    inner = shard_spec(parameter)
                    whole = tuple(parameter.shape) if inner is None else inner.whole_shape(parameter.shape)
                    away.append(Away(module, key, names[parameter], whole))
    return away


def _part(parameter: nn.Parameter, owner: int, degree: int, index: int) -> nn.Parameter:
    rows = len(parameter)
    pieces = tuple(
        range(0, rows)
        if place == owner
        else range(rows if place > owner else 0, rows if place > owner else 0)
        for place in range(degree)
    )
    piece = ShardSpec(AXIS, 0, pieces, index, within=shard_spec(parameter))
    own = parameter.detach().narrow(0, piece.local_bounds.start, len(piece.local_bounds)).clone()
    return set_shard_spec(take_attributes(nn.Parameter(own, parameter.requires_grad), vars(parameter)), piece)


def _named(cut: str | None) -> list[str]:
    return [name for name in cut.split(",") if name != NOTHING] if cut else []


def _limits(text: str | None) -> list[float]:
    try:
        return [math.inf if part.strip() == "-" else float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigurationError(
            f"memory is {text!r}; write the bytes of each rank's weights, such as 4e9,1e9, and - for any"
        ) from None


# The example for measuring layers


def _example(model: nn.Module, learner: Learner, pieces: int) -> dict[str, Any] | None:
    """Returns the arguments of ``forward`` for as many samples as a micro-batch may have; None without samples."""
    task = learner.task
    count = max(2, task.batch_size // pieces)
    inputs = first_inputs(task.train, task.collate, count)
    if inputs is None:
        return None
    dtype, device = learner.settings.weight_type, learner.session.device

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype and in_type(leaf, dtype))

    return called_with(model, task.forward, map_leaves(moved, inputs))
