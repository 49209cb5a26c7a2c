"""How many workers read, decided on times that are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evener.data.worker_tuning import (
    MOST,
    TRANSFER_SECONDS,
    WINDOW_MOST,
    Choice,
    cores_of,
    most_workers,
    workers_for,
)

Times = Callable[[int], tuple[float, float]]
"""From a number of workers to the wait for a batch and the rest of a step."""


def machine(reading: float, rest: float, handing_over: float = 0.001, crowded: float = 0.0) -> Times:
    """One whose workers read ``reading`` seconds each; each of them slows the rest down by the part ``crowded``."""

    def times(workers: int) -> tuple[float, float]:
        if not workers:
            return reading, rest
        slower = rest * (1 + crowded * workers)
        return handing_over + max(0.0, reading / workers - slower - handing_over), slower

    return times


def settled(choice: Choice, times: Times, steps: int = 6000) -> list[str]:
    for _ in range(steps):
        choice.add(*times(choice.workers))
    return choice.new_words()


@pytest.mark.parametrize(
    ("reading", "rest", "most", "workers"),
    [
        (0.0001, 0.010, 8, 0),
        (1.9 * TRANSFER_SECONDS, 0.0001, 8, 0),
        (0.004, 0.100, 8, 0),
        (0.010, 0.100, 8, 1),
        (0.050, 0.050, 8, 2),
        (0.400, 0.100, 8, 5),
        (0.400, 0.100, 3, 3),
        (0.400, 0.0, 8, 8),
        (0.400, 0.100, 0, 0),
    ],
)
def test_reading_takes_less_than_the_rest_of_a_step(
    reading: float, rest: float, most: int, workers: int
) -> None:
    assert workers_for(reading, rest, most) == workers


def test_the_cores_of_a_host_are_divided_among_its_ranks() -> None:
    four = frozenset(range(4))
    assert cores_of(0, [("a", four), ("a", four), ("b", four)]) == 2
    assert cores_of(2, [("a", four), ("a", four), ("b", four)]) == 4
    bound = [("a", frozenset({0, 1, 2})), ("a", frozenset({2, 3}))]
    assert [cores_of(rank, bound) for rank in range(2)] == [2.5, 1.5]
    assert cores_of(0, [("a", four), ("a", four)], quota=1.5) == 0.75


@pytest.mark.parametrize(("cores", "workers"), [(0.5, 0), (1.0, 0), (2.0, 1), (2.9, 1), (1e3, MOST)])
def test_one_core_is_left_to_the_training(cores: float, workers: int) -> None:
    assert most_workers(cores) == workers


def test_thirds_of_cores_add_up_to_whole_ones() -> None:
    ranks = [("a", frozenset(range(9)))] * 3
    assert most_workers(cores_of(0, ranks)) == 2


def test_reading_that_costs_nothing_stays_where_it_is() -> None:
    choice = Choice(8)
    assert settled(choice, machine(0.0001, 0.010)) == []
    assert choice.workers == 0


def test_slow_reading_gets_workers_and_no_more_once_nobody_waits() -> None:
    choice = Choice(8)
    (words,) = settled(choice, machine(0.200, 0.100))
    assert choice.workers == 3
    assert (
        words
        == "rank 0 waits for batches 67% of its time (200.0 ms of 300.0 ms a step): 3 workers read for it"
    )


def test_a_rank_that_still_waits_gets_more() -> None:
    def times(workers: int) -> tuple[float, float]:
        return (0.300, 0.100) if not workers else (max(0.001, 0.500 / workers - 0.100), 0.100)

    choice = Choice(8)
    words = settled(choice, times)
    assert choice.workers == 7
    assert len(words) == 2
    assert words[1].endswith("7 workers read for it")


def test_workers_that_make_no_step_shorter_are_taken_back_once() -> None:
    choice = Choice(8)
    words = settled(choice, machine(0.020, 0.100, crowded=0.3))
    assert choice.workers == 0
    assert words[1:] == [
        "rank 0 goes back to 0 workers: a step took 120.0 ms without workers, and 131.0 ms with 1 worker",
        "rank 0 waits for batches 17% of its time (20.0 ms of 120.0 ms a step), without workers: with 1 worker a step "
        "took 131.0 ms",
    ]


def test_more_workers_that_do_not_help_are_taken_back_to_those_that_did() -> None:
    def disk(workers: int) -> tuple[float, float]:
        """It reads a batch in 50 ms, whoever asks."""
        return (0.100, 0.010) if not workers else (0.040, 0.010)

    choice = Choice(16)
    words = settled(choice, disk)
    assert choice.workers == 13
    back, waits = words[2:]
    assert (
        back
        == "rank 0 goes back to 13 workers: a step took 50.0 ms with 13 workers, and 50.0 ms with 16 workers"
    )
    assert waits.endswith("with 13 workers: with 16 workers a step took 50.0 ms")


@pytest.mark.parametrize(
    ("most", "reading", "why"),
    [
        (0, 0.1, "without workers: no core is left for more"),
        (1, 0.01, "with 1 worker: no core is left for more"),
        (
            8,
            0.0015,
            "without workers: workers would take longer to hand a batch over than it takes to be read",
        ),
    ],
)
def test_a_wait_that_no_worker_ends_is_told_once(most: int, reading: float, why: str) -> None:
    choice = Choice(most)
    words = settled(choice, machine(reading, 0.005))
    assert sum(each.endswith(why) for each in words) == 1
    assert words[-1].endswith(why)
    assert choice.why_not == why.partition(": ")[2]


def test_an_evaluation_between_two_steps_counts_for_nothing() -> None:
    choice, times = Choice(8), machine(0.200, 0.100)
    for step in range(200):
        waited, rest = times(choice.workers)
        choice.add(waited, rest + 60 * (step % 50 == 10))
    assert choice.workers == 3


def test_workers_that_bring_several_batches_at_once_are_waited_for_on_average() -> None:
    choice = Choice(8)
    for step in range(1000):
        burst = 0.300 if step % 3 == 0 else 0.0
        choice.add({0: 0.200, 3: burst}.get(choice.workers, 0.0), 0.100)
    assert choice.workers == 8


def test_reading_that_becomes_slow_is_found() -> None:
    choice = Choice(8)
    settled(choice, machine(0.0001, 0.010))
    for _ in range(3 * WINDOW_MOST):
        choice.add(*machine(0.020, 0.010)(choice.workers))
    assert choice.workers == 3


def test_workers_that_cannot_be_started_are_not_tried_again() -> None:
    choice = Choice(8)
    settled(choice, machine(0.200, 0.100), steps=30)
    assert choice.workers == 3
    choice.refuse("a lambda")
    assert settled(choice, machine(0.200, 0.100))[-1] == "rank 0 stays without workers: a lambda"
    assert choice.workers == 0
    assert choice.why_not == "a lambda"


@pytest.mark.parametrize(
    ("start_method", "steps", "workers"), [("spawn", 50, 0), ("spawn", 500, 3), ("fork", 50, 3)]
)
def test_a_short_run_is_over_before_workers_are_of_use(start_method: str, steps: int, workers: int) -> None:
    choice = Choice(8)
    choice.begin(steps, start_method)
    words = settled(choice, machine(0.100, 0.050), 49)
    assert choice.workers == workers
    assert words[0].endswith("over before more had been started") == (workers == 0)


def test_a_limit_names_its_reason() -> None:
    choice = Choice(8)
    choice.limit(1, "no room")
    choice.limit(4, "another")
    assert settled(choice, machine(0.200, 0.020))[-1].endswith("with 1 worker: no room")


def test_random_numbers_that_become_the_workers_are_told_of() -> None:
    choice = Choice(8)
    choice.draws = True
    (words,) = settled(choice, machine(0.200, 0.100))
    assert "samples draw random numbers, which are the workers' own from here on" in words
