"""What changes between two steps is followed by CUDA graphs, or found before it does harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import evener
from evener.errors import DivergenceError
from evener.torch_internals.autograd import version
from evener.training.engine import Engine
from tests.strategies.graph_runs import (
    GRAPHS,
    Odd,
    convolutions,
    engine,
    of_model,
    taped,
    trained,
)

__all__ = ["taped"]  # a fixture that all tests here use


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

    with mock.patch("tests.strategies.graph_runs.Engine", partial(Engine, observers=[Told()])):
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
