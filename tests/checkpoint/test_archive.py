from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from evener.checkpoint.archive import check_archive


def test_an_archive_that_would_grow_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/0", bytes(1 << 20))
    with (tmp_path / "bomb").open("rb") as file, pytest.raises(ValueError, match="1048576 bytes, more than"):
        check_archive(file)
    with zipfile.ZipFile(tmp_path / "plain", "w") as archive:
        archive.writestr("data/0", bytes(1 << 20))
    with (tmp_path / "plain").open("rb") as file:
        check_archive(file)
        assert file.tell() == 0
