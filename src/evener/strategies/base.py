"""How one training step runs over a mesh: a layout and three parts, each of which can be replaced alone.

::

    layout         how many ranks there are along each axis of the mesh
    parallelize    what becomes of the model: functions applied to it before it has numbers
    stepper        who runs which micro-batch when, and where loss and outputs are
    synchronizer   what is summed over the ranks, and when

A strategy sets up a :class:`~evener.strategies.learner.Learner`. A step is two calls, so that what the ranks have to
tell each other (did some parameter get no gradient anywhere) can travel between them::

    engine:    divisor ──▶ stepper.run(batch, divisor) ──▶ outcome ══ one tiny message ══▶ learner.update(forget)
                           micro-batches: forward, backward;                               clip, optimizer
                           the synchronizer sums gradients

The gradients that the update finds are those of ``sum of total / divisor`` over all samples of the global batch.
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
from evener.components.build import build_optimizer, check_trainable
from evener.components.checks.embeddings import refuse_lookups
from evener.components.checks.param_hooks import refuse_hooks
from evener.components.compile_check.graph import watched
from evener.components.memory_limits.fits import check_room
from evener.components.memory_limits.limits import room_on
from evener.components.offload.offload import Offloaded
from evener.components.optim.eight_bit import check_state, in_eight_bits
from evener.components.optim.fused import fuse
from evener.components.sharded_tensor.shard_spec import divided
from evener.components.trainable import Trained
from evener.core.config.recompute import Recompute
from evener.core.config.run_config import Recipe
from evener.core.config.strategy_names import STRATEGIES
from evener.core.task.task import Task
from evener.distributed.mesh import Layout, Mesh
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.strategies.interfaces import Cut, Settings, Stepper, Synchronizer
from evener.strategies.learner import Learner
from evener.strategies.memory_attribution import name_model, updates_named
from evener.strategies.memory_monitor import watching
from evener.strategies.steppers.oom_lockstep import fitted
from evener.strategies.steppers.optimizer_in_backward import in_backward
from evener.strategies.sync_batch_norm import normalize_apart


class Strategy(Recipe, ABC):
    """A recipe for setting up a :class:`~evener.strategies.learner.Learner`; stateless.

    One with options is a frozen dataclass whose fields have defaults: numbers and words, as a command line has them.
    """

    name: ClassVar[str] = ""
    """What records call it; if empty, the short name that it has in Evener, or the class's name."""
    divides_model: ClassVar[bool] = False
    """Whether ranks hold parts of the model, which is then built on the meta device where it can be."""
    axis: ClassVar[str] = "data"
    """The axis of the mesh that is its own."""
    combines: ClassVar[tuple[str, ...]] = ()
    """Further axes that a mesh may have with it, over which other strategies are laid."""
    apart: ClassVar[Mapping[str, str]] = {}
    """Of further axes, why a mesh may not have them with it, and what to do instead, where that can be said."""
    sums_in_backward: ClassVar[bool] = True
    """Whether DistributedDataParallel can sum gradients while its stepper goes backward."""
    one_process: ClassVar[bool] = False
    """Whether it uses several devices in one process."""
    mixes: ClassVar[bool] = False
    """Whether hosts may have different kinds of devices: it sends nothing but through gloo and the all-reduce."""

    @property
    def label(self) -> str:
        """What records call it."""
        kind = type(self)
        path = f"{kind.__module__}:{kind.__qualname__}"
        short = next((short for short, known in STRATEGIES.items() if known == path), "")
        return self.name or short or kind.__name__.lower()

    def __str__(self) -> str:
        """The label, and the options that are not as usual."""
        set_ = [f"{name}={value}" for name, value in self._set_options()]
        return f"{self.label}({', '.join(set_)})" if set_ else self.label

    def _set_options(self) -> Iterator[tuple[str, Any]]:
        options: Any = self  # of a subclass, which mypy cannot know to be a dataclass
        for entry in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
            if getattr(self, entry.name) != entry.default:
                yield entry.name, getattr(self, entry.name)

    @abstractmethod
    def layout(self, world_size: int, settings: Settings) -> Layout:
        """The axes over ``world_size`` ranks.

        Raises:
            ConfigurationError: If the strategy does not run on so many, or with these settings.
        """

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        """The strategy with what it has to know of the model, the task and the ranks before it divides the model; all
        ranks come to the same. ``learner`` has no model yet."""
        return self

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: Settings) -> nn.Module:
        """What the strategy makes of the model, which may be on the meta device: a model without numbers."""
        return model

    def settle(self, divided: nn.Module, learner: Learner) -> nn.Module:
        """The model where it computes, in the type of the run; what was on the meta device is memory then, to be
        filled. A collective call.

        Raises:
            ConfigurationError: If a rank holds all of the model, and cannot.
        """
        if not self.divides_model:
            check_room(divided, learner.session)
        return model.settle_on(divided, learner.session.device, learner.settings.weight_type)

    @abstractmethod
    def synchronizer(self, learner: Learner) -> Synchronizer:
        """What is summed when, where the strategy is alone on the mesh."""

    def around(self, learner: Learner, inner: Synchronizer) -> Synchronizer:
        """``inner``, which sums over the axes that divide the batch, with what the strategy's own axis needs besides;
        asked for where other strategies are laid over the mesh too."""
        return inner

    @abstractmethod
    def stepper(self, learner: Learner) -> Stepper:
        """Who runs which micro-batch when."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigurationError for an optimizer that the strategy cannot have."""

    def check_recompute(self, asked: Recompute) -> None:
        """Raises ConfigurationError if blocks of the model cannot be computed again."""
        if self.one_process:
            raise ConfigurationError(
                f"recompute={asked.text} goes with one device for each rank, and strategy {self.label!r} has several "
                "in one process: use ddp, sharded or pipeline, or torch.utils.checkpoint in the model"
            )

    def portion(self, dataset: Any, learner: Learner) -> Any:
        """The data set with no more of each item than this rank needs."""
        return dataset

    def pieces(self, learner: Learner) -> Cut:
        """What of the samples of its part a rank computes, where these are divided too."""
        return Cut()


def set_up(
    strategy: Strategy,
    task: Task,
    session: Session,
    settings: Settings,
    agree: Callable[[nn.Module], None] = lambda model: None,
    fill: Callable[[nn.Module], None] = lambda model: None,
) -> Learner:
    """The learner of a rank: builds the model, lets the strategy divide it, fills it, and builds what steps it.

    Args:
        agree: Called with the model before any tensor travels, to compare it with that of other ranks.
        fill: Called on rank 0 with the model that holds the first weights of all ranks.
    """
    if session.mixed and not strategy.mixes:
        raise ConfigurationError(
            f"strategy {strategy.label!r} wants one kind of device on all hosts, and with --device mixed these have "
            "different ones: use ddp, or hosts of one kind"
        )
    settings = replace(settings, precision=_agreed(settings.precision, session))
    caches = not strategy.divides_model  # else the weights that a rank need not hold would be held, cast
    task = replace(task, forward=settings.precision.around(task.forward, caches))
    learner = Learner(strategy.label, task, session, settings, strategy.portion)
    with ExitStack() as undo:
        undo.callback(learner.close)
        learner.mesh = session.lay(strategy.layout(session.world_size, settings))
        owned = ExitStack()
        learner.mesh.own(owned.close)
        owned.enter_context(products_of(settings.precision.name))
        built, source = _build(strategy, task, session, settings)
        agree(built)
        if session.rank == 0:
            fill(built if source is None else source)
        if strategy.divides_model:
            refuse_hooks(built, strategy.label)
        refuse_lookups(built, learner.mesh)
        strategy = strategy.prepared(built, learner)
        _draw_apart(settings.seed, learner.mesh)
        if settings.batch_norm == "local":
            normalize_apart(built, learner, strategy.one_process)
        placed = strategy.settle(strategy.parallelize(built, learner.mesh, settings), learner)
        model.share_first_weights(placed, source, session.world, session.rank == 0)
        learner.model = placed
        check_trainable(placed)
        learner.graphs = settings.compiling.apply(
            placed, session.device.type, learner.mesh.degree("pipeline") > 1
        )
        if settings.compiling.check != "no":
            owned.enter_context(watched(placed, learner.graphs.findings))
        learner.recomputed = recompute_blocks(settings.recompute, placed)
        learner.offloaded = Offloaded(settings.offload, session.device)
        owned.callback(learner.offloaded.close)
        learner.offloaded.apply(placed)
        learner.precision_of = settings.precision.apply(placed, caches)
        learner.optimizer = build_optimizer(task, placed)
        if settings.optimizer_state is not None:
            learner.optimizer = in_eight_bits(learner.optimizer)
        if settings.fuses:
            fuse(learner.optimizer)
        pieces = any(True for _ in divided(placed))
        check_state(learner.optimizer, session.device, pieces, session.world_size)
        strategy.check_optimizer(learner.optimizer)
        learner.offloaded.take(learner.optimizer)
        owned.enter_context(_memory_watched(learner, strategy))
        learner.trained = Trained(learner.names)
        learner.synchronizer = strategy.synchronizer(learner)
        learner.stepper = fitted(strategy.stepper(learner), learner, strategy.one_process)
        if settings.update_in_backward:
            learner.stepper = in_backward(learner, strategy.one_process)
        learner.cut = strategy.pieces(learner)
        undo.pop_all()
    return learner


@contextmanager
def _memory_watched(learner: Learner, strategy: Strategy) -> Iterator[None]:
    """What each rank may use of its memory is held to."""
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
    """Of all ranks together, also where nothing was chosen: whether all have chosen the same is compared later."""
    return agreed(precision, session.control.gather_objects(able(session.device)))


def _build(
    strategy: Strategy, task: Task, session: Session, settings: Settings
) -> tuple[nn.Module, nn.Module | None]:
    """The model to divide, and on rank 0 the one that holds the first weights if that is another."""
    on_meta = model.build_on_meta(task, settings.seed) if strategy.divides_model else None
    if on_meta is None:
        built = model.build_model(task, settings.seed)
        return built, model.build_model(task, settings.seed) if strategy.divides_model else None
    return on_meta, model.build_model(task, settings.seed) if session.rank == 0 else None


def _draw_apart(seed: int, mesh: Mesh) -> None:
    """Ranks that compute the same terms of the same samples draw the same numbers, others others."""
    part = mesh.data.index * mesh.degree("context") + mesh.index("context")
    torch.manual_seed(((seed << 20) + part) % 2**63)
