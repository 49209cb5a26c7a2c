"""``evener devices``: what it prints and writes, and with which status it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evener.cli.devices import text
from evener.cli.main import main
from evener.hardware.diagnosis.diagnose import diagnose
from evener.hardware.survey import files
from evener.hardware.survey.facts import MeasuredLink, Speed, Survey
from tests.hardware.survey import machines
from tests.warm import Warm


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def devices(*arguments: str) -> int:
    try:
        return main(["devices", *arguments])
    except SystemExit as end:  # argparse
        return int(end.code or 0)


def shown(survey: Survey) -> list[str]:
    return text(survey, diagnose(survey)).splitlines()


def test_two_ranks_of_this_machine(
    tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("evener.hardware.speed._BUDGET_SECONDS", 0.01)
    status = Warm(tmp_path, ranks, monkeypatch).status(
        *(
            "evener",
            "devices",
            "--processes",
            "2",
            "--device",
            "cpu",
            "--save",
            "here.json",
            "--json",
            "out.json",
        )
    )
    first = capsys.readouterr().out
    assert status == 0
    saved = files.load(Path("here.json"))
    assert [(link.a, link.b) for link in saved.links] == [(0, 1)]
    assert saved.speeds[0].device == "cpu"
    assert saved.speeds[0].products.keys() == {"float64", "float32", "bfloat16"}
    written = json.loads(Path("out.json").read_text())
    assert written["survey"] == json.loads(Path("here.json").read_text())
    assert [each["name"] for each in written["findings"]] == [each.name for each in diagnose(saved)]
    for words in ("host ", "CPU ", "memory ", "torch", "matrix product in TFLOP/s: float64", "ranks 0-1: "):
        assert words in first
    assert devices("--from", "here.json") == status
    assert capsys.readouterr().out == first


def test_without_measuring_no_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("evener.training.survey.launch", launch)
    monkeypatch.setattr("evener.training.survey.measure", launch)
    assert devices("--no-measure", "--device", "cpu", "--processes", "2", "--save", "here.json") == 0
    assert files.load(Path("here.json")).speeds == ()


@pytest.mark.parametrize(
    ("survey", "status", "words"),
    [
        (machines.on_cpu(), 0, "nothing found wrong"),
        (machines.h100_node(), 0, "nothing found wrong"),
        (machines.mixed_cards(), 0, "slow: the 2 cards are not alike"),
        (machines.k80(), 1, "wrong: driver 470.256.02 is older than 525.60.13"),
    ],
    ids=["cpu", "h100", "mixed", "k80"],
)
def test_another_machine(survey: Survey, status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    files.save(survey, Path("there.json"))
    assert devices("--from", "there.json", "--json", "out.json") == status
    assert words in capsys.readouterr().out
    assert json.loads(Path("out.json").read_text())["survey"]["host"]["name"] == "node"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "absent.json"], "there is no file absent.json"),
        (["--from", "wrong.json"], "wrong.json is no survey: host is missing"),
        (
            ["--from", "wrong.json", "--save", "x", "--processes", "2"],
            "--save and --processes and --from do not go",
        ),
        (["--from", "wrong.json", "--no-measure"], "--no-measure and --from do not go together"),
        (["--processes", "0", "--device", "cpu"], "processes is 0"),
        (["--processes", "two"], "processes"),
        (["--save", ""], "the path is empty"),
    ],
)
def test_what_cannot_work_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.json").write_text('{"format": "evener-survey-2"}')
    assert devices(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_machine_with_cards_for_people() -> None:
    machine = machines.mixed_cards()
    machine = replace(
        machine,
        host=machines.host(cpu_quota=8.0, memory_limit_nbytes=1 << 36),
        cards=(machine.cards[0], replace(machine.cards[1], device=None, pcie_width=8)),
        variables={"CUDA_VISIBLE_DEVICES": "0"},
        speeds=(
            Speed("cpu", {"float32": 2.5e12}, copy=2e11),
            Speed("cuda:0", {"float32": 3.1e13, "tf32": 6e13}, copy=8e11, from_host=2.5e10, to_host=2.6e10),
        ),
        links=(MeasuredLink(0, 1, 1.2e-5, 2.05e10),),
    )
    assert shown(machine)[:15] == [
        "host      node, Linux 6.8.0, x86_64",
        "CPU       A processor: 64 cores, 64 usable, time of 8, AVX512",
        "memory    512.0 GiB, 500.0 GiB free, 64.0 GiB for the container; /dev/shm 256.0 GiB",
        "versions  evener 0.1.0, Python 3.12.3, torch 2.13.0+cu128",
        "built for CUDA 12.8, cuDNN 9.10.2, NCCL 2.27.3",
        "driver    NVIDIA 570.124.06 (CUDA 12.8)",
        "CUDA_VISIBLE_DEVICES 0",
        "card 0    NVIDIA GeForce RTX 3090: cuda:0, sm_86, 24.0 GiB, 23.0 GiB free, 0000:01:00.0, PCIe 4 x16, 40 °C",
        "card 1    NVIDIA GeForce RTX 4090: not seen by torch, sm_89, 24.0 GiB, 23.0 GiB free, 0000:02:00.0, "
        "PCIe 4 x8, 40 °C",
        "cpu       matrix product in TFLOP/s: float32 2.5",
        "cpu       memory copy in GB/s: within 200",
        "cuda:0    matrix product in TFLOP/s: float32 31, tf32 60",
        "cuda:0    memory copy in GB/s: within 800, from host 25, to host 26",
        "ranks 0-1: 12 us, 20.50 GB/s",
        "",
    ]


def test_a_finding_is_followed_by_its_remedy() -> None:
    lines = shown(machines.k80())
    start = next(n for n, line in enumerate(lines) if line.startswith("wrong: driver 470"))
    remedy = next(n for n, line in enumerate(lines[start:]) if line.startswith("  -> update the driver"))
    assert remedy > 0
    assert all(len(line) <= 100 for line in lines[start:])
    assert lines[start + remedy + 1].startswith("     ") or "wrong" in lines[start + remedy + 1]
