"""Merges with a quorum: those replicas merge that are there, and who is late comes into a later merge.

A replica that has come to a merge registers in the store at the *open* one, the first that is not decided. When those
of a quorum are there, they wait for others for the ``grace``. Then one of them decides who takes part. A replica that
comes later registers at the next merge. Until then it keeps its own weights, so all that it has trained counts there.

A quorum is more than half of all, so one of the replicas in a merge has been in the merge before. It gives the others
the merged weights and the state of the outer optimizer.

When the first rank is through with the steps of a round, the round has no more such merges: the others take their last
steps, and all meet at its end.
"""

from __future__ import annotations

import json
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from evener.collectives.registry import make
from evener.components.coalesce import broadcast_together
from evener.data.rounds import Rounds, carried_by
from evener.distributed.hosts import all_gather, destroy
from evener.distributed.recovery.replacement import check_recall
from evener.errors import RankTimeoutError
from evener.hardware.timers import waiting
from evener.strategies.learner import Learner
from evener.strategies.local_steps.merge import MergeGroup
from evener.strategies.local_steps.replicas import ReplicaSet
from evener.torch_internals.process_groups import default_store, named_group

_POLL_SECONDS, _FEW = 0.002, 16
"""How often up to so many ranks look into the store. More look less often."""
_END = "end"


@dataclass(frozen=True)
class QuorumRules:
    """When replicas merge without others."""

    replicas: int
    """The number of all replicas."""
    quorum: int
    """The number of replicas that a merge needs."""
    grace: float
    """The seconds for which those of a quorum wait for others."""

    def is_due(self, there: int, seconds: float) -> bool:
        """Returns True if the replicas that are there merge now.

        Args:
            there: The number of replicas.
            seconds: For how long those of a quorum have been there.
        """
        return there == self.replicas or (there >= self.quorum and seconds >= self.grace)


class OpenMerges:
    """The merges of a round, as ranks decide them in a store.

    Args:
        store: A store of all ranks, with a prefix for this round.
        replicas_of: The number of replicas of each rank that registers.
        rank: The rank that registers: this one, or the first of its team.
    """

    def __init__(self, store: Store, rules: QuorumRules, replicas_of: Mapping[int, int], rank: int) -> None:
        self._store, self._rules = store, rules
        self._replicas_of, self._rank = replicas_of, rank
        self._here: list[int] = []
        """The ranks that have registered at the open merge, as far as this rank knows."""
        self.decided: list[tuple[int, ...]] = []
        """The ranks in each merge that is decided, as far as this rank knows. None if the round has ended before."""

    def register(self) -> None:
        """Registers at the open merge."""
        self.read()
        place = self._store.add(self._key("number"), 1)
        self._store.set(self._key(place), str(self._rank))

    def wait(self, limit: float, leads: bool) -> tuple[int, ...]:
        """Waits until a merge is decided that has this rank. Returns the ranks in it; none if the round ends instead.

        Args:
            limit: The time of the monotonic clock at which the wait ends.
            leads: True on the rank that registers.

        Raises:
            RankTimeoutError: If those of a quorum are not there until then.
        """
        since: float | None = None
        while True:
            check_recall()
            decision = self._decision()
            if decision is not None:
                if not decision or self._rank in decision:
                    return decision
                since = None
                if leads:
                    self.register()
                continue
            now = time.monotonic()
            there = self._there()
            number = sum(self._replicas_of[rank] for rank in there)
            since = None if number < self._rules.quorum else since if since is not None else now
            if leads and self.is_ending:
                self._decide(())
            elif leads and since is not None and self._rules.is_due(number, now - since):
                self._decide(there)
            elif now > limit:
                missing = ", ".join(str(rank) for rank in sorted(set(self._replicas_of) - set(there)))
                raise RankTimeoutError(
                    f"a merge waits for rank {missing}: {number} of {self._rules.replicas} replicas are there, and the "
                    f"quorum is {self._rules.quorum}"
                )
            else:
                time.sleep(_POLL_SECONDS * max(1.0, len(self._replicas_of) / _FEW))

    def end(self) -> None:
        """Tells the others that this rank is through with its steps."""
        self._store.set(_END, "")

    @property
    def is_ending(self) -> bool:
        """True if a rank is through with its steps."""
        return bool(self._store.check([_END]))

    def read(self) -> None:
        """Reads the decisions of others."""
        while self._decision() is not None:
            pass

    def delete(self) -> None:
        """Deletes from the store what all ranks have read."""
        for at in range(len(self.decided)):
            for name in ("decided", "number", *range(1, len(self._replicas_of) + 1)):
                self._store.delete_key(f"{at}/{name}")
        self._store.delete_key(_END)

    def _key(self, name: str | int) -> str:
        return f"{len(self.decided)}/{name}"

    def _there(self) -> tuple[int, ...]:
        """Returns the ranks that have registered at the open merge."""
        for place in range(len(self._here), self._store.add(self._key("number"), 0)):
            self._here.append(int(self._store.get(self._key(place + 1))))
        return tuple(sorted(self._here))

    def _decide(self, ranks: Sequence[int]) -> None:
        self._store.compare_set(self._key("decided"), "", json.dumps(ranks))

    def _decision(self) -> tuple[int, ...] | None:
        """Returns the decision on the open merge, after which the next one is open. None if there is none yet."""
        if not self._store.check([self._key("decided")]):
            return None
        self.decided.append(tuple(json.loads(self._store.get(self._key("decided")))))
        self._here.clear()
        return self.decided[-1]


class QuorumMerges:
    """Lets the replicas of this rank merge with those that are there.

    Args:
        everyone: All ranks.
    """

    def __init__(
        self,
        learner: Learner,
        rounds: Rounds,
        rules: QuorumRules,
        everyone: MergeGroup,
        replicas: ReplicaSet,
        outer: torch.optim.Optimizer,
    ) -> None:
        self._learner, self._rules, self._everyone = learner, rules, everyone
        self._replicas, self._outer = replicas, outer
        self._team, self._leads = rounds.team, rounds.leads
        self._leader = rounds.rank - rounds.rank % rounds.team
        teams = rounds.ranks // rounds.team
        carried = [len(carried_by(index, teams, rounds.replicas)) for index in range(teams)]
        self._replicas_of = {index * rounds.team: number for index, number in enumerate(carried)}
        self._name: str = learner.session.control.broadcast_object(f"evener_quorum_{secrets.token_hex(8)}")
        self._open: OpenMerges | None = None
        self._some: dict[tuple[int, ...], MergeGroup] = {}
        """The groups of the merges of a round that did not have all ranks, by the ranks in them."""
        self._version = 0
        """The number of the last merge that had this rank, counted from 1."""
        self._has_warned = False

    def begin(self, step: int) -> None:
        """Begins a round. All ranks must have ended the one before."""
        self.close()
        if self._open is not None and not self._learner.session.rank:
            self._open.delete()
        store = PrefixStore(f"{self._name}/{step}", default_store())
        self._open, self._version = OpenMerges(store, self._rules, self._replicas_of, self._leader), 0

    def wait_for_quorum(self, step: int) -> MergeGroup | None:
        """Waits for a quorum. Returns the ranks that merge; None if the next merge is that at the end of the round."""
        session, merges = self._learner.session, self._open
        assert merges is not None
        with waiting(), session.watchdog.wait("a quorum of replicas", step):
            if self._leads:
                merges.register()
            ranks = merges.wait(time.monotonic() + session.timeout_seconds, self._leads)
            if not ranks:
                return None
            return self._group_of(ranks, f"{step}_{len(merges.decided)}")

    def all_ranks(self) -> MergeGroup:
        """Returns all ranks, for the merge at the end of a round."""
        assert self._open is not None
        self._open.end()
        return self._everyone

    def partial(self, step: int) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks in each merge of the round before that at its end. All ranks must have met.

        A rank that was in none of them warns once.
        """
        assert self._open is not None
        self._open.read()
        decided = [ranks for ranks in self._open.decided if ranks]
        if decided and not self._has_warned and all(self._leader not in ranks for ranks in decided):
            self._has_warned = True
            warnings.warn(
                f"rank {self._leader} came too late for all {len(decided)} merges of step {step} with a quorum. What "
                "it has trained has merged at the end of the step. Give it fewer samples (--balance auto) or a longer "
                "grace",
                stacklevel=2,
            )
        return tuple(
            tuple(leader + place for leader in ranks for place in range(self._team)) for ranks in decided
        )

    def close(self) -> None:
        """Destroys the groups of the merges of a round. All ranks must have ended it."""
        for merge in self._some.values():
            merge.close()
            destroy(merge.group)
        self._some.clear()

    def _group_of(self, leaders: tuple[int, ...], name: str) -> MergeGroup:
        """Returns the ranks of a merge as a group. One that does not have all is kept until the next round: NCCL
        destroys a group when all of its ranks do, and some of them may come late to a merge that waits for this
        rank."""
        if len(leaders) == len(self._replicas_of):
            return self._everyone
        if leaders in self._some:
            return self._some[leaders]
        group, session = self._everyone.group, self._learner.session
        assert group is not None
        world = dist.get_process_group_ranks(group)
        ranks = [world[leader + place] for leader in leaders for place in range(self._team)]
        if len(ranks) == 1:
            return MergeGroup(None, None)
        backend = dist.get_backend_config(group)
        made = named_group(f"{self._name}_{name}", ranks, backend, session.group_timeout)
        self._some[leaders] = MergeGroup(made, make("native", made, session.timeout_seconds))
        return self._some[leaders]

    @torch.no_grad()
    def catch_up(self, over: MergeGroup, step: int) -> None:
        """Gives the ranks that were not in the merge before the merged weights and the state of the outer optimizer.
        They must have sent their differences, which are those to the merged weights that they had."""
        assert self._open is not None
        before, self._version = self._version, len(self._open.decided)
        if over.group is None:
            return
        with waiting(), self._learner.session.watchdog.wait("the replicas of a merge", step):
            versions = all_gather(before, over.group)
            if len(set(versions)) > 1:
                self._share(over.group, versions.index(max(versions)))

    def _share(self, group: dist.ProcessGroup, source: int) -> None:
        """Gives all ranks of a group what rank ``source`` of it has merged."""
        parameters, state = self._replicas.parameters, self._outer.state
        own = [{key: _sent(value, p) for key, value in state.get(p, {}).items()} for p in parameters]
        given = all_gather(own, group)[source]
        tensors = [self._replicas.merged[p] for p in parameters]
        for parameter, entries in zip(parameters, given, strict=True):
            for key, value in entries.items():
                if value is not None:
                    state[parameter][key] = value
                    continue
                if state[parameter].get(key) is None:
                    state[parameter][key] = torch.zeros_like(parameter)
                tensors.append(state[parameter][key])
        broadcast_together(tensors, group, source, self._learner.settings.bucket_nbytes)


def _sent(value: Any, parameter: Tensor) -> Any:
    """Returns a value of the outer optimizer's state as it is sent; None if it is a tensor that is sent by itself."""
    return None if isinstance(value, Tensor) and value.shape == parameter.shape else value
