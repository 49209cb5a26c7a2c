"""Every strategy, over meshes of one to three axes, with every kind of model: one device's training, or a refusal.

A cell is four steps of uneven batches in micro-batches, clipped by the global norm, then an evaluation in which each
sample counts once, predictions in order, and the whole state of model and optimizer: all of it that of one device.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from evener.core.config.strategy_names import STRATEGIES
from evener.strategies.features import FeatureParallel
from evener.strategies.sharded.sharded import Sharded
from evener.strategies.tensor.tensor import TensorParallel
from tests.comparing import worst
from tests.conformance.models import MODELS
from tests.conformance.runs import Outcome, run
from tests.tiers import ALWAYS, NIGHTLY, SLOW, Tier

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Row:
    """A strategy on a mesh."""

    ranks: int
    how: dict[str, Any]
    refused: dict[str, str] = field(default_factory=dict)
    """By model, the words of the refusal."""
    always: bool = False
    """Whether it is a fast test though it takes eight ranks."""

    @property
    def slow(self) -> bool:
        return self.ranks > 4 and not self.always


NO_EXPERTS = dict.fromkeys(MODELS, "TaskError: .* evener.nn.Experts; .* has none")
NO_FEATURES = {
    "convolution": "DataError: no tensor among the inputs, .* has the 5 features of the divided layer",
    "transformer": "ConfigurationError: .* cannot be divided by features",
    "recurrent": "DataError: no tensor among the inputs, .* has the 8 features",
    "recommender": "TaskError: .* divides the first torch.nn.Linear by its features; Factors has none",
    "dictionary": "DataError: no tensor among the inputs, .* has the 8 features",
}
OF_SAMPLES = ("mlp", "convolution", "recommender", "dictionary")
NO_POSITIONS = dict.fromkeys(OF_SAMPLES, "TaskError: .* divides the loss's terms with the positions") | {
    "recurrent": "TaskError: .* does not compute from pieces of sequences .* cell .GRU.",
    "several": "TaskError: .* divides sequences of one length",
}

NO_SPARSE = {"recommender": "TaskError: items has sparse gradients, which PyTorch's FSDP2 does not sum"}
NO_SPARSE_SERVER = {"recommender": "ConfigurationError: strategy 'asynchronous' sends dense gradients"}
NO_PAIRS = {"several": "TaskError: strategy 'tensor' looked in Several for pairs of linear layers"}
NO_STREAM = dict.fromkeys(MODELS, "TaskError: sequence=True: .* has none of PyTorch's transformer layers")
del NO_STREAM["transformer"]

ROWS = {
    "ddp": Row(3, {"strategy": "ddp", "balance": "3,0,1"}),
    "experts": Row(2, {"strategy": "experts"}, NO_EXPERTS),
    "data_parallel": Row(
        1,
        {"strategy": "data_parallel", "devices": "cpu:0,cpu:1,cpu:2", "strategy_option": ("balance=3,0,1",)},
    ),
    "local_sgd of one replica": Row(1, {"strategy": "local_sgd", "strategy_option": ("sync_every=1",)}),
    "diloco of one replica, without momentum": Row(
        1, {"strategy": "diloco", "strategy_option": ("sync_every=1", "outer_lr=1", "outer_momentum=0")}
    ),
    "asynchronous without staleness": Row(
        1,
        {"strategy": "asynchronous", "strategy_option": ("sync_every=1", "staleness=0", "damping=1")},
        NO_SPARSE_SERVER,
    ),
    "layers": Row(1, {"strategy": "layers", "devices": "cpu:0,cpu:1"}),
    "dimension": Row(2, {"strategy": "dimension"}, NO_FEATURES),
    "pipeline": Row(2, {"strategy": "pipeline"}),
    "pipeline of zero bubble": Row(2, {"strategy": "pipeline", "strategy_option": ("schedule=zero-bubble",)}),
    "data x pipeline": Row(4, {"strategy": "pipeline", "mesh": "pipeline=2,data=2", "balance": "2,1"}),
    "data x dimension": Row(
        4, {"strategy": "dimension", "mesh": "data=2,tensor=2", "balance": "2,1"}, NO_FEATURES
    ),
    "tensor": Row(3, {"strategy": "tensor"}, NO_PAIRS),
    "data x tensor": Row(4, {"strategy": "tensor", "mesh": "data=2,tensor=2", "balance": "2,1"}, NO_PAIRS),
    "tensor with sequence": Row(3, {"strategy": TensorParallel(sequence=True)}, NO_STREAM | NO_PAIRS),
    "data x tensor with sequence": Row(
        4,
        {"strategy": TensorParallel(sequence=True), "mesh": "data=2,tensor=2", "balance": "2,1"},
        NO_STREAM | NO_PAIRS,
    ),
    "sharded 1": Row(3, {"strategy": Sharded(zero=1, shard_sizes="2,1,1"), "balance": "3,0,1"}),
    "sharded 2": Row(3, {"strategy": Sharded(zero=2, shard_sizes="3,0,1"), "balance": "1,2,0"}),
    "data x sharded 2": Row(
        4, {"strategy": Sharded(zero=2, shard_sizes="2,1"), "mesh": "data=2,shard=2", "balance": "2,0,1,1"}
    ),
    "sharded 2 x dimension": Row(
        4,
        {"strategy": (Sharded(zero=2, shard_sizes="2,1"), FeatureParallel()), "mesh": "shard=2,tensor=2"},
        NO_FEATURES,
    ),
    "pipeline x tensor": Row(4, {"mesh": "pipeline=2,tensor=2"}, NO_PAIRS),
    "pipeline x data x tensor": Row(
        8, {"mesh": "pipeline=2,data=2,tensor=2", "balance": "2,1"}, NO_PAIRS, always=True
    ),
    "sharded 2 x tensor": Row(
        4,
        {"strategy": (Sharded(zero=2, shard_sizes="2,1"), TensorParallel()), "mesh": "shard=2,tensor=2"},
        NO_PAIRS,
    ),
    "data x sharded 2 x tensor": Row(
        8,
        {"strategy": Sharded(zero=2), "mesh": "data=2,shard=2,tensor=2", "balance": "3,0,1,1"},
        NO_PAIRS,
    ),
    "sharded": Row(3, {"strategy": "sharded", "balance": "3,0,1"}, NO_SPARSE),
    "data x sharded": Row(4, {"mesh": "data=2,shard=2", "balance": "2,0,1,1"}, NO_SPARSE),
    "pipeline x sharded 1": Row(
        4, {"strategy": Sharded(zero=1, shard_sizes="1,2"), "mesh": "pipeline=2,shard=2", "balance": "2,1"}
    ),
    "pipeline x sharded 2": Row(
        4, {"strategy": Sharded(zero=2, shard_sizes="2,1"), "mesh": "pipeline=2,shard=2", "balance": "1,2"}
    ),
    "pipeline x data x sharded 2": Row(
        8,
        {
            "strategy": Sharded(zero=2, shard_sizes="1,3"),
            "mesh": "pipeline=2,data=2,shard=2",
            "balance": "3,0,1,1",
        },
    ),
    "pipeline x sharded 2 x tensor": Row(
        8,
        {
            "strategy": Sharded(zero=2, shard_sizes="2,1"),
            "mesh": "pipeline=2,shard=2,tensor=2",
            "balance": "2,1",
        },
        NO_PAIRS,
    ),
    "sharded x tensor": Row(
        4,
        {"strategy": (Sharded(), TensorParallel()), "mesh": "shard=2,tensor=2", "balance": "2,1"},
        NO_SPARSE | NO_PAIRS,
    ),
    "sharded x dimension": Row(
        4,
        {"strategy": (Sharded(), FeatureParallel()), "mesh": "shard=2,tensor=2", "balance": "1,2"},
        NO_SPARSE | NO_FEATURES,
    ),
    "data x sharded x tensor": Row(
        8,
        {"strategy": "sharded", "mesh": "data=2,shard=2,tensor=2", "balance": "3,0,1,1"},
        NO_SPARSE | NO_PAIRS,
    ),
    "context": Row(3, {"strategy": "context"}, NO_POSITIONS),
    "data x context": Row(
        4, {"strategy": "context", "mesh": "data=2,context=2", "balance": "2,1"}, NO_POSITIONS
    ),
    "context x tensor": Row(4, {"mesh": "context=2,tensor=2"}, NO_POSITIONS | NO_PAIRS),
    "sharded 1 x context": Row(
        4, {"strategy": Sharded(zero=1), "mesh": "shard=2,context=2", "balance": "2,1"}, NO_POSITIONS
    ),
    "sharded 2 x context": Row(
        4,
        {"strategy": Sharded(zero=2, shard_sizes="2,1"), "mesh": "shard=2,context=2", "balance": "0,1"},
        NO_POSITIONS,
    ),
    "sharded x context": Row(4, {"mesh": "shard=2,context=2", "balance": "2,1"}, NO_POSITIONS | NO_SPARSE),
    "pipeline x context": Row(4, {"mesh": "pipeline=2,context=2"}, NO_POSITIONS),
    "data x context x tensor": Row(
        8, {"mesh": "data=2,context=2,tensor=2", "balance": "2,1"}, NO_POSITIONS | NO_PAIRS
    ),
    "pipeline x context x tensor": Row(8, {"mesh": "pipeline=2,context=2,tensor=2"}, NO_POSITIONS | NO_PAIRS),
}


ELSEWHERE = (
    *("pipeline", "pipeline of zero bubble", "tensor", "data x tensor", "tensor with sequence", "sharded"),
    *("pipeline x sharded 1", "context", "data x context", "context x tensor"),
    *("sharded 1 x context", "sharded 2 x context"),
)
"""Rows of strategies, and of pairs of them, that other fast tests or rows train."""


@functools.cache
def reference(model: str) -> Outcome:
    found = run(model, {"strategy": "single"}, alone=True)
    assert not found.refused
    return found


def tiers(row: str, trained: bool) -> tuple[Tier, ...]:
    """The tiers of a row's first, second and further cells; all after the last are of the last one's tier."""
    later = ROWS[row].slow or row in ELSEWHERE
    return (ALWAYS, SLOW, NIGHTLY) if trained and not later else (SLOW, NIGHTLY)


def cells() -> list[Any]:
    """All cells. The model moves on from row to row; each refusal is always met in the first row that has it."""
    found, met = [], set[str]()
    for place, (name, row) in enumerate(ROWS.items()):
        for trained in (True, False):
            models = [model for model in MODELS if (model not in row.refused) == trained]
            dealt = tiers(name, trained)
            for other, model in enumerate(models):
                marks = dealt[min((other + place) % len(models), len(dealt) - 1)]
                words = row.refused.get(model)
                if words is not None and words not in met:
                    met.add(words)
                    marks = ALWAYS
                found.append(pytest.param(name, model, id=f"{name}-{model}", marks=marks))
    return found


@pytest.mark.parametrize(("row", "model"), cells())
def test_it_is_the_training_of_one_device_or_refused(ranks: Any, row: str, model: str) -> None:
    expected, found = ROWS[row].refused.get(model), ranks(ROWS[row].ranks).run(run, model, ROWS[row].how)
    for outcome in found:
        if expected is not None:
            assert re.search(expected, outcome.refused), outcome.refused or "it ran"
        else:
            assert not outcome.refused
            assert worst(reference(model).numbers, outcome.numbers) <= TOLERANCE


def test_every_strategy_has_a_row() -> None:
    named = {name for row in ROWS.values() for name in re.findall(r"[a-z_]+", str(row.how))}
    assert not STRATEGIES.keys() - named - {"single"}
