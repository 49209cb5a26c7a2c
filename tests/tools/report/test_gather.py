from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evener.core.attempts import ATTEMPTS
from evener.errors import ConfigurationError, DataError, EvenerError
from evener.tools.report import json_of, report_of
from evener.tools.report.schema import Report, ReportFile, Series
from tests.tools.plan.test_choice import calibration
from tests.tools.report.making import directory, step


def series(report: Report, name: str, rank: int | None = None) -> Series:
    (found,) = (each for each in report.series if (each.name, each.rank) == (name, rank))
    return found


def attempts(path: Path, *records: dict[str, Any]) -> None:
    (path / ATTEMPTS).write_text("".join(json.dumps(record) + "\n" for record in records))


def start(at: int = 0, **others: Any) -> dict[str, Any]:
    run = {
        "world_size": 2,
        "task": "digits",
        "devices": ["cpu", "cpu"],
        "total_steps": 50,
        **others.pop("run", {}),
    }
    usual = {"started": 1e9, "startup_seconds": 3.0, "lost_steps": 0, "lost_seconds": 0.0}
    return {"kind": "start", "step": at, "run": run, **usual, **others}


def test_the_times_of_the_ranks_add_up(tmp_path: Path) -> None:
    records = [
        step(at, (0.1, 0.3), wait_seconds=[0.25, 0.05], input_seconds=[0.02, 0.0], seconds=0.4)
        for at in range(20)
    ]
    report = report_of(directory(tmp_path / "run", records))
    first, second = report.ranks
    assert (first.compute, first.waiting, first.communication, first.input) == pytest.approx(
        (2.0, 4.0, 1.0, 0.4)
    )
    assert (second.compute, second.waiting, second.communication, second.input) == pytest.approx(
        (6.0, 0.0, 1.0, 0.0)
    )
    goodput = report.goodput
    assert (goodput.compute, goodput.waiting, goodput.communication) == pytest.approx((4.0, 2.0, 1.0))
    assert goodput.total == pytest.approx(20 * (0.4 + 0.02))
    assert goodput.startup is None
    assert goodput.checkpoints is None
    assert report.samples_per_second == pytest.approx(8 / 0.42, rel=1e-5)


def test_times_of_nothing_name_no_rank(tmp_path: Path) -> None:
    for took in (0.0, -1.0):
        records = [step(at, (took, took), input_seconds=[]) for at in range(9)]
        assert report_of(directory(tmp_path / "run", records)).verdict.healthy


def test_the_slowest_rank_of_each_step_is_counted(tmp_path: Path) -> None:
    records = [step(at, (0.1, 0.3) if at % 4 else (0.3, 0.1)) for at in range(20)]
    assert [rank.slowest for rank in report_of(directory(tmp_path / "run", records)).ranks] == [0.25, 0.75]


def test_forward_and_backward_are_parts_of_compute(tmp_path: Path) -> None:
    report = report_of(
        directory(tmp_path / "run", [step(at, forward_seconds=[0.03, 0.04]) for at in range(9)])
    )
    assert [(rank.forward, rank.backward) for rank in report.ranks] == [
        pytest.approx((0.27, 0.63)),
        pytest.approx((0.36, 0.54)),
    ]
    assert {span.name for span in report.timeline[0].spans} == {"forward", "backward"}


def test_no_spike_of_a_long_run_vanishes(tmp_path: Path) -> None:
    """Only some steps are read as a whole; the slowest step of each column is among them."""
    records = [step(at, (0.1, 0.1)) for at in range(40_000)]
    records[12_345] = step(12_345, (0.1, 7.0), loss=50.0)
    report = report_of(directory(tmp_path / "run", records))
    assert report.every > 1
    assert len(report.columns.first) <= 480
    column = next(at for at, last in enumerate(report.columns.last) if last >= 12_345)
    for name, rank, peak in (
        ("loss", None, 50.0),
        ("step", None, 7.0),
        ("compute", 1, 7.0),
        ("compute", None, 7.0),
    ):
        assert series(report, name, rank).maximum[column] == peak
    assert series(report, "compute", 0).maximum[column] == 0.1
    assert report.identity.steps == 40_000
    assert report.ranks[1].compute == pytest.approx(4000, rel=1e-3)


def test_a_damaged_number_is_unknown_and_a_damaged_line_an_error(tmp_path: Path) -> None:
    records = [step(0), step(1, loss=None), step(2, loss=1e300), step(3)]
    report = report_of(directory(tmp_path / "run", records))
    assert series(report, "loss").mean == (1.0, None, None, 1.0)
    for line in ('{"kind": "step"}', "[]", "{", '{"kind": "step", "step": "x"}', "\udcff", '"kind"'):
        path = directory(tmp_path / "run", records)
        with (path / "records.jsonl").open("ab") as file:
            file.write(line.encode(errors="surrogateescape") + b"\n")
        with pytest.raises(DataError, match=r"records.jsonl, line 5 "):
            report_of(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"compute_seconds": 3},
        {"shares": ["x"]},
        {"wait_seconds": {"a": 1}},
        {"seconds": "1"},
        {"memory_peak": [None, "x"]},
    ],
)
def test_values_of_wrong_types_are_errors(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="line 1 "):
        report_of(directory(tmp_path / "run", [step(0, **wrong)]))


def test_the_last_line_of_a_killed_run_does_not_count(tmp_path: Path) -> None:
    path = directory(tmp_path / "run", [step(0), step(1)])
    with (path / "records.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    report = report_of(path)
    assert (report.identity.steps, report.identity.state) == (2, "broken off")


def test_a_directory_without_steps_has_a_report(tmp_path: Path) -> None:
    report = report_of(directory(tmp_path / "run", []))
    assert (report.identity.steps, report.series, report.ranks) == (0, (), ())
    assert report.verdict.healthy


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no run directory"):
        report_of(tmp_path)


def test_a_pipe_or_an_endless_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "records.jsonl")
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "records.jsonl").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(EvenerError):
            report_of(tmp_path / name)
    path = directory(tmp_path / "run", [step(0)])
    (path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"config\.json"):
        report_of(path)


@pytest.mark.parametrize("name", ["config", "summary", "task"])
def test_another_file_in_the_place_of_one_of_the_runs(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"{name}.json"):
        report_of(directory(tmp_path / "run", [step(0)], **{name: [1]}))


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    path = directory(tmp_path / "run", [step(at) for at in range(10)], summary={"task": "a", "world_size": 2})
    assert len({json_of(ReportFile((report_of(path),))) for _ in range(2)}) == 1


def test_starts_saves_and_faults(tmp_path: Path) -> None:
    path = directory(tmp_path / "run", [step(at) for at in range(30)])
    death = {"kind": "fault", "cause": "death", "rank": 1, "words": "rank 1 was killed"}
    again = start(10, lost_steps=4, lost_seconds=0.5, startup_seconds=2.0)
    saves = [{"kind": "save", "step": at, "seconds": 0.25} for at in (5, 10)]
    attempts(path, start(), *saves, death, again, {**death, "cause": "hang"})
    report = report_of(path)
    assert (report.goodput.startup, report.goodput.checkpoints, report.goodput.saves) == (5.0, 0.5, 2)
    assert report.goodput.lost_steps == 0.5
    assert [(each.step, each.lost_steps, each.reason) for each in report.attempts] == [
        (0, 0, ""),
        (10, 4, "rank 1 was killed"),
    ]
    assert report.identity.started == "2001-09-09T01:46:40+00:00"
    assert [(event.step, event.kind, event.rank) for event in report.events] == [
        (10, "restart", None),
        (14, "death", 1),
        (30, "hang", 1),
    ]
    assert [(cause.kind, cause.rank) for cause in report.verdict.causes] == [("death", 1), ("hang", 1)]


def test_steps_that_are_in_the_records_twice_are_lost_once(tmp_path: Path) -> None:
    report = report_of(directory(tmp_path / "run", [step(at) for at in (0, 1, 2, 1, 2, 3)]))
    assert report.goodput.lost_steps == pytest.approx(0.2)
    assert report.goodput.compute == pytest.approx(0.4)
    assert report.identity.steps == 4


def test_a_rank_counts_in_the_steps_in_which_it_was_there(tmp_path: Path) -> None:
    records = [step(at, (0.1, 0.1, 0.1) if at < 5 else (0.2, 0.2)) for at in range(20)]
    report = report_of(directory(tmp_path / "run", records))
    assert [rank.compute for rank in report.ranks] == pytest.approx([3.5, 3.5, 0.5])
    assert report.goodput.compute == pytest.approx(3.5)
    assert report.goodput.total == pytest.approx(3.5)


def test_shares_and_notes_are_events(tmp_path: Path) -> None:
    change = {"old_shares": [4, 4], "new_shares": [6, 2], "effective_step": 3, "reason": "rank 1 is slower"}
    records = [
        {"kind": "note", "step": 0, "words": "a note"},
        step(0),
        {"kind": "decision", "step": 1, **change},
        {
            "kind": "evaluation",
            "step": 1,
            "epoch": 0,
            "metrics": {"loss": 0.5, "odd": None},
            "samples": 5,
            "seconds": 2.0,
        },
        step(1),
    ]
    report = report_of(directory(tmp_path / "run", records))
    assert [(event.kind, event.shares) for event in report.events] == [("note", ()), ("shares", (0.75, 0.25))]
    assert report.events[1].reason == "rank 1 is slower"
    assert report.evaluations[0].metrics == {"loss": 0.5, "odd": None}
    assert report.goodput.evaluation == 2.0


def test_of_many_events_the_first_and_the_last_are_kept(tmp_path: Path) -> None:
    records = [{"kind": "note", "step": at, "words": f"note {at}"} for at in range(1000)]
    events = report_of(directory(tmp_path / "run", records)).events
    assert len(events) == 401
    assert events[200].words == "600 events are left out here"
    assert (events[0].words, events[-1].words) == ("note 0", "note 999")


def test_memory_that_grows_in_a_line_is_told_from_memory_that_does_not(tmp_path: Path) -> None:
    held = [[1 << 30, (1 << 30) + at * (8 << 20)] for at in range(50)]
    parts = {"activations": [5, 6], "odd": "x"}
    records = [step(at, memory_held=now, memory_peak=now, memory_parts=parts) for at, now in enumerate(held)]
    report = report_of(directory(tmp_path / "run", records, config={"memory_limit": "4GB"}))
    first, second = report.memory
    assert first.growth is None
    assert second.growth == pytest.approx(8 << 20)
    assert (second.peak, second.limit, second.parts) == (held[-1][1], 4 * 10**9, {"activations": 6})


def test_of_very_many_ranks_the_slowest_have_series(tmp_path: Path) -> None:
    compute = [0.1] * 100
    compute[70] = 0.5
    report = report_of(directory(tmp_path / "run", [step(at, compute, shares=[1] * 100) for at in range(9)]))
    shown = {each.rank for each in report.series if each.name == "compute"}
    assert len(shown) == 9
    assert {70, None} < shown
    assert len(report.ranks) == 100
    assert report.verdict.causes[0].rank == 70


def test_the_command_repeats_the_settings_that_are_no_defaults(tmp_path: Path) -> None:
    config = {
        "batch_size": 8,
        "seed": 0,
        "fused_optimizer": "auto",
        "precision_of": ["a=fp32"],
        "overwrite": True,
    }
    task = {"task": "package.module:task", "options": {"width": 3, "name": "3"}}
    report = report_of(directory(tmp_path / "run", [step(0)], config=config, task=task))
    assert report.identity.command == (
        "evener train package.module:task --option width=3 --option 'name='\"'\"'3'\"'\"'' --processes 2 "
        "--batch-size 8 --precision-of a=fp32"
    )


def test_merges_and_the_ages_of_gradients(tmp_path: Path) -> None:
    held = [[[0, 0, 0, 4]], [[1, 0, 4, 8]], [[0, 0, 8, 9]]]
    records = [step(0, merges=held, merge_bytes=7, wasted=2, compute_seconds=[])]
    merges = report_of(directory(tmp_path / "run", records, summary={"merging": "every 3 steps"})).merges
    assert merges is not None
    assert (merges.number, merges.nbytes, merges.wasted) == (3, 7, 2)
    assert merges.versions_old == {"0": 1, "1": 1, "2-3": 1}
    assert merges.words == ("every 3 steps",)


def test_a_run_stands_beside_what_was_planned(tmp_path: Path) -> None:
    calibration().save(tmp_path / "plan.json")
    times = {"seconds": 36e-3, "wait_seconds": [4e-3, 4e-3], "input_seconds": [0.0, 1e-4]}
    records = [step(at, (32e-3, 32e-3), samples=64, shares=[32, 32], **times) for at in range(40)]
    config = {"strategy": "auto", "strategy_option": [], "mesh": None, "micro_batch": None, "recompute": None}
    summary = {"task": "small", "world_size": 2, "batch_size": 64}
    run = directory(tmp_path / "run", records, config=config, summary=summary)
    prediction = report_of(run, tmp_path / "plan.json").prediction
    assert prediction is not None
    assert [term.name for term in prediction.terms] == [
        "compute",
        "waiting",
        "communication",
        "input",
        "step",
    ]
    assert (prediction.terms[-1].predicted, prediction.terms[-1].measured) == pytest.approx(
        (36e-3, 36e-3), rel=1e-4
    )
    assert prediction.low < 36e-3 < prediction.high
    assert "as predicted" in prediction.words
    assert report_of(run).prediction is None


def test_collectives_are_counted_for_a_step(tmp_path: Path) -> None:
    counted = {"name": "all_reduce", "algorithm": "ring", "nbytes": 1024, "calls": 40}
    summary = {"batch_size": 8, "samples_in_seconds": 156, "collectives": [counted]}
    (found,) = report_of(
        directory(tmp_path / "run", [step(at) for at in range(20)], summary=summary)
    ).collectives
    assert (found.name, found.algorithm, found.nbytes, found.calls_per_step) == (
        "all_reduce",
        "ring",
        1024,
        2.0,
    )


def test_a_step_may_be_a_round_of_many_batches(tmp_path: Path) -> None:
    counted = {"name": "all_reduce", "algorithm": "ring", "nbytes": 1024, "calls": 20}
    summary = {"batch_size": 8, "steps": 30, "samples_in_seconds": 640, "collectives": [counted]}
    records = [step(at, samples=32, shares=[24, 8]) for at in range(30)]
    run = directory(tmp_path / "run", records, config={"batch_size": 8}, summary=summary)
    attempts(run, start(0), start(10, run={"steps_done": 10}))
    report = report_of(run)
    assert report.collectives[0].calls_per_step == 1.0, "of the 20 steps since the last start"
    assert [rank.sample_seconds for rank in report.ranks] == pytest.approx([0.1 / 24, 0.1 / 8], rel=1e-4)


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ({"timed": 2, "timed_seconds": 0.5, "least_seconds": 0.1}, (0.5, 0.1)),
        ({}, (None, None)),
        ({"timed": 2, "timed_seconds": 0.5}, (None, None)),
        ({"timed": 2, "timed_seconds": -0.5, "least_seconds": 0.1}, (None, None)),
        ({"timed": 0, "timed_seconds": 0.5, "least_seconds": 0.1}, (None, None)),
    ],
)
def test_calls_that_were_timed_stand_for_all(
    tmp_path: Path, times: dict[str, Any], found: tuple[float | None, float | None]
) -> None:
    counted = {"name": "all_reduce", "algorithm": "ring", "nbytes": 1024, "calls": 40}
    summary = {"batch_size": 8, "samples_in_seconds": 160, "collectives": [counted | times]}
    run = directory(tmp_path / "run", [step(at) for at in range(20)], summary=summary)
    (each,) = report_of(run).collectives
    assert (each.seconds_per_step, each.least_seconds) == found


def test_merges_of_a_long_run_are_those_of_all_steps(tmp_path: Path) -> None:
    records = [step(at, merges=[[[0, 0, 0, 4]], [[1, 0, 4, 8]]], merge_bytes=7) for at in range(5001)]
    report = report_of(directory(tmp_path / "run", records))
    assert report.every > 1
    assert report.merges is not None
    assert (report.merges.number, report.merges.nbytes) == (2 * 5001, 7 * 5001)
    assert report.merges.versions_old == {"0": 5001, "1": 5001}
