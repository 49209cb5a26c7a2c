"""How one training step runs over a mesh: a layout and three parts, each of which can be replaced alone.

::

    layout         how many ranks there are along each axis of the mesh
    parallelize    how the model is divided: functions applied to it before its weights are initialized
    stepper        which rank runs which micro-batch when, and which ranks have the loss and the outputs
    synchronizer   what is summed over the ranks, and when

A strategy sets up a :class:`~evener.strategies.learner.Learner`. A step is two calls. Between them the ranks exchange
one message, which tells for example whether a parameter got no gradient on any rank::

    engine:    divisor ──▶ stepper.run(batch, divisor) ──▶ outcome ══ one tiny message ══▶ learner.update(forget)
                           micro-batches: forward, backward;                               clip, optimizer
                           the synchronizer sums gradients

The update uses the gradients of ``total / divisor``, summed over all samples of the global batch.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from evener.components import model_init as model
from evener.components.activation_checkpoint.forward import recompute_blocks
from evener.components.amp.policy import Precision, able, agreed, products_of
from evener.components.build import check_trainable
from evener.components.checks.embeddings import refuse_lookups
from evener.components.checks.param_hooks import refuse_hooks
from evener.components.compile_check.graph import watched
from evener.components.determinism import deterministic
from evener.components.memory_limits.fits import check_room
from evener.components.memory_limits.limits import room_on
from evener.components.offload.offload import OffloadState
from evener.components.optim.eight_bit import check_state, in_eight_bits
from evener.components.optim.fused import fuse, lay_out_state
from evener.components.optim.stand_ins import updated_by
from evener.components.sharded_tensor.shard_spec import divided
from evener.components.trainable import TrainableParameters
from evener.components.weight_average import WeightAverage
from evener.core.config.recompute import Recompute
from evener.core.config.run_config import Recipe
from evener.core.config.strategy_names import STRATEGIES
from evener.core.task.average import as_average
from evener.core.task.task import Task
from evener.distributed.mesh import Layout, Mesh
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.nn.grain_norm import normalize_by_grains
from evener.strategies.cuda_graphs import replays_of
from evener.strategies.exact_bits import check_model, check_strategy
from evener.strategies.exact_sums import check_sums
from evener.strategies.interfaces import BatchSlicer, Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.memory_attribution import name_model, updates_named
from evener.strategies.memory_monitor import watching
from evener.strategies.steppers.grain_by_grain import by_grains
from evener.strategies.steppers.oom_lockstep import fitted
from evener.strategies.steppers.optimizer_in_backward import in_backward
from evener.strategies.sync_batch_norm import normalize_apart
from evener.strategies.synchronizer import Synchronizer
from evener.strategies.whole_matrices import build_divided, ownership_terms


class Strategy(Recipe, ABC):
    """The base class of strategies: sets up a :class:`~evener.strategies.learner.Learner`. Strategies are stateless.

    A strategy with options is a frozen dataclass whose fields have defaults. Options are numbers or words, so that the
    command line can set them.
    """

    name: ClassVar[str] = ""
    """The name in records. If empty, the strategy's short name in Evener is used, or else the class name."""
    divides_model: ClassVar[bool] = False
    """True if each rank holds only a part of the model. The model is then built on the meta device if possible."""
    axis: ClassVar[str] = "data"
    """The mesh axis over which the strategy works."""
    combines: ClassVar[tuple[str, ...]] = ()
    """Other mesh axes, handled by other strategies, that can be combined with this strategy."""
    apart: ClassVar[Mapping[str, str]] = {}
    """Maps mesh axes that cannot be combined with this strategy to the reason and a remedy, where these can be
    given."""
    sums_in_backward: ClassVar[bool] = True
    """True if DistributedDataParallel can sum gradients while this strategy's stepper runs backward."""
    one_process: ClassVar[bool] = False
    """True if the strategy uses several devices in one process."""
    serves_one_rank: ClassVar[bool] = False
    """True if the strategy does something else than ``single`` with one rank, too."""
    sums_bits: ClassVar[bool] = False
    """True if the strategy has ``exact="bits"``: its sum has the same bits on any division of a batch into blocks."""
    replays: ClassVar[bool] = False
    """True if each rank runs forward and backward of the whole model, one after the other, so that both can be replayed
    as CUDA graphs."""
    mixes: ClassVar[bool] = False
    """True if hosts may have different kinds of devices. Such a strategy communicates only through gloo and the
    all-reduce."""

    @property
    def label(self) -> str:
        """The name of the strategy in records."""
        kind = type(self)
        path = f"{kind.__module__}:{kind.__qualname__}"
        short = next((short for short, known in STRATEGIES.items() if known == path), "")
        return self.name or short or kind.__name__.lower()

    def for_own_loop(self) -> Strategy:
        """Returns the strategy as a training loop uses it that calls the model and backward itself (`evener.prepare`).

        Raises:
            ConfigurationError: If no such loop can use it.
        """
        raise ConfigurationError(
            f"strategy {self.label!r} runs forward and backward in an order of its own, so that a loop cannot call "
            "them: take the batches and steps of evener.Engine, which keeps a loop of your own around them, or use "
            "ddp, sharded, tensor, context or experts"
        )

    def __str__(self) -> str:
        """Returns the label and the options that differ from their defaults."""
        set_ = [f"{name}={value}" for name, value in self._set_options()]
        return f"{self.label}({', '.join(set_)})" if set_ else self.label

    def _set_options(self) -> Iterator[tuple[str, Any]]:
        options: Any = self  # mypy cannot know that the subclass is a dataclass
        for entry in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
            if getattr(self, entry.name) != entry.default:
                yield entry.name, getattr(self, entry.name)

    @abstractmethod
    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        """Returns the layout of the mesh over ``world_size`` ranks.

        Raises:
            ConfigurationError: If the strategy cannot run on so many ranks or with these settings.
        """

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        """Returns the strategy, completed by what it must know of the model, the task and the ranks before it divides
        the model. All ranks get the same result. ``learner`` has no model yet."""
        return self

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        """Divides the model, or replaces modules of it, and returns it. The model may be on the meta device."""
        return model

    def settle(self, divided: nn.Module, learner: Learner) -> nn.Module:
        """Moves the model to the rank's device and data type. Tensors on the meta device get uninitialized memory. All
        ranks must call this together.

        Raises:
            ConfigurationError: If a rank must hold the whole model and has not enough memory.
        """
        if not self.divides_model:
            check_room(divided, learner.session)
        return model.settle_on(divided, learner.session.device, learner.settings.weight_type)

    def batch_parts(self, world_size: int) -> int | None:
        """Returns the number of parts into which a batch is divided, if it is not the number that the mesh says."""
        return None

    @property
    def batches_in_step(self) -> int:
        """The number of batches that the engine takes in one step."""
        return 1

    def on_one_device(self, processes: int) -> Strategy | None:
        """Returns a strategy that is the same training on one rank as this one is on ``processes`` ranks. None means
        that of ``single``, which computes whole batches."""
        return None

    @abstractmethod
    def synchronizer(self, learner: Learner) -> Synchronizer:
        """Returns the gradient synchronizer, for a mesh on which this strategy is alone."""

    def around(self, learner: Learner, inner: Synchronizer) -> Synchronizer:
        """Returns ``inner``, extended by the communication that the strategy's own axis needs. ``inner`` sums gradients
        over the axes that divide the batch. Called if the mesh has other strategies too."""
        return inner

    @abstractmethod
    def stepper(self, learner: Learner) -> Stepper:
        """Returns the stepper, which runs the micro-batches."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigurationError if the strategy does not support ``optimizer``."""

    def check_recompute(self, asked: Recompute) -> None:
        """Raises ConfigurationError if the strategy does not support activation checkpointing."""
        if self.one_process:
            raise ConfigurationError(
                f"recompute={asked.text} goes with one device for each rank, and strategy {self.label!r} has several "
                "in one process: use ddp, sharded or pipeline, or torch.utils.checkpoint in the model"
            )

    def portion(self, dataset: Any, learner: Learner) -> Any:
        """Returns the data set with each item reduced to what this rank needs."""
        return dataset

    def pieces(self, learner: Learner) -> BatchSlicer:
        """Returns the slicer that selects this rank's pieces of samples, for a strategy that divides samples."""
        return BatchSlicer()

    def try_model(self, learner: Learner) -> None:
        """Tries whether the model computes the same when divided. Called before the first step, on all ranks together.

        Raises:
            TaskError: If it does not.
        """


def set_up(
    strategy: Strategy,
    task: Task,
    session: Session,
    settings: StrategySettings,
    agree: Callable[[nn.Module], None] = lambda model: None,
    fill: Callable[[nn.Module], None] = lambda model: None,
    is_filled: bool = False,
) -> Learner:
    """Builds the learner of a rank: builds the model, lets the strategy divide it, initializes its weights, and builds
    the optimizer, the synchronizer and the stepper. All ranks must call this together.

    Args:
        agree: Called with the model before any tensor is communicated, to compare it with the models of other ranks.
        fill: Called on rank 0 with the model that holds the first weights of all ranks.
        is_filled: True if the task returns one model that is whole on each rank, with the same weights on all.
    """
    if session.mixed and not strategy.mixes:
        raise ConfigurationError(
            f"strategy {strategy.label!r} wants one kind of device on all hosts, and with --device mixed these have "
            "different ones: use ddp, or hosts of one kind"
        )
    settings = replace(settings, precision=_agreed(settings.precision, session))
    caches = not strategy.divides_model  # a cache would hold casts of weights that the rank need not hold
    task = replace(task, forward=settings.precision.around(task.forward, caches))
    learner = Learner(strategy.label, task, session, settings, strategy.portion)
    with ExitStack() as undo:
        undo.callback(learner.close)
        learner.mesh = session.lay(strategy.layout(session.world_size, settings))
        owned = ExitStack()
        learner.mesh.close_with_mesh(owned.close)
        owned.enter_context(products_of(settings.precision.name))
        if settings.bits is not None:
            owned.enter_context(deterministic(session.device))
            check_strategy(strategy.label, strategy.sums_bits, settings.precision, task, session)
        built, source = _build(strategy, task, session, settings, is_filled)
        agree(built)
        if session.rank == 0:
            fill(built if source is None else source)
        if strategy.divides_model:
            refuse_hooks(built, strategy.label)
        refuse_lookups(built, learner.mesh)
        if strategy.divides_model:
            learner.ownership = ownership_terms(task, built, learner)
        strategy = strategy.prepared(built, learner)
        _draw_apart(settings.seed, learner.mesh, settings.bits is None)
        if settings.batch_norm == "local":
            normalize_apart(built, learner, strategy.one_process)
        if settings.batch_norm == "grain":
            normalize_by_grains(built)
        if settings.bits is not None:
            check_model(built)
        placed = strategy.settle(strategy.parallelize(built, learner.mesh, settings), learner)
        if not is_filled:
            model.share_first_weights(placed, source, session.world, session.rank == 0)
        learner.model = placed
        check_trainable(placed)
        learner.graphs = settings.compiling.apply(
            placed, session.device.type, learner.mesh.degree("pipeline") > 1
        )
        if settings.compiling.check != "no":
            owned.enter_context(watched(placed, learner.graphs.findings))
        learner.recomputed = recompute_blocks(settings.recompute, placed)
        learner.offloaded = OffloadState(settings.offload, session.device)
        owned.callback(learner.offloaded.close)
        learner.offloaded.apply(placed)
        own_precision = settings.precision.apply(placed, caches)
        learner.first_step_checks = [own_precision.check, learner.offloaded.check]
        learner.optimizer = build_divided(learner, placed)
        if settings.optimizer_state is not None:
            learner.optimizer = in_eight_bits(learner.optimizer)
        if settings.fuses and settings.bits is None:  # see check_kernels
            fuse(learner.optimizer)
        learner.optimizer.register_load_state_dict_post_hook(lay_out_state)
        pieces = any(True for _ in divided(placed))
        check_state(learner.optimizer, session.device, pieces, session.world_size)
        strategy.check_optimizer(learner.optimizer)
        learner.offloaded.take_optimizer(learner.optimizer)
        owned.enter_context(_memory_watched(learner, strategy))
        learner.trained = TrainableParameters(learner.names, updated_by(learner.optimizer))
        learner.average = WeightAverage(as_average(task.average), placed)
        learner.synchronizer = strategy.synchronizer(learner)
        check_sums(learner)
        learner.stepper = fitted(strategy.stepper(learner), learner, strategy.one_process)
        if settings.update_in_backward:
            learner.stepper = in_backward(learner, strategy.one_process)
        learner.stepper = by_grains(learner.stepper, learner)
        learner.cut = strategy.pieces(learner)
        learner.replays = replays_of(learner, strategy.replays)
        if learner.replays is not None:
            owned.callback(learner.replays.close)
        strategy.try_model(learner)
        undo.pop_all()
    return learner


@contextmanager
def _memory_watched(learner: Learner, strategy: Strategy) -> Iterator[None]:
    """Measures the rank's memory within the block, and enforces its memory limit."""
    settings, rank = learner.settings, learner.session.rank
    if settings.limits is not None and strategy.one_process:
        raise ConfigurationError(
            f"memory_limit is that of a rank with one device, and strategy {strategy.label!r} has several in one "
            "process: leave it out, or use 'ddp', which has a process for each"
        )
    limited = settings.limits is not None and settings.limits.can_bind(rank)
    device, ranks = learner.session.device, learner.session.environment.local_world_size
    with room_on(device, limited, ranks) as (learner.room, account), ExitStack() as named:
        learner.watch = named.enter_context(watching(learner, account))
        if account is not None:
            name_model(account, learner)
            named.enter_context(updates_named(account, learner))
        yield


def _agreed(precision: Precision, session: Session) -> Precision:
    """Returns the precision that all ranks support. All ranks call this, also those whose user chose no precision; a
    later check compares their choices."""
    return agreed(precision, session.control.gather_objects(able(session.device)))


def _build(
    strategy: Strategy, task: Task, session: Session, settings: StrategySettings, is_filled: bool
) -> tuple[nn.Module, nn.Module | None]:
    """Returns the model to divide, and, on rank 0, the model with the first weights if it is a different one (else
    None)."""
    if is_filled:
        return model.build_model(task, settings.seed), None
    if not strategy.divides_model:
        return model.build_model(task, settings.seed), None
    on_meta = model.build_on_meta(task, settings.seed)
    source = model.build_model(task, settings.seed) if session.rank == 0 else None
    serves = on_meta is not None and (source is None or model.holds_the_same(on_meta, source))
    if all(session.control.gather_objects(serves)) and on_meta is not None:
        return on_meta, source
    return model.build_model(task, settings.seed), source


def _draw_apart(seed: int, mesh: Mesh, differ: bool) -> None:
    """Seeds the random number generator: ranks that compute the same samples draw equal numbers, all others different
    ones if they are to ``differ``."""
    part = mesh.data.index * mesh.degree("context") + mesh.index("context") if differ else 0
    torch.manual_seed(((seed << 20) + part) % 2**63)
