"""Whether anybody regrets learned shares: simulated ranks, in four kinds of weather, over many seeds.

    python -m benchmarks.steadiness [--seeds 40] [--steps 500] [--alone]

Times of a run with learned shares over those with the best fixed ones (equal shares, of equal ranks) under the very
same disturbances: all steps, and those from the 60th on. The kinds of weather are those of the tests: ``usual`` is
calibrated on real runs, in ``busy`` other programs come for seconds, ``storm`` is a host that is full.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

from tests.balance.simulator import Rank, slow_between
from tests.balance.test_by_speed_large import Crowd
from tests.balance.weather import WEATHERS, Weather, best, lived

from benchmarks.results import Cell, Table, Value, cell, record
from evener.balance import BySpeed
from evener.balance.base import Balancer

Make = Callable[[int], Balancer]
"""The balancer of so many ranks."""
PER_RANK = 96
USUAL = Rank(0.004, 0.0002)


def slower(times: float) -> Rank:
    return Rank(USUAL.overhead * times, USUAL.price * times)


RANKS: dict[str, list[Rank]] = {
    "2 equal": [USUAL] * 2,
    "3 equal": [USUAL] * 3,
    "8 equal": [USUAL] * 8,
    "2:1": [USUAL, slower(2)],
    "3:1": [USUAL, slower(3)],
    "4:1": [USUAL, slower(4)],
    "1, and 2 at a half": [USUAL, slower(2), slower(2)],
    "16 from 1 to 1/4": [slower(1 + 3 * rank / 15) for rank in range(16)],
}


def row(make: Make, ranks: Sequence[Rank], weather: Weather, seeds: int, steps: int) -> list[Value]:
    """Median and worst of all steps and of the late ones, and changes."""
    whole, late, changes, batch_size = [], [], [], PER_RANK * len(ranks)
    for seed in range(seeds):
        factors, auto = weather.factors(len(ranks), steps, seed), make(len(ranks))
        ours = lived(auto, ranks, factors, batch_size)
        fixed = lived(best(ranks, batch_size), ranks, factors, batch_size)
        whole.append(sum(ours) / sum(fixed))
        late.append(sum(ours[60:]) / sum(fixed[60:]))
        changes.append(len(auto.decisions))
    return [*_median_and_worst(whole), *_median_and_worst(late), cell(statistics.mean(changes))]


def _median_and_worst(found: Sequence[float]) -> list[Cell]:
    return [cell(statistics.median(found)), cell(max(found))]


def slowdown(make: Make, world_size: int, weather: Weather, seeds: int) -> list[Value]:
    """From 12 steps on after a rank became twice as slow, and from 40 on after it recovered, over the best there."""
    ranks = [*[USUAL] * (world_size - 1), Rank(USUAL.overhead, USUAL.price, slow_between(200, 300, 2))]
    slowed, recovered, batch_size = [], [], PER_RANK * world_size
    for seed in range(seeds):
        factors = weather.factors(world_size, 500, seed)
        ours = lived(make(world_size), ranks, factors, batch_size)
        there, equal = (lived(best(ranks, batch_size, at), ranks, factors, batch_size) for at in (250, 0))
        slowed.append(sum(ours[212:300]) / sum(there[212:300]))
        recovered.append(sum(ours[340:]) / sum(equal[340:]))
    return [*_median_and_worst(slowed), *_median_and_worst(recovered)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--alone", action="store_true", help="each rank knows its own times alone, as of many"
    )
    arguments = parser.parse_args()
    make: Make = Crowd.of if arguments.alone else BySpeed
    know = ", each rank knows its own times" if arguments.alone else ""
    columns = ["ranks, weather", "all: median", "worst", "from step 60: median", "worst", "changes"]
    rows = (
        [f"{name}, {kind}", *row(make, ranks, weather, arguments.seeds, arguments.steps)]
        for name, ranks in RANKS.items()
        for kind, weather in WEATHERS.items()
    )
    record("steadiness", f"whole runs{know}", Table(columns, rows))
    columns = ["slowed, weather", "followed: median", "worst", "after its end: median", "worst"]
    rows = (
        [f"1 of {ranks}, {kind}", *slowdown(make, ranks, weather, arguments.seeds)]
        for ranks in (2, 4)
        for kind, weather in WEATHERS.items()
    )
    record("steadiness", f"a rank twice as slow for a while{know}", Table(columns, rows))


if __name__ == "__main__":
    main()
