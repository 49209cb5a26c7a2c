"""Small files in which the kernel tells of the machine: ``/proc`` and ``/sys``."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """Without blanks around it; empty where the kernel has no such file, or does not show it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
