"""Early stopping, as an observer of one's own: a run ends when its evaluation has become no better for a while.

All ranks end after the same step, and the run ends as a complete one does: evaluated, and saved where it has a
directory. What it remembers is part of the checkpoints, so that a run that goes on has the same patience left.

    python examples/early_stopping.py
"""

from __future__ import annotations

import evener


class EarlyStopping(evener.Observer):
    """Ends the run after ``patience`` evaluations in a row that are no better than the best one.

    Args:
        metric: The lower the better.
        least: By so much an evaluation has to be better.
    """

    def __init__(self, metric: str = "loss", patience: int = 2, least: float = 0.0) -> None:
        self.metric, self.patience, self.least = metric, patience, least

    def start(self, run):
        self.best, self.waited = float("inf"), 0

    def state_dict(self):
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.waited = state["best"], state["waited"]
        self.decide()  # a run that had ended, and is started again, takes no further step

    def evaluation(self, record):
        value = record.metrics[self.metric]
        better = value < self.best - self.least
        self.best, self.waited = (value, 0) if better else (self.best, self.waited + 1)
        self.decide()

    def decide(self):
        if self.waited >= self.patience:
            self.ends_because = (
                f"{self.metric} was no better than {self.best:.4f} for {self.waited} evaluations"
            )


if __name__ == "__main__":
    stopping = EarlyStopping(patience=1, least=0.1)
    summary = evener.fit("digits", processes=1, epochs=20, observers=[stopping]).summary
    print(f"ended after {summary.epochs} epochs: loss {summary.metrics['loss']:.3f}")
