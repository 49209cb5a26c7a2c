"""Checks that values which must be the same on all ranks of a prepared loop are so, and raises errors if not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from zlib import crc32

from evener.errors import ConfigurationError

Exchange = Callable[..., list[list[float]]]
"""Maps a reason and numbers to the numbers of all ranks."""
WAITS = (
    *("the loss", "the sum of gradients", "the end of a batch", "evener.gather", "a barrier", "a batch"),
    *(
        "the comparison of gradients that were not summed",
        "layers that were put in or taken out",
        "evener.prepare",
        "evener.save",
        "evener.load",
        "seeding anew",
        "optimizer.step()",
        "state_dict()",
        "a number of a divided tensor",
    ),
)
"""The reasons for which the ranks exchange values."""
WAY_OUT = (
    "Give the loss function to evener.prepare and call what it returns, or say evener.global_mean(value) of a mean "
    "that the model computed itself. A loss with parameters of its own is a model: call "
    "evener.global_mean(loss, outputs, targets)"
)
_ALIKE = 1e-3
"""Relative tolerance for the size of a gradient that ranks compute from the same rows."""
UNLIKE = 1e-4
"""Relative tolerance for a number that devices of different kinds may round differently."""
_PART = 1 << 26
"""Limit of each of two integers that are packed into one, which a double holds exactly."""


def check_calls(calls: list[int]) -> None:
    """Checks that the ranks call for the same reason, an index of :data:`WAITS`.

    Raises:
        ConfigurationError: If the calls are not the same on all ranks.
    """
    if len(set(calls)) > 1:
        waits = ", ".join(f"rank {rank} in {WAITS[call]}" for rank, call in enumerate(calls))
        raise ConfigurationError(
            f"the ranks are at different places of the loop: {waits}. The loss, evener.gather and backward are for all "
            "ranks together: what is done on one rank alone, as under evener.is_main(), must have none of them, and an "
            "if, continue or break in front of them must not be decided by a rank's own samples: let it depend on the "
            "loss, which is the same on all ranks, or on rows that evener.gather gives"
        )


def check_exchange(rows: Sequence[Sequence[float]], what: str) -> None:
    """Checks what each exchange begins with: the call, the number of updates, and the result of :func:`folded`.

    Raises:
        ConfigurationError: If it differs between the ranks.
    """
    check_calls([int(row[0]) for row in rows])
    check_updates([row[1] for row in rows], what)
    check_strangers([row[2] for row in rows])


def check_trained(sums: Sequence[float]) -> None:
    """Checks that the ranks train the same parameters.

    Raises:
        ConfigurationError: If ranks have different parameters that require gradients.
    """
    if len(set(sums)) > 1:
        raise ConfigurationError(
            "the ranks train different parameters: requires_grad of one is not the same on all of them. What is frozen "
            "or thawed is so on all ranks in the same step"
        )


def check_updates(steps: Sequence[float], what: str) -> None:
    """Checks the ranks' numbers of updates.

    Raises:
        ConfigurationError: If ranks have made different numbers of updates.
    """
    other = next((rank for rank, number in enumerate(steps) if number != steps[0]), None)
    if other is not None:
        raise ConfigurationError(
            f"rank 0 has made {steps[0]:.0f} updates and rank {other} {steps[other]:.0f} before {what}: "
            "optimizer.step() is for all ranks together: under evener.is_main(), or an if that a rank's own samples "
            "decide, it must not be"
        )


def folded(before: int, strangers: int, rates: int) -> int:
    """Packs a rank's updates into one number: gradients of tensors in no prepared model, and learning rates.

    Args:
        before: The result for earlier updates; 0 if there were none.
        strangers: A checksum of the gradients; 0 if there are none.
        rates: A checksum of the learning rates; 0 if they are not to be compared.
    """
    parts = (divmod(before, _PART), (strangers, rates))
    high, low = (
        crc32(repr(pair).encode()) % (_PART - 1) + 1 if pair[1] else pair[0]
        for pair in zip(*parts, strict=True)
    )
    return high * _PART + low


def check_strangers(updates: Sequence[float]) -> None:
    """Checks the ranks' results of :func:`folded`, where 0 means no update.

    Raises:
        ConfigurationError: If ranks have updated tensors of no prepared model with different gradients, or any tensors
            with different learning rates.
    """
    rates = [number % _PART for number in updates]
    other = _ranks_that_differ(rates)
    if other is not None:
        raise ConfigurationError(
            f"an optimizer has stepped with another learning rate on rank {other[1]} than on rank {other[0]}: it, or "
            "what a scheduler was given, depends on a rank's own samples. Let it depend on the loss, which is the same "
            "on all ranks, or on rows that evener.gather gives"
        )
    other = _ranks_that_differ([number // _PART for number in updates])
    if other is not None:
        raise ConfigurationError(
            f"an optimizer has updated tensors of no prepared model with other gradients on rank {other[1]} than on "
            f"rank {other[0]}: they are those of each rank's own samples. Give evener.prepare the model that has them, "
            "or put them into a module and give it that"
        )


def _ranks_that_differ(numbers: Sequence[float]) -> tuple[int, int] | None:
    """Returns the first two ranks with different numbers, or None. Zeros are ignored."""
    ranks = [rank for rank, number in enumerate(numbers) if number]
    return next(((ranks[0], rank) for rank in ranks if numbers[rank] != numbers[ranks[0]]), None)


def check_roots(roots: Sequence[float], tolerance: float, where: str = "") -> None:
    """Checks the numbers on which the ranks called ``backward``. ``where`` says in which step.

    Raises:
        ConfigurationError: If they differ.
    """
    other = _other(roots, tolerance)
    if other:
        raise ConfigurationError(
            f"backward was called on {roots[0]:.9g} on rank 0 and on {roots[other]:.9g} on rank {other}{where}, and "
            "goes with the number of the whole batch, which is the same on all ranks: a term, a factor or a divisor "
            f"depends on samples and went through no prepared loss. {WAY_OUT}. A sum over the samples of all ranks is "
            "divided by evener.batch_size(), not by len(x)"
        )


def check_factors(factors: Sequence[float], tolerance: float, where: str = "") -> None:
    """Checks the gradients that reached prepared losses, summed on each rank. ``where`` says in which step.

    Raises:
        ConfigurationError: If they differ, because a rank multiplied a loss by a number of its own.
    """
    other = _other(factors, tolerance)
    if other:
        raise ConfigurationError(
            f"prepared losses count {factors[0]:.9g} times on rank 0 and {factors[other]:.9g} times on rank {other}"
            f"{where}: what a loss is multiplied by depends on a rank's own samples. {WAY_OUT}"
        )


def check_rows(sizes: Sequence[float], tolerance: float, where: str = "") -> None:
    """Checks the sizes of the gradients that reached gathered rows. ``where`` says in which step.

    Raises:
        ConfigurationError: If they differ, because the loss is not of these rows alone.
    """
    other = _other(sizes, max(tolerance, _ALIKE))
    if other:
        raise ConfigurationError(
            f"rows that evener.gather gave have other gradients on rank {other} than on rank 0{where}: the loss is "
            "also of a rank's own rows, as in own @ gathered.T, which give the rows of other ranks no gradient, "
            "or it is weighed by evener.global_mean. Compute the loss from gathered rows alone, as all ranks do alike, "
            "or give evener.prepare the function of the rows, which then sees those of all: loss(own, ...)"
        )


def _other(values: Sequence[float], tolerance: float) -> int:
    """Returns the first rank whose value differs from that of rank 0; 0 if there is none."""
    for rank, value in enumerate(values):
        if not math.isclose(value, values[0], rel_tol=tolerance) and not (
            math.isnan(value) and math.isnan(values[0])
        ):
            return rank
    return 0


def check_marks(marks: list[float]) -> None:
    """Checks the numbers that identify the ranks' current batches.

    Raises:
        ConfigurationError: If the ranks have different batches.
    """
    if len(set(marks)) > 1:
        ranks = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        raise ConfigurationError(
            f"the ranks are not working on the same batch: {_listed(ranks)} another one than rank 0. All ranks must "
            "go through the same loaders in the same order, no rank may leave a loop alone, and shuffling must have "
            "the same seed on all: use torch's default generator, or one with the same seed on all ranks. A sampler "
            "or a stream must not divide itself by rank: Evener divides its batches. With cost=... the cost of a "
            "sample must be the same on all ranks"
        )


def check_crossed(ranks: list[int]) -> None:
    """Raises ConfigurationError if ``ranks`` have had samples in only one of two loaders that are gone through at
    once."""
    if ranks:
        raise ConfigurationError(
            f"two prepared loaders were gone through at once, and rank {ranks[0]} had other numbers of samples of "
            "their batches, so that whose a loss was of cannot be told: give both the same batch size and "
            "drop_last=True, with balance='equal' and a sample for each rank, or read both with one loader"
        )


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
