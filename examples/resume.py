"""Stop in mid-epoch on two ranks, go on with one: the samples that follow are those that would have followed.

python examples/resume.py
"""

from __future__ import annotations

from pathlib import Path

import evener

RUN_DIR = Path("runs/resumed")
SETTINGS = {"batch_size": 50, "epochs": 1, "dtype": "float64", "show": False}


def largest_difference(one: evener.Trained, other: evener.Trained) -> float:
    """Over all weights."""
    return max((value - other.weights[name]).abs().max().item() for name, value in one.weights.items())


def main() -> None:
    stopped = evener.fit("digits", processes=2, steps=11, run_dir=RUN_DIR, overwrite=True, **SETTINGS)
    print(f"stopped after {stopped.summary.steps} steps on {stopped.summary.world_size} ranks")
    resumed = evener.fit("digits", processes=1, resume=RUN_DIR, **SETTINGS)
    print(f"ended after {resumed.summary.steps} steps on {resumed.summary.world_size} ranks")
    whole = evener.fit("digits", processes=1, **SETTINGS)
    print(f"largest difference to a run without a stop: {largest_difference(whole, resumed):.0e}")


if __name__ == "__main__":
    main()
