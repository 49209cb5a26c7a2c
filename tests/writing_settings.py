"""Writes ``src/evener/core/config/kwargs.py``, by which an editor and mypy know the settings, from the record of
settings.

python -m tests.writing_settings
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from evener.core.config.run_config import RunConfig
from evener.training.prepare.prepare import SETTINGS

TARGET = Path(__file__).parents[1] / "src/evener/core/config/kwargs.py"
_HEAD = '''"""The settings as keyword arguments: what an editor completes in a call of ``fit``, and mypy checks there.

Written from the fields of ``RunConfig`` by ``python -m tests.writing_settings``; a test compares both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from evener.core.config.run_config import Recipe


class LoopSettings(TypedDict, total=False):
    """Settings that go with a loop of one's own, for ``evener.prepare``."""

'''


_OF_RUNS = '''

class Settings(LoopSettings, total=False):
    """Settings of a run; ``evener train --help-full`` explains each."""

'''


def written() -> str:
    """The text of the file. A path may be given as a text too."""
    lines = {
        entry.name: f"    {entry.name}: {str(entry.type).replace('Path', 'str | Path')}\n"
        for entry in dataclasses.fields(RunConfig)
    }
    of_runs = (line for name, line in lines.items() if name not in SETTINGS)
    return _HEAD + "".join(lines[name] for name in SETTINGS) + _OF_RUNS + "".join(of_runs)


if __name__ == "__main__":
    TARGET.write_text(written())
