"""How far a verification is, for the bar of a notebook. Its runs take the same steps."""

from __future__ import annotations

import time

from evener.training.reporting.notebook import ProgressFile
from evener.training.reporting.terminal import LIVE_SECONDS


class RunProgress:
    """Tells how far one run is. It may be sent to a rank.

    Args:
        file: The file that carries the progress to the bar; None if there is no bar.
        before: Steps of the runs before.
        steps: Steps of this run.
        total: Steps of all runs, as far as they are known.
        words: What the run is.
    """

    def __init__(
        self, file: ProgressFile | None, before: int = 0, steps: int = 0, total: int = 0, words: str = ""
    ) -> None:
        self._file, self._before, self._steps, self._total, self._words = file, before, steps, total, words
        self._last = 0.0

    def __call__(self, done: int) -> None:
        """Tells that so many steps of the run are done, if it is time or they are all."""
        now = time.monotonic()
        if self._file is not None and (done == self._steps or now - self._last >= LIVE_SECONDS):
            self._last = now
            words = f"{self._words}: step {done} of {self._steps}"
            self._file.tell(self._before + done, max(self._total, self._before + self._steps), words)


class VerificationProgress:
    """Counts the runs of a verification.

    Args:
        file: The file that carries the progress to the bar; None if there is no bar.
        runs: Runs that it takes at least.
        steps: Steps of each run.
    """

    def __init__(self, file: ProgressFile | None, runs: int, steps: int) -> None:
        self._file, self._runs, self._steps = file, runs, steps
        self._begun = 0

    def next_run(self, where: str) -> RunProgress:
        """Returns the progress of the next run, which is taken ``where``, such as on one device."""
        before, self._begun = self._begun * self._steps, self._begun + 1
        words = f"run {self._begun} of {max(self._runs, self._begun)}, {where}"
        return RunProgress(self._file, before, self._steps, self._runs * self._steps, words)
