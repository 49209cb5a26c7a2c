"""When to change the shares: ``BySpeed``, the balancer that learns each rank's speed and keeps learning.

::

    step      0 1 | 2 3 4 5 6 7 | 8 ...      d              d + lookahead + 1
              warm-  calibration   equal      decided        new shares, or old and new in turn
              up     up and down                             (a batch that nobody prefetched)

The first steps' times are not learned from: kernels are chosen and memory is reserved then. The calibration
makes the shares of odd and even ranks a quarter larger and smaller in turn, so that overhead and price per
sample can be told apart. Times are learned without what all ranks have in common in a step: a busy host is no
reason to divide a batch otherwise.

After that a change must pay. A large gain, beyond the errors of its prediction, is taken at once, and the steps
after it are compared with those before; if they are no shorter, the shares before are tried again. A small one
is tried first: old and new shares take turns until the steps have told which are shorter. A trial that fails
leaves doubt, which makes the next one harder and is forgotten in time; a change that is soon made back does so
for sudden changes of speed.

A rank too slow for any share is probed with one quantum now and then, the seldomer the more a probe costs, so
that it is found when it recovers. No change takes more than three quarters of a share at once.

Shares of a step are settled ``lookahead`` steps before it is observed, hence on the same step on all ranks;
asking for a step that is not settled yet is an error and no guess.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from evener.balance.base import Balancer, Decision
from evener.balance.doubt import Doubt
from evener.balance.judgement import EVEN, Judgement, Policy, judge, learned_lines
from evener.balance.line import Line
from evener.balance.noise import LEVEL_STEPS, common
from evener.balance.rules import Division, Rule, tilted
from evener.balance.shares import normalize_caps
from evener.balance.speed import SpeedModel
from evener.balance.trial import Comparison
from evener.errors import ConfigurationError, ShareError

DEFAULT_LOOKAHEAD = 2
DEFAULT_POLICY = Policy()


class BySpeed(Balancer):
    """Shares by learned speed.

    Args:
        world_size: Number of ranks.
        caps: The most samples that each rank can hold; None, for all or for one, is no limit.
        quantum: Shares are multiples of it, but for the one that holds the remainder of the batch.
        lookahead: Steps whose shares may be asked for ahead of the current one (what is prefetched).
        policy: When a change is worth it.

    Raises:
        ConfigurationError: For numbers that cannot be.
        ShareError: From ``shares``, if the caps cannot hold the batch.
    """

    def __init__(
        self,
        world_size: int,
        *,
        caps: Sequence[int | None] | None = None,
        quantum: int = 1,
        lookahead: int = DEFAULT_LOOKAHEAD,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        if world_size < 1 or quantum < 1 or lookahead < 0:
            raise ConfigurationError(
                f"world_size {world_size}, quantum {quantum}, lookahead {lookahead}: need at least 1, 1 and 0"
            )
        self._models = [SpeedModel() for _ in range(world_size)]
        self._caps = normalize_caps(caps, world_size)
        self._quantum, self._lookahead, self._policy = quantum, lookahead, policy
        self._decisions: list[Decision] = []
        self._restart()

    def _restart(self) -> None:
        self._rules: list[Rule] = []
        self._observed = self._first_step = self._next_look = 0
        self._next_probe = [0] * self.world_size
        self._batch_size = 0
        self._pause = self._policy.settle_steps
        self._changed: dict[int, float] = {}
        self._level = 0.0
        self._doubt = Doubt()
        self._differ = False  # whether shares were changed since the calibration
        self._pause_equal = self._next_equal = self._policy.equal_steps
        self._trial: Comparison | None = None
        self._check: Comparison | None = None
        self._before: Division | None = None

    @property
    def world_size(self) -> int:
        return len(self._models)

    @property
    def decisions(self) -> Sequence[Decision]:
        return tuple(self._decisions)

    @property
    def models(self) -> Sequence[SpeedModel]:
        """What is known of each rank's speed, against the others'."""
        return tuple(self._models)

    def shares(self, step: int, batch_size: int) -> list[int]:
        """See ``Balancer``; the first call says at which step the run starts or goes on.

        Raises:
            ValueError: For a step that is over, or more than ``lookahead`` beyond the one being computed:
                its shares may still change, and ranks that ask at different times would disagree.
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

    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """See ``Balancer``; to be called for every step, in order, with the same values on every rank."""
        if len(sizes) != self.world_size or len(seconds) != self.world_size:
            raise ShareError(
                f"step {step}: {len(sizes)} sizes and {len(seconds)} times for {self.world_size} ranks"
            )
        if not self._rules:
            self._begin(step)
        self._observed = step
        if step < self._first_step + self._policy.warmup_steps:
            return
        batch_size, previous = sum(sizes), self._batch_size
        self._batch_size = batch_size
        self._doubt.forget(self._policy)
        self._learn(sizes, seconds)
        self._compare(step, sizes, seconds)
        overdue = step - self._next_look
        # A short last batch is a poor one to judge by: wait for the next, but not for ever.
        usual = batch_size == previous
        if batch_size and not self._trial and overdue >= (0 if usual else self._policy.every_steps):
            self._look(step, batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {
            "models": [model.state_dict() for model in self._models],
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
        """Goes on exactly; with another world size, keeps what was learned of the ranks that still exist."""
        models = state["models"]
        for model, learned in zip(self._models, models, strict=False):
            model.load_state_dict(learned)
        self._restart()
        if len(models) != self.world_size:
            return
        self._rules = [Rule.from_values(values) for values in state["rules"]]
        self._observed, self._first_step = state["observed"], state["first_step"]
        self._next_look, self._next_probe = state["next_look"], list(state["next_probe"])
        self._batch_size, self._pause = state["batch_size"], state["pause"]
        self._changed = dict(state["changed"])
        if "level" in state:  # else of a version that had no trials
            self._load_trials(state)

    def _load_trials(self, state: dict[str, Any]) -> None:
        self._differ, self._level, self._doubt = (
            state["differ"],
            state["level"],
            Doubt.from_values(state["doubt"]),
        )
        self._next_equal, self._pause_equal = state["equal"]
        self._trial, self._check = (
            Comparison.from_values(state[name]) if state[name] else None for name in ("trial", "check")
        )
        self._before = Division.from_values(state["before"]) if state["before"] else None

    def _begin(self, step: int) -> None:
        """Lays out the warm-up and the calibration from ``step`` on."""
        policy, lines = self._policy, learned_lines(self._models)
        self._first_step, self._observed = step, step - 1
        calibration = step + policy.warmup_steps
        end = calibration + (policy.calibration_steps if self.world_size > 1 else 0)
        varied = [Rule(at, tilted(lines, at, policy.calibration_spread)) for at in range(calibration, end)]
        self._rules = [Rule(step, Division(lines)), *varied, Rule(end, Division(lines))]
        self._next_look = end - 1
        self._next_probe = [end + policy.probe_every_steps[0]] * self.world_size

    def _rule(self, step: int) -> Rule:
        return self._rules[bisect_right(self._rules, step, key=lambda rule: rule.effective) - 1]

    def _divided(self, rule: Rule, step: int, batch_size: int) -> list[int]:
        return rule.divide(step, batch_size, self._caps, self._quantum, self._policy.placeholder)

    # Learning

    def _learn(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        given = zip(self._models, sizes, seconds, strict=True)
        apart = [model.residual(n, time) for model, n, time in given]
        known = [residual for residual in apart if residual is not None]
        now = common(known, self._level) if len(known) > 1 else self._level
        self._level += (now - self._level) / LEVEL_STEPS
        for rank, model in enumerate(self._models):
            ratio = model.observe(sizes[rank], seconds[rank] / math.exp(now), self._doubt.sudden)
            if ratio is not None:
                self._changed[rank] = ratio * self._changed.get(rank, 1.0)
                self._next_look = min(self._next_look, max(self._observed, self._rules[-1].effective))

    # Deciding

    def _look(self, step: int, batch_size: int) -> None:
        """Considers a change of shares, else a probe, and when to look again."""
        if self._changed:
            self._pause = self._policy.settle_steps
        self._next_look, self._pause = step + self._pause, min(2 * self._pause, self._policy.every_steps)
        at, lines = step + self._lookahead + 1, learned_lines(self._models)
        old = self._divided(self._rules[-1], self._rules[-1].effective, batch_size)
        candidate = Rule(at, Division.near(lines, old))
        new = self._divided(candidate, at, batch_size)
        verdict = judge(self._models, lines, old, new)
        if self._doubt.is_sure(verdict, self._policy, bool(self._changed)):
            self._jump(step, candidate, old, new, verdict)
        elif self._doubt.is_worth_a_trial(verdict, self._policy):
            self._try(candidate, old, new, verdict)
        elif not self._reconsider(step, lines, old):
            self._probe(step, old, candidate, new)
        self._changed.clear()

    def _jump(self, step: int, rule: Rule, old: list[int], new: list[int], verdict: Judgement) -> None:
        """Changes the shares at once, and what is to be compared afterwards."""
        self._doubt.jumped(step, old, new, self._policy)
        self._before = self._rules[-1].division
        self._check = Comparison(step, sum(old), tuple(old), tuple(new), verdict.gain, verdict.error)
        self._decide(step, rule, old, new, verdict, f"{self._cause()}: {verdict.words}")

    def _decide(
        self, step: int, rule: Rule, old: Sequence[int], new: Sequence[int], verdict: Judgement, reason: str
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
        """The kind of reason for a change now."""
        if self._changed:
            return ", ".join(
                f"rank {rank} became {ratio:.2f}x slower"
                if ratio > 1
                else f"rank {rank} became {1 / ratio:.2f}x faster"
                for rank, ratio in sorted(self._changed.items())
            )
        return "estimate revised" if self._differ else "ranks differ in speed"

    # Trials

    def _try(self, candidate: Rule, old: list[int], new: list[int], verdict: Judgement) -> None:
        """Lets old and new shares take turns."""
        gain, error = verdict.gain, verdict.error
        self._trial = Comparison(
            candidate.effective, sum(old), tuple(old), tuple(new), gain, error, self._cause()
        )
        self._install(Rule(candidate.effective, self._rules[-1].division, candidate.division))
        self._check = None

    def _reconsider(self, step: int, lines: Sequence[Line], old: list[int]) -> bool:
        """Now and then shares that are not clearly better than equal ones are tried against them."""
        if step < self._next_equal:
            return False
        self._next_equal, self._pause_equal = step + self._pause_equal, 2 * self._pause_equal
        rule = Rule(step + self._lookahead + 1, Division((EVEN,) * self.world_size))
        equal = self._divided(rule, rule.effective, sum(old))
        loss = judge(self._models, lines, equal, old)
        if equal == old or self._doubt.is_sure(loss, self._policy):
            return False
        self._try(rule, old, equal, judge(self._models, lines, old, equal))
        return True

    def _compare(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Takes the step into what is being compared, and acts on what that tells."""
        times = [time for n, time in zip(sizes, seconds, strict=True) if n]
        slowest = max(times, default=math.nan) if not any(map(math.isnan, times)) else math.nan
        if self._trial:
            if step >= self._trial.effective:
                self._trial.add(sizes, slowest)
            self._judge_trial(step, self._trial)
        elif self._check:
            self._check.add(sizes, slowest * math.exp(-self._level))
            self._judge_check(step, self._check)

    def _judge_trial(self, step: int, trial: Comparison) -> None:
        """Ends the trial when it has told, and when a rank changed its speed: then it was of other ranks."""
        stays = trial.verdict(self._policy)
        overdue = step - trial.effective > 2 * self._policy.trial_steps[1]
        if stays is None and not self._changed and not overdue:
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

    def _keep(self, step: int, trial: Comparison, rule: Rule) -> None:
        """What was tried stays."""
        verdict = judge(self._models, learned_lines(self._models), trial.old, trial.new)
        if trial.promised is None:
            self._doubt.paid()
        else:
            self._doubt.failed(self._policy)
        self._decide(step, rule, trial.old, trial.new, verdict, f"{trial.cause}: {trial.words}")

    def _judge_check(self, step: int, check: Comparison) -> None:
        """Tries the shares of before again if the steps are no shorter."""
        if check.fewest < 2 or len(check.of_new) < self._policy.settle_steps:
            return
        self._check = None
        measured, _ = check.measured()
        if measured > check.gain / 4 or self._changed or self._before is None:
            return
        self._doubt.rash(2.0)
        at = step + self._lookahead + 1
        self._trial = Comparison(
            at, check.batch_size, check.new, check.old, 0.0, 0.1, "taken back", check.gain
        )
        self._install(Rule(at, self._rules[-1].division, self._before))

    # Probes

    def _probe(self, step: int, old: Sequence[int], candidate: Rule, new: Sequence[int]) -> None:
        """Gives an idle rank that is due, or seems faster, work for the next open step.

        It is one quantum, or what the candidate gives it if that is more: the gain may only be too uncertain.
        """
        due = [rank for rank, share in enumerate(old) if share == 0 and self._may_probe(rank, step)]
        if not due:
            return
        rank, base = min(due, key=lambda rank: self._next_probe[rank]), self._rules[-1].division
        at, division = candidate.effective, candidate.division
        step_seconds = max(line(n) for line, n in zip(division.lines, old, strict=True))
        excess = division.lines[rank](self._quantum) / step_seconds - 1.0
        self._next_probe[rank] = at + self._policy.probe_interval(excess)
        self._next_look = min(self._next_look, at)
        self._install(Rule(at, division) if new[rank] else Rule(at, base, probe=rank))
        self._install(Rule(at + 1, base))

    def _may_probe(self, rank: int, step: int) -> bool:
        cap, model = self._caps[rank], self._models[rank]
        return (cap is None or cap >= self._quantum) and (
            model.seems_faster or step >= self._next_probe[rank]
        )

    def _install(self, rule: Rule) -> None:
        self._rules = [kept for kept in self._rules if kept.effective < rule.effective] + [rule]
        while len(self._rules) > 1 and self._rules[1].effective <= self._observed:
            self._rules.pop(0)
