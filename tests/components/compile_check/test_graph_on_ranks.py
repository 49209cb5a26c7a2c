"""Ranks agree on the graphs whose compiled code is wrong."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from evener.errors import DivergenceError
from evener.torch_internals.compiling import compiled_so_far
from evener.training.engine import Engine
from tests import tasks
from tests.comparing import worst
from tests.components.compile_check import wrong_code
from tests.components.compile_check.test_graph import TASKS
from tests.components.test_compile import Tower
from tests.tiers import NIGHTLY, SLOW, spread

Found = tuple[dict[str, Tensor], list[str], list[str]]

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
"""At which the compiler looks."""


def trained(name: str, **settings: Any) -> Found:
    """Weights after some steps, what runs uncompiled, and what the rank warned of."""
    wrong_code.register()
    torch.compiler.reset()
    settings = {"dtype": "float64", "steps": 3, **settings}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Engine(TASKS[name](), device="cpu", **settings) as engine:
            list(map(engine.step, engine.batches()))
            weights = {name: value.clone() for name, value in engine.learner.tensors().items()}
            uncompiled = engine.learner.graphs.uncompiled
    return weights, uncompiled, [str(each.message) for each in seen if "compile:" in str(each.message)]


def check(ranks: Any, name: str, world: int, code: str, how: str = "blocks", **settings: Any) -> None:
    (plain, _, _) = trained(name)
    found = ranks(world).run(trained, name, compile=how, compile_backend=code, **settings)
    wrong = ["the model"] if how == "whole" else found[0][1]
    for rank, (weights, uncompiled, words) in enumerate(found):
        assert worst(plain, weights) <= 1e-10
        assert uncompiled == wrong
        assert len(words) == (rank == 0)
    assert all((block if how != "whole" else "the whole model") in found[0][2][0] for block in wrong)
    assert wrong


def test_ranks_compute_the_same_blocks_uncompiled(ranks: Any) -> None:
    """The code is wrong for rank 0's ten samples and not for the three of rank 1."""
    check(ranks, "tower", 2, "scaled_from_5", balance="3,1")


def stopped(**settings: Any) -> str:
    with pytest.raises(DivergenceError) as raised:
        trained("tower", compile="blocks", compile_check="stop", **settings)
    return str(raised.value)


def test_a_run_may_be_ended_by_it_on_all_ranks_alike(ranks: Any) -> None:
    first, second = ranks(2).run(stopped, compile_backend="scaled_from_5", balance="3,1")
    assert first == second
    assert "In blocks.0, blocks.1, blocks.2 (rank 0): " in first


def later(code: str) -> tuple[list[str], list[str]]:
    """A rank comes to the size for which the code is wrong when the first steps are over."""
    wrong_code.register()
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        task = tasks._task(model=Tower, batch_size=4)
        settings: dict[str, Any] = {"compile": "blocks", "compile_backend": code, "balance": "3,1"}
        with Engine(task, device="cpu", steps=4, **settings) as engine:
            list(map(engine.step, engine.batches()))
            before = engine.learner.graphs.uncompiled
            engine.evaluate()
    assert any("compile:" in str(each.message) for each in seen) == (engine.session.rank == 0)
    return before, engine.learner.graphs.uncompiled


def test_what_evaluation_finds_is_known_to_all(ranks: Any) -> None:
    for before, after in ranks(2).run(later, "scaled_without_gradients"):
        assert before == []
        assert after == ["blocks.0", "blocks.1", "blocks.2"]


EVERYWHERE: list[tuple[str, int, str, str, dict[str, Any]]] = [
    ("tower", 1, "scaled", "blocks", {"strategy": "single"}),
    ("tower", 2, "without_weights", "whole", {"strategy": "ddp"}),
    ("tower", 2, "scaled", "blocks", {"strategy": "sharded", "strategy_option": ("zero=1",)}),
    ("tower", 2, "without_inputs", "blocks", {"strategy": "sharded", "strategy_option": ("zero=2",)}),
    ("tower", 2, "without_weights", "blocks", {"strategy": "sharded", "strategy_option": ("zero=3",)}),
    ("gpt", 2, "without_weights", "blocks", {"strategy": "tensor"}),
    ("tower", 2, "one_number", "blocks", {"strategy": "pipeline", "strategy_option": ("balance=equal",)}),
    ("sentences", 2, "without_weights", "blocks", {"strategy": "context"}),
    ("experts", 2, "scaled", "whole", {"strategy": "experts"}),
    ("tower", 1, "without_inputs", "blocks", {"strategy": "data_parallel", "devices": "cpu:0,cpu:1"}),
    ("tower", 1, "without_weights", "blocks", {"strategy": "layers", "devices": "cpu:0,cpu:1"}),
]


@pytest.mark.parametrize(
    ("name", "world", "code", "how", "settings"),
    spread(EVERYWHERE, SLOW, NIGHTLY),
    ids=[str(each[-1]) for each in EVERYWHERE],
)
def test_it_is_found_under_every_strategy(
    ranks: Any, name: str, world: int, code: str, how: str, settings: dict[str, Any]
) -> None:
    check(ranks, name, world, code, how, **settings)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports, and of this code
@pytest.mark.parametrize("precision", spread([None, "bf16"], SLOW, NIGHTLY))
def test_digits_learn_compiled_what_they_learn_uncompiled(precision: str | None) -> None:
    """PyTorch 2.13 makes gradients of zero of these convolutions on a CPU, with which 0.92 is reached."""
    with Engine("digits", device="cpu", epochs=6, compile="auto", precision=precision) as engine:
        list(map(engine.step, engine.batches()))
        assert engine.evaluate()["accuracy"] >= 0.98
    assert compiled_so_far().graphs
