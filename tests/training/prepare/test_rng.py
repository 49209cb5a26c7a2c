"""The order of samples after the loop has set the state of torch's default generator, however it does so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import evener
from evener.training.prepare.rng import CommonRandom
from tests.ids import placeless
from tests.tiers import ALWAYS, NIGHTLY, spread
from tests.training.prepare.running import Loop, Weights, model_of, prepared, rows, sgd

imported_before = torch.manual_seed
SOME = torch.Generator().manual_seed(77).get_state()
LATER = torch.Generator().manual_seed(4)
torch.rand(7, generator=LATER)


def epochs(loop: Loop, count: int = 2) -> Weights:
    for _ in range(count):
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            loop.backward(x, y)
            loop.optimizer.step()
    return loop.weights()


def by_the_generator(epoch: int = 0) -> Any:
    torch.default_generator.manual_seed(33 + epoch)


def by_another_name(epoch: int = 0) -> Any:
    torch.random.manual_seed(4)


def by_a_name_of_before(epoch: int = 0) -> Any:
    imported_before(4)


def by_a_state(epoch: int = 0) -> Any:
    torch.set_rng_state(SOME)


def by_a_state_of_the_same_seed(epoch: int = 0) -> Any:
    torch.random.set_rng_state(LATER.get_state())


def within_a_fork(epoch: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        torch.rand(3)


WAYS = (by_the_generator, by_another_name, by_a_name_of_before, by_a_state, by_a_state_of_the_same_seed)


def set_before_each_epoch(is_prepared: bool, way: Callable[..., Any]) -> Weights:
    loop = Loop(is_prepared)
    for epoch in range(2):
        way(epoch)
        epochs(loop, 1)
    return loop.weights()


@pytest.mark.parametrize("way", [within_a_fork, *spread(WAYS, NIGHTLY, ALWAYS)], ids=placeless)
def test_the_order_is_that_of_the_seed(ranks: Any, way: Callable[..., Any]) -> None:
    expected = set_before_each_epoch(False, way)
    for found in ranks(2).run(prepared, lambda is_prepared: set_before_each_epoch(is_prepared, way)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def folds(is_prepared: bool) -> Weights:
    """Each begins with the same seed and makes the same model, so that the default generator is where it was."""
    return {f"{fold}.{name}": value for fold in range(3) for name, value in epochs(Loop(is_prepared)).items()}


def test_each_fold_of_a_seed_has_its_order(ranks: Any) -> None:
    expected = folds(False)
    for found in ranks(2).run(prepared, folds):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def folds_that_draw_on(_: bool) -> Weights:
    """Each model is drawn after the one before it has trained, and nothing is seeded again."""
    torch.manual_seed(4)
    found: Weights = {}
    for fold in range(3):
        model = model_of()
        parts = model, sgd(model), DataLoader(rows(), batch_size=6, shuffle=True), F.cross_entropy
        model, optimizer, loader, loss = evener.prepare(*parts)
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        found |= {f"{fold}.{name}": value.clone() for name, value in model.state_dict().items()}
    return found


@pytest.mark.parametrize("strategy", ["ddp", "sharded"])
def test_the_next_fold_is_that_of_one_rank(ranks: Any, strategy: str) -> None:
    expected = prepared(folds_that_draw_on)
    for found in ranks(2).run(prepared, folds_that_draw_on, strategy=strategy):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.fixture
def common() -> Any:
    before = torch.get_rng_state()
    torch.manual_seed(4)
    made = CommonRandom(torch.get_rng_state(), rank=1)
    made.watch()
    made.follow()
    yield made
    made.close()
    torch.set_rng_state(before)


@pytest.mark.parametrize("way", WAYS, ids=placeless)
def test_each_way_is_noticed_once(common: CommonRandom, way: Callable[..., Any]) -> None:
    told: list[Any] = []
    common.exchange = lambda *numbers: told.append(numbers) or [[*numbers]]  # type: ignore[func-returns-value]
    common.follow()
    assert not told, "nothing was set since"
    way()
    expected = torch.get_rng_state()
    common.follow()
    common.follow()
    assert len(told) == 1
    assert torch.equal(common.held(), expected)
    assert not torch.equal(torch.get_rng_state(), expected), "the rank draws apart"


def test_what_is_put_back_was_not_set(common: CommonRandom) -> None:
    held = common.held()
    state = torch.get_rng_state()
    torch.rand(3)
    within_a_fork()
    torch.set_rng_state(state)
    with common.drawn():
        torch.manual_seed(9)
    common.exchange = lambda *_: pytest.fail("nothing was set")
    common.follow()
    assert not torch.equal(common.held(), held), "but by what was drawn in common"


def test_states_that_differ_by_rank_leave_the_order(common: CommonRandom) -> None:
    held = common.held()
    common.exchange = lambda *numbers: [[*numbers], [number + 1 for number in numbers]]
    for way in WAYS:
        way()
        common.follow()
        assert torch.equal(common.held(), held)


def test_torch_has_its_generator_again() -> None:
    made = CommonRandom(torch.get_rng_state(), rank=0)
    assert torch.random.default_generator is not torch.default_generator
    made.close()
    assert torch.random.default_generator is torch.default_generator
