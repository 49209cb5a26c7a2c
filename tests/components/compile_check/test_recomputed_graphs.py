"""Compiled blocks that are recomputed in backward are compared with what the model computes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import evener
from evener.components.compile import Compiling
from evener.components.compile_check.eager_graph import recomputed
from evener.components.compile_check.trial import Inputs, disturbed, trial
from evener.training.engine import Engine
from tests import tasks
from tests.comparing import worst
from tests.components.compile_check.test_graph import NAMED, computed, said
from tests.tiers import ALWAYS, NIGHTLY, crossed

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
"""At which the compiler looks."""


class Recomputed(nn.Module):
    """A block that is computed again in backward, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def once(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.once, x, use_reentrant=False)
        return found


def recomputed_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Recomputed(), Recomputed(), nn.Linear(6, 3)).double()


def test_a_block_that_is_recomputed_in_backward_is_compared_with_what_the_model_computes() -> None:
    """The captured graph by itself would draw other random numbers in backward."""
    plain, model = recomputed_blocks(), recomputed_blocks()
    graphs = Compiling("blocks", backend="aot_eager").apply(model, "cpu")
    assert worst(dict(enumerate(computed(plain))), dict(enumerate(computed(model)))) <= 1e-12
    assert not said(graphs)


def test_wrong_code_of_a_block_that_is_recomputed_is_found_and_the_model_computed() -> None:
    plain, model = recomputed_blocks(), recomputed_blocks()
    graphs = Compiling("blocks", backend="without_weights").apply(model, "cpu")
    assert all(map(torch.equal, computed(plain), computed(model)))
    assert NAMED["without_weights"] in said(graphs)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
def test_rounding_is_measured_inside_of_what_is_recomputed(dtype: torch.dtype) -> None:
    """Each of ten products, and not their result alone."""

    def deep(x: Tensor) -> Tensor:
        for _ in range(10):
            x = 1.1 * x
        return x

    nodes = fx.Graph()
    x = nodes.placeholder("x")
    nodes.output((nodes.call_function(recomputed, (nodes.get_attr("body"), x)),))
    root = nn.Module()
    root.body = fx.symbolic_trace(deep)
    graph, eps = fx.GraphModule(root, nodes), torch.finfo(dtype).eps
    inputs = Inputs([torch.ones(500, dtype=dtype)])
    (plain,), (moved,) = trial(graph, inputs).outputs, disturbed(graph, inputs, 0).outputs
    assert 2.5 * eps < float((moved - plain).norm() / plain.norm()) < 5 * eps


class Dropping(nn.Module):
    """Blocks with masks by sample, each of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        inner = lambda: nn.Sequential(nn.Linear(6, 6), evener.nn.Dropout(0.4), nn.Tanh())  # noqa: E731
        self.blocks = nn.ModuleList(inner() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        outputs: Tensor = self.head(x)
        return outputs


@pytest.mark.parametrize(
    ("code", "recompute"),
    crossed(["right", "without_weights"], [None, "blocks"], lambda _: (NIGHTLY, ALWAYS)),
)
def test_masks_by_sample_are_those_of_the_plain_model(code: str, recompute: str | None) -> None:
    """A trial is no call of a layer, so that the layers' masks are those of the calls that count."""

    def weights(**settings: Any) -> dict[str, Tensor]:
        task = tasks._task(model=Dropping)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with Engine(task, device="cpu", dtype="float64", steps=3, **settings) as engine:
                list(map(engine.step, engine.batches()))
                found = {name: value.clone() for name, value in engine.learner.tensors().items()}
        assert any("compile:" in str(each.message) for each in seen) == (
            settings.get("compile_backend") == "without_weights"
        )
        return found

    compiled = weights(compile="blocks", compile_backend=code, recompute=recompute)
    assert worst(weights(), compiled) <= 1e-12
