"""A run that goes on with fewer ranks is the same training."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.launch.rendezvous import Rendezvous
from evener.errors import ConfigurationError
from evener.training.fit import fit
from evener.training.lifecycle.elastic import headcount_of, restarting
from tests.distributed.processes import call
from tests.faults import chaos
from tests.faults.running import Fault, rows, suffer

SAMPLES, BATCH, EPOCHS = 240, 40, 3


def counts(processes: str, rendezvous: Rendezvous | None = None, **settings: Any) -> tuple[int, ...]:
    found = headcount_of(RunConfig(processes=processes, device="cpu", **settings), rendezvous)
    assert found is not None
    return found.counts


def test_the_greatest_number_first() -> None:
    assert counts("2:4") == (4, 3, 2)
    assert counts("1:3", rendezvous=Rendezvous(max_restarts=2)) == (3, 2, 1)
    assert headcount_of(RunConfig(processes=3), None) is None


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"mesh": "tensor=2"}, (6, 4, 2)),
        ({"mesh": "data=2,tensor=2"}, (4,)),
        ({"strategy": "sharded,tensor", "mesh": "tensor=3"}, (6,)),
        ({"strategy": "tensor"}, (6, 5, 4, 3, 2)),
        ({"balance": "auto", "allreduce": "ring", "compress": "fp16"}, (6, 5, 4, 3, 2)),
    ],
)
def test_numbers_that_the_division_does_not_permit_are_passed_over(
    settings: dict[str, Any], found: tuple[int, ...]
) -> None:
    assert counts("2:6", **settings) == found


def test_on_gpus_there_are_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = headcount_of(RunConfig(processes="2:8", device="cuda"), None)
    assert found is not None
    assert found.counts == (3, 2)
    with pytest.raises(ConfigurationError, match="asked for 4 processes on cuda, 3 GPUs here"):
        headcount_of(RunConfig(processes="4:8", device="cuda"), None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"balance": "3,2,1"}, "balance '3,2,1' says something of each rank"),
        ({"max_shares": "8,-,8"}, "max_shares '8,-,8'"),
        ({"throttle": "1,1,0.5"}, "throttle '1,1,0.5'"),
        ({"throttle_at": ("3:1:0.5",)}, "throttle_at '3:1:0.5'"),
        ({"rendezvous": Rendezvous(nnodes="2", master_addr="head")}, "and nnodes '2'"),
        ({"mesh": "data=2,tensor=2"}, "has 4 places, and there are 3 ranks"),
        ({"strategy": "magic"}, "no strategy is called 'magic'"),
    ],
)
def test_what_goes_with_no_range_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        counts("2:3", **settings)


def test_ranks_of_another_launcher_cannot_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="another launcher"):
        counts("1:2")


def test_a_range_implies_restarts() -> None:
    config = RunConfig(processes="2:5")
    assert restarting(config, None) == Rendezvous(max_restarts=3)
    assert restarting(config, Rendezvous(max_restarts=0)) == Rendezvous(max_restarts=0)
    assert restarting(RunConfig(processes=3), None) is None


class DyingJournal(chaos.Journal):
    """Rank 1 is killed before its tenth step, in the middle of the second epoch, in the first start."""

    def step(self, record: Any) -> None:
        if record.step == 9 and self.rank == 1 and self.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def few_digits() -> Task:
    task = chaos.numbered()
    return dataclasses.replace(
        task, train=Subset(task.train, range(SAMPLES)), batch_size=BATCH, epochs=EPOCHS
    )


train = partial(fit, few_digits, device="cpu", dtype="float64", show=False)
saving = partial(train, save_every="4steps", save_mode="blocking")


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all((found[name] - expected[name]).abs().max() < 1e-12 for name in found)


@pytest.mark.slow
def test_two_ranks_go_on_with_what_three_began(
    tmp_path: Path, ranks: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = ranks(3).run(train)[0]
    capfd.readouterr()
    trained = call(saving, processes="2:3", run_dir=tmp_path / "run", observers=[DyingJournal(tmp_path)])
    shown = capfd.readouterr().err
    assert "was killed by SIGKILL" in shown
    assert "restart 1 of 1, with 2 ranks" in shown
    assert (whole.summary.world_size, trained.summary.world_size) == (3, 2)
    assert_near(trained.weights, whole.weights)

    lines = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(EPOCHS * SAMPLES // BATCH))
    assert [len(step["shares"]) for step in steps] == [3] * 8 + [2] * 10
    assert [sum(step["shares"]) for step in steps] == [BATCH] * len(steps)
    notes = [(line["step"], line["words"]) for line in lines if line["kind"] == "note"]
    assert [step for step, words in notes if words == "optimizer AdamW, fused"] == [0, 8]
    assert [note for note in notes if "fused" not in note[1]] == [
        (8, f"goes on after step 8 of {tmp_path / 'run'}, on 2 ranks")
    ]
    assert_each_sample_once_an_epoch(tmp_path)


def assert_each_sample_once_an_epoch(directory: Path) -> None:
    """In what is left of both starts: the last that took a step counts."""
    taken: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in directory.glob("journal-*"):
        for attempt, _, step, samples in map(json.loads, path.read_text().splitlines()):
            taken[step][attempt] += samples
    assert {max(taken[step]) for step in range(8)} == {0}
    assert {max(taken[step]) for step in range(8, 18)} == {1}
    for epoch in range(EPOCHS):
        steps = range(epoch * SAMPLES // BATCH, (epoch + 1) * SAMPLES // BATCH)
        samples = [sample for step in steps for sample in taken[step][max(taken[step])]]
        assert sorted(samples) == list(range(SAMPLES))


FAULTS = (
    Fault(
        "raises once",
        "raises_once",
        0,
        (r"rank 1 raised RuntimeError: no luck", r"restart 1 of 1, with 2 ranks"),
        40,
        ("--processes", "2:3"),
        never=("timeout",),
    ),
    Fault(
        "the last that can be spared",
        "killed_twice",
        0,
        (r"restart 1 of 3, with 2 ranks", r"restart 2 of 3: of rank 1 alone; the others stay"),
        60,
        ("--processes", "2:3", "--max-restarts", "3", "--save-every", "1steps"),
    ),
    Fault(
        "no restart is left",
        "killed_twice",
        1,
        (
            r"restart 1 of 1, with 2 ranks",
            r"with 2 ranks\n(.*\n)*evener: rank 1 \(pid \d+\) was killed by SIGKILL",
        ),
        60,
        ("--processes", "2:3"),
    ),
    Fault(
        "three cannot hold a model in two parts",
        "killed_once",
        0,
        (r"restart 1 of 2, with 2 ranks",),
        60,
        (
            "--processes",
            "2:4",
            "--mesh",
            "tensor=2",
            "--strategy",
            "tensor",
            "--strategy-option",
            "plan=0=colwise,3=rowwise",
        ),
    ),
)


@pytest.mark.parametrize("fault", rows(*FAULTS, slow=("no restart is left",)))
def test_it_goes_on_as_promised(fault: Fault, tmp_path: Path) -> None:
    suffer(fault, tmp_path)
