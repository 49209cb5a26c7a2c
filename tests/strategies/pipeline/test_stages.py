"""What is read of a model, what a cut makes of it, and that its stages one after the other are the model."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.errors import ConfigurationError, TaskError
from evener.strategies.pipeline.pipeline import Pipeline
from evener.strategies.pipeline.stage_code import function_of
from evener.strategies.pipeline.stages import Stages, layers_of, parts_batch_norm, words_of
from evener.strategies.pipeline.tracing import inputs_of, read_both


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Asking(nn.Module):
    """A list of blocks within code that asks for numbers: it stays one block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) if x.sum() > 1e9 else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.asking = Encoder(), Asking()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, *rest: Tensor, twice: bool = False, **named: Tensor) -> Any:
        rows = x.shape[0]
        first = self.encoder(x) * self.weight
        if self.training:
            self.seen.add_(first.detach().sum(0))
        second = self.inner(self.asking(first)) + torch.ones(rows, 4)
        return (second + first * self.weight, rest[0] + named["more"], rows) if twice else second


def given() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(3, 4), torch.randn(2)), {"twice": True, "more": torch.randn(2)}


LAYERS = [
    "encoder.layers.0",
    "encoder.layers.1",
    "encoder.layers.2",
    "asking",
    "inner.0.0",
    "inner.0.1",
    "inner.1",
]


@pytest.mark.parametrize(
    "cut", ["asking", "encoder.layers.1,inner", "encoder.layers.0,-,asking,inner.0.1", "-,inner.1,-"]
)
@pytest.mark.parametrize("training", [True, False])
def test_the_stages_one_after_the_other_are_the_model(cut: str, training: bool) -> None:
    model = Model().train(training)
    args, kwargs = given()
    arguments = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    stages = Stages(model, cut, cut.count(",") + 2, {"x": args[0], "twice": True})
    expected = model(*args, **kwargs)
    seen = model.seen.clone()
    names = inputs_of(stages.graph(training), inspect.signature(model.forward))
    values: Any = ()
    for number in range(len(stages)):
        function = function_of(stages.stage(number, training), list(names))
        values = function(model, *(arguments[name] for name in names.values()), *values)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(model.seen, (2 if training else 1) * seen)


def test_what_is_read() -> None:
    model = Model()
    graph = read_both(model, {"twice": True}, ())[True]
    assert layers_of(graph) == LAYERS
    assert words_of(LAYERS, [range(0, 2), range(2, 2), range(2, 7)]) == "-,encoder.layers.2"


def test_who_uses_what() -> None:
    users = Stages(Model(), "encoder.layers.2,inner", 3, {"twice": True}).users()
    assert users["encoder.layers.1.weight"] == {0}
    assert users["asking.layers.0.bias"] == users["encoder.layers.2.weight"] == users["seen"] == {1}
    assert users["weight"] == {1, 2}
    assert "nothing" not in users


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_a_tied_weight_is_used_by_both() -> None:
    assert Stages(Tied(), "last", 2, None).users() == {
        "first.weight": {0, 1},
        "first.bias": {0},
        "last.bias": {1},
    }


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ("inner,asking", "names 'asking', which in Model comes before another"),
        ("asking,nowhere", "names 'nowhere', which in Model is none that its code calls"),
        ("asking", "begins 1 stages besides the first, and there are 3"),
    ],
)
def test_a_cut_that_cannot_be(cut: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Stages(Model(), cut, 3, {"twice": True})


class Siamese(nn.Module):
    """Calls a part with BatchNorm twice, and others before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.twin = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        found: Tensor = self.twin(x) - self.twin(-x)
        return found


def test_no_cut_is_chosen_that_parts_the_calls_of_a_batch_norm() -> None:
    model = Siamese()
    example = {"x": torch.zeros(2, 4)}
    graph = read_both(model, example, [])[True]
    layers = layers_of(graph)
    assert layers == ["enter", *(f"twin.{place}" for place in range(5))]
    assert parts_batch_norm(graph, model) == [False] * 2 + [True] * 3
    learner: Any = SimpleNamespace(
        mesh=SimpleNamespace(degree=lambda axis: 2),
        settings=SimpleNamespace(weights=None),
        data=SimpleNamespace(degree=1),
    )
    pipeline = Pipeline(balance="equal", memory="1e9,1e9")
    cut = pipeline._best_cut(model, graph, None, learner)
    assert cut == "twin.1"
    Stages(model, cut, 2, example).check_apart([0, 1])
    with pytest.raises(TaskError, match="holds BatchNorm"):
        Stages(model, "twin.2", 2, example).check_apart([0, 1])


class Unreadable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_code_that_asks_for_numbers_says_the_way_out() -> None:
    with pytest.raises(TaskError, match=r"Unreadable.forward cannot be read .*nn.Sequential of blocks"):
        read_both(Unreadable(), None, ())
