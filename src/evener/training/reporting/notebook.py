"""Shows the progress of a run in a notebook: one bar that replaces itself, in place of the live line of a terminal.

Rank 0 usually runs in another process than the notebook's kernel. So it writes its progress to a small file, and a
thread of the kernel shows what is in the file::

    rank 0   NotebookTerminal ──▶ ProgressFile ──▶ ProgressBar   kernel, IPython.display

The bar is an HTML element. It needs no widgets, and stays in the saved notebook as it was at the end.
"""

from __future__ import annotations

import contextvars
import importlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from evener.core.html import html_text
from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, RunStart, RunSummary, StepRecord
from evener.files import read_json, write_json
from evener.training.reporting.terminal import LIVE_SECONDS, Terminal

_LONGEST = 1 << 16
"""Maximum size of the file, in bytes."""


class ProgressFile:
    """The file that carries progress to the bar. It may be sent to other processes.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def tell(self, done: int, total: int | None, words: str) -> None:
        """Tells how far something is.

        Args:
            done: Steps that are done.
            total: Steps in all; None if that is not known.
            words: Text beside the bar.
        """
        with suppress(OSError):  # the bar stands still, and the run goes on
            write_json(self._path, {"done": done, "total": total, "words": words})


class NotebookTerminal(Terminal):
    """Shows lines as `Terminal` does, and tells a bar of the progress instead of showing it.

    Args:
        file: The file that carries it.
    """

    def __init__(self, file: ProgressFile) -> None:
        super().__init__()
        self._file = file
        self._untold: StepRecord | None = None

    def start(self, run: RunStart) -> None:
        super().start(run)
        self._untold = None

    def show(self, record: StepRecord) -> None:
        self._untold = record
        if self._due(LIVE_SECONDS):
            self._tell()

    def evaluation(self, record: EvaluationRecord) -> None:
        self._tell()
        super().evaluation(record)  # after which the speed is not known until the next step

    def end(self, summary: RunSummary | None) -> None:
        super().end(summary)
        self._tell()

    def _tell(self) -> None:
        record, self._untold = self._untold, None
        if record is not None:
            self._file.tell(record.step + 1, self._total, self.progress_text(record))


@contextmanager
def notebook_bar(show: bool) -> Iterator[Observer | None]:
    """Shows the progress of a run in a notebook while the block runs.

    Yields:
        The observer for the run. None if ``show`` is False, or if this process is no notebook's kernel.
    """
    with drawn_progress() if show else nullcontext() as file:
        yield None if file is None else NotebookTerminal(file)


@contextmanager
def drawn_progress() -> Iterator[ProgressFile | None]:
    """Draws a bar in a notebook while the block runs.

    Yields:
        The file with the progress. None if this process is no notebook's kernel.
    """
    if not is_kernel():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="evener-progress-") as directory:
        path, over = Path(directory) / "progress.json", threading.Event()
        # In its context, IPython knows the cell to which the output belongs.
        follow = contextvars.copy_context().run
        thread = threading.Thread(target=follow, args=(ProgressBar(path).follow, over), daemon=True)
        thread.start()
        try:
            yield ProgressFile(path)
        finally:
            over.set()
            thread.join()


def is_kernel() -> bool:
    """Returns True if this process runs the cells of a notebook."""
    python: Any = sys.modules.get("IPython")
    shell = None if python is None else python.get_ipython()
    return getattr(shell, "kernel", None) is not None


class ProgressBar:
    """The bar in the output of a cell, drawn from a `ProgressFile`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown: Any = None
        self._handle: Any = None

    def follow(self, over: threading.Event) -> None:
        """Shows each change of the file until ``over`` is set."""
        while not over.wait(LIVE_SECONDS):
            self.refresh()
        self.refresh()

    def refresh(self) -> None:
        """Shows the content of the file, if it is new."""
        try:
            found = read_json(self._path, _LONGEST)
        except (OSError, ValueError):  # no step is done
            return
        if found == self._shown:
            return
        self._shown = found
        data = {"text/plain": found["words"], "text/html": bar_html(found)}
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def bar_html(progress: dict[str, Any]) -> str:
    """Returns the bar and its words. A run of unknown length has no bar."""
    done, total, words = progress["done"], progress["total"], html_text(progress["words"])
    bar = f'<progress value="{done}" max="{total}" aria-label="steps"></progress> ' if total else ""
    return f"<div>{bar}{words}</div>"
