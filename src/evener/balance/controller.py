"""Decides when to change the shares. Subclasses of ``Controller`` learn the ranks' speeds.

::

    step      0 1 | 2 3 4 5 6 7 | 8 ...      d              d + lookahead + 1
              warm-  calibration   equal      decided        new shares, or old and new in turn
              up     up and down                             (a batch that nobody prefetched)

The times of the first steps are ignored: kernels are selected and memory is allocated then. During calibration the
shares of odd and even ranks are in turn a quarter larger and smaller, so that the overhead and the time per sample can
be told apart. A slowdown that all ranks share in a step is removed from the times before anything is learned: a busy
host is no reason to change the shares.

After calibration a change must pay. A large gain that exceeds the errors of its prediction is taken at once. The steps
after it are compared with those before; if they are no shorter, the old shares are tried again. A small gain is tried
first: old and new shares take turns until the step times show which are shorter. A failed trial raises the threshold
for the next one (``Backoff``), and this fades with time. A change that is soon reverted raises the threshold for
immediate changes in the same way.

A rank too slow for any share gets one multiple now and then as a probe, so that its recovery is noticed. Probes are
rarer the more they cost. No change takes more than three quarters of a share at once.

The shares of a step are fixed ``lookahead`` steps before it is observed, so they change at the same step on all ranks.
Asking for a step whose shares are not fixed yet raises an error.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from evener.balance.backoff import Backoff
from evener.balance.base import Balancer, Decision
from evener.balance.division import Divides, Division, Rule
from evener.balance.policy import Policy, PredictedChange
from evener.balance.shares import normalize_max_shares
from evener.balance.trial import DivisionComparison
from evener.errors import ConfigurationError

DEFAULT_LOOKAHEAD = 2
DEFAULT_POLICY = Policy()


class Controller(Balancer):
    """Divides batches by the ranks' speeds. Subclasses learn the speeds.

    Args:
        world_size: Number of ranks.
        max_shares: The most samples that each rank can hold; None, for all or for one, is no limit.
        share_multiple_of: Shares are multiples of it, except the one share that holds the remainder of the batch.
        lookahead: How many steps ahead of the current one shares may be asked for (the number of prefetched batches).
        policy: Thresholds that decide whether a change of shares is worth it.

    Raises:
        ConfigurationError: If ``world_size``, ``share_multiple_of`` or ``lookahead`` is too small.
        ShareError: From ``shares``, if max_shares cannot hold the batch.
    """

    def __init__(
        self,
        world_size: int,
        *,
        max_shares: Sequence[int | None] | None = None,
        share_multiple_of: int = 1,
        lookahead: int = DEFAULT_LOOKAHEAD,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        if world_size < 1 or share_multiple_of < 1 or lookahead < 0:
            raise ConfigurationError(
                f"world_size {world_size}, share_multiple_of {share_multiple_of}, lookahead {lookahead}: "
                "need at least 1, 1 and 0"
            )
        self.world_size = world_size
        """Number of ranks."""
        self._max_shares = normalize_max_shares(max_shares, world_size)
        self._share_multiple_of, self._lookahead, self._policy = share_multiple_of, lookahead, policy
        self._decisions: list[Decision] = []
        self._know_nothing()
        self._restart()

    def _restart(self) -> None:
        self._rules: list[Rule] = []
        self._observed = self._first_step = self._next_look = 0
        self._next_probe = [0] * self.world_size
        self._batch_size, self._usual = 0, False
        self._pause = self._policy.settle_steps
        self._changed: dict[int, float] = {}
        self._level = 0.0
        self._doubt = Backoff()
        self._differ = False  # True once shares were changed after the calibration
        self._pause_equal = self._next_equal = self._policy.equal_steps
        self._trial: DivisionComparison | None = None
        self._check: DivisionComparison | None = None
        self._before: Divides | None = None

    # What is known

    @abstractmethod
    def _know_nothing(self) -> None:
        """Resets what is known of the ranks' speeds."""

    @abstractmethod
    def _by_speed(self) -> Divides:
        """Returns the division by the speeds known now."""

    @abstractmethod
    def _tilted(self, step: int) -> Divides:
        """Returns `_by_speed` with the shares of odd and even ranks larger and smaller in turn, for calibration."""

    @abstractmethod
    def _equally(self) -> Divides:
        """Returns the division that treats all ranks as equally fast."""

    @abstractmethod
    def _judge(self, divided: Divides, old: Sequence[int], new: Sequence[int]) -> PredictedChange:
        """Predicts with the lines of ``divided`` what a change from shares ``old`` to ``new`` would bring."""

    @abstractmethod
    def _seems_faster(self, rank: int) -> bool:
        """Returns True if an idle rank may have become faster."""

    @property
    def _has_changed(self) -> bool:
        """True if a rank has changed its speed since a change of shares was last considered."""
        return bool(self._changed)

    # Shares

    @property
    def decisions(self) -> Sequence[Decision]:
        return tuple(self._decisions)

    def shares(self, step: int, batch_size: int) -> list[int]:
        """Implements `Balancer.shares`. The first call sets the step at which the run starts or resumes.

        Raises:
            ValueError: For a step that is over, or for one more than ``lookahead`` steps ahead of the current one: its
                shares may still change, and ranks that ask at different times would disagree.
        """
        if not self._rules:
            self._begin(step)
        first, last = self._rules[0].effective, self._observed + self._lookahead + 1
        if not first <= step <= last:
            raise ValueError(
                f"shares of step {step} asked for when step {self._observed} was the last observed, so that "
                f"steps {first} to {last} are settled: observe every step, and make lookahead, now "
                f"{self._lookahead}, the number of batches that are prefetched"
            )
        return self._divided(self._rule(step), step, batch_size)

    def _notices(self, step: int, sizes: Sequence[int]) -> bool:
        """Records that ``step`` is over. Returns False if it belongs to the warm-up, so that nothing is learned."""
        if not self._rules:
            self._begin(step)
        self._observed = step
        if step < self._first_step + self._policy.warmup_steps:
            return False
        self._usual = sum(sizes) == self._batch_size
        self._batch_size = sum(sizes)
        self._doubt.forget(self._policy)
        return True

    def _is_time_to_look(self, step: int) -> bool:
        """Returns True if a change is to be considered now. Waits up to ``every_steps`` after a batch of other size."""
        overdue = step - self._next_look
        least = 0 if self._usual else self._policy.every_steps
        return bool(self._batch_size) and not self._trial and overdue >= least

    def _look_early(self) -> None:
        """Moves the next look to now, because a rank has changed its speed."""
        self._next_look = min(self._next_look, max(self._observed, self._rules[-1].effective))

    def state_dict(self) -> dict[str, Any]:
        return {
            "rules": [rule.values() for rule in self._rules],
            "observed": self._observed,
            "first_step": self._first_step,
            "next_look": self._next_look,
            "pause": self._pause,
            "next_probe": list(self._next_probe),
            "batch_size": self._batch_size,
            "changed": [[rank, ratio] for rank, ratio in self._changed.items()],
            "level": self._level,
            "differ": self._differ,
            "doubt": self._doubt.values(),
            "equal": [self._next_equal, self._pause_equal],
            "trial": self._trial and self._trial.values(),
            "check": self._check and self._check.values(),
            "before": self._before and self._before.values(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restart()
        self._rules = [Rule.from_values(values) for values in state["rules"]]
        self._observed, self._first_step = state["observed"], state["first_step"]
        self._next_look, self._next_probe = state["next_look"], list(state["next_probe"])
        self._batch_size, self._pause = state["batch_size"], state["pause"]
        self._changed, self._differ, self._level = dict(state["changed"]), state["differ"], state["level"]
        self._doubt = Backoff.from_values(state["doubt"])
        self._next_equal, self._pause_equal = state["equal"]
        self._trial, self._check = (
            DivisionComparison.from_values(state[name]) if state[name] else None
            for name in ("trial", "check")
        )
        self._before = Division.from_values(state["before"]) if state["before"] else None

    def _begin(self, step: int) -> None:
        """Plans the warm-up and the calibration, beginning at ``step``."""
        policy, known = self._policy, self._by_speed()
        self._first_step, self._observed = step, step - 1
        calibration = step + policy.warmup_steps
        end = calibration + (policy.calibration_steps if self.world_size > 1 else 0)
        varied = [Rule(at, self._tilted(at)) for at in range(calibration, end)]
        self._rules = [Rule(step, known), *varied, Rule(end, known)]
        self._next_look = end - 1
        self._next_probe = [end + policy.probe_every_steps[0]] * self.world_size

    def _rule(self, step: int) -> Rule:
        return self._rules[bisect_right(self._rules, step, key=lambda rule: rule.effective) - 1]

    def _divided(self, rule: Rule, step: int, batch_size: int) -> list[int]:
        return rule.divide(
            step, batch_size, self._max_shares, self._share_multiple_of, self._policy.placeholder
        )

    # Deciding

    def _look(self, step: int, batch_size: int) -> None:
        """Considers a change of shares, otherwise a probe, and sets the step of the next look."""
        if self._has_changed:
            self._pause = self._policy.settle_steps
        self._next_look, self._pause = step + self._pause, min(2 * self._pause, self._policy.every_steps)
        at, known = step + self._lookahead + 1, self._by_speed()
        old = self._divided(self._rules[-1], self._rules[-1].effective, batch_size)
        candidate = Rule(at, known.near(old))
        new = self._divided(candidate, at, batch_size)
        verdict = self._judge(known, old, new)
        if self._doubt.is_sure(verdict, self._policy, self._has_changed):
            self._jump(step, candidate, old, new, verdict)
        elif self._doubt.is_worth_a_trial(verdict, self._policy):
            self._try(candidate, old, new, verdict)
        elif not self._reconsider(step, known, old):
            self._probe(step, old, candidate, new)
        self._changed.clear()

    def _jump(self, step: int, rule: Rule, old: list[int], new: list[int], verdict: PredictedChange) -> None:
        """Changes the shares at once, and starts to compare the step times with those before."""
        self._doubt.jumped(step, old, new, self._policy)
        self._before = self._rules[-1].division
        self._check = DivisionComparison(step, sum(old), tuple(old), tuple(new), verdict.gain, verdict.error)
        self._decide(step, rule, old, new, verdict, f"{self._cause()}: {verdict.description}")

    def _decide(
        self,
        step: int,
        rule: Rule,
        old: Sequence[int],
        new: Sequence[int],
        verdict: PredictedChange,
        reason: str,
    ) -> None:
        self._install(rule)
        self._settle(rule.effective)
        self._differ = True
        self._pause_equal = self._policy.equal_steps
        self._next_equal = step + self._pause_equal
        scale = math.exp(self._level)
        before, after = verdict.seconds_before * scale, verdict.seconds_after * scale
        self._decisions.append(Decision(step, rule.effective, tuple(old), tuple(new), before, after, reason))

    def _settle(self, effective: int) -> None:
        self._pause = self._policy.settle_steps
        self._next_look = effective + self._pause - 1

    def _cause(self) -> str:
        """Returns the first part of a decision's reason: why the shares are to change now."""
        if self._changed:
            return ", ".join(
                f"rank {rank} became {ratio:.2f}x slower"
                if ratio > 1
                else f"rank {rank} became {1 / ratio:.2f}x faster"
                for rank, ratio in sorted(self._changed.items())
            )
        return "estimate revised" if self._differ else "ranks differ in speed"

    # Trials

    def _try(self, candidate: Rule, old: list[int], new: list[int], verdict: PredictedChange) -> None:
        """Starts a trial: old and new shares take turns."""
        gain, error = verdict.gain, verdict.error
        self._trial = DivisionComparison(
            candidate.effective, sum(old), tuple(old), tuple(new), gain, error, self._cause()
        )
        self._install(Rule(candidate.effective, self._rules[-1].division, candidate.division))
        self._check = None

    def _reconsider(self, step: int, known: Divides, old: list[int]) -> bool:
        """Now and then tries equal shares, unless the present ones are clearly better. Returns True if it does."""
        if step < self._next_equal:
            return False
        self._next_equal, self._pause_equal = step + self._pause_equal, 2 * self._pause_equal
        rule = Rule(step + self._lookahead + 1, self._equally())
        equal = self._divided(rule, rule.effective, sum(old))
        loss = self._judge(known, equal, old)
        if equal == old or self._doubt.is_sure(loss, self._policy):
            return False
        self._try(rule, old, equal, self._judge(known, old, equal))
        return True

    def _compare(self, step: int, sizes: Sequence[int], slowest: float) -> None:
        """Adds a step, whose slowest rank computed for ``slowest`` seconds, to what is compared. Acts on the result."""
        if self._trial:
            if step >= self._trial.effective:
                self._trial.add(sizes, slowest)
            self._judge_trial(step, self._trial)
        elif self._check:
            self._check.add(sizes, slowest * math.exp(-self._level))
            self._judge_check(step, self._check)

    def _judge_trial(self, step: int, trial: DivisionComparison) -> None:
        """Ends the trial when it has a result or is overdue, or when a rank changed its speed, which makes it void."""
        stays = trial.verdict(self._policy)
        overdue = step - trial.effective > 2 * self._policy.trial_steps[1]
        if stays is None and not self._has_changed and not overdue:
            return
        rule, at = self._rules[-1], step + self._lookahead + 1
        self._trial = None
        if stays and rule.challenger:
            self._keep(step, trial, Rule(at, rule.challenger))
            return
        self._install(Rule(at, rule.division))
        if stays is False:
            self._doubt.failed(self._policy)
            self._settle(at)

    def _keep(self, step: int, trial: DivisionComparison, rule: Rule) -> None:
        """Makes the shares of a successful trial permanent."""
        verdict = self._judge(self._by_speed(), trial.old, trial.new)
        if trial.promised is None:
            self._doubt.paid()
        else:
            self._doubt.failed(self._policy)
        self._decide(step, rule, trial.old, trial.new, verdict, f"{trial.cause}: {trial.description}")

    def _judge_check(self, step: int, check: DivisionComparison) -> None:
        """Checks an immediate change: starts a trial of the old shares if the steps did not become shorter."""
        if check.fewest < 2 or len(check.of_new) < self._policy.settle_steps:
            return
        self._check = None
        measured, _ = check.measured()
        if measured > check.gain / 4 or self._has_changed or self._before is None:
            return
        self._doubt.rash(2.0)
        at = step + self._lookahead + 1
        self._trial = DivisionComparison(
            at, check.batch_size, check.new, check.old, 0.0, 0.1, "taken back", check.gain
        )
        self._install(Rule(at, self._rules[-1].division, self._before))

    # Probes

    def _probe(self, step: int, old: Sequence[int], candidate: Rule, new: Sequence[int]) -> None:
        """Gives one idle rank work for a single step: a rank whose probe is due, or which seems faster.

        The work is what the candidate division gives the rank, or else one multiple.
        """
        idle = [rank for rank, share in enumerate(old) if share == 0] if 0 in old else []
        due = [rank for rank in idle if self._may_probe(rank, step)]
        if not due:
            return
        rank, base = min(due, key=lambda rank: self._next_probe[rank]), self._rules[-1].division
        at, division = candidate.effective, candidate.division
        excess = division.seconds(rank, self._share_multiple_of) / division.slowest(old) - 1.0
        self._next_probe[rank] = at + self._policy.probe_interval(excess)
        self._next_look = min(self._next_look, at)
        self._install(Rule(at, division) if new[rank] else Rule(at, base, probe=rank))
        self._install(Rule(at + 1, base))

    def _may_probe(self, rank: int, step: int) -> bool:
        cap = self._max_shares[rank]
        return (cap is None or cap >= self._share_multiple_of) and (
            self._seems_faster(rank) or step >= self._next_probe[rank]
        )

    def _install(self, rule: Rule) -> None:
        self._rules = [kept for kept in self._rules if kept.effective < rule.effective] + [rule]
        while len(self._rules) > 1 and self._rules[1].effective <= self._observed:
            self._rules.pop(0)
