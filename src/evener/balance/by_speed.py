"""``BySpeed``, the balancer that learns each rank's speed from the times of all ranks throughout training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from evener.balance.controller import Controller
from evener.balance.division import Divides, Division, tilted
from evener.balance.noise_model import LEVEL_STEPS, common
from evener.balance.policy import EVEN, PredictedChange, judge, learned_lines
from evener.balance.speed import SpeedModel
from evener.errors import ShareError


class BySpeed(Controller):
    """Divides batches by learned speeds. Takes the arguments of :class:`~evener.balance.controller.Controller`."""

    def _know_nothing(self) -> None:
        self._models = [SpeedModel() for _ in range(self.world_size)]

    @property
    def models(self) -> Sequence[SpeedModel]:
        """Each rank's speed model. Its times exclude slowdowns that all ranks share, so they are relative."""
        return tuple(self._models)

    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Learns from one step. Must be called for every step, in order, with the same values on every rank.

        Raises:
            ShareError: If there are not ``world_size`` sizes and times.
        """
        self._observe(step, sizes, seconds)

    def observe_costs(
        self, step: int, sizes: Sequence[int], costs: Sequence[float], seconds: Sequence[float]
    ) -> None:
        """Learns from one step of a task that gives costs: lines of cost, by the costs as they were. To compare steps,
        times are moved along these lines to the shares."""
        self._observe(step, sizes, seconds, costs)

    def _observe(
        self,
        step: int,
        sizes: Sequence[int],
        seconds: Sequence[float],
        costs: Sequence[float] | None = None,
    ) -> None:
        if len(sizes) != self.world_size or len(seconds) != self.world_size:
            raise ShareError(
                f"step {step}: {len(sizes)} sizes and {len(seconds)} times for {self.world_size} ranks"
            )
        if not self._notices(step, sizes):
            return
        given: Sequence[float] = sizes
        compared = seconds
        if costs is not None:
            moves = zip(self._models, seconds, costs, sizes, strict=True)
            given, compared = costs, [model.moved(time, cost, n) for model, time, cost, n in moves]
        self._learn(given, seconds, SpeedModel.observe if costs is None else SpeedModel.observe_cost)
        times = [time for n, time in zip(sizes, compared, strict=True) if n]
        slowest = max(times, default=math.nan) if not any(map(math.isnan, times)) else math.nan
        self._compare(step, sizes, slowest)
        if self._is_time_to_look(step):
            self._look(step, self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"models": [model.state_dict() for model in self._models], **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state exactly. With another world size, keeps only the models of the ranks that still exist."""
        models = state.get("models", ())  # absent in another balancer's state
        for model, learned in zip(self._models, models, strict=False):
            model.load_state_dict(learned)
        if len(models) == self.world_size:
            super().load_state_dict(state)
        else:
            self._restart()

    def _learn(
        self, sizes: Sequence[float], seconds: Sequence[float], observe: Callable[..., float | None]
    ) -> None:
        given = zip(self._models, sizes, seconds, strict=True)
        apart = [model.residual(n, time) for model, n, time in given]
        known = [residual for residual in apart if residual is not None]
        now = common(known, self._level) if len(known) > 1 else self._level
        self._level += (now - self._level) / LEVEL_STEPS
        for rank, model in enumerate(self._models):
            ratio = observe(model, sizes[rank], seconds[rank] / math.exp(now), self._doubt.sudden)
            if ratio is not None:
                self._changed[rank] = ratio * self._changed.get(rank, 1.0)
                self._look_early()

    def _by_speed(self) -> Division:
        return Division(learned_lines(self._models))

    def _tilted(self, step: int) -> Division:
        return tilted(learned_lines(self._models), step, self._policy.calibration_spread)

    def _equally(self) -> Division:
        return Division((EVEN,) * self.world_size)

    def _judge(self, divided: Divides, old: Sequence[int], new: Sequence[int]) -> PredictedChange:
        assert isinstance(divided, Division)
        return judge(self._models, divided.lines, old, new)

    def _seems_faster(self, rank: int) -> bool:
        return self._models[rank].seems_faster
