"""Reads small kernel files in ``/proc`` and ``/sys``."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """Returns the file's text, stripped of whitespace at both ends; empty if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
