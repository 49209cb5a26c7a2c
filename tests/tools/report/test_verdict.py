from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evener.tools.report.schema import (
    Attempt,
    Cause,
    EvaluationPoint,
    Goodput,
    MemoryOfRank,
    Report,
    RunEvent,
)
from evener.tools.report.verdict import KINDS, slow_link, verdict_of
from tests.tools.report.making import report


def only(found: Report) -> Cause:
    """The one cause that is named."""
    (cause,) = verdict_of(found).causes
    assert cause.kind in KINDS
    return cause


def rank(**others: Any) -> dict[str, Any]:
    return {
        "compute": 0.1,
        "waiting": 0.0,
        "communication": 0.005,
        "input": 0.0,
        "forward": 0.04,
        "backward": 0.06,
    } | others


def test_a_run_of_equal_ranks_has_nothing_to_say() -> None:
    found = verdict_of(report([rank(), rank(), rank()]))
    assert found.healthy
    assert not found.causes
    assert found.words == "Nothing stands out: of 10.5 s of training, 95% compute, 5% communication."


def test_a_run_without_steps_has_nothing_to_say() -> None:
    assert verdict_of(report()).words == "Nothing stands out: no step has ended yet."


@pytest.mark.parametrize(
    ("slow", "kind"),
    [
        (rank(compute=0.2, forward=0.14), "slow forward"),
        (rank(compute=0.2, backward=0.16), "slow backward"),
        (rank(compute=0.2, forward=0.08, backward=0.12), "slow rank"),
        (rank(input=0.1), "slow loader"),
    ],
)
def test_a_slow_rank_is_named_with_what_is_slow(slow: dict[str, Any], kind: str) -> None:
    fast = rank(waiting=0.1)
    cause = only(report([fast, fast, slow, fast]))
    assert (cause.kind, cause.rank) == (kind, 2)
    assert cause.seconds == pytest.approx(100 * 0.1)
    assert cause.fraction == pytest.approx(0.1 / 0.205, rel=1e-3)


@pytest.mark.parametrize(("slowest", "names"), [(0.9, True), (0.5, False)])
def test_a_rank_that_is_seldom_the_slowest_is_not_slow(slowest: float, names: bool) -> None:
    slow = rank(compute=0.2, forward=0.14, slowest=slowest)
    assert bool(verdict_of(report([rank(waiting=0.1, slowest=1 - slowest), slow])).causes) == names


def test_a_rank_without_times_of_passes_is_slow_as_a_whole() -> None:
    fast, slow = ({"compute": seconds, "waiting": 0.2 - seconds} for seconds in (0.1, 0.2))
    assert only(report([slow, fast])).kind == "slow rank"


def test_the_gain_of_shares_by_speed_is_what_the_times_of_samples_give() -> None:
    cause = only(report([rank(waiting=0.1), rank(compute=0.2, forward=0.08, backward=0.12)]))
    each = (0.1 / 4, 0.2 / 4)
    balanced = 8 / sum(1 / seconds for seconds in each)
    assert (cause.advice, cause.gain) == (
        "--balance auto",
        pytest.approx(0.205 / (0.005 + balanced), rel=1e-3),
    )


def test_nobody_is_told_to_balance_what_is_balanced() -> None:
    found = report([rank(waiting=0.1), rank(compute=0.2, forward=0.08, backward=0.12)])
    assert not only(replace(found, identity=replace(found.identity, learns=True))).advice


def test_a_rank_with_more_samples_is_not_slow() -> None:
    cause = only(report([rank(waiting=0.1, share=0.33), rank(compute=0.2, share=0.67, sample_seconds=0.025)]))
    assert (cause.kind, cause.rank) == ("uneven shares", 1)


def test_an_emulated_slow_rank_is_not_slow_in_backward() -> None:
    ranks = [rank(waiting=0.1), rank(compute=0.2, backward=0.16)]
    cause = only(report(ranks, settings={"throttle": "1,0.5"}))
    assert cause.kind == "slow rank"
    assert "--throttle" in cause.words
    assert only(report(ranks, settings={"throttle": "0.5,1"})).kind == "slow backward"


@pytest.mark.parametrize(
    ("workers", "cores", "advice"), [(0, 8, "--workers 2"), (2, 8, "--workers 6"), (2, 4, "")]
)
def test_as_many_workers_are_advised_as_keep_up(workers: int, cores: int, advice: str) -> None:
    """Reading takes as long as the input that is seen, and with workers, who read all the time, as long as a step."""
    found = only(report([rank(input=0.2, workers=workers, cores=cores)]))
    assert (found.kind, found.rank, found.advice) == ("slow loader", 0, advice)
    assert found.gain == (pytest.approx(0.305 / 0.105, rel=1e-3) if advice else None)


def test_all_ranks_may_wait_for_samples() -> None:
    cause = only(report([rank(input=0.05), rank(input=0.05)]))
    assert (cause.kind, cause.rank) == ("slow loader", None)


def test_communication_is_named_with_the_gain_of_one_rank() -> None:
    small = rank(compute=0.01, forward=0.004, backward=0.006, communication=0.05)
    cause = only(report([small, small]))
    assert (cause.kind, cause.advice, cause.gain) == ("communication", "--processes 1", pytest.approx(3.0))


def test_no_device_is_advised_to_leave_if_it_is_a_gpu() -> None:
    small = rank(compute=0.01, communication=0.05, device="cuda:0 (H100)")
    assert not only(report([small, small])).advice


def test_the_rank_with_a_slow_link_is_named() -> None:
    ranks = [rank(communication=0.1, link_seconds=seconds) for seconds in (0.2, 0.21, 0.02, 0.021)]
    cause = only(report(ranks))
    assert (cause.kind, cause.rank) == ("slow link", 1)
    assert cause.gain == pytest.approx(0.2 / (0.2 - 0.1 * (1 - 0.021 / 0.2)), rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([], None),
        ([1.0, 1.0], None),
        ([1.0, 1.0, None], None),
        ([1.0, 1.1, 0.9], None),
        ([1.0, 0.1, 0.1, 0.1], None),
        ([1.0, 0.1, 1.0], (0, 10.0)),
        ([0.1, 0.1, 0.8, 0.8, 0.1], (3, 8.0)),
    ],
)
def test_a_link_is_slow_on_both_sides_of_its_rank(
    seconds: list[float | None], found: tuple[int, float] | None
) -> None:
    assert slow_link(seconds) == (found if found is None else (found[0], pytest.approx(found[1])))


def threads(*numbers: int, queued: float = 0.4, cores: int = 4) -> Report:
    ranks = [
        rank(threads=number, cores=cores, queued=queued, queued_seconds=100.0, host="a") for number in numbers
    ]
    return report(ranks)


def test_the_rank_with_too_many_threads_is_named() -> None:
    cause = only(threads(2, 24))
    assert (cause.kind, cause.rank, cause.advice) == ("oversubscribed threads", 1, "OMP_NUM_THREADS=2")


def test_all_ranks_may_have_too_many_threads() -> None:
    cause = only(threads(8, 8))
    assert (cause.kind, cause.rank) == ("oversubscribed threads", None)


def test_a_machine_that_others_use_is_no_fault_of_the_run() -> None:
    cause = only(threads(2, 2))
    assert (cause.kind, cause.rank, cause.advice) == ("busy machine", None, "")


def test_waiting_of_threads_that_hardly_compute_is_no_loss() -> None:
    sleepy = rank(threads=2, cores=4, queued=0.9, queued_seconds=0.1, host="a")
    assert verdict_of(report([sleepy, sleepy])).healthy


def test_threads_that_have_their_cores_are_not_named() -> None:
    assert verdict_of(threads(8, 8, queued=0.02)).healthy


def test_threads_explain_a_slow_rank() -> None:
    slow = rank(compute=0.2, forward=0.14, threads=24, cores=4, queued=0.5, queued_seconds=50.0, host="a")
    fast = rank(waiting=0.1, threads=2, cores=4, queued=0.3, queued_seconds=1.0, host="a")
    assert (only(report([fast, slow])).kind, only(report([fast, slow])).rank) == ("oversubscribed threads", 1)


def test_memory_that_grows_is_named_with_its_end() -> None:
    memory = (MemoryOfRank(0, 1 << 30), MemoryOfRank(1, 1 << 30, limit=2 << 30, growth=float(1 << 20)))
    cause = only(report([rank(), rank()], memory=memory))
    assert (cause.kind, cause.rank) == ("memory growth", 1)
    assert "1 MiB a step" in cause.words
    assert "in 1,024 steps" in cause.words


@pytest.mark.parametrize("kind", ["death", "hang", "error"])
def test_faults_come_first(kind: str) -> None:
    events = (RunEvent(3, "note", "something"), RunEvent(40, kind, "rank 1 (pid 7) was killed\nTraceback", 1))
    slow = rank(compute=0.2, forward=0.14)
    causes = verdict_of(report([rank(waiting=0.1), slow], events=events)).causes
    assert [(cause.kind, cause.rank) for cause in causes] == [(kind, 1), ("slow forward", 1)]
    assert causes[0].words == "after 40 steps: rank 1 (pid 7) was killed"


def test_saves_are_advised_at_an_interval_that_costs_a_hundredth() -> None:
    goodput = Goodput(compute=80.0, checkpoints=20.0, saves=10)
    cause = only(report([rank()], goodput=goodput))
    assert (cause.kind, cause.advice, cause.gain) == (
        "checkpoints",
        "--save-every 200s",
        pytest.approx(100 / 81, rel=1e-3),
    )


@pytest.mark.parametrize(("now", "advice"), [(1, "--evaluate-every 5"), (2, "--evaluate-every 10")])
def test_evaluations_are_advised_so_often_that_they_cost_a_tenth(now: int, advice: str) -> None:
    evaluations = tuple(EvaluationPoint(10 * at, at, {}, 5, 5.0) for at in range(10))
    goodput = Goodput(compute=100.0, evaluation=50.0)
    cause = only(report([rank()], goodput=goodput, evaluations=evaluations, settings={"evaluate_every": now}))
    assert (cause.kind, cause.advice, cause.gain) == (
        "evaluation",
        advice,
        pytest.approx(150 / 110, rel=1e-3),
    )


def test_a_plain_script_is_told_of_no_setting_that_it_does_not_have() -> None:
    goodput = Goodput(compute=50.0, checkpoints=20.0, saves=10, evaluation=50.0)
    evaluations = tuple(EvaluationPoint(10 * at, at, {}, 5, 5.0) for at in range(10))
    ranks = [rank(waiting=0.1), rank(compute=0.2, forward=0.08, backward=0.12, input=0.2)]
    found = report(ranks, goodput=goodput, evaluations=evaluations)
    causes = verdict_of(replace(found, identity=replace(found.identity, plain_script=True))).causes
    assert {cause.kind for cause in causes} == {"slow loader", "checkpoints", "evaluation"}
    assert not any(cause.advice for cause in causes)


def test_repeated_steps_are_advised_to_be_fewer() -> None:
    attempts = (Attempt(0, 2), Attempt(50, 2, lost_steps=40))
    goodput = Goodput(compute=100.0, checkpoints=1.0, saves=10, lost_steps=20.0)
    cause = only(report([rank()], goodput=goodput, attempts=attempts))
    assert cause.kind == "lost steps"
    assert cause.words == "40 steps repeated after 1 restart"
    assert cause.advice.startswith("--save-every ")


def test_short_saves_are_not_worth_a_word() -> None:
    goodput = Goodput(compute=3.0, checkpoints=1.0, saves=5, evaluation=1.9)
    assert verdict_of(report([rank()], goodput=goodput)).healthy


def test_of_many_causes_the_words_have_the_first_three() -> None:
    events = tuple(RunEvent(step, "error", f"fault {step}") for step in range(5))
    found = verdict_of(replace(report([rank()]), events=events))
    assert len(found.causes) == 5
    assert found.words.startswith(
        "After 0 steps: fault 0; after 1 step: fault 1; after 2 steps: fault 2, and 2 more. Of"
    )
