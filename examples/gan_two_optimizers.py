"""Two networks, two losses, two optimizers: the manual form of a step.

``engine.backward(total, count)`` takes the sum of a loss's terms over this rank's samples and their number, and
divides by the number on all ranks. ``engine.update(optimizer)`` sums the gradients of that optimizer's parameters over
the ranks, steps, and clears them.

    python examples/gan_two_optimizers.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener


class Gan(nn.Module):
    """Both networks in one module, so that they are placed and saved together."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def ring(size: int) -> Tensor:
    """Points (size, 2) on a circle."""
    angle = torch.rand(size, generator=torch.Generator().manual_seed(0)) * 6.28
    return torch.stack([angle.cos(), angle.sin()], 1)


def task() -> evener.Task:
    return evener.Task(
        model=Gan,
        loss=None,  # the loop below has its own
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        train=TensorDataset(ring(512), torch.zeros(512)),
    )


def terms(scores: Tensor, real: float) -> Tensor:
    """The sum of the terms: the mean is taken over all ranks, later."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real), reduction="sum")


def train() -> None:
    """Runs on every rank. The noise is each rank's own, so the samples that are drawn depend on the division."""
    with evener.Engine(task(), batch_size=64, epochs=4) as engine:
        gan = engine.model
        for_generator = torch.optim.Adam(gan.generator.parameters(), lr=2e-3)
        for_discriminator = torch.optim.Adam(gan.discriminator.parameters(), lr=2e-3)
        for batch in engine.batches():
            real = batch.micro_batches[0].inputs
            fake = gan.generator(torch.randn(len(real), 4, device=real.device))
            total = terms(gan.discriminator(real), 1.0) + terms(gan.discriminator(fake.detach()), 0.0)
            loss_d = engine.backward(total, 2 * len(real))
            engine.update(for_discriminator)
            loss_g = engine.backward(terms(gan.discriminator(fake), 1.0), len(real))
            engine.update(for_generator)
            for_discriminator.zero_grad()  # the generator's loss left gradients there too
            if batch.last and engine.session.rank == 0:
                print(f"epoch {batch.epoch}: discriminator {loss_d:.3f}, generator {loss_g:.3f}")


if __name__ == "__main__":
    evener.launch(train, processes=2)
