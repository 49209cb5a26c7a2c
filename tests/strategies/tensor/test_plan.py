"""Which modules are divided: what is derived, what a plan says, and what is refused."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.nn import Dropout
from evener.strategies.tensor.tensor import TensorParallel, plan_of
from evener.strategies.tensor.trace import output_layer
from tests.strategies import wide


def derived(model: nn.Module) -> dict[str, str]:
    with suppress(TaskError):
        return {name: str(use) for name, use in plan_of(model).uses.items()}
    return {}


def pair(*between: nn.Module, first: Any = None, last: Any = None) -> nn.Sequential:
    return nn.Sequential(first or nn.Linear(4, 6), *between, last or nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (pair(), "0=colwise,1=rowwise"),
        (pair(nn.ReLU(), nn.Dropout(0.1)), "0=colwise,2=between,3=rowwise"),
        (pair(nn.BatchNorm1d(6), Dropout(0.1)), "0=colwise,1=between,2=between,3=rowwise"),
        (pair(nn.LayerNorm(6)), ""),
        (pair(nn.PReLU()), ""),
        (pair(nn.Softmax(-1)), ""),
        (pair(nn.Dropout1d(0.1)), ""),
        (pair(nn.LazyBatchNorm1d()), ""),
        (pair(first=weight_norm(nn.Linear(4, 6))), ""),
        (pair(last=nn.LazyLinear(3)), ""),
        (pair(last=nn.Linear(5, 3)), ""),
        (nn.Sequential(pair(), nn.Tanh(), pair()), "0.0=colwise,0.1=rowwise,2.0=colwise,2.1=rowwise"),
        (nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 4))), "0=colwise,1.1=rowwise"),
        (nn.Sequential(*[nn.Linear(4, 4)] * 2), ""),
        (
            pair(nn.MaxPool1d(2), nn.Dropout1d(0.1), first=nn.Conv1d(2, 6, 3), last=nn.Conv1d(6, 2, 3)),
            "0=colwise,2=between,3=rowwise",
        ),
        (pair(first=nn.Conv2d(2, 6, 3), last=nn.Conv2d(6, 6, 3, groups=2)), ""),
        (pair(first=nn.Conv2d(2, 6, 3), last=nn.Conv2d(6, 2, 3, padding_mode="circular")), ""),
        (pair(nn.Flatten(), first=nn.Conv2d(2, 6, 1), last=nn.Linear(6, 2)), ""),
        (nn.Embedding(9, 4), ""),
        (nn.Sequential(nn.Embedding(9, 4)), "0=vocabulary"),
        (nn.Sequential(nn.Embedding(4, 9)), ""),
        (nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), ""),
        (nn.Sequential(nn.EmbeddingBag(9, 4)), "0=vocabulary"),
        (nn.Sequential(nn.EmbeddingBag(9, 4, mode="max")), ""),
        (nn.Sequential(nn.EmbeddingBag(9, 4, max_norm=1.0)), ""),
        (nn.Sequential(nn.Embedding(9, 4), nn.GRU(4, 6), nn.LSTMCell(4, 6)), "0=vocabulary"),
        (nn.ModuleList([nn.MultiheadAttention(4, 2)]), "0=heads"),
    ],
    ids=str,
)
def test_what_follows_from_the_structure(model: nn.Module, words: str) -> None:
    found = derived(model)
    assert ",".join(f"{name}={use}" for name, use in found.items() if name) == words


def test_layers_in_a_row_are_not_one_weight_twice() -> None:
    layers = pair(last=nn.Linear(6, 4))
    tied = nn.Sequential(layers, nn.Tanh(), nn.Linear(4, 6))
    tied[2].weight = layers[0].weight
    assert derived(tied) == {}


class Forward(nn.Module):
    """A pair whose forward is the function that it is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm, self.drop, self.scale = nn.LayerNorm(6), nn.Dropout(0.1), nn.Parameter(torch.ones(6))
        self.given = forward

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        made: Tensor = self.given(self, x, mask)
        return made


GATED = {"up": "colwise", "gate": "colwise", "down": "rowwise"}
PAIR = {"up": "colwise", "down": "rowwise"}
NOT_DIVIDED: dict[str, str] = {}


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x, _: m.down(F.relu(m.up(x)) * 2 + 1), PAIR),
        (lambda m, x, _: m.down(m.up(x).sigmoid()), PAIR),
        (lambda m, x, _: m.down(torch.mul(F.silu(m.gate(x)), m.up(x))), GATED),
        (lambda m, x, _: m.down(m.drop(m.up(x))), PAIR | {"drop": "between"}),
        (lambda m, x, mask: m.down(m.up(x)) if mask is None else m.down(m.up(x)) * mask, PAIR),
        (lambda m, x, mask: m.down(m.up(x) if mask is None else m.up(x) * mask), NOT_DIVIDED),
        (lambda m, x, _: m.down(m.up(x) * m.scale), NOT_DIVIDED),
        (lambda m, x, _: m.down(m.norm(m.up(x))), NOT_DIVIDED),
        (lambda m, x, _: m.down(m.up(x)) + m.up(x).mean(), NOT_DIVIDED),
        (lambda m, x, _: (lambda h: m.down(h) + h.sum(-1, keepdim=True))(m.up(x)), NOT_DIVIDED),
        (lambda m, x, _: m.down(m.up(x).softmax(-1)), NOT_DIVIDED),
        (lambda m, x, _: m.down(F.dropout(m.up(x))), NOT_DIVIDED),
        (lambda m, x, _: m.down(m.drop(m.drop(m.up(x)))), NOT_DIVIDED),
        (lambda m, x, _: m.down(m.up(x)) + F.linear(x, m.up.weight).sum(), NOT_DIVIDED),
        (lambda m, x, _: m.down(m.up(x)) if m.training else m.down(m.norm(m.up(x))), NOT_DIVIDED),
        (lambda m, x, _: m.down(m.up(x)) if x.sum() > 0 else x, NOT_DIVIDED),
        (lambda m, x, _: m.down(m.up(x) + m.gate(m.down(m.gate(x)))), NOT_DIVIDED),
    ],
)
def test_what_a_forward_tells(forward: Any, expected: dict[str, str]) -> None:
    assert derived(Forward(forward)) == {name: expected[name] for name in sorted(expected, key=_order)}


def _order(name: str) -> int:
    return ["up", "gate", "down", "norm", "drop"].index(name)


def test_a_model_stays_as_it_is() -> None:
    class Counts(Forward):
        calls = 0

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.calls += 1
            return super().forward(x, mask)

    model, state = Counts(lambda m, x, _: m.down(m.up(x))), torch.random.get_rng_state()
    assert derived(model)
    assert model.calls == 0
    assert torch.equal(torch.random.get_rng_state(), state)


def test_pytorchs_transformer() -> None:
    with torch.device("meta"):
        found = derived(wide.words().model())
    layer = {"self_attn": "heads", "linear1": "colwise", "dropout": "between", "linear2": "rowwise"}
    expected = {"embed": "vocabulary"}
    expected |= {f"encoder.layers.{i}.{name}": use for i in range(2) for name, use in layer.items()}
    expected |= {"decoder.self_attn": "heads", "decoder.multihead_attn": "heads"}
    expected |= {f"decoder.{name}": use for name, use in layer.items()}
    assert found == expected | {"attention": "heads", "head": "vocabulary"}


def test_an_activation_of_ones_own_is_not_known_to_be_elementwise() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 6, activation=lambda x: x.softmax(-1))
    assert derived(nn.ModuleList([layer])) == {"0.self_attn": "heads"}


@pytest.mark.parametrize("name", ["mlp", "gated", "convolutions", "words"])
def test_what_is_derived_can_be_given(name: str) -> None:
    model = getattr(wide, name)().model()
    plan = plan_of(model)
    assert plan_of(model, str(plan)) == plan == plan_of(model, "auto")


def test_a_plan_is_read_in_order() -> None:
    model = wide.words().model()
    plan = plan_of(
        model, "auto, *.linear?=whole, encoder.layers.0.dropout=whole,*.dropout=whole, place=vocabulary"
    )
    assert {
        str(use) for name, use in plan.uses.items() if "self_attn" not in name and "multihead" not in name
    } == {
        "vocabulary",
        "heads",
    }
    assert "place" in plan.uses
    described = TensorParallel("attention=heads").describe(model)
    assert described == "1 modules of Words are divided:\n  attention  heads"


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.other, self.down = nn.Linear(4, 6), nn.Linear(4, 8), nn.Linear(6, 4)
        self.drop, self.norm, self.layer_norm = nn.Dropout(0.1), nn.BatchNorm1d(6), nn.LayerNorm(6)
        self.embed = nn.Embedding(9, 4, max_norm=1.0)
        self.attention = nn.MultiheadAttention(4, 2)
        self.attention.out_proj = nn.Linear(4, 4)
        self.lazy, self.most = nn.LazyLinear(3), nn.EmbeddingBag(9, 4, mode="max")
        self.cell, self.steps = nn.GRUCell(4, 4), nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("plan", "kind", "words"),
    [
        ("ups=colwise", ConfigurationError, "'ups' fits no module .* there are up, other, down, norm"),
        ("up", ConfigurationError, "'up' is not NAME=WORD with one of the words colwise, rowwise"),
        ("up=sideways", ConfigurationError, "'up=sideways' is not NAME=WORD"),
        ("up=colwise:0,down=rowwise", ConfigurationError, "'up=colwise:0' is not"),
        ("up=colwise,down=rowwise:2:3", ConfigurationError, "'down=rowwise:2:3' is not"),
        ("up=colwise", ConfigurationError, "divides nothing to its end"),
        ("", ConfigurationError, "divides nothing to its end"),
        ("layer_norm=rowwise", TaskError, "layer_norm is a LayerNorm, and rowwise is for Linear, Conv1d"),
        ("embed=vocabulary", TaskError, "embed cannot be divided: it has max_norm"),
        ("attention=heads", TaskError, "attention cannot be divided: its out_proj is a Linear"),
        ("lazy=vocabulary", TaskError, "lazy cannot be divided: it is a LazyLinear"),
        ("most=vocabulary", TaskError, "most cannot be divided: it has mode='max'; .* sums and means"),
        (
            "steps=rowwise",
            TaskError,
            "steps cannot be divided: it is a LSTM, each step .*; leave it out of the plan",
        ),
        ("cell=vocabulary", TaskError, "cell cannot be divided: it is a GRUCell, each step of which"),
        (
            "up=colwise:4,down=rowwise",
            TaskError,
            "up has 6 features, which are not 1 blocks of whole runs of 4",
        ),
        ("up=colwise,down=rowwise", TaskError, "drop drops, .* say drop=between, drop=whole or drop=seq"),
        (
            "up=colwise,other=colwise,drop=between,down=rowwise",
            TaskError,
            "several numbers of features: 6, 8",
        ),
        ("drop=between,down=rowwise", TaskError, "drop is between, and no layer beside it is colwise"),
    ],
)
def test_a_plan_that_cannot_be(plan: str, kind: type[EvenerError], words: str) -> None:
    with pytest.raises(kind) as caught:
        plan_of(Loose(), plan)
    assert re.search(words, str(caught.value)), caught.value


def test_what_no_plan_divides_is_said() -> None:
    described = TensorParallel().describe(nn.Sequential(nn.Embedding(9, 4), nn.GRU(4, 6)))
    first, *_, last = described.splitlines()
    assert first == "1 modules of Sequential are divided:"
    assert last.startswith(
        "  1 is left whole: it is a GRU, each step of which needs all features of the one before"
    )


class Scores(nn.Module):
    """Ends in scores of words, of which the function makes the output."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(9, 4), nn.GRU(4, 4), nn.Linear(4, 9)
        self.function = function

    def forward(self, words: Tensor) -> Any:
        hidden, _ = self.cell(self.embed(words))
        return self.function(self, hidden)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda m, x: m.head(x), "head"),
        (lambda m, x: m.head(x).transpose(1, 2), "head"),
        (lambda m, x: torch.permute(m.head(x), (0, 2, 1)).contiguous(), "head"),
        (lambda m, x: m.head(x).view(-1, 9) if m.training else m.head(x).reshape(-1, 9), "head"),
        (lambda m, x: m.head(x).softmax(-1), None),
        (lambda m, x: m.head(x) if m.training else m.head(x)[:, -1], None),
        (lambda m, x: m.head(x) + m.head(x), None),
        (lambda m, x: (m.head(x), x), None),
        (lambda m, x: x, None),
        (lambda m, x: m.head(x * m.head.weight.mean()), None),
    ],
)
def test_the_layer_whose_scores_are_the_output(function: Any, found: str | None) -> None:
    assert output_layer(Scores(function)) == found


def test_layers_in_a_row_end_in_the_output() -> None:
    assert output_layer(nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 9)))) == "1.1"
    assert output_layer(nn.Sequential(nn.Linear(3, 9), nn.Softmax(-1))) is None


def test_scores_are_derived_where_they_are_the_output() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 9))
    assert str(plan_of(model, output="3")) == "0=colwise,2=rowwise,3=vocabulary"
    assert str(plan_of(model, "auto,3=whole", output="3")) == "0=colwise,2=rowwise"
    tied = nn.Sequential(
        nn.Embedding(5, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 5, bias=False)
    )
    tied[4].weight = tied[0].weight
    assert str(plan_of(tied, output="4")) == "1=colwise,3=rowwise"
    narrow = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    assert str(plan_of(narrow, output="2")) == "0=colwise,2=rowwise"


def test_nothing_to_divide() -> None:
    with pytest.raises(
        TaskError, match=r"looked in Linear for pairs .* plan='NAME=colwise,NAME=rowwise', or use"
    ):
        plan_of(nn.Linear(3, 2))
