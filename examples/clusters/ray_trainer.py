"""A run of Evener on workers that Ray starts: a ``TorchTrainer`` makes the ranks and their process group.

Ray says how many workers there are, on which machines and devices; Evener divides each batch over them.

    python ray_trainer.py --workers 2 --cpu
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import evener


def work(settings: dict[str, Any]) -> None:
    """On each worker, which is a rank already."""
    task = settings.pop("task")
    summary = evener.fit(task, **settings).summary
    if ray.train.get_context().get_world_rank() == 0:
        print(f"{summary.steps} steps on {summary.world_size} ranks, last loss {summary.final_loss:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="digits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="workers without a GPU each")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--storage", default=None, help="a directory that all machines see, for what Ray keeps"
    )
    args = parser.parse_args()
    device = "cpu" if args.cpu else "cuda"
    trainer = TorchTrainer(
        work,
        train_loop_config={"task": args.task, "steps": args.steps, "device": device},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=not args.cpu),
        run_config=RunConfig(storage_path=args.storage),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
