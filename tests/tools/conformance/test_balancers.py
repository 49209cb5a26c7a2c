"""The battery finds every broken promise, and names it and the step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from evener.balance.base import Balancer, Decision, Equal
from evener.errors import ShareError
from evener.testing import ConformanceError, check_balancer


class AllToTheFirst(Balancer):
    """Right, with the smallest constructor; those below each break one promise."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def shares(self, step: int, batch_size: int) -> list[int]:
        return [batch_size] + [0] * (self.world_size - 1)


class LosesTheRemainder(AllToTheFirst):
    def shares(self, step: int, batch_size: int) -> list[int]:
        return [batch_size // self.world_size] * self.world_size


class TakesMoreThanThereIs(AllToTheFirst):
    def shares(self, step: int, batch_size: int) -> list[int]:
        return [batch_size + 1, -1] + [0] * (self.world_size - 2)


class ForgetsARank(AllToTheFirst):
    def shares(self, step: int, batch_size: int) -> list[int]:
        return super().shares(step, batch_size)[:-1]


class SaysFloats(AllToTheFirst):
    def shares(self, step: int, batch_size: int) -> Any:
        return [batch_size / self.world_size] * self.world_size


class ChangesItsMind(AllToTheFirst):
    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.turns = itertools.count()

    def shares(self, step: int, batch_size: int) -> list[int]:
        shares = super().shares(step, batch_size)
        return shares if next(self.turns) % 2 else shares[::-1]


class HandsOutItsOwnList(AllToTheFirst):
    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.kept: dict[int, list[int]] = {}

    def shares(self, step: int, batch_size: int) -> list[int]:
        return self.kept.setdefault(batch_size, super().shares(step, batch_size))


class DrawsAtRandom(AllToTheFirst):
    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.first = random.randrange(world_size)

    def shares(self, step: int, batch_size: int) -> list[int]:
        return [batch_size if rank == self.first else 0 for rank in range(self.world_size)]


class NeedsTimes(AllToTheFirst):
    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self.slowest = round(sum(seconds))


class IgnoresMaxShares(AllToTheFirst):
    def __init__(self, world_size: int, max_shares: Sequence[int | None] | None) -> None:
        super().__init__(world_size)


class RefusesMaxShares(Equal):
    """Names them, and can do with none."""

    def __init__(self, world_size: int, max_shares: Sequence[int | None] | None) -> None:
        if max_shares is not None:
            raise ShareError("no luck with max_shares")
        super().__init__(world_size)


class RefusesAMultiple(Equal):
    def __init__(self, world_size: int, share_multiple_of: int) -> None:
        if share_multiple_of > 1:
            raise ShareError("no luck with share_multiple_of")
        super().__init__(world_size)


class NeverRefuses(Equal):
    def shares(self, step: int, batch_size: int) -> list[int]:
        try:
            return super().shares(step, batch_size)
        except ShareError:
            return [batch_size] + [0] * (len(self.weights) - 1)


class IgnoresTheMultiple(Equal):
    def __init__(self, world_size: int, share_multiple_of: int) -> None:
        super().__init__(world_size)


class ForgetsWhatItLearned(AllToTheFirst):
    """Goes over to the last rank once it has seen forty steps."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.seen = 0

    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self.seen += 1

    def shares(self, step: int, batch_size: int) -> list[int]:
        shares = super().shares(step, batch_size)
        return shares if self.seen < 40 else shares[::-1]


class KeepsNoPlainValues(AllToTheFirst):
    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


class DecidesForThePast(AllToTheFirst):
    @property
    def decisions(self) -> Sequence[Decision]:
        return (Decision(5, 5, (8, 0, 0), (0, 8, 0), 0.2, 0.1, "why not"),)


BROKEN = [
    (LosesTheRemainder, "add up to the batch", "Step 0, a batch of 1 over 3 ranks: [0, 0, 0]"),
    (TakesMoreThanThereIs, "one integer of at least 0", "rank 0 has a share of 1"),
    (ForgetsARank, "for each rank", "2 shares"),
    (SaysFloats, "a list of int", "[0.0, 0.0, 0.0]"),
    (ChangesItsMind, "whenever they are asked", "and then ["),
    (HandsOutItsOwnList, "whenever they are asked", "and then []"),
    (DrawsAtRandom, "equal inputs get equal shares", "drawn from the step"),
    (NeedsTimes, "NaN where there is none", "raised ValueError"),
    (IgnoresMaxShares, "within max_shares", "a share of 6 samples; it must be from 0 to 3"),
    (NeverRefuses, "is a ShareError", "max_shares [3, 4, 5], a batch of 13"),
    (IgnoresTheMultiple, "multiples of share_multiple_of", "share_multiple_of=4"),
    (ForgetsWhatItLearned, "as if nothing had happened", "Step 40"),
    (KeepsNoPlainValues, "through JSON", "no plain values"),
    (DecidesForThePast, "from a later step on", "why not"),
]


@pytest.mark.parametrize(
    ("kind", "seen"), [(RefusesMaxShares, "with max_shares"), (RefusesAMultiple, "with share_multiple_of")]
)
@pytest.mark.parametrize("named", [False, True], ids=["class", "name"])
def test_a_limit_that_is_named_is_tried(kind: type[Balancer], seen: str, named: bool) -> None:
    """Whatever the constructor makes of it."""
    with pytest.raises(ConformanceError, match=f"no luck {seen}"):
        check_balancer(f"{__name__}:{kind.__name__}" if named else kind)


def test_what_is_right_passes() -> None:
    check_balancer(AllToTheFirst)
    check_balancer(f"{__name__}:AllToTheFirst", world_size=1)


@pytest.mark.parametrize(
    ("kind", "promise", "seen"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_broken_promise_is_named(kind: Any, promise: str, seen: str) -> None:
    before = random.getstate()
    with pytest.raises(ConformanceError) as raised:
        check_balancer(kind)
    assert random.getstate() == before
    assert str(raised.value).startswith(f"{kind.__name__} breaks its promise: ")
    assert promise in str(raised.value)
    assert seen in str(raised.value)
