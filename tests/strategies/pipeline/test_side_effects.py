"""What code around blocks does besides returning values: it is read rightly, or run, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.core.task.task import call_model
from evener.errors import ConfigurationError, TaskError
from evener.strategies.pipeline.call_list import calls_of
from evener.strategies.pipeline.module_calls import leaves_of
from evener.strategies.pipeline.reading_check import check_reading
from evener.strategies.pipeline.stage_forward import StagedForward
from evener.strategies.pipeline.stages import Stages
from evener.strategies.pipeline.traced_run import Rehearsal, TracedCalls, try_both
from evener.strategies.pipeline.tracing import opened_in, read_both

CPU = torch.device("cpu")
SIZE = 3
Way = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = (way,)
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.register_buffer("steps", torch.zeros(()))
        self.count, self.seen, self.last = torch.zeros(()), [], None
        self.calls = 0

    def forward(self, x: Tensor, factor: float = 1.0, word: str = "a", scale: float = 1.0) -> Tensor:
        found = self.way[0](self, x) * factor * scale
        return found if word == "a" else -found


def plain(model: Model, x: Tensor) -> Tensor:
    found: Tensor = model.second(torch.tanh(model.first(x)))
    return found


def assigned(model: Model, x: Tensor) -> Tensor:
    model.steps = model.steps + 1
    return plain(model, x)


def counted(model: Model, x: Tensor) -> Tensor:
    model.count = model.count + 1
    return plain(model, x) * model.count


def counted_in_place(model: Model, x: Tensor) -> Tensor:
    model.count.add_(1)
    return plain(model, x) * model.count


def noted(model: Model, x: Tensor) -> Tensor:
    model.seen.append(1)
    return plain(model, x)


def following(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        for one, other in zip(model.first.parameters(), model.second.parameters(), strict=True):
            other.lerp_(one, 0.1)
    return plain(model, x)


def hooked(model: Model, x: Tensor) -> Tensor:
    assert len(x)
    h = model.first(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / 2)
    found: Tensor = model.second(h)
    return found


def penalized(model: Model, x: Tensor) -> Tensor:
    return plain(model, x) * (1 + sum(p.square().sum() for p in model.first.parameters()))


def asked(model: Model, x: Tensor) -> Tensor:
    h = model.first(x)
    found: Tensor = model.second(h * 2 if isinstance(h, Tensor) else h)
    return found


def switched(model: Model, x: Tensor) -> Tensor:
    model.norm.eval()
    found: Tensor = model.second(model.norm(model.first(x)))
    return found


def without_gradients(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = model.first(x)
        size = h.abs().mean()
    found: Tensor = model.second(h + model.first(x) / size)
    return found


def cast(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = model.first(x)
    found: Tensor = model.second(h.float())
    return found


def graphs_of(model: Model, x: Tensor, how: str) -> Any:
    """Graphs of the model, by its code or by a run."""
    if how == "tried":
        return try_both(Rehearsal(model, leaves_of(model, opened_in(model, ())), {"x": x}, CPU, None))
    arguments = {"x": x, "factor": 1.0, "word": "a", "scale": 1.0}
    graphs = read_both(model, arguments, ())
    check_reading(graphs, Rehearsal(model, (), arguments, CPU, None))
    return graphs


def stages_of(model: Model, x: Tensor, how: str) -> Stages:
    graphs = graphs_of(model, x, how)
    return Stages(
        model,
        "second",
        2,
        {"x": x, "factor": 1.0, "word": "a", "scale": 1.0},
        graphs if how == "tried" else None,
    )


def results_of(way: Way, x: Tensor, how: str | None) -> dict[str, Tensor | None]:
    """Output and gradients of a model: of one device, or of stages one after the other."""
    torch.manual_seed(0)
    model: Any = Model(way)
    if how is None:
        found = model(x)
    else:
        forward = StagedForward(stages_of(model, x, how), {})
        model.forward, found = forward, ()
        for number in range(2):
            found = forward.run(number, found, call_model, x)
    found.square().sum().backward()
    return {"outputs": found.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", ["read", "tried"])
@pytest.mark.parametrize(
    ("way", "words"),
    [
        (assigned, "another tensor in the place of 'steps'|cannot be read"),
        (counted, "changes its attribute 'count'"),
        (counted_in_place, "attribute 'count'|writes into a tensor that it did not make"),
        (noted, r"changes its attribute 'seen"),
        (following, "writes into the parameter|computes with second.weight in a way"),
        (hooked, "registers a hook|cannot be read"),
    ],
)
def test_what_would_be_lost_is_refused_and_undone(way: Way, words: str, how: str) -> None:
    model, x = Model(way), torch.randn(4, SIZE)
    held, weight = dict(vars(model)), model.second.weight.detach().clone()
    with pytest.raises(TaskError, match=words):
        graphs_of(model, x, how)
    if how == "read":
        assert all(vars(model)[key] is value for key, value in held.items())
        assert model.seen == []
    assert type(model.steps) is Tensor
    assert torch.equal(model.second.weight, weight)


@pytest.mark.parametrize("way", [penalized, asked, switched, cast])
def test_code_that_stand_ins_would_mislead_is_not_read_but_run(way: Way) -> None:
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))
    with pytest.raises(TaskError):
        graphs_of(Model(way), x, "read")
    torch.testing.assert_close(results_of(way, x, "tried"), results_of(way, x, None))


@pytest.mark.parametrize("how", ["read", "tried"])
@pytest.mark.parametrize("way", [plain, without_gradients])
def test_gradients_that_the_code_switches_off_stay_off(way: Way, how: str) -> None:
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(results_of(way, x, how), results_of(way, x, None))


def test_numbers_may_change_from_batch_to_batch_and_words_may_not() -> None:
    model: Any = Model(plain)
    x = torch.randn(4, SIZE)
    own = model.forward
    forward = StagedForward(
        Stages(model, "second", 2, {"x": x, "factor": 2.0, "word": "a", "scale": 1.0}, None), {}
    )
    expected = own(x, 3.0)
    model.forward = forward

    def through(**inputs: Any) -> Any:
        found: Any = ()
        for number in range(2):
            found = forward.run(number, found, call_model, {"x": x, **inputs})
        return found

    torch.testing.assert_close(through(factor=3.0), expected)
    with pytest.raises(ConfigurationError, match="is given word='b', and was given 'a'"):
        through(factor=2.0, word="b")
    with pytest.raises(ConfigurationError, match=r"is given scale=4.0, and was given 1.0"):
        through(factor=2.0, scale=4.0)
    with pytest.raises(ConfigurationError, match=r"is given factor=None, and was given 2.0"):
        through(factor=None)


@pytest.mark.parametrize("other", [None, "it asks whether something is a tensor"])
def test_ranks_read_the_code_all_or_none(other: str | None) -> None:
    """Their first samples may differ, and with them the way that the code goes."""
    model, answers = Model(plain), iter([other])

    def gather_objects(own: Any) -> list[Any]:
        return [own, next(answers, own)]

    learner: Any = SimpleNamespace(
        session=SimpleNamespace(device=CPU, control=SimpleNamespace(gather_objects=gather_objects)),
        settings=SimpleNamespace(weight_type=None),
    )
    example = {"x": torch.randn(4, SIZE), "factor": 1.0, "word": "a", "scale": 1.0}
    found = calls_of(model, example, learner, (), None)
    assert isinstance(found[True], TracedCalls) is (other is not None)
