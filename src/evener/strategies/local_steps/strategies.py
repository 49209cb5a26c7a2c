"""The strategies of local steps: their options, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from evener.components.fragments import cut_into_fragments
from evener.components.optim.elementwise import updated_whole
from evener.data.rounds import Rounds
from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError
from evener.strategies.base import Strategy
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.local_steps.quorum import QuorumRules
from evener.strategies.local_steps.stepper import LocalSteps, LocalSynchronizer
from evener.strategies.sharded.sharded import Sharded
from evener.strategies.single import NoSync
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.synchronizer import Synchronizer


@dataclass(frozen=True)
class LocalSgd(Strategy):
    """Local SGD: every replica takes steps of its own, and the weights merge every ``sync_every`` batches.

    The replicas are part of the training, and the ranks are not. With fewer ranks than replicas, a rank carries
    several. With more, several ranks compute each step of a replica together, as by data parallelism.
    """

    sync_every: int = 100
    """The number of batches between two merges."""
    replicas: int | None = None
    """The number of replicas. None means one for each rank."""
    warmup_steps: int = 0
    """The number of batches at the start that all replicas take together, as with ``ddp``."""
    num_fragments: int = 1
    """The number of parts of the model that merge in turn, each once every ``sync_every`` batches."""
    fragment_sync_delay: int = 0
    """The number of batches of training between sending a fragment and merging it."""
    fragment_update_alpha: float = 0.0
    """The part of a replica's own weights that stays in a merge: 0 takes the merged ones."""
    quorum: int = 0
    """The number of replicas that a merge needs, more than half of them. 0 means that each merge waits for all."""
    grace: float = 1.0
    """The seconds for which the replicas of a quorum wait for the others."""
    meet_every: int = 10
    """With a quorum, the number of merges after which one waits for all. The engine takes them in one step."""
    zero: int = 0
    """How several ranks of a replica divide its training state, as strategy ``sharded`` does: a stage of ZeRO from 1 to
    3. 0 means that each holds all of it."""

    serves_one_rank: ClassVar[bool] = True
    apart: ClassVar[Mapping[str, str]] = {
        "shard": "ranks that compute a replica together need no mesh, only replicas=N with fewer replicas than ranks, "
        "which may divide its state with zero=1 to 3"
    }

    def __post_init__(self) -> None:
        for name, least in (
            ("sync_every", 1),
            ("warmup_steps", 0),
            ("num_fragments", 1),
            ("fragment_sync_delay", 0),
            ("quorum", 0),
            ("grace", 0),
            ("meet_every", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.replicas is not None and self.replicas < 1:
            raise ConfigurationError(f"replicas is {self.replicas}; it must be at least 1")
        if not 0 <= self.fragment_update_alpha < 1:
            raise ConfigurationError(
                f"fragment_update_alpha is {self.fragment_update_alpha}; it must be at least 0 and below 1, with which "
                "replicas would never merge"
            )
        if self.zero not in (0, 1, 2, 3):
            raise ConfigurationError(f"zero is {self.zero!r}; there are 1, 2 and 3, and 0 for whole replicas")
        if self.zero and self.quorum:
            raise ConfigurationError(
                "a quorum does not go with zero: a replica that comes late gets the whole weights from another"
            )
        if self.num_fragments > self.sync_every:
            raise ConfigurationError(
                f"{self.num_fragments} fragments cannot merge in turn within sync_every={self.sync_every} batches: "
                "give fewer fragments or a larger sync_every"
            )
        if self.fragment_sync_delay and self.fragment_sync_delay * self.num_fragments >= self.sync_every:
            raise ConfigurationError(
                f"fragment_sync_delay={self.fragment_sync_delay} must be less than the {self.sync_every} batches of "
                f"sync_every divided by {self.num_fragments} fragments"
            )

        if self.quorum and (self.num_fragments > 1 or self.fragment_sync_delay or self.fragment_update_alpha):
            raise ConfigurationError(
                "a quorum does not go with fragments, which merge while training goes on, or with "
                "fragment_update_alpha: give one of them"
            )

    @property
    def outer_words(self) -> str:
        """A description of the outer optimizer."""
        return "their mean, weighted by terms"

    def outer_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer that takes a step with the merged difference."""
        return torch.optim.SGD(model.parameters(), lr=1.0, foreach=self._foreach)

    @property
    def _foreach(self) -> bool | None:
        """False if the weights of FSDP2 stand beside whole scalars, which cannot be updated in one call."""
        return False if self.zero == 3 else None

    def batch_parts(self, world_size: int) -> int:
        return max(self.replicas or world_size, world_size)

    @property
    def batches_in_step(self) -> int:
        return self.sync_every * self._merges

    @property
    def _merges(self) -> int:
        """The number of merges in a step of the engine."""
        return self.meet_every if self.quorum else 1

    def on_one_device(self, processes: int) -> Strategy:
        replicas = self.replicas or processes
        if 0 < self.quorum < replicas:
            raise ConfigurationError(
                f"with quorum={self.quorum} of {replicas} replicas, which of them merge depends on time, and no device "
                f"alone can repeat it: verify with quorum={replicas}, or without"
            )
        return replace(self, replicas=replicas)

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        self._check(settings)
        replicas = self.replicas or world_size
        self._check_quorum(replicas)
        if replicas >= world_size:
            return Layout({"data": world_size})
        if world_size % replicas:
            raise ConfigurationError(
                f"replicas={replicas} cannot be divided over {world_size} ranks, for replicas need equal numbers "
                "of them: use a multiple of the replicas as number of processes, or at most as many"
            )
        return Layout({"data": replicas, "shard": world_size // replicas})

    @property
    def divides_model(self) -> bool:  # type: ignore[override]
        return self.zero > 0

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        model = normalize_together(model, mesh, ("shard",))
        return Sharded(self.zero).parallelize(model, mesh, settings) if self._divides(mesh) else model

    def _divides(self, mesh: Mesh) -> bool:
        """Returns True if several ranks divide the state of a replica."""
        return self.zero > 0 and mesh.degree("shard") > 1

    def _check(self, settings: StrategySettings) -> None:
        """Raises ConfigurationError for settings that do not go with steps of each replica."""
        asked = {
            "precision fp16, whose loss scale all ranks share: use bf16": settings.precision.is_scaled,
            "micro_batch=auto: give micro_batch a number": settings.fits,
            "update_in_backward": settings.update_in_backward,
            "compress=powersgd, which is for gradients: use int8 or top-k": settings.compression
            == "powersgd",
            f"offload {settings.offload.words}": bool(settings.offload.kinds),
            f"optimizer_state={settings.optimizer_state}": settings.optimizer_state is not None,
            "a budget of recompute: use recompute=blocks": settings.recompute is not None
            and settings.recompute.is_budget,
        }
        for what in (what for what, is_asked in asked.items() if is_asked):
            raise ConfigurationError(
                f"strategy {self.label!r} does not go with {what}. In it each replica steps on its own"
            )
        if self.quorum and settings.compression is not None:
            raise ConfigurationError(
                f"a quorum does not go with compress={settings.compression}: what rounding leaves of one merge belongs "
                "to the next, which others make"
            )

    def _check_quorum(self, replicas: int) -> None:
        """Raises ConfigurationError for a quorum that is never met, or that two merges could have at once."""
        if self.quorum > replicas:
            raise ConfigurationError(f"quorum={self.quorum} can never be met by {replicas} replicas")
        if 0 < 2 * self.quorum <= replicas:
            raise ConfigurationError(
                f"quorum={self.quorum} is not more than half of {replicas} replicas, so replicas could merge in two "
                f"groups that never meet: give at least {replicas // 2 + 1}"
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(f"strategy {self.label!r} does not go with LBFGS, which needs closures")
        if self.zero:
            if updated_whole(optimizer):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} may look at a weight as a whole, but each rank of strategy "
                    f"{self.label!r} with zero={self.zero} holds a slice; use zero=0, or SGD or AdamW"
                )
            Sharded(self.zero).check_optimizer(optimizer)

    def prepared(self, model: nn.Module, learner: Learner) -> Strategy:
        world_size, rank = learner.session.world_size, learner.session.rank
        if learner.task.partition == "sample":
            raise ConfigurationError(
                f"strategy {self.label!r} divides one data set over its replicas, and the task's data are partitioned "
                "by sample: let every rank hold all samples, partition='batch'"
            )
        replicas = self.replicas or world_size
        learner.rounds = Rounds(
            replicas,
            self.sync_every,
            learner.settings.batch_size or learner.task.batch_size,
            rank,
            world_size,
            learner.settings.micro_batch,
            self.warmup_steps,
            self.num_fragments,
            self.fragment_sync_delay,
            self._merges,
        )
        if learner.mesh.degree("shard") != learner.rounds.team:
            raise ConfigurationError(
                f"{replicas} replicas are laid over {world_size} ranks by themselves: leave out the mesh"
            )
        return self

    def _words(self, rounds: Rounds) -> str:
        count = f"{rounds.replicas} replicas merge" if rounds.replicas > 1 else "1 replica merges"
        team = f", each computed by {rounds.team} ranks together" if rounds.team > 1 else ""
        if self.zero:
            one = f"; zero={self.zero} divides nothing, as no replica has several ranks"
            team += f", which divide its state (zero={self.zero})" if rounds.team > 1 else one
        turns = f", {self.num_fragments} fragments in turn" if self.num_fragments > 1 else ""
        if self.quorum:
            turns = f", those that are there if they are {self.quorum}, {self.grace:g} s after that"
        return (
            f"{count} every {self.sync_every} batches by {self.outer_words}{turns}{team}; "
            f"a step is a round of {rounds.size} samples"
        )

    def synchronizer(self, learner: Learner) -> Synchronizer:
        divides = self._divides(learner.mesh)
        return LocalSynchronizer(
            learner, Sharded(self.zero).synchronizer_apart(learner) if divides else NoSync(learner)
        )

    def stepper(self, learner: Learner) -> Stepper:
        assert isinstance(learner.rounds, Rounds)
        fragments = cut_into_fragments(list(learner.names), self.num_fragments, "num_fragments")
        outer, alpha = self.outer_optimizer(learner.model), self.fragment_update_alpha
        rounds = learner.rounds
        rules = QuorumRules(rounds.replicas, self.quorum, self.grace) if self.quorum else None
        divides = self._divides(learner.mesh)
        stepper = LocalSteps(learner, rounds, outer, fragments, alpha, self._words(rounds), rules, divides)
        learner.replicas = stepper.replicas
        assert isinstance(learner.synchronizer, LocalSynchronizer)
        learner.synchronizer.stepper = stepper
        return stepper


@dataclass(frozen=True)
class DiLoCo(LocalSgd):
    """DiLoCo: local steps, and Nesterov's momentum on the merged differences (Douillard et al., 2023).

    With one replica it is the outer optimizer alone, as in Lookahead.
    """

    outer_lr: float = 0.7
    """The rate of the outer optimizer."""
    outer_momentum: float = 0.9
    """The momentum of the outer optimizer; 0 for plain steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outer_lr > 0:
            raise ConfigurationError(f"outer_lr is {self.outer_lr}; it must be above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigurationError(
                f"outer_momentum is {self.outer_momentum}; it must be at least 0 and below 1"
            )

    @property
    def outer_words(self) -> str:
        return f"a Nesterov step (rate {self.outer_lr:g}, momentum {self.outer_momentum:g})"

    def outer_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        momentum = self.outer_momentum
        return torch.optim.SGD(
            model.parameters(),
            lr=self.outer_lr,
            momentum=momentum,
            nesterov=momentum > 0,
            foreach=self._foreach,
        )
