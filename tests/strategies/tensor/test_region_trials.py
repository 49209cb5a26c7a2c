"""Regions that a trial finds in blocks whose code cannot be read, against one device, in float64."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch

from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.errors import EvenerError, TaskError
from evener.strategies.tensor import TensorParallel
from evener.strategies.tensor.candidates import LinearCall, changes, guesses
from evener.tools.verify import Trajectory, record
from evener.training.engine import Engine
from tests.comparing import worst
from tests.strategies import foreign
from tests.tiers import ALWAYS, NIGHTLY, SLOW, spread

ATTENTION_AND_MLP = {
    "mingpt": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "bert": (
        *(f"attention.self_.{name}" for name in ("query", "key", "value")),
        *("attention.output.dense", "intermediate.dense", "output.dense"),
    ),
    "llama": (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
}


def trained(name: str, alone: bool = False, **settings: Any) -> tuple[Trajectory, set[str], str]:
    """A run, the layers whose weights are divided, and what is printed."""
    usual = {"strategy": "tensor", "device": "cpu", "dtype": "float64", "steps": 4} | settings
    environment, config = Environment() if alone else None, RunConfig(**usual)
    found = record(f"tests.strategies.foreign:{name}", None, config, environment)
    if alone:
        return found, set(), ""
    with (
        redirect_stderr(io.StringIO()) as words,
        Engine(getattr(foreign, name)(), config) as engine,
    ):
        named = engine.model.named_parameters()
        divided = {key.rpartition(".")[0] for key, p in named if key.endswith("weight") and shard_spec(p)}
    return found, divided, words.getvalue()


def exact(ranks: Any, size: int, name: str, **settings: Any) -> list[tuple[Trajectory, set[str], str]]:
    one = {key: value for key, value in settings.items() if key not in ("balance", "mesh")}
    reference, *_ = trained(name, True, **(one | {"strategy": "single"}))
    found: list[tuple[Trajectory, set[str], str]] = ranks(size).run(trained, name, **settings)
    assert worst(reference.weights, found[0][0].weights) <= 1e-11
    assert all(ours.losses == pytest.approx(reference.losses, rel=1e-11) for ours, *_ in found)
    assert len({ours.digest for ours, *_ in found}) == 1, "replicas differ"
    return found


@pytest.mark.parametrize("name", spread(ATTENTION_AND_MLP, NIGHTLY, ALWAYS, NIGHTLY, ALWAYS))
def test_attention_and_feed_forward_are_divided(ranks: Any, name: str) -> None:
    for _, divided, _ in exact(ranks, 2, name):
        assert {f"h.{block}.{layer}" for block in range(2) for layer in ATTENTION_AND_MLP[name]} <= divided


@pytest.mark.parametrize(
    ("size", "name", "settings"),
    spread(
        [
            (2, "mingpt", {"balance": "2,1", "micro_batch": 3, "clip_norm": 0.1}),
            (3, "bert", {"micro_batch": 3}),
            (3, "gpt2", {"clip_norm": 0.1}),
            (4, "llama", {"mesh": "data=2,tensor=2", "clip_norm": 0.1}),
            (4, "bert", {"mesh": "shard=2,tensor=2"}),
            (2, "mingpt", {"recompute": "blocks"}),
        ],
        SLOW,
        NIGHTLY,
    ),
    ids=str,
)
def test_they_go_together_with_others(ranks: Any, size: int, name: str, settings: dict[str, Any]) -> None:
    exact(ranks, size, name, **settings)


@pytest.mark.slow
def test_heads_that_are_fewer_than_ranks_stay_whole(ranks: Any) -> None:
    _, divided, words = exact(ranks, 3, "llama")[0]
    assert not any("self_attn" in name for name in divided)
    assert {"h.0.gate_proj", "h.0.up_proj", "h.0.down_proj"} <= divided
    assert "h.*.self_attn.o_proj is left whole: its features are 2 runs" in words


def test_heads_and_features_that_look_at_each_other_stay_whole(ranks: Any) -> None:
    _, divided, words = exact(ranks, 2, "whole")[0]
    assert divided == {"embed"}
    assert "h.*.attn.c_proj is left whole: " in words
    assert "h.*.mlp.c_proj is left whole: " in words


def test_heads_that_look_at_each_other_in_training_alone_stay_whole(ranks: Any) -> None:
    _, divided, words = exact(ranks, 2, "in_training")[0]
    assert divided == {"embed", "h.0.mlp.c_fc", "h.0.mlp.c_proj", "h.1.mlp.c_fc", "h.1.mlp.c_proj"}
    assert "h.*.attn.c_proj is left whole: " in words


def refused(name: str, plan: str) -> tuple[type, str]:
    with pytest.raises(EvenerError) as caught:
        trained(name, strategy=TensorParallel(plan=plan))
    return caught.type, str(caught.value)


def test_a_loss_of_what_lies_between_divided_layers_is_found(ranks: Any) -> None:
    for kind, message in ranks(2).run(refused, "penalised", "up=colwise,down=rowwise"):
        assert issubclass(kind, TaskError)
        assert re.search(
            "the losses of the first step add up to between .* that compute the same samples", message
        )


def test_ranks_that_drop_by_pytorchs_generator_stay_alike(ranks: Any) -> None:
    (first, divided, _), (other, *_) = ranks(2).run(trained, "dropping")
    assert "h.1.attn.c_attn" in divided
    assert first.digest == other.digest
    assert first.losses == other.losses
    assert all(map(torch.isfinite, map(torch.tensor, first.losses)))


def test_what_may_be_a_region_follows_from_widths() -> None:
    fused = next(guesses(LinearCall("o", 12, 12), [LinearCall("qkv", 12, 36)], {("", "n_head"): 3}))
    assert [(c.name, c.unit, c.blocks) for c in fused.columns] == [("qkv", 4, 3)]
    assert (fused.unit, fused.runs) == (4, 3)
    apart = [LinearCall("q", 12, 16), LinearCall("k", 12, 8), LinearCall("v", 12, 8)]
    shared = next(guesses(LinearCall("o", 16, 12), apart, {("", "head_dim"): 4, ("", "layer_idx"): 2}))
    assert [(c.name, c.unit) for c in shared.columns] == [("q", 8), ("k", 4), ("v", 4)]
    assert (shared.unit, shared.runs) == (8, 2)
    assert not [*guesses(LinearCall("o", 5, 12), apart, {})]


def test_sizes_that_may_have_to_change_are_tried_the_fewest_first() -> None:
    numbers = {("", "n_head"): 3, ("", "n_embd"): 12, ("", "head_dim"): 4, ("", "block_size"): 30}
    guess = next(guesses(LinearCall("o", 12, 12), [LinearCall("qkv", 12, 36)], numbers))
    tried = [tuple(name for _, name in places) for places in changes(guess, numbers)]
    assert tried == [(), ("n_head",), ("n_embd",), ("n_head", "n_embd")]
