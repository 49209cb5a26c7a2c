"""Conformance test of a strategy. Its main promise: training on the ranks gives the same results as on one device.

The process that calls the test takes the steps on one device once. Each rank compares its results with these. All ranks
report to each other before any of them raises.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from evener.checkpoint import weights_digest
from evener.core.collector import older_objects_set_apart
from evener.core.config.run_config import RunConfig
from evener.distributed.launch.launch import is_launched, launch
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.strategies.interfaces import StrategySettings
from evener.tools.conformance.errors import ConformanceError, broken
from evener.tools.conformance.harness import (
    Chosen,
    Findings,
    NotKeptError,
    StrategyTrial,
    TrialRanks,
    alone,
    reference_of,
)
from evener.tools.conformance.trials import NAMES, TRIALS
from evener.training.factory import strategy_of

TOLERANCE = 1e-10
"""Largest difference in float64 that the order of summation explains, relative to the largest number of a tensor."""

References = dict[int, Findings]
"""Results of one device, by index of the trial."""


def check_strategy(
    strategy: Chosen,
    processes: Sequence[int] = (2, 3),
    *,
    mesh: str | None = None,
    without: Sequence[str] = (),
    device: str = "cpu",
    timeout_seconds: float = 60.0,
) -> None:
    """Checks that ``strategy`` keeps every promise of :class:`evener.strategies.Strategy`.

    If this process is a rank already, all ranks must call this together, and it runs on them. Otherwise it starts
    ranks, once for each number in ``processes``.

    Args:
        strategy: As ``--strategy`` takes it, ``ddp`` or ``package.module:Class``; or a strategy with its options, or a
            tuple of these.
        processes: Numbers of ranks, each at least 2.
        mesh: As ``--mesh`` takes it. None for the strategy's own layout.
        without: Trials to leave out because the strategy does not claim to support them; names from
            ``evener.tools.conformance.trials.NAMES``.
        device: Device of the ranks.
        timeout_seconds: Longest wait for another rank.

    Raises:
        ConformanceError: If a promise is broken. Says which, in which run, on which rank, by which numbers.
        ConfigurationError: If there is no such strategy, no such name in ``without``, or there are fewer than 2 ranks.
    """
    strange = [name for name in without if name not in NAMES]
    if strange:
        raise ConfigurationError(
            f"nothing that is tried is called {strange[0]!r}; there are {', '.join(NAMES)}"
        )
    in_place = dist.is_initialized() or is_launched()
    if not in_place:
        _check_number(processes)
    config = RunConfig(strategy=strategy, mesh=mesh)
    for number in () if in_place else processes:
        strategy_of(config, number)
    arguments = (config, tuple(without), device, timeout_seconds)
    if in_place:
        _check(*arguments)
        return
    references = _references(without, device, timeout_seconds)
    for number in processes:
        launch(
            _check, *arguments, references, processes=number, device=device, timeout_seconds=timeout_seconds
        )


def _check_number(ranks: Sequence[int]) -> None:
    if not ranks or min(ranks) < 2:
        raise ConfigurationError(f"a strategy is tried on at least two ranks, not {list(ranks)}")


def _references(without: Sequence[str], device: str, timeout_seconds: float) -> References:
    with alone(device, timeout_seconds) as place:
        return {
            number: reference_of(trial)(place, trial)
            for number, trial in enumerate(TRIALS)
            if trial.has_reference and trial.name not in without
        }


def _check(
    config: RunConfig,
    without: Sequence[str],
    device: str,
    timeout_seconds: float,
    references: References | None = None,
) -> None:
    with Session(device, timeout_seconds) as session:
        _check_number([session.world_size])
        if references is None:
            own = _references(without, device, timeout_seconds) if session.rank == 0 else None
            references = session.control.broadcast_object(own)
        place = TrialRanks(config.strategy, session, _parts(config, session.world_size), config.mesh)
        # Each engine collects garbage at its end.
        with older_objects_set_apart(), warnings.catch_warnings():
            # One of the test models writes such buffers on purpose.
            warnings.filterwarnings("ignore", message="buffer .* is (not the same on all|written in each)")
            for number, trial in enumerate(TRIALS):
                if trial.name not in without:
                    _settle(place, trial, references.get(number))


def _parts(config: RunConfig, world_size: int) -> int:
    """Returns the number of weights in ``balance``: the degree of the data axis, or all ranks if that is 1."""
    layout = strategy_of(config, world_size).layout(world_size, StrategySettings())
    degree = layout.data_axis(0).degree
    return degree if degree > 1 else world_size


def _settle(place: TrialRanks, trial: StrategyTrial, reference: Findings | None) -> None:
    """Runs one trial. Raises the same error on all ranks if any rank found one."""
    seen, digest = _attempt(place, trial, reference)
    everyone = place.session.control.gather_objects((seen, digest))
    found = next((rank for rank, (seen, _) in enumerate(everyone) if seen), None)
    if found is not None:
        raise _broken(place, trial, trial.promise, f"On rank {found}: {everyone[found][0]}")
    if len({digest for _, digest in everyone}) > 1:
        digests = ", ".join(digest[:8] for _, digest in everyone)
        promise = trial.promise if reference is None else "all ranks hold the same, to the last bit"
        raise _broken(place, trial, promise, f"The digests of what they hold at the end are {digests}")


def _attempt(place: TrialRanks, trial: StrategyTrial, reference: Findings | None) -> tuple[str | None, str]:
    """Runs a trial on this rank; returns an error text or None, and a digest of the results.

    Raises:
        ConformanceError: At once if the run failed on this rank, for the others may wait for this rank without end.
    """
    try:
        found = trial.run(place, trial)
    except NotKeptError as error:
        return str(error), ""
    except Exception as error:
        way = ". What a strategy does not claim is left out by `without`"
        hint = way if isinstance(error, ConfigurationError) else ""
        seen = f"On rank {place.session.rank}: it raised {type(error).__name__}: {error}{hint}"
        raise _broken(place, trial, trial.promise, seen) from error
    return (None if reference is None else difference(reference, found)), weights_digest(found)


def _broken(place: TrialRanks, trial: StrategyTrial, promise: str, seen: str) -> ConformanceError:
    where = f"{trial.name!r} on {place.session.world_size} ranks ({trial.words})"
    mesh = f" over {place.mesh}" if place.mesh else ""
    return broken(f"strategy '{place.words}'{mesh}", promise, f"{seen}; in {where}")


def difference(reference: Findings, found: Findings) -> str | None:
    """Describes the largest difference from the results of one device. Returns None if all agree to rounding."""
    if reference.keys() != found.keys():
        strange = sorted(reference.keys() ^ found.keys())[0]
        return f"{strange!r} is there only {'on one device' if strange in reference else 'here'}"
    errors = {name: _relative(value, found[name]) for name, value in reference.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    if not worst or errors[worst] <= TOLERANCE:
        return None
    return (
        f"the {worst} is off by {errors[worst]:.1e} of its largest number, where {TOLERANCE:.0e} is rounding; "
        f"{_numbers(reference[worst], found[worst])}"
    )


def _relative(reference: Tensor, found: Tensor) -> float:
    if reference.shape != found.shape:
        return math.inf
    if not reference.numel():
        return 0.0
    largest = _apart(reference, found).max().item()
    scale = reference.abs().nan_to_num(0.0, posinf=0.0).max().item()
    return float(largest / scale if scale else largest)


def _apart(reference: Tensor, found: Tensor) -> Tensor:
    """Returns the difference of each element: 0 if both are the same infinity or NaN, infinity if only one is."""
    same = (reference == found) | (reference.isnan() & found.isnan())
    return (reference - found).abs().nan_to_num(math.inf, posinf=math.inf).masked_fill(same, 0.0)


def _numbers(reference: Tensor, found: Tensor) -> str:
    if reference.shape != found.shape:
        return f"it is of shape {tuple(found.shape)} in place of {tuple(reference.shape)}"
    place = int(_apart(reference, found).argmax())
    values = found.flatten()[place].item(), reference.flatten()[place].item()
    return f"element {place} is {values[0]:.17g} in place of {values[1]:.17g}"
