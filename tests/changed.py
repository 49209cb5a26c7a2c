"""Names the tests of what has changed since a commit, by room, for ``make check``.

A file ``src/evener/strategies/pipeline/schedule.py`` is tested by ``tests/strategies/pipeline``, and the plan of the
house by ``tests/test_house.py`` in any case::

    python -m tests.changed [COMMIT]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def changed_files(commit: str) -> list[str]:
    """Paths that differ from ``commit`` or are not tracked, from the root of the repository."""
    commands = (
        ["diff", "--name-only", "--no-renames", commit],
        ["ls-files", "--others", "--exclude-standard"],
    )
    return [
        line
        for command in commands
        for line in subprocess.run(
            ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    ]


def select_tests(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Test files and directories for changed files, without those inside of others, in order."""
    found = {Path("tests/test_house.py")}
    for path in map(Path, files):
        if path.suffix == ".py":
            found.update(_tests_of(path, root))
    return sorted(str(path) for path in found if not found & {*path.parents})


def _tests_of(path: Path, root: Path) -> Iterator[Path]:
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        yield from [path] if (root / path).is_file() else []
        return
    inside = path.relative_to("src/evener") if path.is_relative_to("src/evener") else None
    place = Path("tests") / inside if inside else path
    named = place.with_name(f"test_{place.name}")
    if (root / named).is_file():
        yield named
    directory = next((parent for parent in place.parents if any((root / parent).glob("test_*.py"))), None)
    if directory not in (None, Path("tests"), Path(".")):
        yield directory


if __name__ == "__main__":
    print(*select_tests(changed_files(*(sys.argv[1:] or ["HEAD"]))))
