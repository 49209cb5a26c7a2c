"""Run directories and reports, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evener.tools.report.schema import Goodput, RankTotals, Report, RunIdentity, Verdict

Ranks = Sequence[Mapping[str, float]]


def step(number: int, compute: Sequence[float] = (0.1, 0.1), **others: Any) -> dict[str, Any]:
    """The record of a step. Ranks compute for so many seconds, and wait until the slowest is done."""
    longest = max(compute, default=0.1)
    usual = {
        "kind": "step",
        "step": number,
        "epoch": 0,
        "loss": 1.0,
        "samples": 8,
        "seconds": longest,
        "shares": [8 // max(1, len(compute))] * len(compute),
        "lr": 0.1,
        "compute_seconds": list(compute),
        "wait_seconds": [longest - each for each in compute],
        "input_seconds": [0.0] * len(compute),
    }
    return {**usual, **others}


def directory(path: Path, records: Sequence[Any], **files: Any) -> Path:
    """A run directory with these records, and JSON files by their names without the end."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def report(
    ranks: Ranks = (), steps: int = 100, settings: Mapping[str, Any] | None = None, **others: Any
) -> Report:
    """A report in which each rank has these medians of a step, and further fields of `RankTotals`."""
    identity = RunIdentity(
        name="run",
        task="digits",
        strategy="ddp",
        world_size=max(1, len(ranks)),
        devices=("cpu",) * len(ranks),
        state="finished",
        steps=steps,
        samples=8 * steps,
        seconds=0.1 * steps,
        batch_size=8,
        settings=dict(settings or {}),
    )
    names = ("compute", "waiting", "communication", "input", "forward", "backward")
    totals = []
    for number, rank in enumerate(ranks):
        medians = {name: rank[name] for name in names if name in rank}
        sums = {name: steps * rank.get(name, 0.0) for name in names[:4]}
        fields = {name: value for name, value in rank.items() if name not in names}
        share = 1 / len(ranks)
        known = {"share": share, "sample_seconds": rank["compute"] / (8 * share), "device": "cpu"}
        totals.append(RankTotals(**{**known, **fields}, **sums, rank=number, medians=medians))  # type: ignore[arg-type]
    parts = {name: sum(getattr(each, name) for each in totals) / max(1, len(totals)) for name in names[:4]}
    made = Report(identity, Verdict("", True), Goodput(**parts), ranks=tuple(totals))
    return replace(made, **others)
