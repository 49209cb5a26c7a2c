from __future__ import annotations

from pathlib import Path

import pytest

from evener.checkpoint.outputs import check_output
from evener.checkpoint.run_mark import Identity, write_mark
from evener.errors import ConfigurationError


def test_what_a_run_needs_is_kept(tmp_path: Path) -> None:
    """Through links too; what lies beside it in the run directory may be written."""
    run, alone = tmp_path / "run", tmp_path / "saved"
    for directory, steps in (
        (run, {}),
        (run / "checkpoints" / "step-00000002", {"steps": 2}),
        (alone, {"steps": 2}),
    ):
        directory.mkdir(parents=True)
        write_mark(directory, Identity().as_plain() | steps)
    (run / "summary.json").touch()
    (tmp_path / "link").symlink_to(run / "checkpoints")
    within = (
        "run/summary.json",
        "run/evener.json",
        "run/checkpoints/new",
        "saved/new",
        "link/step-00000002/new",
    )
    for name in within:
        with pytest.raises(ConfigurationError, match="is a file of a run, or lies in its checkpoints"):
            check_output(tmp_path / name)
    for name in ("run/step-2.safetensors", "run/report.json", "run/config.json", "summary.json"):
        check_output(tmp_path / name)
