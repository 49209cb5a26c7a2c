"""The number that is finite if all of a rank's gradients are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from evener.components.gradients import Unsound, number_of_all


def of_many() -> list[Tensor]:
    """Small and large ones, of several types and layouts."""
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad is not None
    return [
        *(drawn(3, 2) for _ in range(5)),
        drawn(100, 100),
        drawn(4, 5).t(),
        drawn(()),
        torch.empty(0),
        drawn(3).double(),
        drawn(4).half(),
        torch.complex(drawn(2), drawn(2)),
        table.weight.grad,
    ]


def test_the_number_of_finite_gradients_is_their_sum() -> None:
    found = of_many()
    sums = [
        (torch.view_as_real(each) if each.is_complex() else each.to_dense()).double().sum() for each in found
    ]
    assert math.isclose(number_of_all(found), float(sum(sums)), rel_tol=1e-4)
    assert number_of_all([]) == 0.0


@pytest.mark.parametrize("place", [place for place, each in enumerate(of_many()) if each.numel()])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_found_in_any_gradient(place: int, bad: float) -> None:
    found = of_many()
    values = found[place]._values() if found[place].is_sparse else found[place]
    values[(-1,) * values.dim()] = bad
    assert not math.isfinite(number_of_all(found))
    names = [f"gradient {number}" for number in range(len(found))]
    unsound = Unsound(names)
    unsound.check_gradients(lambda: zip(names, found, strict=True))
    assert unsound.name() == names[place]


def test_finite_gradients_whose_sum_overflows_are_sound() -> None:
    found = [torch.full((2,), 3e38) for _ in range(9)]
    assert not math.isfinite(number_of_all(found)), "a trial that can fail"
    unsound = Unsound(map(str, range(9)))
    assert unsound.check_gradients(lambda: zip(map(str, range(9)), found, strict=True)).value() == 0.0
    assert unsound.name() is None


def test_infinities_of_both_signs_do_not_cancel() -> None:
    found = [torch.zeros(3) for _ in range(6)]
    found[1][0], found[4][2] = math.inf, -math.inf
    assert math.isnan(number_of_all(found))
