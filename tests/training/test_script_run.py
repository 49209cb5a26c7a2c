"""The run directory of a plain script, from the files of its ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from evener.core.records import StepRecord
from evener.distributed.ddp_profiler.rank_file import ROW, RankFileReader, RankFileWriter, step_files
from evener.distributed.ddp_profiler.report import Observation
from evener.distributed.ddp_profiler.step_times import ObservedStep, StepTimes
from evener.errors import ConfigurationError, InterruptedRunError, RankError
from evener.files import write_json
from evener.training.reporting.run_dir import Records
from evener.training.script_run import ScriptRun, StepMerger
from tests.distributed.processes import end, start_command

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data, other = TensorDataset(torch.rand(12, 4)), TensorDataset(torch.rand(4, 4))
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if dist.get_rank() == 1:
            time.sleep(0.02)
        loss.backward()
        optimizer.step()
        if sys.argv[1:] == ["dies"] and epoch == 1 and dist.get_rank() == 1:
            os._exit(7)
    for (x,) in DataLoader(other, batch_size=2):
        time.sleep(0.02)
print(sum(float(p.sum()) for p in model.parameters()))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def records_in(run_dir: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = (run_dir / "records.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def run(script: Path, *options: str | Path, arguments: tuple[str, ...] = ()) -> Any:
    return end(start_command("run", "--processes", "2", "--device", "cpu", *options, script, *arguments))


@pytest.mark.slow
def test_a_plain_script_leaves_a_run_directory(script: Path, tmp_path: Path) -> None:
    run_dir, metrics = tmp_path / "run", tmp_path / "script.prom"
    plain = run(script)
    ended = run(script, "--observe", "--run-dir", run_dir, "--metrics-file", metrics, "--report")
    assert ended.status == plain.status == 0, ended.err
    assert ended.out == plain.out, "the script computes the same"
    steps = records_in(run_dir)
    assert [step["step"] for step in steps] == list(range(12))
    for step in steps[1:]:
        assert step["shares"] == [2, 2]
        assert step["compute_seconds"][1] > 0.02
        assert 0 < step["loss"] < 10
        assert step["lr"] == 0.1
        assert min(*step["memory_held"], *step["memory_peak"]) > 1 << 20
    assert min(step["compute_seconds"][0] for step in steps[1:]) < 0.02
    waited = [[step["wait_seconds"][rank] for step in steps[1:]] for rank in (0, 1)]
    assert sum(waited[0]) > sum(waited[1])
    (evaluation,) = records_in(run_dir, "evaluation")
    assert (evaluation["step"], evaluation["metrics"]) == (6, {})
    assert evaluation["seconds"] > 0.04
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["task"], summary["world_size"], summary["steps"]) == ("script.py", 2, 12)
    assert [kind["calls"] for kind in summary["collectives"]] == [11]
    assert json.loads((run_dir / "attempts.jsonl").read_text())["startup_seconds"] > 0
    assert 'evener_run_state{run="script",state="completed"} 1.0' in metrics.read_text()
    assert summary["ranks"][0]["cpu_seconds"] > 0
    assert "rank 1, whose forward takes" in " ".join(ended.err.split())
    assert "<html" in (run_dir / "report.html").read_text()
    again = run(script, "--observe", "--run-dir", run_dir)
    assert again.status == 2
    assert "holds a finished run" in again.err


@pytest.mark.slow
def test_a_rank_that_dies_leaves_what_was_done(script: Path, tmp_path: Path) -> None:
    ended = run(script, "--observe", "--run-dir", tmp_path / "run", arguments=("dies",))
    assert ended.status == 7, ended.err
    assert len(records_in(tmp_path / "run")) == 7
    assert not (tmp_path / "run" / "summary.json").exists()
    assert "rank 1 is slowest, by its forward pass" in ended.err, "by what it had written"
    fault = json.loads((tmp_path / "run" / "attempts.jsonl").read_text().splitlines()[-1])
    assert (fault["kind"], fault["cause"], fault["rank"]) == ("fault", "death", 1)


def test_what_would_do_nothing_or_is_not_seen_is_refused(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evener.cli.main import parser

    def execute(*arguments: str) -> None:
        parsed = parser().parse_args(["run", *arguments, str(script)])
        parsed.execute(parsed)

    with pytest.raises(ConfigurationError, match="--run-dir goes with what --observe saw"):
        execute("--run-dir", "run")
    with pytest.raises(ConfigurationError, match="ranks of one machine"):
        execute("--observe", "--run-dir", "run", "--nnodes", "2")
    with pytest.raises(ConfigurationError, match=r"must end with .prom"):
        execute("--observe", "--metrics-file", "metrics.txt")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="without torchrun"):
        execute("--observe", "--run-dir", "run")


# The launcher's part, with files as ranks write them


def write(path: Path, rows: list[dict[str, float]], facts: dict[str, Any]) -> None:
    write_json(path.with_name(path.name.replace("steps", "facts")), facts)
    with path.open("ab") as file:
        for values in rows:
            times = StepTimes(**{"seconds": 1.0, "samples": 4.0} | values)
            file.write(ROW.pack(*vars(times).values(), 0.5, 0.1, 1000.0, 10, 20))


FACTS = {"world_size": 2, "local_world_size": 2, "device": "cpu", "began": 990.0}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "ranks").mkdir()
    return tmp_path / "ranks"


def recorder(place: Path) -> tuple[StepMerger, Path]:
    run_dir = place.parent / "run"
    run_dir.mkdir()
    return StepMerger(place, {"task": "script.py"}, run_dir, [Records(run_dir, stops=False)]), run_dir


def test_steps_are_put_together_as_they_come(place: Path) -> None:
    found, run_dir = recorder(place)
    write(place / "steps-0-0", [{"forward_seconds": 0.5}, {}], FACTS)
    found._read()
    assert not (run_dir / "records.jsonl").exists(), "rank 1 is not there yet"
    write(place / "steps-0-1", [{"backward_seconds": 0.25, "seconds": 2.0, "samples": 2.0}], FACTS)
    with (place / "steps-0-1").open("ab") as file:
        file.write(b"a part")
    found._read()
    (step,) = records_in(run_dir)
    assert (step["compute_seconds"], step["forward_seconds"]) == ([0.5, 0.25], [0.5, 0.0])
    assert (step["seconds"], step["samples"], step["shares"]) == (1.0, 6, [4, 2])
    found.end(RankError("rank 1 died"))
    assert len(records_in(run_dir)) == 1
    assert not (run_dir / "summary.json").exists()


def test_ranks_that_are_started_again_go_on_in_the_same_records(place: Path) -> None:
    found, run_dir = recorder(place)
    for rank in (0, 1):
        write(place / f"steps-0-{rank}", [{}] * (2 + rank), FACTS)
        write(place / f"steps-1-{rank}", [{}] * 2, FACTS)
    found.end(None)
    assert [step["step"] for step in records_in(run_dir)] == [0, 1, 2, 3]
    starts = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [(start["step"], start["startup_seconds"]) for start in starts] == [(0, 9.0), (2, 9.0)]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["samples"], summary["shares"]) == (4, 32, [0.5, 0.5])


def test_what_the_records_lack_is_said(place: Path) -> None:
    found, run_dir = recorder(place)
    write(place / "steps-0-0", [{}] * 9, FACTS)
    write(place / "steps-0-1", [{}] * 2, FACTS)
    lost = Observation(1, 2, StepTimes(), failure="OSError: the disk is full")
    (place / "observed-1.json").write_text(json.dumps(lost.as_json()))
    found.end(InterruptedRunError("stopped", 2))
    words = " ".join(note["words"] for note in records_in(run_dir, "note"))
    assert "rank 0 took 7 steps more" in words
    assert "rank 1 was not observed to its end" in words
    assert json.loads((run_dir / "summary.json").read_text())["interrupted"]


def test_a_script_without_steps_leaves_a_directory_too(place: Path) -> None:
    found, run_dir = recorder(place)
    found.end(None)
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 0


def test_an_observer_that_fails_ends_the_recording_and_not_the_script(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Records):
        def step(self, record: StepRecord) -> None:
            raise ValueError("broken")

    (place.parent / "run").mkdir()
    (other := place.parent / "other").mkdir()
    observers = [Broken(place.parent / "run"), Records(other)]
    found = StepMerger(place, {"task": "script.py"}, None, observers)
    for rank in (0, 1):
        write(place / f"steps-0-{rank}", [{}], FACTS)
    found.end(None)
    assert "Broken no longer records the script: broken" in capsys.readouterr().err
    assert len(records_in(other)) == 1


def test_a_rank_writes_what_the_launcher_reads(place: Path) -> None:
    import torch

    writer = RankFileWriter(place)
    step = ObservedStep(list(vars(StepTimes(1.0, 0.25, 0.5)).values()), math.nan, 0.1, 1000.0)
    for _ in range(3):
        writer.write(step, torch.device("cpu"))
    writer.close()
    (path,) = step_files(place)
    reader = RankFileReader(path)
    reader.read()
    reader.close()
    assert (reader.start, reader.rank, reader.facts["device"]) == (0, 0, "cpu")
    assert [row.step.times for row in reader.rows] == [step.times] * 3
    assert math.isnan(reader.rows[0].step.loss)
    assert reader.rows[0].held > 1 << 20


def test_a_metrics_file_without_a_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    absent = ScriptRun(None, {"task": "script.py"}, metrics_file=tmp_path / "absent" / "script.prom")
    with pytest.raises(ConfigurationError, match="does not exist"), absent.following(tmp_path):
        pass


def test_the_directory_is_held_while_the_script_runs(tmp_path: Path) -> None:
    settings = {"task": "script.py"}
    with (
        ScriptRun(tmp_path / "run", settings).following(tmp_path),
        pytest.raises(ConfigurationError, match="another run writes"),
        ScriptRun(tmp_path / "run", settings).following(tmp_path),
    ):
        pass
