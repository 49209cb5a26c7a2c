"""A model in stages over ranks, against one device, in float64."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, DivergenceError, EvenerError, TaskError
from evener.strategies.pipeline.pipeline import Pipeline, draw
from evener.tools.verify import Trajectory, record, relative_error
from evener.training.engine import Engine
from tests.comparing import handed_on, worst
from tests.strategies.stages import (  # noqa: F401 (some as tasks of this module, by name)
    WORDS,
    choosing,
    deep,
    language,
    layers,
    normalized,
    penalised,
)
from tests.tasks import _task
from tests.tiers import NIGHTLY


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    options = settings.pop("options", None)
    usual: dict[str, Any] = {"dtype": "float64", "device": "cpu", "steps": 5}
    if options is not None:
        usual["strategy"] = Pipeline(**options)
    return record(f"{__name__}:{name}", None, RunConfig(**(usual | settings)), environment)


@pytest.mark.parametrize(
    ("size", "name", "options", "settings"),
    [
        (3, "layers", {"schedule": "gpipe"}, {}),
        (2, "layers", {"microbatches": 5, "cut": "3"}, {"micro_batch": 4, "clip_norm": 0.05}),
        pytest.param(2, "layers", {"schedule": "interleaved", "stages_per_rank": 2}, {}, marks=NIGHTLY),
        slow(2, "layers", {"schedule": "interleaved", "stages_per_rank": 3, "microbatches": 3}, {}),
        nightly(2, "layers", {"schedule": "zero-bubble", "stages_per_rank": 2, "balance": "equal"}, {}),
        (3, "layers", {"schedule": "zero-bubble"}, {"balance": "2,0,1"}),
        slow(2, "penalised", {}, {"clip_norm": 0.1, "balance": "3,1"}),
        nightly(2, "language", {}, {"clip_norm": 0.1}),
        nightly(3, "language", {"cut": "blocks.1,head"}, {"micro_batch": 4}),
        slow(3, "language", {"cut": "embed,blocks.2", "schedule": "zero-bubble"}, {}),
        (
            2,
            "language",
            {"schedule": "interleaved", "stages_per_rank": 2, "cut": "blocks.0,blocks.2,norm"},
            {},
        ),
        (2, "normalized", {}, {}),
        nightly(3, "normalized", {"schedule": "gpipe"}, {"micro_batch": 4}),
        (2, "choosing", {"cut": "2"}, {}),
        (2, "moved_on", {"microbatches": 1}, {}),
        (2, "sized", {}, {}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(
    ranks: Any, size: int, name: str, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    alone = settings | {"balance": "equal", "strategy": "single"}
    reference = trajectory(name, Environment(), **alone)
    divided = ranks(size).run(trajectory, name, options=options, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "ranks differ"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        nightly("language", {"balance": "5,1", "clip_norm": 0.1}),
        slow("normalized", {"balance": "3,1", "micro_batch": 4}),
        nightly("layers", {"balance": "0,1"}),
        slow("choosing", {"balance": "3,1"}),
    ],
    ids=str,
)
def test_pipelines_side_by_side(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    reference = trajectory(name, Environment(), **(settings | {"balance": "equal", "strategy": "single"}))
    divided = ranks(4).run(trajectory, name, options={}, mesh="pipeline=2,data=2", **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "ranks differ"


# Evaluation, state


def held(name: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """What a rank holds, and what evaluation and prediction come to."""
    strategy = "single" if options is None else Pipeline(**options)
    task = globals()[name]()
    with Engine(task, RunConfig(strategy=strategy, device="cpu", dtype="float64", steps=3)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        rows = {n: len(p) for n, p in engine.model.named_parameters() if p.ndim}
        return {
            "rows": rows,
            "apart": [n for n, p in engine.model.named_parameters() if shard_spec(p)],
            "metrics": engine.evaluate(),
            "predicted": engine.predict(engine.task.evaluate, everywhere=True)
            if name == "normalized"
            else None,
        }


def test_each_rank_holds_its_stage_and_evaluates_as_one_device(ranks: Any) -> None:
    (alone,) = ranks(1).run(held, "normalized", None)
    found = ranks(3).run(held, "normalized", {"cut": "1,2.2"})
    assert [one["rows"]["0.0.weight"] for one in found] == [6, 0, 0]
    assert [one["rows"]["1.0.weight"] for one in found] == [0, 6, 0]
    assert [one["rows"]["4.weight"] for one in found] == [0, 0, 3]
    for one in found:
        assert set(one["apart"]) == set(alone["rows"]), "every weight has one owner"
        assert one["metrics"] == pytest.approx(alone["metrics"], rel=1e-12)
        assert relative_error(alone["predicted"], one["predicted"]) <= 1e-12


def test_ties_are_whole_on_every_rank(ranks: Any) -> None:
    for one in ranks(2).run(held, "language", {"cut": "blocks.2"}):
        assert one["rows"]["embed.weight"] == WORDS
        whole = {"embed.weight", "never.weight", "never.bias", "frozen"}
        assert whole & set(one["apart"]) == {"frozen"}, "used by one stage"


@pytest.mark.parametrize(
    "places",
    [
        ((Pipeline(cut="1"), 2, None), ("ddp", 3, None)),
        (("ddp", 2, None), (Pipeline(schedule="zero-bubble"), 3, None)),
        slow(((Pipeline(), 4, "pipeline=2,data=2"), (Pipeline(cut="2"), 2, None))),
    ],
    ids=str,
)
def test_a_checkpoint_is_taken_into_every_other_strategy(ranks: Any, places: Any) -> None:
    reference = trajectory("normalized", Environment(), strategy="single", steps=5)
    where = [(size, {"strategy": strategy, "mesh": mesh}) for strategy, size, mesh in places]
    found = handed_on(ranks, normalized, where, (3, 5))
    for state in found:
        assert worst(reference.weights, {name: state["model"][name] for name in reference.weights}) <= 1e-11


# What it says


class Sized(nn.Module):
    """Asks for sizes, type and device of weights of every stage, and its code cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        assert len(x)
        assert self.embed.weight.shape[0] == self.head.weight.size(1) == 6
        x = self.embed(x) * self.head.weight.numel() ** -0.5
        for block in self.blocks:
            x = block(x)
            assert next(self.parameters()).dtype == x.dtype == self.head.weight.dtype
        outputs: Tensor = self.head(x.to(self.embed.weight)) * len(self.embed.bias)
        return outputs


def sized() -> Task:
    return _task(model=Sized, metrics={})


class Bad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x) if self.training else x


def infinite() -> Task:
    return _task(model=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Bad(), nn.Linear(6, 3)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x.mean() > 0 else self.right(x)


def branching() -> Task:
    return _task(model=Branching)


class Bare(nn.Module):
    """Weights without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def bare() -> Task:
    return _task(model=Bare)


class Counting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return self.left(x) + self.right(x)


def counting() -> Task:
    return _task(model=Counting)


class Drawing(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * torch.rand(()) + self.right(x)


def drawing() -> Task:
    return _task(model=Drawing)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.Sequential(nn.BatchNorm1d(6))
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.normed(self.mix(self.normed(x))))


def twice() -> Task:
    return _task(model=Twice)


def contrasting() -> Task:
    def against_others(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs @ outputs.T).logsumexp(1).sum()

    return _task(model=deep, loss=evener.loss(total=against_others, count=len), metrics={})


def moved_on() -> Task:
    normed = nn.utils.parametrizations.spectral_norm
    return _task(model=lambda: nn.Sequential(normed(nn.Linear(6, 5)), nn.ReLU(), normed(nn.Linear(5, 4))))


def whole_weights() -> Task:
    return _task(model=deep, optimizer=lambda parameters: torch.optim.Adafactor(parameters))


def by_hand() -> None:
    with Engine(layers(), RunConfig(strategy=Pipeline(), device="cpu")) as engine:
        for batch in engine.batches():
            engine.model(batch.micro_batches[0].inputs)


def refused(name: str, options: dict[str, Any]) -> tuple[type[BaseException], str]:
    warnings.simplefilter("ignore")
    with pytest.raises(EvenerError) as caught:
        by_hand() if name == "by_hand" else trajectory(name, options=options)
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "kind", "words"),
    [
        ("branching", {}, ConfigurationError, r"Branching calls 1 modules one after the other"),
        ("bare", {}, ConfigurationError, "Bare calls 0 modules one after the other"),
        ("counting", {}, TaskError, "Counting.forward changes its attribute 'calls'"),
        ("drawing", {}, TaskError, "the code around the blocks draws random numbers"),
        (
            "layers",
            {"blocks": "here"},
            ConfigurationError,
            "blocks names 'here', .* lists of blocks .* are 2",
        ),
        (
            "twice",
            {"cut": "mix"},
            TaskError,
            "normed.0 is called on 2 ranks of the pipeline, and holds BatchNorm",
        ),
        (
            "layers",
            {"cut": "here"},
            ConfigurationError,
            "the cut names 'here', .* a stage can begin at 1, 2.0, 2.1",
        ),
        ("layers", {"cut": "1,2"}, ConfigurationError, "cut '1,2' begins 2 stages besides the first"),
        ("contrasting", {}, ConfigurationError, "it looks at several samples together.* microbatches=1"),
        ("by_hand", {}, ConfigurationError, r"take steps with engine.step\(batch\)"),
        ("infinite", {}, DivergenceError, "the loss is nan in step 0 on rank 1"),
    ],
)
def test_what_cannot_be_is_refused(
    ranks: Any, name: str, options: dict[str, Any], kind: type, words: str
) -> None:
    for found, message in ranks(2).run(refused, name, options):
        assert issubclass(found, kind), message
        assert re.search(words, message), message


def told(name: str, options: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trajectory(name, options=options, steps=2)
    return [str(each.message) for each in caught if "buffer" in str(each.message)]


def test_buffers_that_each_piece_moves_on_are_told_of_once(ranks: Any) -> None:
    for of_rank in ranks(2).run(told, "moved_on", {}):
        (words,) = of_rank
        assert re.search(r"buffer .*_[uv] is written in each forward .* microbatches=1", words)
    assert ranks(2).run(told, "moved_on", {"microbatches": 1}) == [[], []]
    assert ranks(2).run(told, "normalized", {}) == [[], []]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "fast"}, "no schedule 'fast'"),
        ({"stages_per_rank": 2}, "one stage a rank"),
        ({"balance": "weight"}, "balance is 'weight'"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0"),
        ({"memory": "much"}, "memory is 'much'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Pipeline(**options)


def cut_of(balance: str) -> str:
    """Of layers that cost the same, by fixed speeds."""
    config = RunConfig(strategy=Pipeline(balance="equal"), device="cpu", balance=balance)
    with Engine(layers(), config) as engine:
        found: Any = engine.model.forward
        return str(found.stages.cut)


@pytest.mark.parametrize(("balance", "cut"), [("equal", "3.1"), ("3,1", "5.0"), ("0,1", "0")])
def test_a_faster_rank_has_more_layers(ranks: Any, balance: str, cut: str) -> None:
    assert set(ranks(2).run(cut_of, balance)) == {cut}


def drawn() -> str:
    with Engine(layers(), RunConfig(strategy=Pipeline(microbatches=3), device="cpu", steps=2)) as engine:
        with pytest.raises(ConfigurationError, match="no step yet"):
            draw(engine.learner)
        for batch in engine.batches():
            engine.step(batch)
        return str(draw(engine.learner))


def test_the_last_step_is_drawn_alike_on_all_ranks(ranks: Any) -> None:
    first, second = ranks(2).run(drawn)
    assert first == second
    assert re.fullmatch(
        r"(?:(predicted|measured), 3 micro-batches: .* bubble \d+%\n 0  .*\n 1  .*\n?){2}", first
    )
