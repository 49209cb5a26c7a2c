"""Metrics of torchmetrics, exact over the whole evaluation set (needs ``pip install torchmetrics``).

Each sample counts once, also where the ranks' shares differ or a rank has none. Metrics that are no mean, such as F1,
are merged by their states and not by their values.

    python examples/metrics_from_torchmetrics.py
"""

from __future__ import annotations

import dataclasses

from torchmetrics.classification import MulticlassCalibrationError, MulticlassF1Score

import evener
from evener.training.builtin_tasks.digits import task as digits


def task() -> evener.Task:
    """The digits, measured in other ways."""
    metrics = {
        "accuracy": evener.accuracy,
        "f1": MulticlassF1Score(num_classes=10, average="macro"),
        "calibration": MulticlassCalibrationError(num_classes=10),
    }
    return dataclasses.replace(digits(), metrics=metrics, epochs=2)


if __name__ == "__main__":
    for name, value in evener.fit(task, processes=1).summary.metrics.items():
        print(f"{name} {value:.4f}")
