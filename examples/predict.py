"""Predictions for every sample, in the order of the dataset, on however many ranks there are.

python examples/predict.py
"""

from __future__ import annotations

import evener
from evener.data.datasets.digits import digits
from evener.tasks.digits import task


def train_and_predict() -> list[int]:
    """Runs on every rank, and returns the predicted digit of each image of the test set."""
    with evener.Engine(task(), epochs=2) as engine:
        for batch in engine.batches():
            engine.step(batch)
        scores = engine.predict(digits(train=False))  # (360, 10), the same on every rank
    return scores.argmax(1).tolist()


if __name__ == "__main__":
    predicted = evener.launch(train_and_predict, processes=1)[0]
    labels = [int(label) for _, label in digits(train=False)]
    right = sum(a == b for a, b in zip(predicted, labels, strict=True))
    print(f"{right} of {len(labels)} right; the first ten are {predicted[:10]}")
