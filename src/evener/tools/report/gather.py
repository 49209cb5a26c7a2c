"""Makes the report of a run from its directory, whether the run has ended, goes on, was killed or resumed.

The same files give the same report: it has no clock and no random name. Only whether a run without a summary is under
way depends on the processes of this host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evener.checkpoint.remote.fetch import fetched
from evener.checkpoint.run_mark import run_in
from evener.core.attempts import ATTEMPTS
from evener.core.config.sizes import parse_limits
from evener.core.records import RECORDS
from evener.errors import ConfigurationError, DataError
from evener.tools.report import schema
from evener.tools.report.columns import Numbers
from evener.tools.report.events import Happenings
from evener.tools.report.identity import (
    described_notes,
    plain_settings,
    reproducing_command,
    some_text,
    text_table,
)
from evener.tools.report.index_reader import MOST_READ_RANKS
from evener.tools.report.predicted import prediction_of
from evener.tools.report.schema import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    INPUT,
    WAITING,
    Collective,
    Columns,
    Goodput,
    RankTotals,
    Report,
    RunIdentity,
    Verdict,
)
from evener.tools.report.step_reader import EPOCH, SAMPLES, SECONDS, StepReader
from evener.tools.report.step_series import WARM, StepTables, rounded
from evener.tools.report.verdict import verdict_of
from evener.training.reporting.run_dir import is_held
from evener.training.reporting.task_file import read_object


def report_of(run: Path, calibration: Path | None = None) -> Report:
    """Returns the report of a run directory.

    Args:
        run: The directory, which may lie elsewhere.
        calibration: A file that ``evener plan --save`` has written, to compare the run with. None for none.

    Raises:
        ConfigurationError: If it is no run directory.
        DataError: If one of its files is damaged. The message names the file and the line.
        StorageError: If it cannot be read.
    """
    directory = fetched(run, records=True)
    if not (directory / RECORDS).is_file():
        raise ConfigurationError(
            f"{run} is no run directory: it has no {RECORDS}; name the directory that `evener train` has left"
        )
    settings, summary = _read(directory / "config.json"), _read(directory / "summary.json")
    happened = Happenings()
    happened.read_attempts(directory / ATTEMPTS)
    start = happened.start
    world_size = (
        _whole(summary.get("world_size"), MOST_READ_RANKS)
        or _whole(start.get("world_size"), MOST_READ_RANKS)
        or 1
    )
    parts = tuple(_whole(part) for part in _list(start.get("parts")))
    steps = StepReader(directory / RECORDS, happened.add, parts, happened.add_merges).read()
    tables = StepTables(steps) if steps.bins.rows else None
    world_size = max(world_size, tables.ranks if tables else 0)
    state = _state(directory, summary)
    identity = RunIdentity(
        name=directory.resolve().name,
        task=some_text(summary.get("task") or start.get("task") or settings.get("task")),
        strategy=some_text(summary.get("strategy") or start.get("strategy") or settings.get("strategy")),
        world_size=world_size,
        devices=tuple(map(some_text, _list(summary.get("devices") or start.get("devices"))[:10_000])),
        state=state,
        steps=tables.columns.last[-1] + 1 if tables else _whole(start.get("steps_done")),
        samples=int(steps.bins.total[:, SAMPLES].sum()),
        seconds=rounded(float(steps.bins.total[:, SECONDS].sum())),
        batch_size=_whole(settings.get("batch_size") or summary.get("batch_size")) or None,
        total_steps=_whole(start.get("total_steps")) or None,
        epochs=int(np.nan_to_num(steps.bins.spread(EPOCH).maximum).max()) + 1 if tables else 0,
        allreduce=some_text(summary.get("allreduce") or start.get("allreduce")),
        settings=plain_settings(settings),
        versions=text_table(summary.get("versions") or start.get("versions")),
        started=happened.attempts[0].started if happened.attempts else None,
        command=reproducing_command(settings, _read(directory / "task.json"), world_size),
        weights_digest=some_text(summary.get("weights_digest")),
        run=getattr(run_in(directory), "run", ""),
        notes=described_notes(summary),
        learns=start.get("learns") is True,
        plain_script=settings.get("observed") is True,
    )
    report = Report(
        identity,
        Verdict("", True),
        Goodput(),
        evaluations=tuple(happened.evaluations),
        collectives=tuple(_collectives(summary, start, steps.bins.rows)),
        events=tuple(happened.events(identity.steps)),
        attempts=tuple(happened.attempts),
        merges=happened.merges(
            summary,
            tables.columns if tables else Columns(),
            steps.bins.rows / max(1, len(steps.kept.steps)),
        ),
        prediction=prediction_of(calibration, directory),
    )
    if tables is not None:
        report = _with_steps(report, tables, happened, summary)
    return replace(report, verdict=verdict_of(report))


def _with_steps(
    report: Report, tables: StepTables, happened: Happenings, summary: Mapping[str, Any]
) -> Report:
    """Returns the report with all that its steps tell."""
    seconds, inputs = tables.steps.bins.spread(SECONDS).mean, tables.first_input()
    wall = np.nan_to_num(seconds) + inputs
    steps = tables.steps.bins.known[:, SECONDS]
    skipped = -(-WARM // tables.steps.bins.width)
    late = slice(skipped, None) if len(wall) > 2 * skipped else slice(None)
    late_seconds = float((wall * steps)[late].sum())
    late_samples = float(tables.steps.bins.total[late, SAMPLES].sum())
    limits = _limits(report.identity.settings, happened.start, report.identity.world_size)
    ranks = tuple(_ranks(report, tables, happened.start, summary))
    return replace(
        report,
        goodput=_goodput(tables, float((wall * steps).sum()), happened),
        columns=tables.columns,
        series=tuple(tables.series()),
        ranks=ranks,
        memory=tuple(tables.memory(limits)),
        timeline=tuple(tables.timeline()),
        samples_per_second=rounded(late_samples / late_seconds) if late_seconds else 0.0,
        every=tables.steps.kept.every,
        steps_per_block=tables.steps.bins.width,
        block_seconds=tuple(rounded(float(each)) for each in wall[late] if each > 0),
    )


def _goodput(tables: StepTables, wall: float, happened: Happenings) -> Goodput:
    """Adds up where the time went. The parts of a step are means over the ranks; ``other`` is the rest of the steps."""
    repeated = tables.steps.repeated_seconds
    counts = 1 - repeated / wall if wall else 0.0  # steps that were repeated are lost, with all their parts
    parts = {name: counts * tables.mean_total(name) for name in (COMPUTE, COMMUNICATION, WAITING, INPUT)}
    startup, saves = happened.startup, happened.saves
    return Goodput(
        startup=None if startup is None else rounded(startup),
        checkpoints=None if saves is None else rounded(saves),
        saves=None if saves is None else happened.number_of_saves,
        evaluation=rounded(happened.evaluation_seconds),
        lost_steps=rounded(repeated + sum(attempt.lost_seconds for attempt in happened.attempts)),
        other=rounded(max(0.0, wall - repeated - sum(parts.values()))),
        **{name: rounded(seconds) for name, seconds in parts.items()},
    )


def _ranks(
    report: Report, tables: StepTables, start: Mapping[str, Any], summary: Mapping[str, Any]
) -> Sequence[RankTotals]:
    """Returns what each rank did. Empty if no step has times by rank."""
    names = (COMPUTE, WAITING, COMMUNICATION, INPUT, FORWARD, BACKWARD)
    totals = {name: tables.totals(name) for name in names}
    medians = {name: tables.medians(name) for name in names}
    shares, each = tables.totals(schema.SHARE) / tables.number, tables.sample_seconds()
    slowest = tables.slowest()
    links, of_ranks = _list(summary.get("link_seconds")), _list(summary.get("ranks"))

    def seconds(name: str, rank: int) -> float:
        return rounded(float(np.nan_to_num(totals[name][rank])))

    def totals_of(rank: int) -> RankTotals:
        queued, queued_seconds = _queued(_entry(of_ranks, rank, dict))
        return RankTotals(
            rank=rank,
            device=report.identity.devices[rank] if rank < len(report.identity.devices) else "",
            share=rounded(float(np.nan_to_num(shares[rank]))),
            compute=seconds(COMPUTE, rank),
            waiting=seconds(WAITING, rank),
            communication=seconds(COMMUNICATION, rank),
            input=seconds(INPUT, rank),
            forward=_known(totals[FORWARD], rank),
            backward=_known(totals[BACKWARD], rank),
            sample_seconds=_known(each, rank),
            slowest=_known(slowest, rank),
            threads=_entry(start.get("threads"), rank),
            workers=_entry(summary.get("workers"), rank),
            host=some_text(_entry(start.get("hosts"), rank, str), 200),
            cores=_entry(start.get("cores"), rank),
            queued=queued,
            queued_seconds=queued_seconds,
            link_seconds=_entry(links, rank, float),
            medians={
                name: rounded(float(found[rank]))
                for name, found in medians.items()
                if math.isfinite(found[rank])
            },
        )

    return [totals_of(rank) for rank in range(tables.ranks)]


def _known(values: Numbers, rank: int) -> float | None:
    return rounded(float(values[rank])) if math.isfinite(values[rank]) else None


def _queued(times: Any) -> tuple[float | None, float | None]:
    """Returns the part of the time in which threads could compute for which they had no core, and its seconds."""
    found = [
        times.get(name) if isinstance(times, dict) else None for name in ("cpu_seconds", "queued_seconds")
    ]
    busy, queued = (each if type(each) is float and 0 <= each < 1e15 else math.nan for each in found)
    return (rounded(queued / (busy + queued)), rounded(queued)) if busy + queued > 0 else (None, None)


def _entry(values: Any, rank: int, kind: type = int) -> Any:
    """Returns the entry of a rank in a list. None if there is none of this type."""
    found = values[rank] if isinstance(values, list) and rank < len(values) else None
    return found if type(found) is kind else None


def _collectives(summary: Mapping[str, Any], start: Mapping[str, Any], steps: int) -> Sequence[Collective]:
    """Returns the collectives that the summary counts, as calls in a step since the last start of the ranks."""
    taken = _whole(_whole(summary.get("steps")) - _whole(start.get("steps_done"))) or steps
    found = [each for each in _list(summary.get("collectives"))[:1000] if isinstance(each, dict)]
    return [
        Collective(
            some_text(each.get("name"), 200),
            some_text(each.get("algorithm"), 200),
            _whole(each.get("nbytes")),
            rounded(_whole(each.get("calls")) / max(1, taken)),
            *_call_seconds(each, max(1, taken)),
        )
        for each in found
    ]


def _call_seconds(each: Mapping[str, Any], steps: int) -> tuple[float | None, float | None]:
    """Returns the seconds of a collective in a step, and those of its shortest call; None for what was not timed."""
    timed = _whole(each.get("timed"))
    sums: list[Any] = [each.get(name) for name in ("timed_seconds", "least_seconds")]
    if not timed or not all(type(value) is float and 0 <= value < 1e15 for value in sums):
        return None, None
    seconds, least = sums
    return rounded(seconds / timed * _whole(each.get("calls")) / steps), rounded(least)


def _limits(settings: Mapping[str, Any], start: Mapping[str, Any], ranks: int) -> Sequence[int | None]:
    """Returns the memory limit of each rank, as far as start or settings tell it."""
    told = [each if type(each) is int else None for each in _list(start.get("memory_limits"))]
    if told:
        return told
    try:
        return parse_limits(settings.get("memory_limit"), ranks)
    except (ConfigurationError, AttributeError):
        return []


def _state(directory: Path, summary: Mapping[str, Any]) -> str:
    if summary:
        return schema.INTERRUPTED if summary.get("interrupted") else schema.FINISHED
    return schema.UNDER_WAY if is_held(directory) else schema.BROKEN_OFF


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file of a run; empty if it is not there."""
    try:
        return read_object(path)
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: Any, most: int = 1 << 60) -> int:
    """Returns a number that counts something; 0 for anything else."""
    return value if type(value) is int and 0 <= value <= most else 0
