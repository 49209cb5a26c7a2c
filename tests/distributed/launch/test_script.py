from __future__ import annotations

from pathlib import Path

import pytest

from evener.distributed.launch.script import run_script
from evener.errors import ConfigurationError, RankError, RankTimeoutError
from tests.distributed.processes import call, drive, drive_fork

WHOLE = """
import argparse, atexit, os, pickle, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from neighbour import BESIDE

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor([float(index)])

class Box:
    value = 3

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--factor", type=int)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    assert sys.modules["__main__"].Box is Box
    assert pickle.loads(pickle.dumps(Box())).value == 3
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    seen = 0
    for batch in DataLoader(Numbers(), batch_size=4, num_workers=1):
        model(batch).sum().backward()
        seen += len(batch)
    total = torch.tensor([seen * options.factor])
    dist.all_reduce(total)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
    missing = [name for name in names if name not in os.environ]
    atexit.register(lambda: sys.stdout.write(f"bye {Box.value}\\n"))
    words = ["rank", dist.get_rank(), "total", int(total), missing, BESIDE, __file__ == sys.argv[0]]
    sys.stdout.write(" ".join(map(str, words)) + "\\n")

if __name__ == "__main__":
    main()
"""

FAULTS = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, fault = dist.get_rank(), sys.argv[1]
dist.barrier()
if rank == 1:
    if fault == "exit":
        sys.exit(3)
    if fault == "raise":
        def deep():
            return [][1]
        deep()
    if fault == "late":
        time.sleep(100)
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    script = tmp_path / "faults.py"
    script.write_text(FAULTS)
    return script


def test_an_unchanged_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("BESIDE = 'beside'\n")
    script = tmp_path / "whole.py"
    script.write_text(WHOLE)
    ended = drive(script, "--factor", "2")
    assert ended.status == 0, ended.err
    lines = sorted(ended.out.splitlines())
    assert lines == ["bye 3"] * 2 + [f"rank {rank} total 32 [] beside True" for rank in (0, 1)]


def test_a_scripts_traceback_is_shown_once_with_its_rank(faults: Path) -> None:
    ended = drive_fork(faults, "raise")
    assert ended.status == 1
    lines = ended.err.strip().splitlines()
    assert lines[0] == "RankError rank 1 raised IndexError: list index out of range"
    assert lines[2] == "Traceback (most recent call last):"
    assert "faults.py" in lines[3]
    assert lines[-1] == "IndexError: list index out of range"
    assert ended.err.count("Traceback") == 1


@pytest.mark.slow
def test_a_scripts_own_exit_status_is_kept(faults: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 ended with status 3$") as caught:
        call(run_script, str(faults), ["exit"], processes=2, device="cpu")
    assert caught.value.exit_status == 3


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(faults: Path) -> None:
    with pytest.raises(RankTimeoutError) as caught:
        call(run_script, str(faults), ["late"], processes=2, device="cpu", timeout_seconds=3.0)
    lines = str(caught.value).splitlines()
    assert "rank 0 has waited" in lines[0]
    assert "all_reduce of float32[1], at faults.py:16" in lines[0]
    assert "rank 1" in lines[1]
    assert "faults.py:15" in lines[1]


def test_a_script_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no script 'absent\.py'"):
        run_script("absent.py")
    with pytest.raises(ConfigurationError, match=r"no module named 'absent\.module'"):
        run_script("absent.module", is_module=True)
