"""What ranks of a prepared loop say of themselves that has to be the same on all, and the words where it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.errors import ConfigurationError

WAITS = (
    *("the loss", "the sum of gradients", "the end of a batch", "evener.gather", "a barrier", "a batch"),
    *(
        "the comparison of gradients that were not summed",
        "layers that were put in or taken out",
        "evener.prepare",
        "seeding anew",
    ),
)
"""What the ranks tell each other something for."""
WAY_OUT = (
    "Give the loss function to evener.prepare and call what it returns, or say evener.global_mean(value) of a mean "
    "that the model computed itself"
)
UNLIKE = 1e-4
"""How far devices of different kinds may round a number apart, relatively."""


def check_calls(calls: list[int]) -> None:
    """Raises:
    ConfigurationError: If they are not the same on all ranks.
    """
    if len(set(calls)) > 1:
        told = ", ".join(f"rank {rank} in {WAITS[call]}" for rank, call in enumerate(calls))
        raise ConfigurationError(
            f"the ranks are at different places of the loop: {told}. The loss, evener.gather and backward are for all "
            "ranks together: what is done on one rank alone, as under evener.is_main(), must have none of them"
        )


def check_trained(sums: Sequence[float]) -> None:
    """Raises:
    ConfigurationError: If ranks have different parameters that require gradients.
    """
    if len(set(sums)) > 1:
        raise ConfigurationError(
            "the ranks train different parameters: requires_grad of one is not the same on all of them. What is frozen "
            "or thawed is so on all ranks in the same step"
        )


def check_updates(steps: Sequence[float], what: str) -> None:
    """Raises:
    ConfigurationError: If ranks have made different numbers of updates.
    """
    other = next((rank for rank, number in enumerate(steps) if number != steps[0]), None)
    if other is not None:
        raise ConfigurationError(
            f"rank 0 has made {steps[0]:.0f} updates and rank {other} {steps[other]:.0f} before {what}: "
            "optimizer.step() is for all ranks together, as under evener.is_main() it must not be"
        )


def check_strangers(digests: Sequence[float]) -> None:
    """Raises:
    ConfigurationError: If ranks have updated tensors of no prepared model with different gradients; 0 is of a rank
        that has updated none.
    """
    told = [rank for rank, number in enumerate(digests) if number]
    other = next((rank for rank in told if digests[rank] != digests[told[0]]), None)
    if other is not None:
        raise ConfigurationError(
            f"an optimizer has updated tensors of no prepared model with other gradients on rank {other} than on "
            f"rank {told[0]}: they are those of each rank's own samples. Give evener.prepare the model that has them, "
            "or put them into a module and give it that"
        )


def check_roots(roots: Sequence[float], tolerance: float) -> None:
    """Raises:
    ConfigurationError: If ranks went backward from different numbers.
    """
    other = _other(roots, tolerance)
    if other:
        raise ConfigurationError(
            f"backward was called on {roots[0]:.9g} on rank 0 and on {roots[other]:.9g} on rank {other}, and goes with "
            "the number of the whole batch, which is the same on all ranks: a term or a factor depends on samples and "
            f"went through no prepared loss. {WAY_OUT}"
        )


def check_factors(factors: Sequence[float], tolerance: float) -> None:
    """Raises:
    ConfigurationError: If what ranks did with prepared losses differs.
    """
    other = _other(factors, tolerance)
    if other:
        raise ConfigurationError(
            f"prepared losses count {factors[0]:.9g} times on rank 0 and {factors[other]:.9g} times on rank {other}: "
            f"what a loss is multiplied by depends on a rank's own samples. {WAY_OUT}"
        )


def _other(values: Sequence[float], tolerance: float) -> int:
    """The first rank whose value is not that of rank 0; 0 if there is none."""
    for rank, value in enumerate(values):
        if not math.isclose(value, values[0], rel_tol=tolerance) and not (
            math.isnan(value) and math.isnan(values[0])
        ):
            return rank
    return 0


def check_marks(marks: list[float]) -> None:
    """Raises:
    ConfigurationError: If the ranks have different batches before them.
    """
    if len(set(marks)) > 1:
        ranks = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        raise ConfigurationError(
            f"the ranks have different batches before them: {_listed(ranks)} another one than rank 0. They must go "
            "through the same loaders in the same order, none may leave a loop alone, and what shuffles must be seeded "
            "alike: use torch's default generator, or one with the same seed on all ranks"
        )


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
