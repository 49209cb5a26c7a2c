"""Layers divided by features, heads, channels and words, against one device, in float64."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.nn import VocabularyParallelCrossEntropy
from evener.strategies.tensor.tensor import TensorParallel
from evener.testing import check_strategy
from evener.tools.conformance.trials import NAMES
from evener.tools.verify import Trajectory, record, relative_error
from evener.training.engine import Engine
from tests.comparing import handed_on, worst
from tests.conformance import models
from tests.strategies import wide
from tests.strategies.test_standin import STEPS, TRAITS, trained
from tests.strategies.test_standin import task as device_task
from tests.tiers import ALWAYS, NIGHTLY, SLOW, crossed, spread


def trajectory(
    name: str, environment: Environment | None = None, plan: str | None = None, **settings: Any
) -> Trajectory:
    usual = {"dtype": "float64", "device": "cpu", "steps": 5, "strategy": TensorParallel(plan)}
    return record(f"tests.strategies.wide:{name}", None, RunConfig(**(usual | settings)), environment)


SEPARATE = "attention.[qkv]=colwise:2,attention.drop=between,attention.o=rowwise:2"
FUSED = "attention.qkv=colwise:2:3,attention.drop=between,attention.o=rowwise:2"


def exact(ranks: Any, size: int, name: str, one: dict[str, Any], **settings: Any) -> None:
    reference = trajectory(name, Environment(), **one, strategy="single")
    divided = ranks(size).run(trajectory, name, **(one | settings))
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


@pytest.mark.parametrize(
    ("name", "one", "settings"),
    [
        ("mlp", {"clip_norm": 0.1, "micro_batch": 3}, {"balance": "3,1,1"}),
        ("gated", {"clip_norm": 0.05}, {}),
        ("convolutions", {}, {"balance": "1,2,1"}),
        pytest.param("words", {"clip_norm": 0.1, "micro_batch": 3}, {"balance": "1,1,2"}, marks=NIGHTLY),
        pytest.param("scores_apart", {"micro_batch": 3}, {}, marks=NIGHTLY),
        pytest.param("scores_whole", {}, {}, marks=pytest.mark.slow),
        ("penalised", {"clip_norm": 0.1}, {}),
        ("separate", {}, {"plan": SEPARATE}),
        ("fused", {}, {"plan": FUSED}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(
    ranks: Any, name: str, one: dict[str, Any], settings: dict[str, Any]
) -> None:
    exact(ranks, 3, name, one, **settings)


@pytest.mark.parametrize(
    "name",
    spread(["mlp", "gated", "convolutions", "words", "scores_apart", "penalised"], NIGHTLY, SLOW),
)
def test_weights_are_those_of_one_device_on_two_ranks(ranks: Any, name: str) -> None:
    exact(ranks, 2, name, {"micro_batch": 3}, balance="2,1")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("mlp", {"balance": "3,1", "micro_batch": 3, "clip_norm": 0.1}, marks=NIGHTLY),
        ("convolutions", {"balance": "0,1"}),
        pytest.param("words", {"balance": "3,1", "clip_norm": 0.1}, marks=pytest.mark.slow),
        pytest.param("scores_apart", {"balance": "1,3", "micro_batch": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_samples_are_divided_too(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    one = {key: value for key, value in settings.items() if key != "balance"}
    exact(ranks, 4, name, one, balance=settings["balance"], mesh="data=2,tensor=2")


NOT_DERIVED = ("idle", "tied", "accumulation", "unused", "by_hand", "several", "buffers")
"""A rank without features has nothing to compute; of the others' forwards nothing can be proved."""
TRIED_BY_PLAN = ("tied", "accumulation", "unused", "by_hand", "buffers")


@pytest.mark.parametrize("size", spread([2, 3], SLOW, NIGHTLY))
def test_the_battery_of_strategies(ranks: Any, size: int) -> None:
    ranks(size).run(check_strategy, "tensor", without=NOT_DERIVED)


@pytest.mark.slow
def test_the_battery_where_a_plan_divides(ranks: Any) -> None:
    """A layer alone, whose features are gathered."""
    without = [name for name in NAMES if name not in TRIED_BY_PLAN]
    ranks(2).run(check_strategy, TensorParallel("first=vocabulary"), without=without)


def held(name: str, strategy: Any) -> tuple[dict[str, int], dict[str, float], Any]:
    """Elements of each divided tensor, what the metrics are and the predictions."""
    settings = {"strategy": strategy, "device": "cpu", "dtype": "float64", "steps": 3}
    with Engine(getattr(wide, name)(), RunConfig(**settings)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        tensors = dict(engine.model.named_parameters()) | dict(engine.model.named_buffers())
        pieces = {name: tensor.numel() for name, tensor in tensors.items() if shard_spec(tensor)}
        data: Any = engine.task.evaluate
        few = torch.utils.data.Subset(data, [0, 5, 10])  # of one length
        return pieces, engine.evaluate(), engine.predict(few, everywhere=True)


@pytest.mark.parametrize("name", ["scores_apart", "convolutions"])
def test_evaluation_is_that_of_one_device(ranks: Any, name: str) -> None:
    ((none, metrics, predicted),) = ranks(1).run(held, name, "single")
    assert none == {}
    found = ranks(3).run(held, name, "tensor")
    for _, of_rank, outputs in found:
        assert of_rank == pytest.approx(metrics, rel=1e-11)
        assert relative_error(predicted, outputs) <= 1e-11
    if name == "scores_apart":
        words = [pieces["embed.weight"] // wide.WIDTH for pieces, *_ in found]
        assert sorted(words) == [4, 4, 5]
        of_heads = [pieces["encoder.layers.0.self_attn.in_proj_bias"] for pieces, *_ in found]
        assert sorted(of_heads) == [6, 12, 12]
    else:
        assert sorted(pieces["1.running_mean"] for pieces, *_ in found) == [1, 2, 2]


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("convolutions", (("single", 1), ("tensor", 3))),
        ("convolutions", (("tensor", 2), ("ddp", 2))),
        *spread(
            [
                ("words", (("tensor", 2), ("tensor", 3))),
                ("words", (("tensor", 3), ("ddp", 2))),
                ("words", (("ddp", 2), ("tensor", 2))),
                ("words", (("tensor", 3), ("single", 1))),
            ],
            SLOW,
            NIGHTLY,
        ),
    ],
    ids=str,
)
def test_a_checkpoint_is_taken_into_every_other_strategy(ranks: Any, name: str, places: Any) -> None:
    reference = trajectory(name, Environment(), strategy="single", steps=5)
    where = [(size, {"strategy": strategy}) for strategy, size in places]
    found = handed_on(ranks, getattr(wide, name), where, (3, 5))
    for state in found:
        weights = {key: value for key, value in reference.weights.items() if key in state["model"]}
        assert worst(weights, {key: state["model"][key] for key in weights}) <= 1e-11


class Text(nn.Module):
    """Drops by PyTorch's generator, between divided layers and elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(wide.WORDS, wide.WIDTH)
        layer = nn.TransformerEncoderLayer(wide.WIDTH, 5, 7, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(wide.WIDTH, wide.WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embed(words), src_key_padding_mask=words == 0))
        return scores.transpose(1, 2)


def dropping() -> tuple[list[float], float, dict[str, Any]]:
    """The losses, an evaluation, and the state."""
    config = RunConfig(strategy="tensor", device="cpu", dtype="float64", steps=5)
    with Engine(wide.words(model=Text), config) as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        return losses, engine.evaluate()["loss"], engine.state_dict()


def evaluated(state: dict[str, Any]) -> float:
    config = RunConfig(strategy="single", device="cpu", dtype="float64")
    with Engine(wide.words(model=Text), config) as engine:
        engine.load_state_dict(state)
        return engine.evaluate()["loss"]


def test_ranks_that_drop_by_pytorchs_generator_stay_alike(ranks: Any) -> None:
    (losses, metric, state), other = ranks(2).run(dropping)
    assert (losses, metric) == other[:2]
    assert losses[-1] < losses[0]
    assert ranks(1).run(evaluated, state) == [pytest.approx(metric, rel=1e-11)]


class Forward(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.up, self.down, self.head = (
            *(nn.Linear(5, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)),
        )
        self.embed, self.given = nn.Embedding(9, 6), forward

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.given(self, self.first(x)))
        return scores


def forward(function: Callable[[Any, Tensor], Tensor]) -> Task:
    return wide.task_of(lambda: Forward(function), wide.draws(wide.SAMPLES, 5))


def mean_of_a_part() -> Task:
    return forward(lambda m, x: m.down(m.up(x)) + m.up(x).mean(-1, keepdim=True))


def drops_a_part() -> Task:
    return forward(lambda m, x: m.down(F.dropout(m.up(x), 0.5)) + F.dropout(x, 0.5))


def weight_of_a_part() -> Task:
    return forward(lambda m, x: m.down(m.up(x)) + F.linear(x, m.embed.weight).sum(-1, keepdim=True))


def few_heads() -> Task:
    return wide.words(model=lambda: wide.Words(heads=2))


def tied() -> Task:
    def model() -> nn.Module:
        made = Forward(lambda m, x: m.down(m.up(x)))
        made.first = nn.Linear(5, 6, bias=False)
        made.embed.weight = made.head.weight = nn.Parameter(torch.zeros(9, 6))
        return made

    return wide.task_of(model, wide.draws(wide.SAMPLES, 5))


def nothing() -> Task:
    return wide.task_of(lambda: nn.Linear(5, 3), wide.draws(wide.SAMPLES, 5))


def refused(name: str, settings: dict[str, Any], by_hand: bool) -> tuple[type[BaseException], str]:
    with pytest.raises(EvenerError) as caught:
        stepping(name, by_hand, **settings)
    return caught.type, str(caught.value)


def stepping(name: str, by_hand: bool, plan: str | None = None, **settings: Any) -> None:
    task = globals().get(name) or getattr(wide, name)
    usual = {"strategy": TensorParallel(plan), "device": "cpu", "dtype": "float64", "steps": 3}
    with Engine(task(), RunConfig(**(usual | settings))) as engine:
        for batch in engine.batches():
            _by_hand(engine, batch) if by_hand else engine.step(batch)


def _by_hand(engine: Engine, batch: Any) -> None:
    (micro,) = batch.micro_batches
    total = F.cross_entropy(engine.model(micro.inputs), micro.targets, reduction="sum")
    engine.backward(total, len(micro.targets))
    engine.update()


PAIR = "up=colwise,down=rowwise"
UNEVEN = SEPARATE.replace("o=rowwise:2", "o=rowwise")
IN_RUNS = "feed.gate=colwise:7,feed.drop=whole,feed.down=rowwise"


@pytest.mark.parametrize(
    ("name", "loop"),
    crossed(["mean_of_a_part", "drops_a_part"], ["step", "by hand"], lambda _: (ALWAYS, NIGHTLY)),
)
def test_a_part_that_is_taken_for_the_whole_is_found(ranks: Any, name: str, loop: str) -> None:
    for kind, message in ranks(3).run(refused, name, {"plan": PAIR}, loop == "by hand"):
        assert issubclass(kind, TaskError), message
        assert re.search(r"the gradients of \S+ differ between ranks that compute the same samples", message)


@pytest.mark.parametrize(
    ("name", "settings", "kind", "words"),
    [
        ("weight_of_a_part", {"plan": "embed=vocabulary"}, TaskError, "embed is divided .* its weight is read from"),
        ("few_heads", {}, ConfigurationError, "encoder.layers.0.self_attn has 2 .* leave rank 2 of 3 without one"),
        ("mlp", {"balance": "9,1,1"}, ConfigurationError, "has 7 features.* leave rank 2 of 3 without one"),
        ("tied", {"plan": "embed=vocabulary"}, TaskError, "embed.weight and head.weight|head.weight and embed.weight"),
        ("nothing", {}, TaskError, "looked in Linear for pairs"),
        ("separate", {"plan": UNEVEN, "balance": "2,2,1"}, TaskError, r"attention.o reads \[.* and attention.k"),
        ("mlp", {"compress": "int8"}, ConfigurationError, "strategy 'tensor' sends no gradients that 'int8'"),
        ("gated", {"plan": IN_RUNS}, ConfigurationError, "feed.gate has 7 features.* in runs of 7 .* at most 1 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(
    ranks: Any, name: str, settings: dict[str, Any], kind: type, words: str
) -> None:
    for found, message in ranks(3).run(refused, name, settings, False):
        assert issubclass(found, kind), message
        assert re.search(words, message), message


def printed(plan: str | None) -> str:
    with redirect_stderr(io.StringIO()) as words:
        Engine(wide.mlp(), RunConfig(strategy=TensorParallel(plan), device="cpu")).close()
    return words.getvalue()


def test_what_is_derived_is_printed_by_one_rank(ranks: Any) -> None:
    first, other = ranks(2).run(printed, None)
    assert first.startswith("6 modules of Sequential are divided:\n  0.0  colwise\n  0.1  between")
    assert other == ""
    assert ranks(2).run(printed, "auto") == ["", ""]


def scored(name: str, strategy: Any) -> tuple[Any, dict[str, float], Any]:
    """What is divided of the output layer, and the scores of a training pass, of evaluation and of prediction."""
    config = RunConfig(strategy=strategy, device="cpu", dtype="float64", steps=2)
    with Engine(getattr(models, name)(), config) as engine:
        shapes = []
        handle = engine.model.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape[1]))
        for batch in engine.batches():
            engine.step(batch)
        handle.remove()
        return (
            shard_spec(engine.model.out.weight),
            {"classes": shapes[0], **engine.evaluate()},
            engine.predict(engine.task.evaluate, everywhere=True),
        )


def test_scores_of_a_plain_loss_are_divided_and_whole_for_all_who_ask(ranks: Any) -> None:
    ((none, metrics, predicted),) = ranks(1).run(scored, "recurrent", "single")
    assert none is None
    for piece, found, outputs in ranks(2).run(scored, "recurrent", "tensor"):
        assert piece.pieces[-1].stop == found["classes"] == models.WORDS
        assert found == pytest.approx(metrics, rel=1e-11)
        assert relative_error(predicted, outputs) <= 1e-11


@pytest.mark.parametrize("trait", ["penalty, AdamW, clipping", "BatchNorm, accumulation", "Dropout"])
def test_no_step_waits_for_the_device(trait: str) -> None:
    """On the stand-in for a GPU, where a number that the host reads within a step raises."""
    given, settings = TRAITS[trait]
    _, steps, _ = trained(given, "tensor", 2, 1, **settings)
    assert len(steps) == STEPS


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), VocabularyParallelCrossEntropy()], ids=["whole", "apart"]
)
def test_no_step_with_words_waits_for_the_device(loss: Any) -> None:
    words = torch.arange(60).view(30, 2) % wide.WORDS

    def model() -> nn.Module:
        made = Text()
        made.head.weight = made.embed.weight
        return made

    _, steps, _ = trained(device_task(model, train=TensorDataset(words, words), loss=loss), "tensor", 2, 1)
    assert len(steps) == STEPS
