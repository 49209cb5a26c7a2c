"""Keep the best, as an observer of one's own: what it is told is enough to mark the evaluation that was the best.

The weights themselves are a collective matter, for each rank may hold a part of them: ``keep_best`` has their
checkpoint stay, and the observer says which that is.

    python examples/keep_the_best.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import evener


class Best(evener.Observer):
    """Writes the best evaluation so far into a file, by the highest value of a metric."""

    def __init__(self, path: Path, metric: str = "accuracy") -> None:
        self.path, self.metric = path, metric

    def start(self, run):
        self.value = float("-inf")

    def evaluation(self, record):
        value = record.metrics[self.metric]
        if value > self.value:
            self.value = value
            self.path.write_text(json.dumps({"steps": record.step, self.metric: value}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        trained = evener.fit(
            "digits",
            processes=1,
            epochs=3,
            run_dir=home / "run",
            keep_best="accuracy",
            observers=[Best(home / "best.json")],
        )
        if trained.rank == 0:  # which observers are told on
            best = json.loads((home / "best.json").read_text())
            kept = (home / "run/checkpoints/best").read_text().split()[0]
            print(f"best after {best['steps']} steps: accuracy {best['accuracy']:.3f}, kept in {kept}")
