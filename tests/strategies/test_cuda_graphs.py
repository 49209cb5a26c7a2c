"""CUDA graphs train what eager passes train, to the last bit, and what they would change is found and said.

On a CPU a tape of operators stands in for a graph: it runs the same kernels on the same memory, and no Python.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import evener
from evener.components.cuda_graphs.recorded_pass import gradients_of
from evener.components.cuda_graphs.recorder import RECORDERS
from evener.components.cuda_graphs.replays import Replays
from evener.components.cuda_graphs.unfit import leaves_of
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import DivergenceError
from evener.strategies.cuda_graphs import words_of_ranks
from evener.torch_internals.autograd import version
from evener.training.engine import Engine
from evener.training.reporting.terminal import summary_text
from tests import tasks
from tests.components.cuda_graphs.tape import TapeRecorder

Weights = dict[str, Tensor]
GRAPHS = {"cuda_graphs": "auto"}


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", TapeRecorder)


def engine(task: Task, **settings: Any) -> Engine:
    return Engine(task, RunConfig(**({"device": "cpu", "strategy": "single", "epochs": 8} | settings)))


def trained(
    task: Task, after: Callable[[Engine, int], object] = lambda engine, step: None, **settings: Any
) -> tuple[Weights, list[float], Any]:
    """The weights and buffers, the losses, and what is known of the graphs. ``after`` each step something is done."""
    with engine(task, **settings) as made:
        losses = []
        for batch in made.batches():
            losses.append(made.step(batch).loss)
            after(made, made.steps_done)
        weights = {name: value.detach().clone() for name, value in made.model.state_dict().items()}
        return weights, losses, made.learner.replays


def assert_same_training(task: Task, least: int, **settings: Any) -> Any:
    """With graphs and without. At least so many passes are replayed."""
    weights, losses, _ = trained(task, **settings)
    replayed, same_losses, replays = trained(task, **settings, **GRAPHS)
    assert losses == same_losses
    assert weights.keys() == replayed.keys()
    for name, value in weights.items():
        assert torch.equal(value, replayed[name]), name
    assert replays.replayed >= least, replays.words
    return replays


def of_model(model: Callable[[], nn.Module], **parts: Any) -> Task:
    return replace(tasks.plain(), model=model, **parts)


class Odd(nn.Module):
    """A layer that is not used, one that is frozen, two parameters with one gradient, and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.one, self.other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        found: Tensor = self.out(torch.tanh(self.used(self.frozen(x - self.average))))
        return found + (self.one + self.other)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


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


# What a graph cannot repeat


class Counting(nn.Linear):
    """Scales with the number of its passes."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) / self.passes


class Drawing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 + random.random())


class Writing(nn.Linear):
    """Keeps an average in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.average = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.average.add_(found.detach().mean(0))
        return found - self.average


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.weight.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (of_model(partial(Counting)), "changes passes"),
        (of_model(partial(Drawing, 6, 3)), "random numbers on the host"),
        (of_model(partial(Writing)), "writes in place to average"),
        (of_model(partial(Hooked)), "weight has hooks"),
        (tasks.replaced_buffers(), "changes average"),
        (tasks.branches(), "the host waits"),
        (tasks.dropout(), "draws random numbers by the samples"),
        (tasks.sparse(), "are sparse"),
    ],
    ids=["counter", "random", "write", "hook", "buffer", "branch", "dropout", "sparse"],
)
def test_what_cannot_be_recorded_is_said_and_trains_as_ever(task: Task, words: str) -> None:
    def train(**settings: Any) -> Any:
        random.seed(0)
        return trained(task, **settings)

    (weights, losses, _), (same, same_losses, replays) = train(), train(**GRAPHS)
    assert losses == same_losses
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert replays.replayed == 0
    assert words in replays.reason


class Remembering(torch.optim.SGD):
    """Adds the difference from the gradient before, which it keeps without a copy."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                parameter.data.sub_(0.1 * gradient + 0.05 * (gradient - state.get("before", gradient)))
                state["before"] = gradient


def test_an_optimizer_that_keeps_gradients_keeps_its_own() -> None:
    task = of_model(convolutions, optimizer=Remembering)
    (weights, losses, _), (same, same_losses, replays) = trained(task), trained(task, **GRAPHS)
    assert losses == same_losses
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert "keeps gradients beyond their step" in replays.reason


def test_a_weight_of_the_loss_gets_its_gradient() -> None:
    temperature = nn.Parameter(torch.ones(()))
    loss = evener.SumLoss(
        count=len,
        total=lambda outputs, targets: F.cross_entropy(outputs * temperature, targets, reduction="sum"),
    )

    def train(**settings: Any) -> tuple[float, Any]:
        temperature.grad = None
        replays = trained(replace(tasks.plain(), loss=loss), **settings)[2]
        assert temperature.grad is not None
        return temperature.grad.item(), replays

    (value, _), (same, replays) = train(), train(**GRAPHS)
    assert value == same
    assert "no parameter of the model" in replays.reason


def test_inputs_that_a_pass_overwrites_are_those_of_the_batch() -> None:
    class Centering(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(1).mul_(2))

    assert_same_training(of_model(partial(Centering, 6, 3)), 8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"update_in_backward": True}, "update_in_backward"),
        ({"micro_batch": "auto"}, "micro_batch=auto"),
        ({"exact": "bits"}, "exact=bits"),
        ({"recompute": "blocks"}, "recompute"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_graphs_are_named(settings: dict[str, Any], words: str) -> None:
    block = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())  # noqa: E731
    blocks = of_model(lambda: nn.Sequential(nn.Sequential(block(), block()), nn.Linear(6, 3)))
    with engine(blocks, **settings, **GRAPHS) as made:
        assert words in made.learner.replays.reason  # type: ignore[union-attr]


def test_a_device_without_graphs_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RECORDERS, "cpu")
    with engine(tasks.plain(), **GRAPHS) as made:
        assert made.learner.replays.reason == "a device of type cpu has none"  # type: ignore[union-attr]


def test_without_the_setting_there_are_none() -> None:
    with engine(tasks.plain()) as made:
        assert made.learner.replays is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("not permitted")])
def test_a_recording_that_fails_leaves_the_training_alone(error: Exception) -> None:
    task = of_model(convolutions)
    weights, losses, _ = trained(task)
    with mock.patch.object(TapeRecorder, "record", side_effect=error):
        same, same_losses, replays = trained(task, **GRAPHS)
    assert losses == same_losses
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert replays.reason == f"{type(error).__name__}: {error}"


# Changes between steps


CLOCK = [1.0]


class Timed(nn.Linear):
    """Reads a clock that no walk through the model finds."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * now()
        self.average.mul_(0.5).add_(x.detach().mean(0))
        return super().forward(F.dropout(x - self.average, 0.1))


def now() -> float:
    return CLOCK[0]


@pytest.fixture
def clock() -> Iterator[None]:
    yield
    CLOCK[0] = 1.0


@pytest.mark.usefixtures("clock")
def test_a_clock_that_a_pass_reads_ends_the_run_at_the_next_comparison() -> None:
    def tick(made: Engine, step: int) -> None:
        CLOCK[0] = 1.0 if step < 15 else 1.5

    with pytest.raises(DivergenceError, match=r"differ in the loss.*Steps after step \d+ may have computed"):
        trained(of_model(Timed), tick, epochs=20, **GRAPHS)


@pytest.mark.usefixtures("clock")
def test_a_clock_that_never_stands_still_is_found_before_a_replay_counts() -> None:
    """The comparison leaves buffers and generators as the eager pass does."""

    def tick(made: Engine, step: int) -> None:
        CLOCK[0] = 1 + 0.1 * step

    def train(**settings: Any) -> Any:
        CLOCK[0] = 1.0
        return trained(of_model(Timed), tick, **settings)

    (weights, losses, _), (same, same_losses, replays) = train(), train(**GRAPHS)
    assert losses == same_losses
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert replays.replayed == 0
    assert "a CUDA graph and the eager pass differ in the loss" in replays.reason


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.scale = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.first(x)) * self.scale)
        return found


def scale(made: Engine, step: int) -> None:
    if step == 9:
        made.model.scale = 0.5  # type: ignore[assignment]


def freeze(made: Engine, step: int) -> None:
    if step in (9, 17):
        made.model.first.requires_grad_(step == 17)  # type: ignore[union-attr, operator]


def move_weights(made: Engine, step: int) -> None:
    if step == 9:
        for parameter in made.model.parameters():
            parameter.data = parameter.data * 0.5


def load_weights(made: Engine, step: int) -> None:
    if step == 9:
        made.model.load_state_dict({name: value * 0.5 for name, value in made.model.state_dict().items()})


def load_state(made: Engine, step: int) -> None:
    if step == 9:
        state = made.learner.state_dict()
        state["model"] = {name: value * 0.5 for name, value in state["model"].items()}
        made.learner.load_state_dict(state)


def keep_gradient(made: Engine, step: int) -> None:
    """A gradient that stays between two steps: zeros, as of an optimizer that does not set them to None."""
    for parameter in made.model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        (scale, "scale has changed"),
        (freeze, "first."),
        (move_weights, "has changed"),
        (load_weights, ""),
        (load_state, ""),
        (keep_gradient, ""),
    ],
)
def test_changes_between_steps_are_followed(change: Callable[[Engine, int], object], anew: str) -> None:
    told: list[str] = []
    weights, losses, _ = trained(of_model(Scaled), change)

    class Told(evener.Observer):
        def event(self, record: Any) -> None:
            told.append(record.words)

    with mock.patch(f"{__name__}.Engine", partial(Engine, observers=[Told()])):
        same, same_losses, replays = trained(of_model(Scaled), change, **GRAPHS)
    assert losses == same_losses
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert replays.replayed
    assert not replays.reason
    assert [words for words in told if "recorded anew" in words and anew in words] if anew else not told


def test_replays_count_as_writes_to_buffers() -> None:
    """Autograd and the ranks' agreement on buffers look at versions, which no graph raises by itself."""
    versions: list[int] = []

    def note_version(made: Engine, step: int) -> None:
        versions.append(version(made.model.average))  # type: ignore[arg-type]

    replays = trained(of_model(Odd), note_version, **GRAPHS)[2]
    assert replays.replayed
    assert all(before < after for before, after in pairwise(versions))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("anomalies", [False, True])
def test_who_watches_the_operators_sees_them(anomalies: bool) -> None:
    watching = torch.autograd.detect_anomaly(False) if anomalies else FlopCounterMode(display=False)
    with watching:
        replays = trained(of_model(Scaled), **GRAPHS)[2]
    assert replays.recorded == replays.replayed == 0


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def train(**settings: Any) -> str:
        def spoil(made: Engine, step: int) -> None:
            if step == 18:
                made.model.out.weight.data.fill_(torch.inf)  # type: ignore[union-attr, operator]

        with pytest.raises(DivergenceError) as error:
            trained(of_model(Scaled), spoil, **settings)
        return str(error.value)

    assert train() == train(**GRAPHS)


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    task = of_model(convolutions)
    whole = trained(task)[0]
    with engine(task, **GRAPHS) as begun:
        for batch in begun.batches():
            begun.step(batch)
            if begun.steps_done == 17:
                begun.save(tmp_path)
                break
    with engine(task, **GRAPHS) as gone_on:
        gone_on.load(tmp_path)
        for batch in gone_on.batches():
            gone_on.step(batch)
        assert gone_on.learner.replays is not None
        assert gone_on.learner.replays.replayed
        weights = gone_on.model.state_dict()
    assert all(
        torch.equal(value, weights[name]) for name, value in whole.items() if "num_batches" not in name
    )


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

    with mock.patch(f"{__name__}.Engine", partial(Engine, observers=[Counted()])):
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
