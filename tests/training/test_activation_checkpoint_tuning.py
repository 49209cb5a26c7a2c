"""Blocks that are computed again are the same training, and a budget is held, at the least time that was measured."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.components.activation_checkpoint import profiling as measuring
from evener.components.activation_checkpoint.forward import recompute_blocks
from evener.core.config.recompute import Recompute
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.task.task import Task
from evener.errors import ConfigurationError
from evener.hardware.memory import MemoryTracker
from evener.strategies.memory_attribution import name_inputs, name_model
from evener.strategies.sharded.sharded import Sharded
from evener.tools.estimate import estimate_memory
from evener.training.engine import Engine
from evener.training.factory import check_division
from tests import tasks
from tests.tasks import classes, draws
from tests.tiers import ALWAYS, NIGHTLY, SLOW, Tier

WIDTH, SAMPLES, LENGTH = 8, 90, 24


class Block(nn.Module):
    """All that a repetition could do twice, or otherwise: statistics, random numbers of both kinds, a power iteration,
    a keyword, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
        self.drop, self.torchs = evener.nn.Dropout(0.2), nn.Dropout(0.0)
        self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = self.torchs(torch.tanh(self.norm(self.up(x))))
        return x + scale * self.down(self.drop(y)), scale * 0.9


class Tower(nn.Module):
    """The last two are one block, called twice."""

    def __init__(self, block: Any = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.blocks.append(self.blocks[-1])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.stem(x), torch.ones(())
        for block in self.blocks:
            x, scale = block(x, scale=scale)
        scores: Tensor = self.head(x)
        return scores


def tower(**parts: Any) -> Task:
    usual = {"train": TensorDataset(draws(SAMPLES, 6), classes(SAMPLES, 3)), "model": Tower, "epochs": 9}
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    return tasks._task(**(usual | {"evaluate": None, "optimizer": adam, "batch_size": 40} | parts))


class Told(Observer):
    everywhere = True

    def __init__(self) -> None:
        self.words: list[str] = []

    def event(self, record: Any) -> None:
        self.words.append(record.words)


def trained(task: Any, recompute: str | None, steps: int = 7, **settings: Any) -> dict[str, Any]:
    told, settings = Told(), {"device": "cpu", "dtype": "float64"} | settings
    with Engine(task(), recompute=recompute, steps=steps, observers=[told], **settings) as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        state = {name: value.detach().clone() for name, value in engine.learner.tensors().items()}
        return {"losses": losses, "state": state, "told": told.words, "words": engine.recomputing.description}


def pair(task: Any, recompute: str, **settings: Any) -> tuple[float, list[str], str]:
    """How far apart a training is from the same one that keeps all blocks, in its losses, weights and buffers; and what
    was said."""
    kept, other = trained(task, None, **settings), trained(task, recompute, **settings)
    torch.testing.assert_close(other["losses"], kept["losses"], rtol=0, atol=0)
    errors = [
        float((other["state"][name] - value).abs().max())
        for name, value in kept["state"].items()
        if value.numel()
    ]
    return max(errors), other["told"], other["words"]


BUDGET = "75%"


@pytest.mark.parametrize("how", ["blocks", BUDGET])
@pytest.mark.parametrize("micro_batch", [None, pytest.param(17, marks=pytest.mark.slow)])
def test_it_is_the_same_training(how: str, micro_batch: int | None) -> None:
    error, told, said = pair(tower, how, strategy="single", micro_batch=micro_batch)
    assert error == 0
    assert ("instead of" in said) == (told == [said]) == (how == BUDGET), (told, said)


class Substituted(Tower):
    """Calls its blocks with weights that it computes, which are there no longer when backward comes."""

    def __init__(self) -> None:
        super().__init__(Wide)

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.stem(x), torch.ones(())
        for block in self.blocks:
            weights = {name: weight * 1.1 for name, weight in block.named_parameters()}
            x, scale = torch.func.functional_call(block, weights, (x,), {"scale": scale})
        scores: Tensor = self.head(x)
        return scores


def test_weights_that_a_call_was_given_are_there_again() -> None:
    error, _, _ = pair(lambda: tower(model=Substituted), "blocks", strategy="single")
    assert error == 0


class Words(nn.Module):
    """From words (N, T) to scores (N, 11, T), with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.place = nn.Parameter(0.1 * draws(LENGTH, 12))
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))
        self.out = nn.Linear(12, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.place[evener.nn.positions(words.shape[1])]
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.out(x)
        return scores.transpose(1, 2)


def words() -> Task:
    found = classes(40 * (LENGTH + 1), 11).view(40, -1)
    return tower(model=Words, train=TensorDataset(found[:, :-1], found[:, 1:]), batch_size=13, metrics={})


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers[0](x)
        for _ in range(4):
            y = torch.tanh(y)
        return x + y, scale


def expert_words() -> Task:
    return tower(model=ExpertWords, train=words().train, batch_size=13, metrics={})


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(12), evener.nn.Experts(12, 10, experts=4, top=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mixture(self.norm(x)).output
        return x + y


class ExpertWords(Words):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(3))


def of_two(name: str, strategy: Any, task: Any = words, tier: Tier = SLOW, **settings: Any) -> Any:
    return pytest.param(task, {"strategy": strategy} | settings, id=name, marks=tier)


STAGES = ("balance=equal", "microbatches=3")


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        of_two("uneven", "ddp", tower, tier=ALWAYS, balance="2,1", micro_batch=24),
        of_two("weights in parts", Sharded(zero=3), tier=NIGHTLY),
        of_two("a rank without samples", "ddp", tower, balance="1,0"),
        of_two("gradients in parts", Sharded(zero=2, shard_sizes="2,1"), tower, NIGHTLY),
        of_two("optimizer in parts", Sharded(zero=1), tower),
        of_two("tensor", "tensor", tier=NIGHTLY),
        of_two("context", "context"),
        of_two("experts", "experts", expert_words, NIGHTLY),
        of_two("pipeline", "pipeline", tier=NIGHTLY, strategy_option=STAGES),
        of_two(
            "interleaved", "pipeline", strategy_option=(*STAGES, "schedule=interleaved", "stages_per_rank=2")
        ),
        of_two("bf16", "ddp", dtype=None, precision="bf16"),
    ],
)
def test_it_is_the_same_training_on_ranks(ranks: Any, task: Any, settings: dict[str, Any]) -> None:
    for error, told, said in ranks(2).run(pair, task, BUDGET, **settings):
        assert error < 1e-12
        assert "instead of" in said
        assert told == [said]


@pytest.mark.slow
def test_compiled_blocks_are_computed_again(ranks: Any) -> None:
    settings: dict[str, Any] = {
        "strategy": "ddp",
        "compile": "blocks",
        "compile_backend": "aot_eager",
        "steps": 3,
    }
    for error, _, said in ranks(2).run(pair, words, "blocks", timeout=200, **settings):
        assert error < 1e-12
        assert said == "recomputes all 4 blocks in backward"


# Budgets


def chosen(task: Any, budget: str, **settings: Any) -> tuple[list[bool], list[int], int, int]:
    """Which blocks are kept; budget and peak that was predicted; bytes counted in a step with it, and predicted
    without."""
    with Engine(task(), device="cpu", strategy="single", recompute=budget, epochs=99, **settings) as engine:
        batches, recomputing = engine.batches(), engine.recomputing
        for _ in range(8):
            engine.step(next(batches))
        (peaks,), (count,), (limit,) = recomputing._peaks, recomputing._counts, recomputing._budgets
        kept = [each.kept for each in engine.learner.recomputed._forwards.values()]
        return kept, [limit, peaks[count]], counted(engine, batches), peaks[0]


def counted(engine: Engine, batches: Any) -> int:
    """Bytes of a full step at its peak."""
    peaks = []
    for _ in range(4):  # one of which is the last of an epoch
        batch = next(batches)
        with MemoryTracker() as account:
            name_model(account, engine.learner)
            name_inputs(account, batch)
            account.reset_peak()
            engine.step(batch)
        peaks.append(account.peak)
    return max(peaks)


def test_the_peak_is_predicted_and_within_the_budget() -> None:
    kept, (limit, predicted), peak, kept_peak = chosen(words, "70%")
    assert kept == sorted(kept)  # the first are computed again
    assert 0 < sum(kept) < 4
    assert peak <= limit
    assert peak == pytest.approx(predicted, rel=0.03)
    with Engine(words(), device="cpu", strategy="single", epochs=99) as engine:
        batches = engine.batches()
        for _ in range(2):
            engine.step(next(batches))
        assert counted(engine, batches) == pytest.approx(kept_peak, rel=0.03)


def test_what_was_thought_too_little_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks hold more than was measured: more are computed again until a step is within the budget."""
    original = measuring.Counted.again

    @contextmanager
    def again(self: Any, call: Any) -> Any:
        with original(self, call):
            yield
        call.nbytes //= 2

    monkeypatch.setattr(measuring.Counted, "again", again)
    kept, (limit, _), peak, _ = chosen(words, "420KB")
    assert kept == [False, False, False, True]  # by what was measured, two would do
    assert peak <= limit


def test_a_budget_that_cannot_be_met_is_refused_with_the_least() -> None:
    words_ = r"recompute=100KB gives rank 0 97.7 KiB, and a step takes .* at least, with all 4 blocks computed again"
    with pytest.raises(ConfigurationError, match=words_):
        trained(words, "100KB", strategy="single")


def test_a_short_run_computes_all_again_and_says_so() -> None:
    said = trained(words, "70%", steps=2, strategy="single")["words"]
    assert said == (
        "recomputes all 4 blocks in backward while they are measured, 2 steps, then as few as 70% allows"
    )


# What cannot be


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (tasks.plain, {}, "Sequential has no two of one class there that have modules inside"),
        (words, {"strategy": "data_parallel", "devices": "cpu:0,cpu:1"}, "several in one process"),
        (words, {"recompute": "1GB,1GB"}, "2 limits for 1 ranks"),
    ],
)
def test_it_is_refused_with_the_way_out(task: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Engine(task(), **({"device": "cpu", "strategy": "single", "recompute": "blocks"} | settings))


def test_a_backward_in_two_parts_is_refused_before_ranks_start() -> None:
    config = RunConfig(recompute="blocks", strategy="pipeline", strategy_option=("schedule=zero-bubble",))
    with pytest.raises(ConfigurationError, match="zero-bubble takes backward in two parts"):
        check_division(config, 2)


def test_a_loop_by_hand_has_no_budget() -> None:
    with Engine(words(), device="cpu", strategy="single", recompute="60%") as engine:
        next(engine.batches())
        with pytest.raises(ConfigurationError, match="own compute all blocks again with recompute=blocks"):
            engine.backward(torch.zeros(()), 1)


def test_an_estimate_knows_all_blocks_and_no_budget() -> None:
    given: dict[str, Any] = {"device": "cpu", "strategy": "single", "processes": 1}
    kept, again = (estimate_memory(words(), recompute=how, **given).peak for how in (None, "blocks"))
    assert again < 0.7 * kept
    with pytest.raises(ConfigurationError, match="measured in the run's first steps"):
        estimate_memory(words(), recompute="60%", **given)


class Apart(Tower):
    """Uses its blocks' parts, and never calls them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block.down(block.up(x))  # type: ignore[operator, union-attr]
        scores: Tensor = self.head(x)
        return scores


def test_blocks_that_nobody_calls_are_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no rank has called blocks.0, .* nothing is computed again"
    ):
        trained(lambda: tower(model=Apart), "blocks", strategy="single")


class Open(Tower):
    """Its blocks are nn.Sequential, between whose children a pipeline can cut, too."""

    def __init__(self) -> None:
        layers = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        super().__init__(lambda: nn.Sequential(*map(copy.deepcopy, layers)))
        self.blocks = self.blocks[:4]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


def open_tower() -> Task:
    return tower(model=Open)


def in_open_stages() -> str:
    with pytest.raises(ConfigurationError) as caught:
        trained(open_tower, "blocks", steps=1, strategy="pipeline")
    return str(caught.value)


def test_a_pipeline_that_cuts_blocks_open_names_the_option_that_keeps_them_whole(ranks: Any) -> None:
    assert all("blocks=NAME of their list keeps them whole" in said for said in ranks(2).run(in_open_stages))
    option = {"strategy": "pipeline", "strategy_option": ("blocks=blocks",)}
    for error, _, said in ranks(2).run(pair, open_tower, "blocks", **option):
        assert error < 1e-12
        assert "blocks" in said


class Late(nn.Module):
    """Writes into its buffer from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        self.number += 1
        if self.number > 4:
            self.calls.add_(1)
        return x + self.layer(x), scale


def test_a_buffer_that_is_written_later_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match="writes into its buffer calls, and did not when it was first"
    ):
        trained(lambda: tower(model=lambda: Tower(Late)), "blocks", strategy="single")


def test_a_copy_of_a_block_computes_its_own_again() -> None:
    own = Tower(Wide)
    recompute_blocks(Recompute.parse("blocks"), own)
    other = copy.deepcopy(own)
    with torch.no_grad():
        for parameter in other.blocks.parameters():
            parameter.zero_()
    x = torch.ones(2, WIDTH)
    assert torch.equal(other.blocks[0](x, scale=None)[0], x)
    assert not torch.equal(own.blocks[0](x, scale=None)[0], x)
