"""What a device that runs behind the host says of a step: the same, read alone or told to other ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from evener.components import gradients, late_norms
from evener.components.gradients import Unsound, numbers_of
from evener.hardware.async_read import Readout, ReadyValue
from evener.strategies.interfaces import StepOutcome
from evener.torch_internals.optimizers import largest
from evener.training.step.late_results import results_alone, row_on_device
from evener.training.step.step import Results

CPU = torch.device("cpu")
NAMES = [f"layer {number}" for number in range(6)]


@pytest.fixture(
    autouse=True,
    params=[(0, False), (32, False), (0, True)],
    ids=["many gradients", "few", "norms that are known"],
)
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many it is first read whether one is not finite. A CUDA graph has computed the norms already."""
    most, are_known = request.param
    monkeypatch.setattr(late_norms, "_FEW", most)
    monkeypatch.setattr(
        gradients, "largest", lambda found: pytest.fail("looked again") if are_known else largest(found)
    )
    monkeypatch.setitem(KNOWN, "are", are_known)


KNOWN = {"are": False}


def look_at(unsound: Unsound, found: list[Tensor], places: list[float]) -> Readout:
    return unsound.of_late(found, places, torch.stack(largest(found)) if KNOWN["are"] else None)


def outcome_of(
    looked: list[dict[int, Tensor]], *totals: float | Tensor, others: tuple[Readout, ...] = ()
) -> StepOutcome:
    """The outcome of a step in which the gradients of these parameters, by place, were looked at."""
    unsound = Unsound(NAMES)
    looks = [look_at(unsound, list(map(numbers_of, found.values())), list(found)) for found in looked]
    made = tuple(ReadyValue(total) for total in totals)
    return StepOutcome(
        made, (), False, ReadyValue(0.0), soundness=(*looks, *others), unsound=tuple(unsound.found)
    )


def both(outcome: StepOutcome) -> list[Results]:
    row = row_on_device(outcome, CPU)
    assert row.dtype is torch.float64
    assert row.shape == (3,)
    return [results_alone(outcome, CPU)(), Results.from_rows([tuple(row.tolist())], [0])]


def of(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def test_totals_are_added_and_sound_gradients_are_sound() -> None:
    for found in both(outcome_of([{1: of(1, 2), 2: of(-3e38, 3e38)}], of(1.5).sum(), 2.0)):
        assert found == Results(3.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_of_several_gradients_that_are_not_finite_the_last_parameter_is_named(bad: float) -> None:
    # In the order of backward: the last parameter's comes first. The others follow from it.
    order = {6: of(1.0), 5: of(0.0, bad), 3: of(math.nan), 1: of(math.inf)}
    for found in both(outcome_of([order], 1.0)):
        assert found.gradient == (0, 5.0)
        assert found.loss is None
    for found in both(outcome_of([{2: of(1.0)}, {1: of(bad)}, {4: of(bad), 3: of(2.0)}], 1.0)):
        assert found.gradient == (0, 4.0)


def test_a_loss_that_is_not_finite_is_told() -> None:
    for found in both(outcome_of([{1: of(1.0)}], 1.0, math.inf)):
        assert found.loss == (0, math.inf)
        assert found.gradient is None


def test_a_step_without_gradients_or_losses_is_sound() -> None:
    for found in both(outcome_of([])):
        assert found == Results(0.0)
    for found in both(outcome_of([], 2.0)):
        assert found == Results(2.0)


def test_numbers_that_are_of_no_look_count_too() -> None:
    sound, unsound = ReadyValue(of(4.0)), ReadyValue(math.nan)
    for found in both(outcome_of([{1: of(1.0)}], 1.0, others=(sound,))):
        assert found.gradient is None
    for found in both(outcome_of([{1: of(1.0)}], 1.0, others=(sound, unsound))):
        assert found.gradient == (0, 0.0), "nobody knows whose"
    outcome = outcome_of([{1: of(1.0)}], 1.0, others=(unsound,))
    outcome.unsound = (*outcome.unsound, ReadyValue(5.0))
    for found in both(outcome):
        assert found.gradient == (0, 5.0)


def test_types_may_be_mixed_and_lose_no_digits() -> None:
    exact = of(1 + 2**-40, dtype=torch.float64).sum()
    looked = [{1: of(1.0, dtype=torch.bfloat16)}, {2: of(1.0)}, {3: of(math.inf, dtype=torch.float16)}]
    for found in both(outcome_of(looked, exact, of(1.0).sum())):
        assert found.total == 2 + 2**-40
        assert found.gradient == (0, 3.0)


def test_a_large_gradient_does_not_make_the_norms_overflow() -> None:
    looked = [{place: of(1.7e308, dtype=torch.float64) for place in range(1, 7)}]
    for found in both(outcome_of(looked, 1.0)):
        assert found == Results(1.0)


def test_a_look_is_a_readout_for_others() -> None:
    unsound = Unsound(NAMES)
    look = look_at(unsound, [of(1.0), of(-2.0)], [1.0, 2.0])
    assert look.value() == 3.0
    assert unsound.name() is None
    look = look_at(unsound, [of(1.0), of(math.nan)], [1.0, 4.0])
    assert math.isnan(look.value())
    assert unsound.name() == NAMES[3]
