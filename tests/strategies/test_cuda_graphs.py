"""CUDA graphs train what eager passes train, to the last bit, and what they would change is found and said.

On a CPU a tape of operators stands in for a graph: it runs the same kernels on the same memory, and no Python.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.components.cuda_graphs.recorded_pass import gradients_of
from evener.components.cuda_graphs.recorder import RECORDERS
from evener.components.cuda_graphs.replays import Replays
from evener.components.cuda_graphs.unfit import leaves_of
from evener.core.task.task import Task
from evener.errors import DivergenceError
from evener.strategies.cuda_graphs import words_of_ranks
from evener.training.engine import Engine
from evener.training.reporting.terminal import summary_text
from tests import tasks
from tests.components.cuda_graphs.tape import TapeRecorder
from tests.strategies.graph_runs import (
    GRAPHS,
    Odd,
    Weights,
    assert_same_training,
    convolutions,
    engine,
    of_model,
    taped,
    trained,
)

__all__ = ["taped"]  # a fixture that all tests here use


class Recurrent(nn.Module):
    """Reads features one after the other. It has its weights in a list, too, as PyTorch's recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(1, 4), nn.Linear(4, 3)
        self.flat = [self.cell.weight_ih, self.cell.weight_hh, self.cell.bias_ih, self.cell.bias_hh]

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 4)
        of_input, of_hidden, *biases = self.flat
        for feature in x.split(1, 1):
            hidden = torch.tanh(feature @ of_input.T + hidden @ of_hidden.T + biases[0] + biases[1])
        found: Tensor = self.out(hidden)
        return found


adamw = partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (tasks.plain(), {}),
        (replace(tasks.plain(), optimizer=adamw), {"clip_norm": 0.1}),
        (of_model(convolutions, optimizer=adamw), {}),
        (of_model(convolutions), {"precision": "bf16"}),
        (of_model(Odd), {"clip_norm": 0.1}),
        (of_model(Odd, train=TensorDataset(tasks.draws(48, 6), tasks.classes(48, 3))), {"micro_batch": 4}),
        (tasks.penalty(), {"non_finite": "skip"}),
        (tasks.layouts(), {}),
        (tasks.summed(), {"lean": True}),
        (of_model(Recurrent), {}),
    ],
    ids=[
        "sgd",
        "adamw",
        "convolutions",
        "bf16",
        "odd",
        "micro-batches",
        "penalty",
        "layouts",
        "summed",
        "recurrent",
    ],
)
def test_a_replayed_training_is_the_same(task: Task, settings: dict[str, Any]) -> None:
    replays = assert_same_training(task, 8, **settings)
    assert not replays.reason


def test_the_last_batch_of_an_epoch_leaves_the_graph_and_gets_its_own() -> None:
    """47 samples: 13, 13, 13 and 8. Those of 8 come once an epoch."""
    few, many = trained(tasks.plain(), epochs=2, **GRAPHS)[2], trained(tasks.plain(), epochs=8, **GRAPHS)[2]
    assert (few.recorded, many.recorded) == (1, 2)


def test_graphs_of_autograd_that_live_on_are_not_those_of_a_recording() -> None:
    """As DistributedDataParallel's do, and those of a loss that somebody keeps."""
    seen: list[set[Tensor]] = []

    def watched(total: Tensor, *args: Any) -> Any:
        seen.append(leaves_of(total))
        return gradients_of(total, *args)

    with (
        mock.patch("evener.components.cuda_graphs.recorded_pass.gradients_of", watched),
        mock.patch("evener.components.cuda_graphs.replays.gradients_of", watched),
        engine(tasks.plain(), **GRAPHS) as made,
    ):
        for batch in made.batches():
            made.step(batch)
        own = set(made.model.parameters())
    assert len(seen) == 4, "two shapes, each tried and recorded"
    assert not any(leaves & own for leaves in seen)


def test_a_comparison_leaves_no_graph_of_autograd_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is held by its own hooks would live until Python collects garbage, with the nodes of the parameters."""
    compared, kept = Replays._compared, list[Any]()

    def remembered(replays: Replays, *args: Any) -> Tensor:
        total = compared(replays, *args)
        kept.append(weakref.ref(total))
        return total

    monkeypatch.setattr(Replays, "_compared", remembered)
    gc.disable()
    try:
        trained(tasks.plain(), **GRAPHS)
        assert len(kept) > 4
        assert not any(reference() is not None for reference in kept)
    finally:
        gc.enable()


def test_comparisons_are_few() -> None:
    replays = assert_same_training(tasks.plain(), 100, epochs=40)
    assert replays.passes - replays.replayed < 25


def test_the_memory_of_gradients_is_not_overwritten_between_two_micro_batches() -> None:
    """Two shapes in one step, so that graphs alternate in it."""
    data = TensorDataset(tasks.draws(50, 6), tasks.classes(50, 3))
    assert_same_training(of_model(Odd, train=data, batch_size=10), 20, micro_batch=4, epochs=12)


# Reports


def test_the_run_tells_of_its_graphs() -> None:
    result = evener.fit(tasks.plain, processes=1, device="cpu", cuda_graphs="auto", show=False, epochs=4)
    assert result.summary.cuda_graphs == "2 CUDA graphs, replayed in 6 of 16 passes"
    assert result.summary.cuda_graphs in summary_text(result.summary)


def test_the_records_show_the_steps_that_were_slow() -> None:
    """The balancer learns nothing from a step that records or compares a graph."""
    counts: list[int] = []

    class Counted(evener.Observer):
        def step(self, record: Any) -> None:
            counts.append(sum(record.graphs))

    with mock.patch("tests.strategies.graph_runs.Engine", partial(Engine, observers=[Counted()])):
        replays = trained(tasks.plain(), epochs=2, **GRAPHS)[2]
    slow = [step for step, (before, after) in enumerate(pairwise([0, *counts])) if after > before]
    assert slow == [2, 4, 6]  # the third of 13 samples is recorded and compared; replays 2 and 4 are compared
    assert replays.recorded == 1


def test_the_run_says_at_its_beginning_why_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    evener.fit(tasks.plain, processes=1, device="cpu", cuda_graphs="auto", steps=1, exact="bits")
    assert "no CUDA graphs: exact=bits runs grain by grain" in capsys.readouterr().err


def test_a_summary_names_the_ranks_that_differ() -> None:
    assert words_of_ranks(["one", "one"]) == "one"
    assert words_of_ranks(["one", "two"]) == "rank 0: one; rank 1: two"
    assert words_of_ranks([str(rank) for rank in range(10)]).endswith("rank 7: 7; and on 2 more")


# Several ranks


def on_ranks(name: str, strategy: str = "ddp", **settings: Any) -> tuple[Weights, list[float], Any]:
    """What a rank has trained: the tape is registered in its own process."""
    with mock.patch.dict(RECORDERS, {"cpu": TapeRecorder}):
        task = of_model(Odd) if name == "odd" else getattr(tasks, name)()
        weights, losses, replays = trained(task, strategy=strategy, **settings)
        found = None if replays is None else (replays.replayed, replays.reason)
        return weights, losses, found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plain", {"balance": "0.7,0.3"}),
        ("odd", {"clip_norm": 0.1}),
        ("odd", {"micro_batch": 6, "balance": "0.6,0.4"}),
        ("batch_norm", {"batch_norm": "local", "batch_size": 12}),
    ],
    ids=str,
)
def test_ranks_train_the_same_with_graphs(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    eager = ranks(2).run(on_ranks, name, **settings)
    for (weights, losses, _), (same, same_losses, (replayed, reason)) in zip(
        eager, ranks(2).run(on_ranks, name, **settings, **GRAPHS), strict=True
    ):
        assert losses == same_losses
        assert all(torch.equal(value, same[name]) for name, value in weights.items())
        assert replayed > 5
        assert not reason


@pytest.mark.parametrize(
    ("name", "strategy", "words"),
    [("batch_norm", "ddp", "layer 1 communicates"), ("plain", "sharded", "strategy 'sharded'")],
)
def test_what_runs_over_ranks_in_other_ways_is_named(
    ranks: Any, name: str, strategy: str, words: str
) -> None:
    for _, _, (replayed, reason) in ranks(2).run(on_ranks, name, strategy, **GRAPHS, epochs=1):
        assert replayed == 0
        assert words in reason


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("settings", "rtol"), [({}, 1e-3), ({"precision": "bf16"}, 3e-2), ({"micro_batch": 4}, 1e-3)], ids=str
)
def test_a_gpu_trains_the_same_with_graphs(settings: dict[str, Any], rtol: float) -> None:
    """Two shapes take turns, with dropout. Where memory lies may change the order of a sum."""
    task = of_model(convolutions)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        _, losses, _ = trained(task, device="cuda", **settings)
        _, same, replays = trained(task, device="cuda", **settings, **GRAPHS)
    torch.testing.assert_close(losses, same, rtol=rtol, atol=rtol)
    assert not replays.reason, replays.reason
    assert replays.replayed > 8


class Rooted(nn.Module):
    """Its loss is finite where a gradient is not: at a gain of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = convolutions(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x) + self.gain.sqrt()
        return scores


@pytest.mark.gpu
def test_a_gpu_names_a_gradient_that_is_not_finite_with_graphs() -> None:
    """There the graphs compute what is looked at."""

    def train(**settings: Any) -> str:
        def spoil(made: Engine, step: int) -> None:
            if step == 18:
                made.model.gain.data.zero_()  # type: ignore[union-attr, operator]

        with pytest.raises(DivergenceError, match="gain") as error:
            trained(of_model(Rooted), spoil, device="cuda", **settings)
        return str(error.value)

    assert train() == train(**GRAPHS)
