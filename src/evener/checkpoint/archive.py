"""Looks at archives, as torch.save writes them, before they are read."""

from __future__ import annotations

import os
import zipfile
from typing import BinaryIO


def check_archive(file: BinaryIO) -> None:
    """Checks that the parts of a zip archive, as torch.save writes it, are not longer than the file, and goes back to
    its beginning. Parts that are compressed, or lie in one another, could fill the memory when they are read.

    Raises:
        ValueError: If they are longer.
        zipfile.BadZipFile: If the archive is damaged.
    """
    if zipfile.is_zipfile(file):
        found = sum(part.file_size for part in zipfile.ZipFile(file).infolist())
        if found > file.seek(0, os.SEEK_END):
            raise ValueError(f"its parts have {found} bytes, more than the file; torch.save compresses none")
    file.seek(0)
