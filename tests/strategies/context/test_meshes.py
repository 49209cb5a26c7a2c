"""Sequences divided over ranks of a mesh that divides the model too, against one device, in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import evener
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.nn import VocabularyParallelCrossEntropy
from evener.strategies.context.context import ContextParallel
from evener.strategies.pipeline.pipeline import Pipeline
from evener.strategies.sharded.sharded import Sharded
from evener.tools.verify import Trajectory, record, relative_error
from tests.comparing import trained_by_hand, worst
from tests.strategies.context.test_refused import DIFFERS, counting  # noqa: F401
from tests.strategies.sentences import (  # noqa: F401 (some as tasks of this module, by name)
    HEADS,
    PADDING,
    WIDTH,
    Model,
    Ordinary,
    count,
    dropping,
    evaluated,
    layered,
    multi,
    ordinary,
    penalised,
    task,
    total,
)
from tests.tiers import NIGHTLY, SLOW, spread


class Scores(Model):
    """Classes on dimension 1, by a layer that has the embedding's weight."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words).transpose(1, 2)


class Layer(nn.Module):
    """Heads of torch, under a causal mask of the piece and for both sides."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.causal = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.both = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        after = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.causal(x, x, x, attn_mask=after, key_padding_mask=hidden)[0]
        x = x + self.both(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return x + self.mlp(x)


class Repeated(Ordinary):
    """Repeated in backward."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, hidden, use_reentrant=False)
        return found


def heads(**options: Any) -> Task:
    # One position a rank would not tell a mask.
    return task(lambda: Model(lambda: Layer(**options)), shortest=6)


def scores() -> Task:
    loss = VocabularyParallelCrossEntropy(PADDING, label_smoothing=0.1)
    return task(lambda: Scores(Layer), shortest=6, loss=loss, metrics={})


def repeated() -> Task:
    return task(lambda: Model(Repeated))


def short() -> Task:
    """Some sequences of one position, of which some ranks have none."""
    return task(shortest=1, batch_size=3)


def zero_attention() -> Task:
    return heads(add_zero_attn=True)


def dropped_weights() -> Task:
    return heads(dropout=0.1)


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual: dict[str, Any] = {"dtype": "float64", "device": "cpu", "steps": 4}
    return record(f"{__name__}:{name}", None, RunConfig(**(usual | settings)), environment)


ULYSSES = ContextParallel(method="ulysses", order="contiguous")
TENSOR, STAGES, SHARDS = "context=2,tensor=2", "pipeline=2,context=2", "shard=2,context=2"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "mesh", "settings"),
    [
        ("heads", TENSOR, {"clip_norm": 0.1}),
        pytest.param("scores", TENSOR, {"clip_norm": 0.1, "micro_batch": 2}, marks=NIGHTLY),
        pytest.param(
            *("repeated", STAGES, {"strategy": Pipeline(schedule="zero-bubble"), "micro_batch": 3}),
            marks=NIGHTLY,
        ),
        ("penalised", SHARDS, {"strategy": Sharded(zero=2, shard_sizes="2,1"), "balance": "2,1"}),
        pytest.param("multi", SHARDS, {"balance": "3,1", "micro_batch": 2}, marks=NIGHTLY),
        pytest.param("dropping", TENSOR, {"micro_batch": 3}, marks=slow),
        pytest.param("layered", TENSOR, {}, marks=NIGHTLY),
        pytest.param("penalised", TENSOR, {"clip_norm": 0.1}, marks=slow),
        pytest.param("short", TENSOR, {"micro_batch": 1}, marks=NIGHTLY),
        pytest.param("ordinary", STAGES, {"strategy": ULYSSES, "clip_norm": 0.1}, marks=slow),
        pytest.param("dropping", STAGES, {"micro_batch": 2}, marks=NIGHTLY),
        pytest.param("multi", STAGES, {"micro_batch": 2}, marks=NIGHTLY),
        pytest.param("heads", STAGES, {}, marks=NIGHTLY),
        pytest.param("short", STAGES, {"micro_batch": 1}, marks=NIGHTLY),
        pytest.param(
            "task", STAGES, {"strategy": Pipeline("interleaved", stages_per_rank=2)}, marks=slow
        ),
        pytest.param("dropping", SHARDS, {"strategy": Sharded(zero=1), "balance": "1,0"}, marks=NIGHTLY),
        pytest.param("dropping", SHARDS, {"micro_batch": 2, "balance": "1,0"}, marks=NIGHTLY),
        pytest.param("short", SHARDS, {"micro_batch": 1}, marks=NIGHTLY),
        pytest.param("multi", SHARDS, {"strategy": (Sharded(zero=2), ULYSSES)}, marks=slow),
    ],
    ids=str,
)  # fmt: skip
def test_weights_are_those_of_one_device(ranks: Any, name: str, mesh: str, settings: dict[str, Any]) -> None:
    alone = settings | {"strategy": "single", "balance": "equal"}
    reference = trajectory(name, Environment(), **alone)
    divided = ranks(4).run(trajectory, name, mesh=mesh, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)


@pytest.mark.parametrize("mesh", spread([TENSOR, STAGES, SHARDS], NIGHTLY, NIGHTLY, SLOW))
def test_evaluation_sees_whole_sequences(ranks: Any, mesh: str) -> None:
    ((metrics, outputs),) = ranks(1).run(evaluated)
    for found, predicted in ranks(4).run(evaluated, mesh=mesh):
        assert found == pytest.approx(metrics, rel=1e-12)
        assert relative_error(outputs, predicted) <= 1e-12


@pytest.mark.parametrize("mesh", spread([TENSOR, SHARDS], NIGHTLY, SLOW))
def test_a_loop_of_the_users_own(ranks: Any, mesh: str) -> None:
    (weights,) = ranks(1).run(trained_by_hand, heads, total, count)
    for found in ranks(4).run(trained_by_hand, heads, total, count, mesh=mesh):
        assert worst(weights, found) <= 1e-11


def test_a_model_that_counts_positions_keeps_to_the_whole_in_a_stage() -> None:
    class Counting(nn.Module):
        def forward(self, words: Tensor) -> Tensor:
            return evener.nn.positions(words.shape[1], words.device)

    graph = fx.symbolic_trace(Counting()).graph
    assert evener.nn.positions in [node.target for node in graph.nodes]


def refused(name: str, **settings: Any) -> tuple[type[BaseException], str]:
    with pytest.raises(EvenerError) as found:
        trajectory(name, **settings)
    return found.type, str(found.value)


@pytest.mark.parametrize(
    ("name", "mesh", "settings", "words"),
    [
        ("counting", STAGES, {}, DIFFERS + ".*evener.nn.positions"),
        pytest.param("counting", SHARDS, {}, DIFFERS, marks=NIGHTLY),
        ("counting", SHARDS, {"strategy": Sharded(zero=2)}, DIFFERS),
        pytest.param("counting", TENSOR, {}, DIFFERS, marks=NIGHTLY),
        ("zero_attention", TENSOR, {}, "with add_zero_attn adds keys of no position"),
        ("dropped_weights", TENSOR, {}, "attention drops its weights .dropout 0.1."),
        ("heads", TENSOR, {"strategy": ULYSSES}, "blocks.0.causal has 1 heads on a rank, .* method 'ring'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(
    ranks: Any, name: str, mesh: str, settings: dict[str, Any], words: str
) -> None:
    for kind, message in ranks(4).run(refused, name, mesh=mesh, **settings):
        assert issubclass(kind, TaskError | ConfigurationError), message
        assert re.search(words, message), message
