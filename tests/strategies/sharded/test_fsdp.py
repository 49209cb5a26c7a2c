"""Parameters, gradients and optimizer state divided over the ranks by FSDP2, against one device, in float64."""

from __future__ import annotations

import gc
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.components.sharded_tensor.local import local
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.records import StepRecord
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError, DivergenceError, EvenerError, TaskError
from evener.strategies.sharded.fsdp import Fsdp
from evener.testing import check_strategy
from evener.tools.conformance.tasks import broken
from evener.tools.verify import Trajectory, record, relative_error
from evener.training.engine import Engine
from tests.comparing import handed_on, worst
from tests.strategies.seven import step_by_hand
from tests.strategies.sharding import (  # noqa: F401 (some as tasks of this module, by name)
    SAMPLES,
    WIDTH,
    WORDS,
    EachLayer,
    Model,
    penalised,
    recomputed,
    recurrent,
    task,
)
from tests.tasks import layouts, no_gradients  # noqa: F401
from tests.tiers import ALWAYS, NIGHTLY, SLOW, spread

FSDP = Fsdp()


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual = {"dtype": "float64", "device": "cpu", "steps": 6, "strategy": FSDP}
    return record(f"{__name__}:{name}", None, RunConfig(**(usual | settings)), environment)


def compare(ranks: Any, number: int, name: str, **settings: Any) -> None:
    alone = settings | {"balance": "equal", "strategy": "single", "mesh": None}
    reference = trajectory(name, Environment(), **alone)
    divided = ranks(number).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "the ranks' weights differ"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("task", {"balance": "5,1,2", "clip_norm": 0.05}, marks=NIGHTLY),
        pytest.param("task", {"balance": "3,0,1", "micro_batch": 4}, marks=NIGHTLY),
        pytest.param("task", {"strategy": Fsdp(wrap="")}, marks=NIGHTLY),
        ("task", {"strategy": Fsdp(wrap="blocks.*.layers.*,never", reshard=False), "micro_batch": 4}),
        ("task", {"strategy": Fsdp(offload=True), "balance": "5,1,2"}),
        ("penalised", {"balance": "5,1,2", "clip_norm": 0.2}),
        ("recomputed", {"balance": "5,1,2"}),
        ("no_gradients", {}),
        ("layouts", {"strategy": Fsdp(wrap="")}),
        pytest.param("recurrent", {"strategy": Fsdp(wrap="layers"), "balance": "5,1,2"}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    compare(ranks, 3, name, **settings)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("task", {"balance": "4,1,0,2", "micro_batch": 4, "clip_norm": 0.05}),
        ("penalised", {"strategy": Fsdp(reshard=False)}),
    ],
    ids=str,
)
def test_parts_are_summed_over_a_second_axis(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    compare(ranks, 4, name, mesh="data=2,shard=2", **settings)


# What a rank holds


class Wide(nn.Module):
    """Some megabytes, of rows that three ranks cannot divide equally; tells where it was built."""

    built: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(400, 400), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(400, 5)
        Wide.built.append(self.head.weight.device.type)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(x))
        return scores


def wide() -> Task:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(12, 400, generator=generator), torch.arange(12) % 5)
    return task(Wide, train=data, evaluate=data, batch_size=6)


def held(dtype: str | None) -> tuple[dict[str, int], list[str], int]:
    """Bytes of parameters, gradients and optimizer state, where the model was built, and bytes between the steps."""
    Wide.built = []
    with Engine(wide(), RunConfig(strategy=FSDP, device="cpu", dtype=dtype, steps=2)) as engine:
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            outputs = engine.model(micro.inputs)
            engine.backward(nn.functional.cross_entropy(outputs, micro.targets, reduction="sum"), micro.size)
            gradients = sum(local(p.grad).nbytes for p in engine.model.parameters() if p.grad is not None)
            engine.update()
        state = engine.learner.optimizer.state.values()
        tensors = [local(value) for entries in state for value in entries.values() if value.ndim]
        found = {
            "parameters": sum(local(p).nbytes for p in engine.model.parameters()),
            "gradients": gradients,
            "state": sum(tensor.nbytes for tensor in tensors),
        }
        storage = sum(local(p).untyped_storage().nbytes() for p in engine.model.parameters())
        return found, Wide.built, storage


@pytest.mark.parametrize("dtype", spread([None, "float64"], ALWAYS, NIGHTLY))
def test_a_rank_holds_its_part_and_only_the_first_ever_holds_the_whole(ranks: Any, dtype: str | None) -> None:
    Wide.built = []
    whole = sum(p.numel() for p in Wide().parameters()) * (8 if dtype else 4)
    for rank, (found, built, storage) in enumerate(ranks(3).run(held, dtype)):
        assert found["parameters"] <= whole / 3 * 1.05
        assert found["gradients"] <= whole / 3 * 1.05
        assert found["state"] <= 2 * whole / 3 * 1.05
        assert storage <= whole / 3 * 1.05
        assert sorted(built) == (["cpu", "meta"] if rank == 0 else ["meta"])


def test_pieces_follow_each_other_and_may_be_empty(ranks: Any) -> None:
    found = ranks(4).run(sizes)
    assert [of_rank["never.weight"] for of_rank in found] == [1, 1, 0, 0]
    assert [of_rank["embed.weight"] for of_rank in found] == [3, 3, 3, 2]
    assert all("scale" not in of_rank for of_rank in found)


def sizes() -> dict[str, int]:
    with Engine(task(), RunConfig(strategy=FSDP, device="cpu", steps=1)) as engine:
        named = engine.model.named_parameters()
        return {name: len(piece.local_bounds) for name, p in named if (piece := shard_spec(p)) is not None}


def open_connections() -> int:
    """Threads that wait for messages of process groups: one for each group that is still there."""
    gc.collect()
    names = list[str]()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has ended meanwhile
            names.append(path.read_text())
    return names.count("gloo_tcp_loop\n")


def test_ranks_keep_no_group_of_a_run(ranks: Any) -> None:
    """PyTorch would, for each mesh: ``tests.ranks.forget_meshes``."""
    before = ranks(2).run(open_connections)
    if not min(before):
        pytest.skip("this PyTorch does not name its threads")
    ranks(2).run(trajectory, "task", steps=1)
    assert ranks(2).run(open_connections) == before


# Checkpoints, evaluation, a loop of the user's own


WHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {"strategy": "single"}),
    "replicas": (2, {"strategy": "ddp"}),
    "sharded": (3, {"strategy": FSDP}),
    "sharded in two": (2, {"strategy": Fsdp(wrap="", reshard=False)}),
    "two axes": (4, {"strategy": FSDP, "mesh": "data=2,shard=2"}),
}


@pytest.mark.parametrize(
    "places",
    [
        ("sharded", "one device"),
        pytest.param(("one device", "sharded"), marks=NIGHTLY),
        pytest.param(("sharded", "replicas"), marks=SLOW),
        ("replicas", "two axes"),
        pytest.param(("two axes", "sharded in two"), marks=SLOW),
    ],
    ids=" to ".join,
)
def test_any_ranks_go_on_from_a_checkpoint_of_any(ranks: Any, places: tuple[str, str]) -> None:
    reference = trajectory("task", Environment(), strategy="single", steps=5)
    found = handed_on(ranks, task, [WHERE[place] for place in places], (3, 5))
    for state in found:
        assert worst(reference.weights, state["model"]) <= 1e-11


def evaluated(strategy: Any) -> tuple[dict[str, float], Any, Any]:
    with Engine(
        task(), RunConfig(strategy=strategy, device="cpu", dtype="float64", balance="equal")
    ) as engine:
        few = TensorDataset(*(tensor[:2] for tensor in engine.task.train.tensors))
        metrics = [engine.evaluate(), engine.evaluate(few)]
        engine.step(next(iter(engine.batches())))  # weights that an evaluation left whole would not be these
        return {**metrics[0], "few": metrics[1]["loss"]}, engine.predict(few), engine.evaluate()["loss"]


@pytest.mark.parametrize("reshard", spread([True, False], NIGHTLY, ALWAYS))
def test_evaluation_and_predictions(ranks: Any, reshard: bool) -> None:
    ((metrics, predicted, after),) = ranks(1).run(evaluated, "single")
    for rank, found in enumerate(ranks(3).run(evaluated, Fsdp(reshard=reshard))):
        assert found[0] == pytest.approx(metrics, rel=1e-11)
        assert found[2] == pytest.approx(after, rel=1e-11)
        assert (found[1] is None) == (rank > 0)
        assert found[1] is None or relative_error(predicted, found[1]) <= 1e-11


def by_hand(strategy: Any, **settings: Any) -> dict[str, Tensor]:
    """Two optimizers, of which each updates its own after one backward pass."""
    config = RunConfig(strategy=strategy, device="cpu", dtype="float64", epochs=1, clip_norm=0.1, **settings)
    scaled = task(
        optimizer=lambda named_parameters: torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
    )
    with Engine(scaled, config) as engine:
        own = torch.optim.SGD(
            [engine.learner.parameter("scale"), *engine.model.blocks[1].parameters()], lr=0.3
        )
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            outputs = engine.model(micro.inputs)
            counted = (micro.targets >= 0).sum()
            engine.backward(nn.functional.cross_entropy(outputs, micro.targets, reduction="sum"), counted)
            engine.update(own)
            engine.update()
        return {name: value.detach().clone() for name, value in engine.learner.tensors().items()}


def failing(by_hand: bool) -> str:
    """In the last step, after which no rank waits for one that is gone."""
    config = RunConfig(strategy=FSDP, device="cpu", dtype="float64", steps=4)
    try:
        with Engine(broken("gradient", 1), config) as engine:
            for batch in engine.batches():
                step_by_hand(engine, batch) if by_hand else engine.step(batch)
    except DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "by hand"])
def test_an_error_names_the_rank_whose_gradient_is_not_finite(ranks: Any, by_hand: bool) -> None:
    """Though the sum that FSDP2 leaves is not finite on any."""
    for message in ranks(2).run(failing, by_hand):
        assert re.search(
            r"a gradient is not finite.* on rank 1[:,] that of layers\.2\.bias; the run stops here", message
        )


def test_a_loop_of_the_users_own(ranks: Any) -> None:
    (weights,) = ranks(1).run(by_hand, "single")
    for found in ranks(3).run(by_hand, FSDP, balance="3,0,1"):
        assert worst(weights, found) <= 1e-11


# Speeds

LATE_SECONDS = 0.04


class LateOnRankOne(Model):
    """Rank 1 comes late to each block, whose weights the other cannot gather before."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(late_on_rank_one)


def late_on_rank_one(*_: Any) -> None:
    if dist.get_rank() == 1:
        time.sleep(LATE_SECONDS)


def least_seconds() -> list[float]:
    """The least time of each rank's own work over some steps."""
    kept = Shown()
    settings = RunConfig(strategy=FSDP, device="cpu", steps=6, balance="equal")
    with Engine(task(LateOnRankOne), settings, observers=[kept]) as engine:
        for batch in engine.batches():
            engine.step(batch)
    return [min(times) for times in zip(*kept.compute_seconds, strict=True)]


class Shown(Observer):
    everywhere = True

    def __init__(self) -> None:
        self.compute_seconds: list[Any] = []

    def step(self, record: StepRecord) -> None:
        self.compute_seconds.append(record.compute_seconds)


def test_waiting_for_the_weights_of_others_is_no_work(ranks: Any) -> None:
    """Would it count, all ranks were equally slow, for each gathers what the others have."""
    for waiting, late in ranks(2).run(least_seconds):
        assert waiting < 3 * LATE_SECONDS <= late


# Refusals


class Choosing(nn.Module):
    """Chooses between blocks, by a sample or by what is given."""

    def __init__(self, chosen: Any = None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 2), nn.Tanh()) for _ in range(2))
        self.chosen, self.passes = chosen, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        hidden = self.first(x)
        if self.chosen is not None:
            scores: Tensor = self.blocks[self.chosen(self.passes)](hidden)
            return scores
        rows = [self.blocks[int(row[0] > 0)](h) for row, h in zip(x, hidden, strict=True)]
        return torch.stack(rows)


def choosing(chosen: Any = None) -> Task:
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.arange(SAMPLES) % 2)
    return task(lambda: Choosing(chosen), train=data, evaluate=data)


def choosing_by_rank() -> Task:
    return choosing(lambda _: dist.get_rank())


def choosing_by_pass() -> Task:
    return choosing(lambda passes: passes - 1)


class Apart(Model):
    def embedded(self, words: Tensor) -> Tensor:
        x: Tensor = self.blocks[0](torch.zeros(len(words), 1, WIDTH))
        return x.expand(-1, WORDS, -1)


def outside() -> Task:
    return task(Apart, forward=lambda model, words: model.embedded(words))


class ReadingOfOthers(Model):
    def forward(self, words: Tensor) -> Tensor:
        weight = next(
            each for each in self.blocks[0].parameters() if each.ndim == 2 and each.shape[1] == WIDTH
        )
        scores: Tensor = super().forward(words)
        return scores + (torch.ones(1, WIDTH, dtype=scores.dtype) @ weight.t()).sum()


def reading() -> Task:
    return task(ReadingOfOthers)


def scaled(module: nn.Module, *given: Any) -> Any:
    """Calls the module with other weights."""
    weights = {name: weight * 1.5 for name, weight in module.named_parameters()}
    return torch.func.functional_call(module, weights, given)


class CallingWithOthers(Model):
    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = super().forward(words)
        return scores + scaled(self.blocks[0], self.embed(words)).sum()


def substituting() -> Task:
    return task(CallingWithOthers)


def substituting_all() -> Task:
    return task(forward=scaled)


def sparse() -> Task:
    return task(lambda: nn.Embedding(WORDS, WORDS, sparse=True))


def mixed() -> Task:
    return task(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float16)))


def complex_weight() -> Task:
    return task(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)))


def listed() -> Task:
    return task(lambda: nn.ModuleList([nn.Linear(2, 2)]))


def together() -> Task:
    return task(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True))


def empty_weight() -> Task:
    return task(lambda: nn.Sequential(Model(), nn.ParameterList([torch.zeros(0, 4)])))


def masked() -> Task:
    return task(optimizer=lambda parameters: torch.optim.Rprop(parameters))


def refused(name: str, settings: dict[str, Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(EvenerError) as caught:
        trajectory(name, dtype=None, **settings)
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "kind", "words"),
    [
        ("sparse", {}, TaskError, "the model has sparse gradients"),
        ("mixed", {}, TaskError, "0.weight of torch.float32, 1.weight of torch.float16: set dtype"),
        ("complex_weight", {}, TaskError, "1.weight is complex"),
        ("empty_weight", {}, TaskError, "1.0 is empty"),
        (
            "listed",
            {},
            TaskError,
            "the model cannot be sharded by PyTorch's FSDP2: fully_shard does not support",
        ),
        ("together", {}, ConfigurationError, "SGD steps many parameters at once.*foreach=False"),
        ("masked", {}, ConfigurationError, "Rprop chooses elements by masks.*zero=2"),
        ("task", {"compress": "bf16"}, ConfigurationError, "there is no compress: leave it out"),
        ("task", {"bucket_mb": 1.0}, ConfigurationError, "there is no bucket_mb: leave it out"),
        (
            "task",
            {"strategy": Fsdp(wrap="layers.*")},
            ConfigurationError,
            "called 'layers.*'; Model has embed, ",
        ),
        (
            "task",
            {"strategy": Fsdp(wrap="out")},
            TaskError,
            "out cannot be a unit: its weight embed.weight is",
        ),
        ("outside", {"strategy": Fsdp(wrap="")}, TaskError, "blocks.0 is called outside of the model's own"),
        ("outside", {}, TaskError, "blocks.0 is called outside of the model's own forward"),
        (
            "reading",
            {},
            TaskError,
            "forward, line .* of test_fsdp.py, computes with the weight of a unit outside of .* @ weight.t.*'wrap'",
        ),
        (
            "substituting",
            {},
            TaskError,
            "blocks.0 is called with another tensor in the place of its weight blocks.0.*an empty text",
        ),
        ("substituting_all", {}, TaskError, "the model is called with another tensor .* itself: use zero=2"),
        (
            "choosing_by_rank",
            {},
            TaskError,
            "the weights of blocks.[01] where another rank's has the weights of blocks.[01]",
        ),
        (
            "choosing_by_pass",
            {},
            TaskError,
            "the weights of blocks.1 where the first has the weights of blocks.0.*an empty 'wrap'",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    ranks: Any, name: str, settings: dict[str, Any], kind: type, words: str
) -> None:
    for found, message in ranks(2).run(refused, name, settings):
        assert issubclass(found, kind), message
        assert re.search(words, message), message


@pytest.mark.parametrize("name", ["reading", "substituting"])
def test_a_weight_that_others_read_may_be_in_the_models_own_unit(ranks: Any, name: str) -> None:
    """As what refuses it says."""
    compare(ranks, 2, name, strategy=Fsdp(wrap=""), steps=2)


@pytest.mark.parametrize("strategy", [Fsdp(wrap=""), Fsdp(wrap="first")], ids=str)
def test_samples_may_choose_between_modules_that_are_no_units(ranks: Any, strategy: Fsdp) -> None:
    compare(ranks, 2, "choosing", strategy=strategy, steps=2)


@pytest.mark.slow
def test_the_battery_of_strategies(ranks: Any) -> None:
    ranks(2).run(check_strategy, FSDP, without=("sparse",))


@pytest.mark.parametrize(
    ("number", "options"),
    spread(
        [
            (3, {"strategy": FSDP, "without": ("sparse",)}),
            (2, {"strategy": EachLayer(), "without": ("sparse",)}),
            (3, {"strategy": EachLayer(reshard=False), "without": ("sparse",)}),
            (4, {"strategy": FSDP, "without": ("sparse",), "mesh": "data=2,shard=2"}),
        ],
        NIGHTLY,
        NIGHTLY,
        SLOW,
        NIGHTLY,
    ),
    ids=str,
)
def test_the_battery_of_strategies_with_other_units(ranks: Any, number: int, options: dict[str, Any]) -> None:
    ranks(number).run(check_strategy, **options)
