"""An update in portions is the same update, for every optimizer that is said to be one of these."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evener.components.offload import optimizer as updates
from evener.components.offload.host_storage import outside_of
from evener.components.offload.optimizer import OffloadedUpdates, check_alone, portions
from evener.components.optim.elementwise import ALONE
from evener.core.config.offload import Offload
from evener.errors import ConfigurationError
from tests.components.offload.late import files
from tests.tasks import draws


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 20))
def test_portions_are_neighbours_that_fit_or_are_alone(sizes: list[int], most: int) -> None:
    found = portions(sizes, most)
    assert [place for each in found for place in each] == list(range(len(sizes)))
    totals = [[sizes[place] for place in each] for each in found]
    assert all(sum(total) <= most or len([size for size in total if size]) == 1 for total in totals)
    assert all(sum(one) + sum(two) > most for one, two in itertools.pairwise(totals) if sum(one))


SHAPES = ((16, 20), (40,), (), (30, 12), (7, 3))


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    return draws(1, *shape, seed=seed)[0]


def parameters(shapes: Any = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(shape, place)) for place, shape in enumerate(shapes)]


def gradients(step: int, own: list[nn.Parameter], sparse: bool = False) -> None:
    """In the third step one parameter has none."""
    for place, parameter in enumerate(own):
        found = numbers(parameter.shape, 100 * step + place)
        parameter.grad = None if (step, place) == (2, 3) else found.to_sparse() if sparse else found


OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "AdamW": {"foreach": True},
}


def made(name: str, own: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer: Any = getattr(torch.optim, name)
    groups = [{"params": own[:2], "lr": 0.03}, {"params": own[2:]}]
    found: torch.optim.Optimizer = optimizer(groups, **OPTIONS.get(name, {}))
    return found


def shapes_for(name: str) -> Any:
    return [shape for shape in SHAPES if len(shape) == 2] if name == "Muon" else SHAPES


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "SMALLEST", 64)
    monkeypatch.setattr(updates, "WINDOW", 1500)


def tensors(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Tensor]:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        (place, key): value
        for place, parameter in enumerate(own)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


@pytest.mark.parametrize("apart", [False, True], ids=["computed with", "apart"])
@pytest.mark.parametrize("name", ALONE)
def test_the_numbers_are_the_same_to_the_bit(name: str, apart: bool, tmp_path: Path) -> None:
    shapes, there = shapes_for(name), files(tmp_path, apart)
    ours, theirs = parameters(shapes), parameters(shapes)
    optimizer, other = made(name, ours), made(name, theirs)
    in_portions, calls = OffloadedUpdates(optimizer, there), list[int]()
    optimizer.register_step_post_hook(lambda *_: calls.append(sum(p.grad is not None for p in ours)))
    for step in range(5):
        gradients(step, ours, name == "SparseAdam")
        gradients(step, theirs, name == "SparseAdam")
        in_portions.step()
        other.step()
        assert all(map(torch.equal, ours, theirs)), step
        assert all(parameter.grad is None for parameter in ours)
    found, expected = tensors(optimizer), tensors(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert calls[:3] == ([1, 1, 1] if name == "Muon" else [3, 1, 1])
    large = [value for value in found.values() if value.nbytes >= 64]
    assert all(map(there.holds, large))
    assert large or name == "SGD"


def test_state_that_is_taken_up_goes_outside(tmp_path: Path) -> None:
    there, own = files(tmp_path), parameters()
    optimizer = made("Adam", own)
    in_portions = OffloadedUpdates(optimizer, there)
    other = made("Adam", parameters())
    gradients(0, [p for group in other.param_groups for p in group["params"]])
    other.step()
    in_portions.load(other.state_dict())
    found = tensors(optimizer)
    assert all(torch.equal(found[key], value) for key, value in tensors(other).items())
    assert all(there.holds(value) == (value.nbytes >= 64) for value in found.values())
    assert optimizer.param_groups[0]["lr"] == 0.03


def test_a_step_without_gradients_is_none(tmp_path: Path) -> None:
    own = parameters()
    before = [parameter.detach().clone() for parameter in own]
    OffloadedUpdates(made("Adam", own), files(tmp_path)).step()
    assert all(map(torch.equal, own, before))


class Counting(torch.optim.SGD):
    """Counts its steps for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """Steps as ever."""


class Telling(torch.optim.AdamW):
    """Says what it is."""

    updates_each_alone = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def hooked(own: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = made("Adam", own)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda own: Counting(own, lr=0.1),
            r"and Counting is not known to update each by itself: use one of torch",
        ),
        (torch.optim.LBFGS, "LBFGS is not known"),
        (hooked, "the task has put hooks on it, which would be called as often"),
    ],
)
def test_what_may_not_be_updated_in_portions_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_alone(make(parameters()))
    check_alone(Renamed(parameters()))
    check_alone(Telling(parameters()))


@pytest.mark.gpu
def test_on_a_gpu_the_numbers_are_the_same_to_the_bit() -> None:
    device = torch.device("cuda", 0)
    ours, theirs = ([nn.Parameter(p.detach().to(device)) for p in parameters()] for _ in range(2))
    optimizer, other = made("Adam", ours), made("Adam", theirs)
    in_portions = OffloadedUpdates(optimizer, outside_of(device, Offload.from_settings("optimizer", None)))
    for step in range(5):
        for own in (ours, theirs):
            for place, parameter in enumerate(own):
                parameter.grad = numbers(parameter.shape, 100 * step + place).to(device)
        in_portions.step()
        other.step()
        assert all(map(torch.equal, ours, theirs))
    assert all(value.device.type == "cpu" for value in tensors(optimizer).values() if value.nbytes >= 64)
