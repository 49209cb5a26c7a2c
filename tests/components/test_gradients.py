"""The number that is finite if all of a rank's gradients are."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from evener.components.gradients import AllGradients, Unsound, number_of_all


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


def _bytes(gradient: Tensor) -> bytes:
    found: bytes = gradient.to_dense().numpy().tobytes()
    return found


def test_the_number_of_finite_gradients_is_finite_and_they_stay_what_they_are() -> None:
    found = of_many()
    found[0][0] = torch.tensor([-0.0, 1e-45])
    found[1][0] = torch.tensor([3e38, -1e-38])
    before = [each.to_dense().numpy().tobytes() for each in found]
    assert math.isfinite(number_of_all(found))
    assert [each.to_dense().numpy().tobytes() for each in found] == before
    assert number_of_all([]) == 0.0


def test_gradients_whose_elements_share_a_place_are_looked_at() -> None:
    found = [torch.ones(1).expand(5), torch.ones(3)]
    assert math.isfinite(number_of_all(found))
    found[1][2] = math.nan
    assert not math.isfinite(number_of_all(found))


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
    found = [torch.full((70, 70), 3e38) for _ in range(9)]
    assert not math.isfinite(number_of_all(found)), "a trial that can fail"
    unsound = Unsound(map(str, range(9)))
    assert unsound.check_gradients(lambda: zip(map(str, range(9)), found, strict=True)).value() == 0.0
    assert unsound.name() is None


def test_infinities_of_both_signs_do_not_cancel() -> None:
    found = [torch.zeros(70, 70) for _ in range(6)]
    found[1][0, 0], found[4][2, 1] = math.inf, -math.inf
    assert math.isnan(number_of_all(found))


# All gradients of a model


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Kinds(nn.Module):
    """Parameters of which some are looked at together, some by themselves, and some are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(drawn(2 + k, 3)) for k in range(5))
        self.biases = nn.ParameterList(nn.Parameter(drawn(4)) for _ in range(6))
        self.others = nn.ParameterList(
            [nn.Parameter(drawn(70, 70)), nn.Parameter(drawn(3).double()), nn.Parameter(drawn(()))]
        )
        self.frozen = nn.Parameter(drawn(3), requires_grad=False)


def checked(model: nn.Module, change: Callable[[dict[str, nn.Parameter]], None]) -> tuple[float, str | None]:
    """The number of a model's gradients, and the name that is found; after others in the step before."""
    names = {p: name for name, p in model.named_parameters()}
    unsound = Unsound(names.values())
    found = AllGradients(names, unsound)
    for p in names:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    assert math.isfinite(found.check().value())
    assert unsound.name() is None
    change({name: p for p, name in names.items()})
    return found.check().value(), unsound.name()


KINDS = [name for name, p in Kinds().named_parameters() if p.requires_grad]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_of_a_model_that_is_not_finite_is_named(name: str, late: bool) -> None:
    def spoil(named: dict[str, nn.Parameter]) -> None:
        gradient = named[name].grad
        assert gradient is not None
        gradient.view(-1)[-1] = math.inf

    with mock.patch("evener.components.gradients.is_late", return_value=late):
        number, found = checked(Kinds(), spoil)
    assert not math.isfinite(number)
    assert found == name


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("missing", ["rows.1", "biases.0", "others.0", "others.2"])
def test_missing_gradients_of_a_model_do_not_hide_others(missing: str, late: bool) -> None:
    def drop(named: dict[str, nn.Parameter]) -> None:
        named[missing].grad = None
        named["biases.3"].grad = torch.full((4,), math.nan)

    with mock.patch("evener.components.gradients.is_late", return_value=late):
        number, found = checked(Kinds(), drop)
    assert not math.isfinite(number)
    assert found == "biases.3"


@pytest.mark.parametrize("late", [False, True])
def test_a_frozen_parameter_that_has_a_gradient_is_looked_at(late: bool) -> None:
    def give(named: dict[str, nn.Parameter]) -> None:
        named["frozen"].grad = torch.full((3,), math.inf)

    with mock.patch("evener.components.gradients.is_late", return_value=late):
        assert checked(Kinds(), give)[1] == "frozen"


def test_sparse_gradients_among_those_of_a_model_are_looked_at() -> None:
    def give(named: dict[str, nn.Parameter]) -> None:
        named["rows.2"].grad = torch.full((4, 3), math.nan).to_sparse()

    assert checked(Kinds(), give)[1] == "rows.2"


def test_finite_gradients_of_a_model_whose_sum_overflows_are_sound() -> None:
    def grow(named: dict[str, nn.Parameter]) -> None:
        for name in ("biases.2", "others.0"):
            named[name].grad = torch.full_like(named[name], 3e38)

    assert checked(Kinds(), grow) == (0.0, None)
