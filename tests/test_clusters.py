"""The files for clusters, as far as a machine without a cluster can tell: what they start is what the command takes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evener.cli.main import parser

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples/clusters"

SRUN = """#!/bin/bash
echo "$@" >> "$CALLS"
exit "$STATUS"
"""
REQUEUE = """#!/bin/bash
echo "scontrol $@" >> "$CALLS"
"""


def arguments(words: list[str]) -> Any:
    """What the command makes of its words; an error of theirs ends the test."""
    assert words[0] == "evener"
    return parser().parse_args(words[1:])


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTERS / name).read_text()))


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, False), (138, True)])
def test_a_job_of_slurm_is_queued_again_where_it_was_asked_to_save(
    tmp_path: Path, status: int, requeued: bool
) -> None:
    for name, text in (("srun", SRUN), ("scontrol", REQUEUE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        "STATUS": str(status),
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    done = subprocess.run(["bash", CLUSTERS / "slurm.sbatch"], env=environment, timeout=20)
    assert done.returncode == status
    started, *after = calls.read_text().splitlines()
    words = shlex.split(started)
    taken = arguments(words[words.index("evener") :])
    assert (taken.run_dir, taken.resume) == (tmp_path / "runs/7", Path("auto"))
    assert after == (["scontrol requeue 7"] if requeued else [])


def test_signals_of_slurm_come_before_its_limit() -> None:
    asked = dict(re.findall(r"^#SBATCH --(\S+?)(?:=(\S+))?$", (CLUSTERS / "slurm.sbatch").read_text(), re.M))
    assert asked["signal"] == "USR1@120"
    assert {"nodes", "ntasks-per-node", "gpus-per-task", "requeue"} <= set(asked)


def test_pods_of_a_job_meet_at_its_first() -> None:
    service, job = documents("kubernetes.yaml")
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    line = container["command"][-1].removeprefix("exec ").replace("$JOB_COMPLETION_INDEX", "1")
    taken = arguments(shlex.split(line))
    assert int(taken.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert taken.master_addr == f"{name}-0.{pod['subdomain']}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(taken.processes)
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_a_trainjob_starts_ranks_by_torchrun() -> None:
    (job,) = documents("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    words = [*trainer["command"], *trainer["args"]]
    assert words[:2] == ["torchrun", "--no-python"]
    assert arguments(words[2:]).task == "digits"
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


def test_an_image_is_built_of_what_there_is() -> None:
    lines = (CLUSTERS / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / each).exists() for each in copied)
    words = {line.split()[0]: yaml.safe_load(line.split(maxsplit=1)[1]) for line in lines if "[" in line[:12]}
    arguments([*words["ENTRYPOINT"], *words["CMD"]])
    torch = re.search(r'"(torch[^"]+)"', (CLUSTERS / "Dockerfile").read_text())
    assert torch is not None
    assert f'"{torch[1]}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_workers_of_ray_are_ranks(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    command = [sys.executable, CLUSTERS / "ray_trainer.py", "--workers", "2", "--cpu", "--storage", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 steps on 2 ranks" in done.stdout
