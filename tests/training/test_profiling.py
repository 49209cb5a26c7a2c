from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

from evener.core.config.run_config import RunConfig
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.hardware import profile_ranges
from evener.training.fit import fit
from evener.training.profiling import ProfileOutcome, StepProfiler, profile_text
from tests import tasks
from tests.engines import engine_of
from tests.ranks import RankPool

EVERYWHERE = {"loading a batch", "training", "forward", "backward", "optimizer"}
STAGE = {"backward of stage {rank} micro-batch 0", "another stage of the pipeline", "optimizer"}
STRATEGIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ddp": ({"strategy": "ddp"}, EVERYWHERE | {"all_reduce bucket 0"}),
    "messages": ({"strategy": "ddp", "allreduce": "ring"}, EVERYWHERE | {"all_reduce bucket 0"}),
    "zero 2": (
        {"strategy": "sharded", "strategy_option": ("zero=2",)},
        EVERYWHERE | {"reduce_scatter bucket 0", "end of reduce_scatter bucket 0"},
    ),
    "zero 3": ({"strategy": "sharded", "strategy_option": ("zero=3",)}, EVERYWHERE),
    "tensor": ({"strategy": "tensor"}, EVERYWHERE | {"all_reduce"}),
    "pipeline": ({"strategy": "pipeline", "strategy_option": ("balance=equal",)}, STAGE),
    "local steps": (
        {"strategy": "diloco", "strategy_option": ("sync_every=2",), "epochs": 8},
        EVERYWHERE | {"merge of fragment 0", "end of the merge of fragment 0", "outer optimizer"},
    ),
    "asynchronous": (
        {"strategy": "asynchronous", "epochs": 8},
        {"training", "forward", "backward", "loading a batch", "weights of the parameter server"},
    ),
}


def trace(file: Path) -> dict[str, Any]:
    with gzip.open(file) as opened:
        found: dict[str, Any] = json.load(opened)
    return found


def names(file: Path) -> set[str]:
    return {event["name"] for event in trace(file)["traceEvents"] if event.get("cat") == "user_annotation"}


def steps_in(file: Path) -> list[int]:
    found = [name.removeprefix("ProfilerStep#") for name in names(file) if name.startswith("ProfilerStep#")]
    return sorted(map(int, found))


def train(run_dir: Path, steps: int = 8, **settings: Any) -> ProfileOutcome | None:
    with engine_of("plain", run_dir=run_dir, **({"profile": 2, "epochs": 3} | settings)) as engine:
        for batch in engine.batches():
            engine.step(batch)
            if engine.steps_done >= steps:
                break
    return engine.profiler.outcome


def train_each(run_dir: Path) -> None:
    for name, (settings, _) in STRATEGIES.items():
        train(run_dir / name, **settings)


def test_each_rank_traces_what_its_strategy_does(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    ranks(2).run(train_each, tmp_path)
    for name, (_, expected) in STRATEGIES.items():
        for rank in range(2):
            file = tmp_path / name / f"profile/step-3/rank{rank}.json.gz"
            assert steps_in(file) == [3, 4]
            ours = {each.format(rank=rank) for each in expected}
            assert {f"{profile_ranges.PREFIX}{each}" for each in ours} <= names(file), name
            said = trace(file)
            assert (said["distributedInfo"]["rank"], said["distributedInfo"]["world_size"]) == (rank, 2)
            assert said["evener"]["steps"] == [3, 4]
    server = names(tmp_path / "asynchronous/profile/step-3/rank0.json.gz")
    # Also from the thread that serves the other rank.
    assert "evener::merge of the parameter server" in server


def test_no_range_is_made_unless_a_profiler_records(tmp_path: Path) -> None:
    with patch.object(
        profile_ranges, "record_function", side_effect=AssertionError("a range was made")
    ) as made:
        train(tmp_path, profile=None)
        assert not made.called
        with pytest.raises(AssertionError, match="a range was made"):
            train(tmp_path)  # the same ranges, when one records
    assert profile_ranges.named_range("forward") is profile_ranges.named_range("backward")


def test_ranges_are_in_a_profile_that_the_user_makes() -> None:
    with engine_of("plain") as engine, torch.profiler.profile() as made:
        for batch in engine.batches():
            engine.step(batch)
            break
    found = {event.key for event in made.key_averages()}
    assert {"evener::forward", "evener::backward", "evener::optimizer"} <= found


def test_a_profile_of_one_rank_has_its_rank_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for link in ("run/profile/.rank0", "run/profile/step-3/.rank0.json.gz"):
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / link).symlink_to(tmp_path / "mine")
    outcome = train(tmp_path / "run")
    assert outcome is not None
    assert outcome.file == tmp_path / "run/profile/step-3/rank0.json.gz"
    assert trace(outcome.file)["distributedInfo"] == {"rank": 0, "world_size": 1}
    assert [path.name for path in outcome.file.parent.iterdir()] == ["rank0.json.gz"]
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(("steps", "recorded"), [(4, [3]), (7, [3, 4, 5, 6])])
def test_a_run_that_ends_early_writes_what_there_is(tmp_path: Path, steps: int, recorded: list[int]) -> None:
    with engine_of("plain", run_dir=tmp_path, profile=5, steps=steps) as engine:
        for batch in engine.batches():
            engine.step(batch)
    outcome = engine.profiler.outcome
    assert outcome is not None
    assert outcome.file is not None
    assert "(5 were to be, and the run ended)" in outcome.text
    assert trace(outcome.file)["evener"]["steps"] == recorded
    assert steps_in(outcome.file) == recorded


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_ends_in_the_warm_up_says_so(tmp_path: Path, steps: int) -> None:
    outcome = train(tmp_path, steps=steps)
    assert outcome is not None
    assert outcome.file is None
    assert "no step was profiled: the run ended in the 3 steps before" in outcome.text
    with torch.profiler.profile():  # the profiler of PyTorch is free again
        pass


class Ends(torch.nn.Linear):
    """Raises in its sixth pass."""

    passes = 0
    error: type[BaseException] = KeyboardInterrupt

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 6:
            raise self.error
        return super().forward(x)


class Fails(Ends):
    error = RuntimeError


@pytest.mark.parametrize(("model", "error"), [(Ends, KeyboardInterrupt), (Fails, Exception)])
def test_an_error_or_an_interrupt_leaves_the_trace_up_to_it(
    tmp_path: Path, model: type[Ends], error: type[BaseException]
) -> None:
    task = lambda: tasks._task(model=lambda: model(6, 3), batch_size=4)  # noqa: E731
    with pytest.raises(error):
        fit(task, processes=1, device="cpu", run_dir=tmp_path, show=False, profile=5)
    assert steps_in(tmp_path / "profile/step-3/rank0.json.gz") == [3, 4, 5]
    summary = tmp_path / "summary.json"
    if error is KeyboardInterrupt:
        assert "profile of steps 3 to 5 (5 were to be" in json.loads(summary.read_text())["profile"]


def test_the_summary_names_the_files_also_of_a_resumed_run(tmp_path: Path) -> None:
    more: dict[str, Any] = {"processes": 1, "device": "cpu", "show": False, "run_dir": tmp_path, "profile": 2}
    first = fit(tasks.plain, steps=6, **more).summary
    assert first.profile == f"profile of steps 3 to 4 in {tmp_path}/profile/step-3/rank0.json.gz"
    again = fit(tasks.plain, steps=12, epochs=9, resume=tmp_path, **more).summary
    assert steps_in(tmp_path / "profile/step-9/rank0.json.gz") == [9, 10]
    assert again.profile.endswith("profile/step-9/rank0.json.gz")
    fit(tasks.plain, steps=1, overwrite=True, **more | {"profile": None})
    assert not list(tmp_path.rglob("rank*.json.gz"))


def test_an_evaluation_between_two_steps_is_a_range(tmp_path: Path) -> None:
    fit(tasks.plain, processes=1, device="cpu", show=False, run_dir=tmp_path, profile=2, epochs=2)
    assert "evener::evaluation" in names(tmp_path / "profile/step-3/rank0.json.gz")  # 4 steps in an epoch


def test_a_run_that_goes_back_to_a_checkpoint_writes_what_there_is(tmp_path: Path) -> None:
    with Session(device="cpu") as session:
        profiler = StepProfiler(5, tmp_path, session, {})
        for step in (0, 1, 2, 3, 4, 2, 3, 4):
            profiler.begin(step)
        profiler.close()
    assert profiler.outcome is not None
    assert "steps 3 to 4" in profiler.outcome.text


def test_a_trace_can_be_written_by_another_thread(tmp_path: Path) -> None:
    """The last words of a run that is stuck come from one."""
    with Session(device="cpu") as session:
        profiler = StepProfiler(5, tmp_path, session, {})
        for step in (0, 1, 2, 3, 4):
            profiler.begin(step)
        thread = Thread(target=profiler.close)
        thread.start()
        thread.join()
    assert steps_in(tmp_path / "profile/step-3/rank0.json.gz") == [3, 4]


@pytest.mark.parametrize("steps", [0, -1, True, 2.5])
def test_a_number_of_steps_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"profile is .*; it must be a whole number of at least 1"):
        RunConfig(profile=steps)


def test_a_run_without_a_directory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"profile=2 .*the run has none: name one with run_dir"):
        engine_of("plain", profile=2)


def refused(run_dir: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        engine_of("plain", run_dir=run_dir, profile=2)
    return str(caught.value)


def test_a_directory_that_cannot_be_written_is_refused_on_all_ranks(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    (tmp_path / "profile").write_text("a file")
    said = ranks(2).run(refused, tmp_path)
    assert said[0] == said[1]
    assert "profile=2 cannot write its traces: rank 0: File exists" in said[0]


def test_a_trace_that_cannot_be_written_at_last_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/step-3").write_text("a file")
    outcome = train(tmp_path)
    assert outcome is not None
    assert outcome.text.startswith("the profile of steps 3 to 4 could not be written: File exists")


def test_another_profiler_that_records_already_is_said(tmp_path: Path) -> None:
    with engine_of("plain", run_dir=tmp_path, profile=2) as engine, torch.profiler.profile():
        for batch in engine.batches():
            engine.step(batch)
    assert engine.profiler.outcome is not None
    assert "no step was profiled" in engine.profiler.outcome.text


def outcomes(*texts: str | None, file: str | None = "r/profile/step-3/rank{}.json.gz") -> Iterable[Any]:
    for rank, text in enumerate(texts):
        of_rank = Path(file.format(rank)) if file and text and "not" not in text else None
        yield None if text is None else ProfileOutcome(text, of_rank)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((None, None), ""),
        (("steps 3",), "steps 3 in r/profile/step-3/rank0.json.gz"),
        (("steps 3", "steps 3"), "steps 3 in r/profile/step-3/rank*.json.gz, one for each rank"),
        (
            ("steps 3", "not written: full"),
            "rank 0: steps 3 in r/profile/step-3/rank0.json.gz; rank 1: not written: full",
        ),
    ],
)
def test_what_the_summary_says(texts: tuple[str | None, ...], expected: str) -> None:
    assert profile_text([*outcomes(*texts)]) == expected
