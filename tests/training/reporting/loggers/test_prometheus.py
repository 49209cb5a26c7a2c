"""The text format is read by a strict parser: Prometheus's own where it is installed, and the format's grammar."""

from __future__ import annotations

import errno
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from evener.core.config.run_config import RunConfig
from evener.core.records import EvaluationRecord, RunStart, RunSummary, SkippedStep, StepRecord
from evener.errors import ConfigurationError, StorageError
from evener.training.fit import fit
from evener.training.reporting.loggers import prometheus
from evener.training.reporting.loggers.prometheus import STATES, MetricsFile
from tests import tasks

LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(
    rf"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{{(?P<labels>{LABEL}(?:,{LABEL})*)\}} "
    r"(?P<value>[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|Inf)|NaN)"
)
Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Figures:
    """The figures by name and labels, without ``run``; fails where the text is not of the format, version 0.0.4."""
    assert text.endswith("\n")
    found: Figures = {}
    families: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert words
            assert name not in families, "the lines of a figure stand together"
            families[name] = ""
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert list(families)[-1] == name
            assert kind in ("counter", "gauge")
            assert (kind == "counter") == name.endswith("_total")
            families[name] = kind
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        assert list(families)[-1] == sample["name"]
        pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', sample["labels"])
        labels = tuple((key, value) for key, value in pairs if key != "run")
        assert (sample["name"], labels) not in found
        found[sample["name"], labels] = float(sample["value"])
    assert all(families.values())
    return found


def figure(path: Path, name: str, **labels: str) -> float:
    return parsed(path.read_text())[f"evener_{name}", tuple(labels.items())]


def state(path: Path) -> str:
    found = [each for each in STATES if figure(path, "run_state", state=each)]
    assert len(found) == 1
    return found[0]


START = RunStart("task", {}, 2, 8, total_steps=40, steps_done=5, strategy="ddp")


def step(number: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "epoch": 1,
        "loss": 0.1 + 0.2,
        "samples": 8,
        "seconds": 0.25,
        "shares": (6, 2),
        "lr": 0.5,
        "compute_seconds": (0.2, 0.1),
        "wait_seconds": (0.0, 0.1),
        "input_seconds": (0.01, 0.0),
        "memory_held": (100, 200),
        "memory_peak": (300 - number, 250),
    }
    return StepRecord(number, **(values | changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "first.prom"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "PERIOD_SECONDS", 0.0)


def test_figures_have_base_units_and_sums_over_steps(path: Path, often: None) -> None:
    metrics = MetricsFile(path)
    metrics.start(START)
    assert state(path) == "running"
    assert figure(path, "steps_total") == 0
    for number in (5, 6):
        metrics.step(step(number))
    metrics.event(SkippedStep(6, "left out"))
    metrics.evaluation(EvaluationRecord(7, 1, {"accuracy": 0.75}, samples=9, seconds=0.5))
    found = {
        (name, *(value for _, value in labels)): value
        for (name, labels), value in parsed(path.read_text()).items()
    }
    assert found["evener_train_loss",] == 0.1 + 0.2
    assert (found["evener_steps_done",], found["evener_steps_planned",], found["evener_steps_total",]) == (
        7,
        40,
        2,
    )
    assert (found["evener_samples_total",], found["evener_step_seconds_total",]) == (16, 0.5)
    assert found["evener_rank_compute_seconds_total", "1"] == 0.2
    assert found["evener_rank_share_ratio", "0"] == 0.75
    assert (found["evener_rank_memory_bytes", "1"], found["evener_rank_memory_peak_bytes", "0"]) == (200, 295)
    assert (found["evener_evaluation", "accuracy"], found["evener_evaluation_seconds_total",]) == (0.75, 0.5)
    assert found["evener_skipped_steps_total",] == 1


def test_prometheus_itself_reads_it(path: Path, often: None) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = MetricsFile(path)
    metrics.start(START)
    metrics.step(step(5))
    families = list(parser.text_string_to_metric_families(path.read_text()))
    assert {family.name for family in families} >= {"evener_train_loss", "evener_steps"}
    assert {sample.labels["run"] for family in families for sample in family.samples} == {"first"}


def test_labels_are_escaped_and_bounded_and_numbers_may_be_no_numbers(path: Path, often: None) -> None:
    metrics = MetricsFile(path)
    metrics.start(RunStart('a "b"\\\n\x00\ud800' + "x" * 999, {}, 1, 8, None, 0))
    for loss, text in ((math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf")):
        metrics.step(step(0, loss=loss))
        assert f'evener_train_loss{{run="first"}} {text}\n' in path.read_text()
    parsed(path.read_text())
    assert 'task="a \\"b\\"\\\\\\n\\\\x00\\\\ud800xxx' in path.read_text()
    assert max(map(len, path.read_text().splitlines())) < 500


@pytest.mark.parametrize(
    ("summary", "expected"), [(None, "failed"), (True, "interrupted"), (False, "completed")]
)
def test_the_end_is_told(path: Path, summary: bool | None, expected: str) -> None:
    metrics = MetricsFile(path)
    metrics.start(START)
    metrics.step(step(5))
    assert figure(path, "steps_total") == 0, "not yet: it is written every few seconds"
    values = dict.fromkeys(RunSummary.__dataclass_fields__)
    metrics.end(None if summary is None else RunSummary(**values | {"interrupted": summary}))  # type: ignore[arg-type]
    assert state(path) == expected
    assert figure(path, "steps_total") == 1


def test_a_reader_never_sees_a_part(path: Path, often: None) -> None:
    """What a reader has opened stays whole: the file is replaced, and nothing else remains beside it."""
    metrics = MetricsFile(path)
    metrics.start(START)
    with path.open() as file:
        before = file.read()
        metrics.step(step(5))
        file.seek(0)
        assert file.read() == before
    assert path.read_text() != before
    assert [each.name for each in path.parent.iterdir()] == ["first.prom"]


def test_a_run_of_ranks_writes_it_once(path: Path) -> None:
    fit(tasks.plain, processes=1, device="cpu", steps=4, show=False, metrics_file=path)
    assert state(path) == "completed"
    assert figure(path, "steps_total") == 4


def test_what_cannot_be_written_ends_no_run_but_at_the_start(
    path: Path, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    metrics = MetricsFile(path, said.append)
    metrics.start(START)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    before = path.read_text()
    with monkeypatch.context() as patched:
        patched.setattr(prometheus, "replace_text", full)
        metrics.step(step(5))
        metrics.step(step(6))
        assert len(said) == 1
        assert "No space left" in said[0]
        assert path.read_text() == before
    metrics.step(step(7))
    assert figure(path, "steps_total") == 3
    path.unlink()
    path.parent.rmdir()
    metrics.end(None)
    assert len(said) == 2
    with pytest.raises(StorageError, match=r"cannot be written: No such file or directory"):
        MetricsFile(path).start(START)
    assert not path.parent.exists()


def test_another_suffix_is_refused() -> None:
    for make in (MetricsFile, lambda name: RunConfig(metrics_file=name)):
        with pytest.raises(ConfigurationError, match=r"must end with .prom"):
            make("metrics.txt")
