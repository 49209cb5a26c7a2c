"""What torch.compile makes faster: which modules, on which ranks, and what is told of it."""

from __future__ import annotations

import copy
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from evener.cli import options
from evener.cli.parsing import Parser
from evener.components import compile as compiling
from evener.components.compile import Compiling
from evener.components.repeated_blocks import repeated_blocks
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError
from evener.strategies.sharded.sharded import Sharded
from evener.training.batches.feed import BatchFeed
from evener.training.engine import Engine
from evener.training.step.oom_report import PieceSizes
from evener.training.step.step import Step
from tests import tasks
from tests.comparing import worst

EAGER = "aot_eager"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(torch.tanh(self.wide(x)))
        return x + y


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"one": nn.Linear(6, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.heads["one"](x)
        return outputs


FROM_A_SCRIPT = """
class Block(Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + nn.functional.gelu(self.inner(x))
"""


def test_a_class_that_came_by_value_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code says that it is of a module which does not have what it refers to, as that of a script does on ranks."""
    monkeypatch.setitem(sys.modules, "a_script", ModuleType("a_script"))
    brought = {"__name__": "a_script", "nn": nn, "Module": nn.Module}
    exec(FROM_A_SCRIPT, brought)
    kind: Any = brought["Block"]
    model = nn.Sequential(kind(), kind())
    x = torch.ones(3, 6)
    expected = model(x)
    Compiling("whole", backend=EAGER).apply(model, "cpu")
    assert torch.equal(model(x), expected)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, batch_first=True)


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (Tower, ["blocks.0", "blocks.1", "blocks.2"]),
        (lambda: nn.Sequential(Tower(), Tower()), ["0", "1"]),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.Sequential(Block(), nn.Tanh(), Block())), ["1.0", "1.2"]),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), []),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2),
            ["layers.0", "layers.1"],
        ),
        (Block, []),
    ],
)
def test_blocks_are_what_a_list_repeats(model: Any, blocks: list[str]) -> None:
    assert list(repeated_blocks(model())) == blocks


def test_a_copy_compiles_its_own() -> None:
    own = Tower()
    Compiling("blocks", backend=EAGER).apply(own, "cpu")
    other = copy.deepcopy(own)
    with torch.no_grad():
        for parameter in other.blocks.parameters():
            parameter.zero_()
    x = torch.ones(2, 6)
    assert torch.equal(other.blocks[0](x), x)
    assert not torch.equal(own.blocks[0](x), x)


@pytest.mark.parametrize(
    ("how", "model", "cut_open", "words"),
    [
        ("blocks", Block, False, "Block has no two of one class there: use compile=whole"),
        (
            "whole",
            Tower,
            True,
            "compile=whole would compile Tower as a whole, which a pipeline cuts into stages",
        ),
        ("auto", Block, True, "compile=auto would compile Block as a whole"),
    ],
)
def test_what_cannot_be_compiled_is_refused(how: str, model: Any, cut_open: bool, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Compiling(how, backend=EAGER).apply(model(), "cpu", cut_open)


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match="on a CPU, and there is no no-such-compiler: install one"):
        Compiling("whole").apply(Tower(), "cpu")


def test_a_model_of_which_nothing_is_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.layer(x)
            return outputs

    nothing = compiling.compiled_so_far()._replace(graphs=0)  # an earlier test may have compiled
    monkeypatch.setattr(compiling, "compiled_so_far", lambda: nothing)
    with (
        Engine(tasks._task(model=Hidden), device="cpu", compile="whole", compile_backend=EAGER) as engine,
        pytest.raises(ConfigurationError, match="no graph was made in the first step"),
    ):
        engine.step(next(engine.batches()))


@pytest.mark.parametrize(
    ("given", "how"), [([], None), (["--compile"], "auto"), (["--compile", "blocks"], "blocks")]
)
def test_the_option_needs_no_value(given: list[str], how: str | None) -> None:
    parser = Parser()
    options.add_config_options(parser, "compile")
    assert options.config_of(parser.parse_args(given)).compile == how


def test_settings_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="compile_mode and compile_backend would do nothing"):
        RunConfig(compile_mode="reduce-overhead")


def test_a_step_in_which_a_rank_compiled_tells_nothing_of_its_speed() -> None:
    seen = learned_from((1, 1), (1, 2), (1, 2))
    assert [[math.isnan(each) for each in row] for row in seen] == [
        [True, True],
        [False, True],
        [False, False],
    ]


def test_without_graphs_all_times_count() -> None:
    assert list(map(list, learned_from(()))) == [[0.5, 0.25]]


def learned_from(*graphs_of_steps: tuple[int, ...]) -> list[list[float]]:
    """The times that a balancer would hear of two ranks."""
    seen: list[list[float]] = []
    feed = object.__new__(BatchFeed)
    feed.skips, feed._graphs, feed._pieces, feed._events, feed._columns = None, (), PieceSizes(), [], ()
    balancer: Any = SimpleNamespace(observe=lambda number, shares, seconds: seen.append(seconds))
    feed.balancer, feed._learns, feed._by_cost, feed._alone = balancer, True, None, None
    data = SimpleNamespace(slowest=list)
    feed._learner = cast(Any, SimpleNamespace(session=SimpleNamespace(device=torch.device("cpu")), data=data))
    for graphs in graphs_of_steps:
        step = Step(SimpleNamespace(shares=(1, 1)), 0, lambda: None)  # type: ignore[arg-type]
        step.compute_seconds, step.graphs, step.retries = (0.5, 0.25), graphs, (0, 0)
        feed.observe_step(step)
    return seen


# Over ranks


def trained(**settings: Any) -> tuple[dict[str, Tensor], int]:
    task = tasks._task(model=Tower)
    with Engine(task, device="cpu", dtype="float64", steps=6, micro_batch=7, **settings) as engine:
        list(map(engine.step, engine.batches()))
        return {
            name: value.clone() for name, value in engine.learner.tensors().items()
        }, engine.learner.graphs.made


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", Sharded(zero=2), Sharded(zero=3), "pipeline", "data_parallel"], ids=str
)
def test_it_is_the_training_of_the_plain_model(ranks: Any, strategy: Any) -> None:
    """Of any shares with two graphs: one, and one for a single sample."""
    how: dict[str, Any] = {"strategy": strategy}
    if strategy == "pipeline":
        how["strategy_option"] = ("balance=equal",)
    elif strategy == "data_parallel":
        how["devices"] = "cpu:0,cpu:1"
    else:
        how["balance"] = "3,1"
    plain, _ = trained()
    world = 1 if strategy == "data_parallel" else 2
    found = ranks(world).run(trained, compile="blocks", compile_backend=EAGER, **how)
    for weights, graphs in found:
        assert worst(plain, weights) <= 1e-10
        assert graphs <= 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports and looks at tensors
def test_the_compiler_of_every_day(ranks: Any) -> None:
    """PyTorch's own backend, which on a CPU writes C++."""
    plain, _ = trained()
    weights, graphs = trained(compile="auto")
    assert worst(plain, weights) <= 1e-10
    assert 1 <= graphs <= 2
