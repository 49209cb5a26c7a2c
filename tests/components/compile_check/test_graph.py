"""Compiled code beside the code it was made of: what is wrong is found, named and not used."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from evener.components.compile import Compiling, Graphs
from evener.components.compile_check import graph as graphs_of
from evener.components.compile_check.difference import GraphComparison, limit
from evener.components.compile_check.eager_graph import plain_graph
from evener.components.compile_check.graph import GraphFinding, findings_text
from evener.components.compile_check.trial import Inputs, trial
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError
from evener.torch_internals.dispatch import fake_mode, is_fake
from evener.training.reporting.terminal import _graphs_text
from tests import tasks
from tests.components.test_compile import Tower
from tests.strategies import sentences, test_experts
from tests.tiers import ALWAYS, NIGHTLY, Tier, crossed, spread
from tests.zoo.text import gpt

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
"""At which the compiler looks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))


def said(graphs: Graphs, **others: Any) -> list[str]:
    """What a rank warns of, beside ranks that found nothing."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        graphs.agree(lambda own: [own])
    return [str(each.message) for each in seen]


def computed(model: nn.Module, samples: int = 7, bf16: bool = False) -> list[Tensor]:
    """Outputs, gradients and buffers of a pass that draws random numbers, and the next of these."""
    torch.manual_seed(samples)
    x = torch.randn(samples, 6, dtype=next(model.parameters()).dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, bf16):
        y = model(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers(), torch.rand(2)]
    return [each.clone() for each in found if each is not None]


NAMED = {
    "scaled": "output 0 is 1 % off",
    "scaled_from_5": "output 0 is 1 % off",
    "without_weights": "the gradient of linear.weight is 100 % off",
    "without_inputs": "the gradient of",
    "one_number": "output 0 is",
    "not_a_number": "output 0 is of another shape or type, or not finite",
    "forgetful": "what it leaves in norm.running_mean is",
}


def tiers_of(code: str) -> tuple[Tier, ...]:
    """What is wrong from a size on is met where each size that is new is compared."""
    return (NIGHTLY,) if code == "scaled_from_5" else (ALWAYS, NIGHTLY)


@pytest.mark.parametrize(("code", "dtype"), crossed(NAMED, [torch.float32, torch.float64], tiers_of))
def test_wrong_code_is_named_and_not_used(code: str, dtype: torch.dtype) -> None:
    plain = blocks().to(dtype)
    model = copy.deepcopy(plain)
    graphs = Compiling("blocks", backend=code).apply(model, "cpu")
    for a, b in zip(computed(plain), computed(model), strict=True):
        assert torch.equal(a, b)
    (words,) = said(graphs)
    assert graphs.uncompiled == ["0", "1"]
    assert "In 0" in words
    assert NAMED[code] in words
    assert not said(graphs), "it is said once"


@pytest.mark.parametrize(
    ("backend", "bf16"), crossed(["right", "aot_eager"], [False, True], lambda _: (ALWAYS, NIGHTLY))
)
def test_right_code_is_used_and_nothing_is_said(backend: str, bf16: bool) -> None:
    """Outputs, gradients, buffers and generators are those of a model that nobody compares."""
    model, uncompared = blocks(), blocks()
    graphs = Compiling("blocks", backend=backend).apply(model, "cpu")
    Compiling("blocks", backend=backend, check="no").apply(uncompared, "cpu")
    for samples in (7, 5, 7):
        for a, b in zip(computed(model, samples, bf16), computed(uncompared, samples, bf16), strict=True):
            assert torch.equal(a, b)
    assert not said(graphs)
    assert graphs.uncompiled == []


@pytest.mark.parametrize(
    "code", spread(["without_weights", "without_inputs", "one_number", "not_a_number"], ALWAYS, NIGHTLY)
)
def test_wrong_code_is_found_in_sixteen_bits(code: str) -> None:
    model = blocks()
    graphs = Compiling("blocks", backend=code).apply(model, "cpu")
    computed(model, 32, bf16=True)
    assert NAMED[code] in said(graphs)[0]


def test_code_is_compared_with_each_size_that_is_new() -> None:
    model = blocks()
    graphs = Compiling("blocks", backend="scaled_from_5").apply(model, "cpu")
    for samples in (3, 4, 3):
        computed(model, samples)
        assert not said(graphs)
    computed(model, 6)
    assert "with inputs of 6x6" in said(graphs)[0]
    assert graphs.made == 1


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_code_for_evaluation_is_compared_too(without: Any) -> None:
    model = blocks().eval()
    graphs = Compiling("blocks", backend="scaled").apply(model, "cpu")
    x = torch.ones(4, 6)
    with without():
        assert torch.equal(model(x), blocks().eval()(x))
    assert "output 0 is 1 % off" in said(graphs)[0]


def test_an_input_that_is_written_in_place_stays() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return torch.tanh(self.linear(x))

    def of(check: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(InPlace(), nn.Linear(6, 6), InPlace()))
        graphs = Compiling("blocks", backend="aot_eager", check=check).apply(model, "cpu")
        found = computed(model)
        assert not said(graphs)
        return found

    assert all(map(torch.equal, of("replace"), of("no")))


def test_what_draws_other_random_numbers_is_said_to_be_unknown() -> None:
    """Dropout of other generators is no error, and no proof of anything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    graphs = Compiling("whole", backend="other_dice").apply(model, "cpu")
    model(torch.ones(500, 6)).sum().backward()
    (words,) = said(graphs)
    assert "was not compared" in words
    assert "In the whole model (rank 0): what other_dice makes of it draws random numbers of its own" in words
    assert graphs.uncompiled == []


def test_what_draws_some_other_random_numbers_is_unknown_and_what_is_scaled_besides_is_wrong() -> None:
    """The first of two results is alike, the second is of other numbers: some of them are the same."""

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            masked = nn.functional.dropout(x, 0.5)
            return masked, masked + torch.randn_like(x)

    plain = fx.symbolic_trace(Drawing())

    def compiled(x: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        masked = nn.functional.dropout(x, 0.5)
        torch.rand(1)
        return masked, factor * masked + torch.randn_like(x)

    given = [torch.linspace(-1, 1, 60, dtype=torch.float64, requires_grad=True)]
    comparison = GraphComparison(plain, compiled)
    assert not comparison.wrong(given)
    assert comparison.by_chance
    comparison = GraphComparison(plain, lambda x: compiled(x, 4.0))
    assert comparison.wrong(given)
    assert not comparison.by_chance


def test_a_graph_of_another_algorithm_is_not_compared() -> None:
    made: list[fx.GraphModule] = []

    def chosen(x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return found

    def kept(graph: fx.GraphModule, examples: Any) -> Any:
        made.append(graph)
        return graph

    torch.compile(chosen, backend=kept, fullgraph=True)(torch.ones(3))
    assert graphs_of._why_not(plain_graph(made[0])) == "cond is another algorithm where it is not compiled"


def test_random_numbers_are_those_of_the_model_where_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, backend: asked.append(backend))
    Compiling("blocks", check="no").function(len)
    assert asked[0].config["fallback_random"]


def test_what_cannot_be_computed_twice_is_said() -> None:
    model = blocks()
    graphs = Compiling("blocks", backend="only_once").apply(model, "cpu")
    computed(model)
    (words,) = said(graphs)
    assert "to compute it a second time raised RuntimeError: no second time" in words


def test_want_of_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(graphs_of.GraphComparison, "wrong", none_left)
    model = blocks()
    graphs = Compiling("blocks", backend="right").apply(model, "cpu")
    computed(model)
    assert "there is no room for what it computes a second time" in said(graphs)[0]


def test_a_graph_that_waits_for_other_ranks_is_computed_once() -> None:
    nodes = fx.Graph()
    x = nodes.placeholder("x")
    nodes.output((nodes.call_function(torch.distributed.all_reduce, (x,)),))
    graph = fx.GraphModule(nn.Module(), nodes)
    why = graphs_of._why_not(graph)
    assert why is not None
    assert "it waits for other ranks" in why


def test_of_many_sizes_some_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_of, "SIZES", 2)
    model = blocks()
    graphs = Compiling("blocks", backend="right").apply(model, "cpu")
    for samples in (3, 4):
        computed(model, samples)
    assert not said(graphs)
    computed(model, 5)
    assert "more than" in said(graphs)[0]


def test_a_number_at_an_edge_is_no_wrong_code() -> None:
    """Only what is wrong with other inputs, too, is wrong."""
    nodes = fx.Graph()
    x = nodes.placeholder("x")
    nodes.output((nodes.call_function(torch.sign, (x,)),))
    plain = fx.GraphModule(nn.Module(), nodes)
    given = torch.linspace(-1, 1, 8)

    def compiled(x: Tensor) -> tuple[Tensor]:
        return (torch.sign(-x if torch.equal(x, given) else x),)

    assert not GraphComparison(plain, compiled).wrong([given])
    assert GraphComparison(plain, lambda x: (torch.sign(-x),)).wrong([given])


def test_more_floors_are_allowed_where_these_are_small() -> None:
    assert limit(1e-7) == pytest.approx(8e-7)
    assert limit(0.2) == pytest.approx(0.8)
    assert limit(2e-3) == pytest.approx(1e-2)


def test_inputs_that_lie_in_one_memory_still_do() -> None:
    memory = torch.arange(12.0)
    first, second = memory[:8].view(2, 4), memory[4:]
    found = trial(lambda a, b: (a.add_(b.sum()), b), Inputs([first, second]))
    assert torch.equal(found.outputs[1][:4], found.outputs[0][1])
    assert torch.equal(memory, torch.arange(12.0))


def test_weights_have_their_names_where_the_block_is_called_with_other_tensors() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    block.c_attn = nn.Linear(2, 2)
    caller = graphs_of.Caller("", block, graphs_of.Findings())
    for written, name in (
        ("L_fn_self_modules_0_parameters_weight_", "0.weight"),
        ("L_self_modules_1_modules_0_parameters_weight_", "1.0.weight"),
        ("L_self_modules_1_modules_1_buffers_running_mean_", "1.1.running_mean"),
        ("L_self_modules_c_attn_parameters_bias_", "c_attn.bias"),
        ("L_x_", "L_x_"),
    ):
        assert caller.name_of(torch.ones(2), written) == name
    assert caller.name_of(block[1][0].bias, "L_x_") == "1.0.bias"


def test_findings_of_all_ranks_in_words() -> None:
    one, other = GraphFinding("blocks.0", "a is off", True), GraphFinding("blocks.1", "a is off", True)
    unknown = GraphFinding("", "no room", False)
    of_ranks = [[one, unknown], [], [one, other]]
    assert findings_text(of_ranks, True) == "In blocks.0, blocks.1 (rank 0, 2): a is off"
    assert findings_text(of_ranks, False) == "In the whole model (rank 0): no room"
    assert findings_text([[], []], True) == ""


def test_it_may_be_left_out() -> None:
    model = blocks()
    graphs = Compiling("blocks", backend="scaled", check="no").apply(model, "cpu")
    computed(model)
    assert not said(graphs)
    with pytest.raises(ConfigurationError, match="must be one of replace, stop, no"):
        RunConfig(compile="auto", compile_check="maybe")


def test_a_call_without_numbers_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP divides a graph into pieces, and calls each with fake tensors before it is compiled."""
    nodes = fx.Graph()
    x = nodes.placeholder("x")
    nodes.output((nodes.call_function(torch.sign, (x,)),))
    plain = fx.GraphModule(nn.Module(), nodes)
    tried: list[Any] = []
    monkeypatch.setattr(graphs_of.GraphComparison, "wrong", lambda self, given: tried.append(given) or [])
    graph = graphs_of.Graph("right", plain, plain, plain, [torch.ones(2)])
    with graphs_of.called(graphs_of.Caller("", plain, graphs_of.Findings())):
        with fake_mode():
            assert is_fake(graph(torch.ones(2))[0])
        assert not tried
        graph(torch.ones(2))
    assert len(tried) == 1


def test_the_summary_names_what_ran_uncompiled() -> None:
    summary: Any = SimpleNamespace(graphs=[2, 2], graph_breaks=0, uncompiled=["blocks.0"])
    assert _graphs_text(summary) == (
        "compiled 2 graphs on each rank; uncompiled, for compiled code computed something else: blocks.0"
    )


# Over ranks

TASKS: dict[str, Any] = {
    "tower": lambda: tasks._task(model=Tower),
    "gpt": gpt,
    "sentences": sentences.task,
    "experts": test_experts.task,
}


def test_weights_that_a_graph_holds_are_updated_once() -> None:
    """The compiler makes an optimizer's parameters attributes of the graph, of which a trial has no copies."""
    torch.manual_seed(3)
    layer, findings = nn.Linear(3, 2), graphs_of.Findings()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(torch.ones(4, 3)).sum().backward()
    before, gradient = layer.weight.detach().clone(), layer.weight.grad
    assert gradient is not None
    with graphs_of.watched(layer, findings), warnings.catch_warnings(action="ignore"):
        torch.compile(lambda: optimizer.step(), backend="eager")()
    assert torch.equal(layer.weight, before - 0.5 * gradient)
    assert "and a trial could write to that" in findings.untold[0].message
