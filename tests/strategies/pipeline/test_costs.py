"""What layers take is measured without changing the model, on the meta device as elsewhere."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from evener.nn.context import current, scope
from evener.nn.dropout import Dropout
from evener.strategies.pipeline.costs import measure
from evener.strategies.pipeline.tracing import read_both


class Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear, self.norm = seconds, nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.norm(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Sleeping(0.0), Sleeping(0.02)])
        self.register_buffer("offset", torch.ones(4))

    def forward(self, words: Tensor, offset: None = None) -> Tensor:
        x = self.words(words) + self.offset
        for block in self.blocks:
            x = block(x).relu()
        return x


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
def test_each_layer_has_its_time(device: str, dtype: torch.dtype | None) -> None:
    with torch.device(device):
        model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = {"words": torch.tensor([1, 4, 0]), "offset": None}
    graph = read_both(model, arguments, ())[True]
    drawn = torch.get_rng_state()
    costs = measure(model, graph, arguments, torch.device("cpu"), dtype)
    seconds = costs.seconds
    assert list(seconds) == ["words", "blocks.0", "blocks.1"]
    assert seconds["blocks.1"] >= 0.02
    assert all(value > 0 for value in seconds.values())
    assert costs.crossing == (3 * 4 * (8 if dtype == torch.float64 else 4),) * 2
    assert torch.equal(drawn, torch.get_rng_state()), "the weights of the run are drawn as without it"
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == device
        assert device == "meta" or torch.equal(tensor, before[name])
        assert tensor.grad is None


def test_a_step_that_is_under_way_is_no_matter() -> None:
    """A model of evener.nn.Dropout, measured inside of another's step."""
    model = nn.Sequential(nn.Linear(4, 4), Dropout(0.5), nn.Linear(4, 2))
    arguments = {"input": torch.ones(2, 4)}
    graph = read_both(model, arguments, ())[True]
    with scope(torch.arange(5), step=0, seed=0):
        assert len(measure(model, graph, arguments, torch.device("cpu"), None).seconds) == 3
        assert current() is not None


class Skipping(nn.Module):
    """What the first layer makes is used by the last too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow, self.wide = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        return self.wide(self.narrow(kept)) + kept


def test_what_crosses_a_cut_is_counted_in_bytes() -> None:
    model, arguments = Skipping(), {"x": torch.ones(3, 4)}
    graph = read_both(model, arguments, ())[True]
    costs = measure(model, graph, arguments, torch.device("cpu"), None)
    assert costs.crossing == (3 * 8 * 4, 3 * (2 + 8) * 4)


class Changing(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.add_(1.0))


def test_the_example_stays_as_it_is() -> None:
    model, arguments = Changing(), {"x": torch.ones(3, 4)}
    measure(model, read_both(model, arguments, ())[True], arguments, torch.device("cpu"), None)
    assert torch.equal(arguments["x"], torch.ones(3, 4))


def test_layers_that_write_to_their_input_have_their_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    arguments = {"input": torch.randn(3, 4)}
    graph = read_both(model, arguments, ())[True]
    seconds = measure(model, graph, arguments, torch.device("cpu"), None).seconds
    assert list(seconds) == ["0", "1", "2", "3"]
