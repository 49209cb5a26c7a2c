"""When to change the shares: ``BySpeed``, the balancer that learns each rank's speed and keeps learning.

::

    step      0 1 | 2 3 4 5 6 7 | 8 ...      d              d + lookahead + 1
              warm-  calibration   equal      decided        new shares
              up     up and down              (gain > 5 %    (a batch that nobody prefetched)
                                              and > 3 errors)

The first steps' times are not learned from: kernels are chosen and memory is reserved then. The calibration
makes the shares of odd and even ranks a quarter larger and smaller in turn, so that overhead and price per
sample can be told apart. After that a change must be worth it, in predicted step time and beyond the standard
error of the prediction: else noise alone would move the shares of equal ranks for ever. A change of speed
that a rank's model establishes is considered at once, anything else ever more seldom.

A rank too slow for any share is probed with one quantum now and then, the seldomer the more a probe costs, so
that it is found when it recovers.

Shares of a step are settled ``lookahead`` steps before it is observed, hence on the same step on all ranks;
asking for a step that is not settled yet is an error and no guess.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from evener.balance.base import Balancer, Decision
from evener.balance.judgement import Judgement, Policy, judge, learned_lines
from evener.balance.line import Line
from evener.balance.shares import normalize_caps, solve
from evener.balance.speed import SpeedModel
from evener.errors import ConfigurationError, ShareError

DEFAULT_LOOKAHEAD = 2
DEFAULT_POLICY = Policy()


@dataclass
class Rule:
    """How any batch is divided from step ``effective`` on."""

    effective: int
    lines: tuple[Line, ...]
    probe: int | None = None
    """An idle rank that gets one quantum nevertheless."""
    solved: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def values(self) -> list[Any]:
        """The rule as plain values that JSON can hold."""
        return [self.effective, [list(astuple(line)) for line in self.lines], self.probe]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Rule:
        effective, lines, probe = values
        return cls(effective, tuple(Line.from_values(line) for line in lines), probe)

    def divide(self, batch_size: int, caps: Sequence[int | None], quantum: int) -> list[int]:
        """The shares, solved once for each batch size. Raises ShareError where the caps forbid it."""
        if batch_size not in self.solved:
            self.solved[batch_size] = self._solve(batch_size, caps, quantum)
        return list(self.solved[batch_size])

    def _solve(self, batch_size: int, caps: Sequence[int | None], quantum: int) -> list[int]:
        shares = solve(self.lines, batch_size, caps, quantum)
        if self.probe is None or shares[self.probe]:
            return shares
        donor = max(range(len(shares)), key=shares.__getitem__)
        if shares[donor] >= 2 * quantum:
            shares[donor] -= quantum
            shares[self.probe] += quantum
        return shares


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

    @property
    def world_size(self) -> int:
        return len(self._models)

    @property
    def decisions(self) -> Sequence[Decision]:
        return tuple(self._decisions)

    @property
    def models(self) -> Sequence[SpeedModel]:
        """What is known of each rank's speed."""
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
        return self._rule(step).divide(batch_size, self._caps, self._quantum)

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
        self._learn(sizes, seconds)
        batch_size, previous = sum(sizes), self._batch_size
        self._batch_size = batch_size
        overdue = step - self._next_look
        # A short last batch is a poor one to judge by: wait for the next, but not for ever.
        if batch_size and overdue >= (0 if batch_size == previous else self._policy.every_steps):
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

    def _begin(self, step: int) -> None:
        """Lays out the warm-up and the calibration from ``step`` on."""
        policy, lines = self._policy, learned_lines(self._models)
        self._first_step, self._observed = step, step - 1
        calibration = step + policy.warmup_steps
        end = calibration + (policy.calibration_steps if self.world_size > 1 else 0)
        tilted = [Rule(at, _tilted(lines, at, policy.calibration_spread)) for at in range(calibration, end)]
        self._rules = [Rule(step, lines), *tilted, Rule(end, lines)]
        self._next_look = end - 1
        self._next_probe = [end + policy.probe_every_steps[0]] * self.world_size

    def _rule(self, step: int) -> Rule:
        return self._rules[bisect_right(self._rules, step, key=lambda rule: rule.effective) - 1]

    def _learn(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        for rank, model in enumerate(self._models):
            ratio = model.observe(sizes[rank], seconds[rank])
            if ratio is not None:
                self._changed[rank] = ratio * self._changed.get(rank, 1.0)
                self._next_look = min(self._next_look, max(self._observed, self._rules[-1].effective))

    def _look(self, step: int, batch_size: int) -> None:
        """Considers a change of shares, else a probe, and when to look again."""
        if self._changed:
            self._pause = self._policy.settle_steps
        self._next_look, self._pause = step + self._pause, min(2 * self._pause, self._policy.every_steps)
        old = self._rules[-1].divide(batch_size, self._caps, self._quantum)
        candidate = Rule(step + self._lookahead + 1, learned_lines(self._models))
        new = candidate.divide(batch_size, self._caps, self._quantum)
        verdict = judge(self._models, candidate.lines, old, new)
        if verdict.worth_it(self._policy):
            self._decide(step, candidate, old, new, verdict)
        else:
            self._probe(step, old, candidate, new)
        self._changed.clear()

    def _decide(self, step: int, rule: Rule, old: list[int], new: list[int], verdict: Judgement) -> None:
        self._install(rule)
        self._pause = self._policy.settle_steps
        self._next_look = rule.effective + self._pause - 1
        self._decisions.append(
            Decision(
                step,
                rule.effective,
                tuple(old),
                tuple(new),
                verdict.seconds_before,
                verdict.seconds_after,
                self._reason(verdict),
            )
        )

    def _reason(self, verdict: Judgement) -> str:
        gain = f"steps are predicted {verdict.gain:.1%} shorter (standard error {verdict.error:.1%})"
        if self._changed:
            return f"{gain}: " + ", ".join(
                f"rank {rank} became {ratio:.2f}x slower"
                if ratio > 1
                else f"rank {rank} became {1 / ratio:.2f}x faster"
                for rank, ratio in sorted(self._changed.items())
            )
        return f"{gain}: " + ("speeds are better known" if self._decisions else "ranks differ in speed")

    def _probe(self, step: int, old: Sequence[int], candidate: Rule, new: Sequence[int]) -> None:
        """Gives an idle rank that is due, or seems faster, work for the next open step.

        It is one quantum, or what the candidate gives it if that is more: the gain may only be too uncertain.
        """
        due = [rank for rank, share in enumerate(old) if share == 0 and self._may_probe(rank, step)]
        if not due:
            return
        rank, base = min(due, key=lambda rank: self._next_probe[rank]), self._rules[-1].lines
        at, lines = candidate.effective, candidate.lines
        step_seconds = max(line(n) for line, n in zip(lines, old, strict=True))
        excess = lines[rank](self._quantum) / step_seconds - 1.0
        self._next_probe[rank] = at + self._policy.probe_interval(excess)
        self._next_look = min(self._next_look, at)
        self._install(Rule(at, lines) if new[rank] else Rule(at, base, probe=rank))
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


def _tilted(lines: Sequence[Line], step: int, spread: float) -> tuple[Line, ...]:
    """Odd and even ranks take larger and smaller shares than with ``lines``, in turn."""
    return tuple(
        line.scaled(1.0 / (1.0 + spread if (rank + step) % 2 else 1.0 - spread))
        for rank, line in enumerate(lines)
    )
