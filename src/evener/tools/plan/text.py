"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evener.core.config.sizes import size_words
from evener.core.text import counted
from evener.tools.plan.result import CurvePoint, TrainingPlan, Way, reason

TOP = 5
"""So many of the fastest ways are shown."""


def plan_text(plan: TrainingPlan, top: int = TOP, explain: bool = False) -> str:
    """Returns the plan as lines for a terminal.

    Args:
        top: The number of ways to show.
        explain: Whether to show the terms of a step.
    """
    return "\n".join(_lines(plan, top, explain))


def _lines(plan: TrainingPlan, top: int, explain: bool) -> Iterator[str]:
    kinds = {name: plan.devices.count(name) for name in dict.fromkeys(plan.devices)}
    devices = " + ".join(f"{number} × {name}" for name, number in kinds.items())
    yield f"{plan.task} on {devices}, batches of {plan.batch_size}; planned in {plan.seconds:.0f} s"
    yield f"{'step':>12}{'90 % interval':>22}{'samples/s':>12}{'memory':>11}"
    fitting = [way for way in plan.ways if way.fits and not way.algorithm]
    for way in fitting[:top]:
        yield from _way(plan, way, explain)
    yield from _other_algorithm(plan, explain)
    for way in (way for way in plan.ways if not way.fits):
        yield f"does not fit: {way.candidate.words}: {reason(way)}"
    yield from _curve(plan)
    yield from _costs(plan)
    yield from _at_scale(plan)
    if plan.repeat_spread:
        yield f"two trials that were the same differed by {plan.repeat_spread:.0%}"
    for why, names in _by_reason(plan.refused).items():
        yield f"cannot: {', '.join(names)}: {why}"
    for name, why in plan.left_out.items():
        yield f"not considered: {name}: {why}"
    yield from (f"note: {note}" for note in plan.notes)


def _way(plan: TrainingPlan, way: Way, explain: bool) -> Iterator[str]:
    low, high = way.time.quantile(0.05), way.time.quantile(0.95)
    interval = f"{seconds_text(low)} to {seconds_text(high)}"
    memory = "" if way.needed is None else size_words(way.needed)
    took, speed = seconds_text(way.time.seconds), plan.batch_size / way.time.seconds
    source = "" if way.costs.is_measured else " (not measured)"
    yield f"{took:>12}{interval:>22}{speed:>12,.0f}{memory:>11}  --strategy {way.candidate.words}"
    yield f"{'':>12}  {reason(way)}{source}"
    if explain:
        terms = ", ".join(f"{name} {seconds_text(took)}" for name, took in way.time.terms.items() if took)
        setup = f"; {seconds_text(way.costs.setup)} until the first step is done" if way.costs.setup else ""
        yield f"{'':>12}  {terms}; shares {' + '.join(map(str, way.time.shares))}{setup}"
        if way.all_reduces:
            fastest = sorted(way.all_reduces.items(), key=lambda each: each[1])
            terms = ", ".join(f"{name} {seconds_text(took)}" for name, took in fastest)
            yield f"{'':>12}  communication by all-reduce: {terms}"


def _other_algorithm(plan: TrainingPlan, explain: bool) -> Iterator[str]:
    """Shows the fastest way that is another training than that of one device, if it is faster than all that are."""
    other = next((way for way in plan.ways if way.algorithm), None)
    points = plan.curve()
    if other is None or not points or (plan.best and plan.best.time.seconds < other.time.seconds):
        return
    yield f"another algorithm, {other.algorithm}:"
    yield from _way(plan, other, explain)
    first = points[0].way.time.seconds
    same = next((each for each in points if each.ranks == other.candidate.ranks), points[-1])
    yield (
        f"{'':>12}  synchronous on {same.ranks}: {same.speedup:.1f}x; this on {other.candidate.ranks}: "
        f"{first / other.time.seconds:.1f}x"
    )


def _curve(plan: TrainingPlan) -> Iterator[str]:
    points, enough = plan.curve(), plan.enough()
    if len(points) < 2 or enough is None:
        return
    yield "devices    " + "   ".join(f"{each.ranks}: {each.speedup:.2f}x" for each in points)
    later = [each for each in points if each.ranks > enough.ranks]
    if later:
        yield f"more than {enough.ranks} {_is_not_worth(later[0], enough)}"


def _is_not_worth(point: CurvePoint, enough: CurvePoint) -> str:
    name, part = point.way.time.largest()
    where = (
        f"{part:.0%} of a step would be {name}" if part >= 0.1 else "smaller parts are not computed faster"
    )
    if point.speedup < enough.speedup:
        return f"are slower: with {point.ranks}, {where}"
    return f"are not worth it: each up to {point.ranks} adds {point.added:.0%}, and {where}"


def _costs(plan: TrainingPlan) -> Iterator[str]:
    best = plan.best
    if best is None:
        yield "no way fits"
        return
    epoch, run = plan.epoch_seconds(best), plan.run_seconds(best)
    if run is None:
        return
    parts = [] if epoch is None else [f"an epoch takes {seconds_text(epoch)}"]
    if plan.steps is not None and run == plan.steps * best.time.seconds:
        parts.append(f"{counted(plan.steps, 'step')} {seconds_text(run)}")
    elif plan.epochs and plan.epochs > 1:
        parts.append(f"{counted(plan.epochs, 'epoch')} {seconds_text(run)}")
    yield f"{', '.join(parts)}, without evaluations and checkpoints"
    if plan.price_per_hour is not None:
        price = plan.price_per_hour * run / 3600
        yield f"at {plan.price_per_hour:g} an hour this costs {price:.2f}"


def prediction_text(plan: Path, way: Way) -> str:
    """Returns a line for the header of a run that trains by a plan."""
    low, high = (seconds_text(way.time.quantile(part)) for part in (0.05, 0.95))
    took = seconds_text(way.time.seconds)
    return f"by {plan}: --strategy {way.candidate.words}, {took} a step ({low} to {high})"


def kept_text(path: Path, made: str, way: Way) -> str:
    """Returns a line for the header of a run that trains by a plan that was kept."""
    return f"{prediction_text(path, way)}; planned {made}, and --strategy ddp takes no plan"


def _at_scale(plan: TrainingPlan) -> Iterator[str]:
    cost = plan.at_scale
    if cost is None:
        return
    low, median, high = map(seconds_text, cost.step_seconds)
    yield (
        f"on {cost.ranks} ranks a step takes {median}, {low} to {high} in 8 of 10 steps; ranks wait for the slowest "
        f"{cost.waiting_share:.0%} of the time"
    )
    yield (
        f"{cost.failures_per_day:.2g} failures a day: a checkpoint every "
        f"{seconds_text(cost.checkpoint_interval_seconds)} loses least, and {cost.goodput:.0%} of the time counts"
    )


def _by_reason(refused: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, why in refused.items():
        found.setdefault(why, []).append(name)
    return found


def seconds_text(seconds: float) -> str:
    """Formats a time with three significant digits, in the unit that suits it."""
    for limit, factor, unit in (
        (1e-3, 1e6, "us"),
        (1.0, 1e3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 1 / 60, "min"),
    ):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h" if seconds < 3 * 86400 else f"{seconds / 86400:.3g} days"
