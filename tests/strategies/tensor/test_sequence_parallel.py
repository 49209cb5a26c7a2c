"""Positions divided between divided layers, against one device, in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.distributed.mesh import Layout
from evener.distributed.session import Session
from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.strategies.interfaces import StrategySettings
from evener.strategies.tensor.tensor import TensorParallel, plan_of
from evener.tools.verify import Trajectory, record, relative_error
from evener.training.engine import Engine
from tests.comparing import worst
from tests.strategies import streams
from tests.strategies.test_standin import STEPS, trained
from tests.strategies.test_standin import task as device_task
from tests.tiers import ALWAYS, NIGHTLY, SLOW, spread

DERIVED = TensorParallel(sequence=True)
OWN = TensorParallel(streams.OWN)


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual = {"dtype": "float64", "device": "cpu", "steps": 5}
    return record(f"tests.strategies.streams:{name}", None, RunConfig(**(usual | settings)), environment)


def exact(ranks: Any, size: int, name: str, strategy: Any, **settings: Any) -> None:
    reference = trajectory(name, Environment(), micro_batch=3, clip_norm=0.3, strategy="single")
    divided = ranks(size).run(trajectory, name, micro_batch=3, clip_norm=0.3, strategy=strategy, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


def test_half_precision_is_that_of_one_device(ranks: Any) -> None:
    settings = {"dtype": None, "precision": "bf16"}
    reference = trajectory("pre_norm", Environment(), strategy="single", **settings)
    (divided, _) = ranks(2).run(trajectory, "pre_norm", strategy=DERIVED, **settings)
    assert divided.losses == pytest.approx(reference.losses, rel=1e-2)
    assert worst(reference.weights, divided.weights) <= 0.05


CASES = [
    ("in_a_row", DERIVED),
    ("pre_norm", DERIVED),
    ("post_norm", DERIVED),
    ("own_blocks", OWN),
    ("short", DERIVED),
    ("one_position", DERIVED),
    ("slope", DERIVED),
    ("repeats", TensorParallel("feed=sequence,feed.drop=sequence,feed.up=colwise,feed.down=rowwise")),
]


@pytest.mark.parametrize(
    ("name", "strategy"),
    spread(CASES, ALWAYS, SLOW, NIGHTLY, SLOW, NIGHTLY, NIGHTLY, ALWAYS, SLOW),
    ids=str,
)
def test_weights_are_those_of_one_device(ranks: Any, name: str, strategy: Any) -> None:
    exact(ranks, 3, name, strategy)


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"),
    spread(
        [
            ("pre_norm", DERIVED, "data=2,tensor=2"),
            ("pre_norm", DERIVED, "shard=2,tensor=2"),
            ("own_blocks", OWN, "shard=2,tensor=2"),
            ("own_blocks", OWN, "data=2,tensor=2"),
        ],
        SLOW,
        NIGHTLY,
    ),
    ids=str,
)
def test_samples_are_divided_too(ranks: Any, name: str, strategy: Any, mesh: str) -> None:
    strategies = (evener.strategies.Sharded(zero=2), strategy) if "shard" in mesh else strategy
    exact(ranks, 4, name, strategies, mesh=mesh, balance="3,1")


def held(strategy: Any) -> tuple[dict[str, float], Any]:
    config = RunConfig(strategy=strategy, device="cpu", dtype="float64", steps=2)
    with Engine(streams.in_a_row(), config) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate(), engine.predict(engine.task.evaluate, everywhere=True)


@pytest.mark.nightly
def test_evaluation_is_that_of_one_device(ranks: Any) -> None:
    ((metrics, predicted),) = ranks(1).run(held, "single")
    for of_rank, outputs in ranks(2).run(held, DERIVED):
        assert of_rank == pytest.approx(metrics, rel=1e-11)
        assert relative_error(predicted, outputs) <= 1e-11


# What it is for


def saved(sequence: bool) -> int:
    """Bytes of activations that two layers keep for backward."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False))
    with Session("cpu", 60) as session:
        mesh = session.lay(Layout({"tensor": session.world_size}))
        divided = TensorParallel(sequence=sequence).parallelize(model, mesh, StrategySettings())
        weights = {p.untyped_storage().data_ptr() for p in divided.parameters()}
        found: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        x = torch.randn(8, 30, 32)
        divided(x)  # in which a stream is tried
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = divided(x)
        assert output.requires_grad
        return sum(tensor.untyped_storage().nbytes() for key, tensor in found.items() if key not in weights)


def test_a_rank_keeps_less_for_backward(ranks: Any) -> None:
    (alone,) = ranks(1).run(saved, False)
    for without, pieces in zip(ranks(2).run(saved, False), ranks(2).run(saved, True), strict=True):
        assert pieces < 0.5 * alone
        assert pieces < 0.82 * without


# The plan


def words_of(model: nn.Module, plan: str | None, sequence: bool = False) -> dict[str, str]:
    return {name: str(use) for name, use in plan_of(model, plan, sequence).uses.items()}


def test_what_is_derived() -> None:
    found = words_of(streams.Encoder(True, True), None, sequence=True)
    assert {name for name, use in found.items() if use == "sequence"} == {"encoder", "decoder"}
    found = words_of(streams.Encoder(True, False), "auto,encoder=whole", sequence=True)
    assert {name: use for name, use in found.items() if "sequence" in use} == {"decoder": "sequence:0"}
    found = words_of(streams.row(), None, sequence=True)
    assert {name for name, use in found.items() if use == "sequence"} == {"1", "6", "8", "9"}
    assert plan_of(streams.row(), None, True) == plan_of(
        streams.row(), str(plan_of(streams.row(), None, True))
    )


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.inner, self.attention = nn.Sequential(), nn.MultiheadAttention(4, 2)


def holding(*modules: nn.Module) -> Holds:
    made = Holds()
    made.inner = nn.Sequential(*modules)
    return made


PAIR = "up=colwise,down=rowwise,inner=sequence"


@pytest.mark.parametrize(
    ("model", "plan", "kind", "words"),
    [
        (holding(nn.BatchNorm1d(4)), PAIR, TaskError, "inner.0 cannot .*: a BatchNorm1d .* Put inner.0=whole"),
        (holding(nn.GRU(4, 4)), PAIR, TaskError, "inner.0 cannot compute some of the positions.* a GRU is not known"),
        (holding(nn.Conv1d(4, 4, 3)), PAIR, TaskError, "inner.0 cannot .* a Conv1d is not known to look at each"),
        (holding(nn.MultiheadAttention(4, 2)), PAIR, TaskError, "inner.0 cannot .*: it is not divided; say =heads"),
        (holding(nn.MultiheadAttention(4, 2)), f"{PAIR},inner.0=heads", TaskError, "positions are on dimension 0"),
        (holding(nn.Dropout1d(0.1)), f"{PAIR},inner.0=sequence", TaskError, "a Dropout1d drops more than elements"),
        (holding(nn.Linear(4, 9)), f"{PAIR},inner.0=vocabulary", TaskError, "a Linear that is vocabulary, which has"),
        (holding(streams.Mixing()), PAIR, TaskError, "inner.0 cannot .* its forward does with weight; if"),
        (Holds(), "up=colwise,down=rowwise,inner=sequence:x", ConfigurationError, "rowwise:UNIT or sequence:DIM"),
        (Holds(), "inner=sequence", ConfigurationError, "divides nothing to its end"),
    ],
)  # fmt: skip
def test_what_cannot_be_in_pieces_is_refused(model: nn.Module, plan: str, kind: type, words: str) -> None:
    with pytest.raises(kind) as caught:
        plan_of(model, plan)
    assert re.search(words, str(caught.value)), caught.value


def test_a_parameter_beside_modules_is_refused() -> None:
    model = holding(nn.LayerNorm(4))
    model.inner.register_parameter("scale", nn.Parameter(torch.ones(4)))
    with pytest.raises(EvenerError, match=r"inner cannot .* it has a parameter scale beside modules"):
        plan_of(model, PAIR)


def test_what_the_option_cannot_find_is_refused() -> None:
    with pytest.raises(
        TaskError, match=r"sequence=True: Holds has none of PyTorch's .* say plan='auto,NAME=seq"
    ):
        plan_of(Holds(), None, sequence=True)
    with pytest.raises(
        ConfigurationError, match=r"sequence=True adds to what is derived, and plan .* has no auto"
    ):
        plan_of(Holds(), "up=colwise,down=rowwise", sequence=True)


# A run that cannot be


def refused(name: str, strategy: Any, **settings: Any) -> str:
    with pytest.raises(EvenerError) as caught:
        trajectory(name, strategy=strategy, **settings)
    assert issubclass(caught.type, TaskError | ConfigurationError)
    return str(caught.value)


ODD = TensorParallel("auto,inner=sequence,inner.up=colwise,inner.down=rowwise,inner.place=whole")


@pytest.mark.parametrize(
    ("name", "strategy", "words"),
    [
        ("averages", ODD, "inner is sequence, and does not compute from some of the positions what"),
        ("averages_in_training", ODD, "inner is sequence, and does not compute .* .tried in training mode."),
        ("counts", ODD, "inner.place, in inner, has a tensor of shape .* where dimension 1 must be"),
        ("adds_all", ODD, "inner is sequence, and cannot compute some of the positions: RuntimeError"),
        ("norms_all", ODD, r"inner.norm, in inner, has a tensor of shape \(8, 3, 10\) where dimension 1 must be the 7"),
        ("drops", ODD, "inner is sequence, and in training a function in its forward draws random numbers"),
        ("flat", DERIVED, r"plan: 0 to 5 is sequence, and gets a tensor of shape \(8, 5\) first"),
        ("repeats_inside", TensorParallel("feed=sequence,feed.drop=sequence,feed.up=colwise,feed.down=rowwise"),
         "feed.norm computes some of the positions, in feed, and is called outside .* checkpoint feed"),
        ("tied", TensorParallel("feed=sequence,feed.drop=sequence,feed.up=colwise,feed.down=rowwise"),
         "feed.norm.weight and norm.weight are one weight"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_in_a_stream_is_found(ranks: Any, name: str, strategy: Any, words: str) -> None:
    for message in ranks(2).run(refused, name, strategy):
        assert re.search(words, message), message


def test_stages_do_not_go_together_with_it(ranks: Any) -> None:
    settings = {"mesh": "pipeline=2,tensor=2", "strategy": DERIVED}
    for message in ranks(4).run(refused, "in_a_row", **settings):
        assert "divides positions by sequence, which does not go together with the axis 'pipeline'" in message


def test_no_step_waits_for_the_device() -> None:
    """On the stand-in for a GPU, where a number that the host reads within a step raises."""
    words = torch.arange(96).view(48, 2) % streams.WORDS
    model = lambda: streams.Encoder(norm_first=True, batch_first=True, dropout=0.1, masked=False)  # noqa: E731
    given = device_task(model, train=TensorDataset(words, words))
    _, steps, _ = trained(given, DERIVED, 2, 1)
    assert len(steps) == STEPS
