"""Predictions for every sample, in the order of the dataset, on however many ranks there are.

python examples/predict.py
"""

from __future__ import annotations

import evener
from evener.data.datasets.digits import digits
from evener.training.builtin_tasks.digits import task


def train_and_predict() -> None:
    """Runs on every rank; rank 0 shows which digits it sees in the images of the test set."""
    with evener.Engine(task(), epochs=2) as engine:
        for batch in engine.batches():
            engine.step(batch)
        scores = engine.predict(digits(train=False))  # (360, 10) on rank 0, None on others
    if scores is not None:
        show(scores.argmax(1).tolist())


def show(predicted: list[int]) -> None:
    labels = [int(label) for _, label in digits(train=False)]
    right = sum(a == b for a, b in zip(predicted, labels, strict=True))
    print(f"{right} of {len(labels)} right; the first ten are {predicted[:10]}")


if __name__ == "__main__":
    evener.launch(train_and_predict, processes=1)
