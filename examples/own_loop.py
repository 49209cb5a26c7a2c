"""A training loop of your own: the Engine takes the steps, you decide what happens between them.

python examples/own_loop.py
"""

from __future__ import annotations

import evener
from evener.training.builtin_tasks.digits import task


def train() -> None:
    """Runs on every rank."""
    with evener.Engine(task(), batch_size=64, epochs=2, clip_norm=1.0) as engine:
        leads = engine.session.rank == 0
        for batch in engine.batches():
            step = engine.step(batch)
            if step.number % 10 == 0 and leads:
                print(f"step {step.number}: loss {step.loss:.4f}, shares {batch.shares}")
            if batch.last:
                values = engine.evaluate()  # on every rank: they evaluate together
                if leads:
                    print(f"epoch {batch.epoch}: accuracy {values['accuracy']:.3f}")


if __name__ == "__main__":
    evener.launch(train, processes=2)
