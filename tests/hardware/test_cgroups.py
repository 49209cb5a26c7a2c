from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.hardware.cgroups import _of_max, cpu_quota, memory_limit


def machine(directory: Path, own: str, **files: str) -> tuple[Path, Path]:
    """A tree of control groups, ``a__b`` for ``a/b``, and the file in which a process reads its own."""
    root = directory / "cgroup"
    root.mkdir()
    for name, text in files.items():
        place = root / name.replace("__", "/").replace("_at_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (directory / "own").write_text(own)
    return root, directory / "own"


def test_a_container_of_the_second_version(tmp_path: Path) -> None:
    places = machine(tmp_path, "0::/\n", cpu_at_max="150000 100000\n", memory_at_max="1073741824\n")
    assert cpu_quota(*places) == 1.5
    assert memory_limit(*places) == 1 << 30


def test_the_least_limit_on_the_way_to_the_top_counts(tmp_path: Path) -> None:
    places = machine(
        tmp_path,
        "0::/jobs/mine\n",
        jobs__cpu_at_max="400000 100000",
        jobs__mine__cpu_at_max="600000 100000",
        jobs__memory_at_max="4096",
        jobs__mine__memory_at_max="8192",
    )
    assert cpu_quota(*places) == 4
    assert memory_limit(*places) == 4096


def test_the_first_version_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    places = machine(
        tmp_path / "first",
        "4:memory:/docker/8f\n3:cpuset:/\n1:cpu,cpuacct:/docker/8f\n",
        cpu__cpu_at_cfs_quota_us="50000",
        cpu__cpu_at_cfs_period_us="100000",
        memory__docker__8f__memory_at_limit_in_bytes="2048",
        memory__memory_at_limit_in_bytes="9223372036854771712",
    )
    assert cpu_quota(*places) == 0.5
    assert memory_limit(*places) == 2048


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu_at_max": "max 100000", "memory_at_max": "max"},
        {"cpu__cpu_at_cfs_quota_us": "-1", "cpu__cpu_at_cfs_period_us": "100000"},
        {"memory__memory_at_limit_in_bytes": "9223372036854771712"},
        {"cpu_at_max": "", "memory_at_max": "what"},
    ],
    ids=["nothing", "max", "minus one", "the largest number", "strange"],
)
def test_what_is_no_limit(files: dict[str, str], tmp_path: Path) -> None:
    places = machine(tmp_path, "0::/../elsewhere\n", **files)
    assert cpu_quota(*places) is None
    assert memory_limit(*places) is None


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_a_quota_is_its_part_of_the_period(quota: int, period: int) -> None:
    assert _of_max(f"{quota} {period}") == quota / period
