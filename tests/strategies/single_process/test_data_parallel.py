from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener import Sum, loss
from evener.core.task.task import Task
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError, DivergenceError, RankTimeoutError, TaskError
from evener.nn import Dropout, Experts
from evener.nn.context import current
from evener.strategies.interfaces import StrategySettings
from evener.strategies.single_process.data_parallel import DataParallel, DeviceReplicas, led
from evener.tools.conformance.tasks import CLASSES, FEATURES
from tests.comparing import worst
from tests.strategies.one_process import engine_of, refused, task_of, trained, try_all
from tests.tiers import NIGHTLY, SLOW, spread

UNEVEN = DataParallel("cpu:0,cpu:1,cpu:2", "3,1,2")


@pytest.mark.parametrize(
    "strategy", spread([UNEVEN, DataParallel("cpu:0,cpu:1", "0,1")], SLOW, NIGHTLY), ids=str
)
def test_all_trials(strategy: DataParallel) -> None:
    try_all(strategy)


class Watched(nn.Module):
    """Notes which thread computes how many samples."""

    seen: dict[str, list[int]] = {}  # noqa: RUF012 (of all replicas)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), Dropout(0.3), nn.Linear(8, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        scope = current()
        assert scope is None or len(scope.samples) == len(x)
        self.seen.setdefault(threading.current_thread().name.partition("_")[0], []).append(len(x))
        scores: Tensor = self.layers(x)
        return scores


@pytest.fixture
def seen() -> dict[str, list[int]]:
    Watched.seen.clear()
    return Watched.seen


def test_every_device_computes_its_part(seen: dict[str, list[int]]) -> None:
    task = task_of(Watched)
    weights = trained(task, UNEVEN)
    assert seen == {"evener cpu:0": [7, 7, 7], "evener cpu:1": [2, 2, 2], "evener cpu:2": [4, 4, 4]}
    assert worst(trained(task, "single"), weights) <= 1e-12


def test_micro_batches_are_cut_so_that_the_first_device_sees_all(seen: dict[str, list[int]]) -> None:
    settings: dict[str, Any] = {"micro_batch": 3, "steps": 2, "batch_size": 12}
    weights = trained(task_of(Watched), DataParallel("cpu:0,cpu:1", "1,5"), **settings)
    assert seen == {"evener cpu:0": [1] * 8, "evener cpu:1": [2] * 8}
    assert worst(trained(task_of(Watched), "single", **settings), weights) <= 1e-12
    assert led([0, 3, 4], 0) == [1, 3, 3]
    assert led([0, 1, 4], 1) == [0, 1, 4]


def test_shares_follow_speed() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread().name.startswith("evener cpu:1"):
                threading.Event().wait(0.004 * len(x))
            scores: Tensor = self.layer(x)
            return scores

    with engine_of(task_of(Slow), DataParallel("cpu:0,cpu:1", "auto"), steps=24, batch_size=16) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert isinstance(engine.learner.stepper, DeviceReplicas)
        first, second = engine.learner.stepper.shares
    assert first > second


def test_threads_and_replicas_see_what_the_loop_changes(seen: dict[str, list[int]]) -> None:
    """Frozen weights, another rate of dropout, weights that were written through ``data``."""

    def run(strategy: Any) -> dict[str, Any]:
        with engine_of(task_of(Watched), strategy, steps=4) as engine:
            model: Any = engine.model
            for batch in engine.batches():
                engine.step(batch)
                model.layers[3].p = 0.6
                model.layers[0].weight.data = model.layers[0].weight.data * 0.5
                model.layers[4].bias.requires_grad_(engine.steps_done < 2)
                model.layers[1].running_mean += 1
            return dict(engine.state_dict()["model"])

    assert worst(run("single"), run(UNEVEN)) <= 1e-12


class Picky(nn.Module):
    """Fails, or leaves out its BatchNorm, where a sample says so."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.norm, self.what = nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES), what

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if threading.current_thread().name.startswith("evener cpu:1"):
            if self.what == "error":
                raise KeyError("a sample")
            return hidden
        normed: Tensor = self.norm(hidden)
        return normed


def test_an_error_on_one_device_is_raised_and_the_next_step_goes_on() -> None:
    with engine_of(task_of(lambda: Picky("error")), UNEVEN) as engine:
        batches = engine.batches()
        batch = next(batches)
        with pytest.raises(KeyError) as caught:
            engine.step(batch)
        assert "on device cpu:1, one of 3 of this process" in caught.value.__notes__
        model: Any = engine.model
        model.what = "less"
        engine.learner.session.timeout_seconds = 0.5
        with pytest.raises(RankTimeoutError, match="not all of 3 devices came"):
            engine.step(batch)


def test_a_loss_that_is_not_a_number_ends_the_run() -> None:
    task = task_of(lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), Log()))
    refused(DivergenceError, "the loss is nan", task, UNEVEN)


class Hooked(nn.Sequential):
    """Halves a gradient, as only the model itself would and no copy of it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, CLASSES))
        next(self.parameters()).register_hook(lambda gradient: gradient / 2)


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-x.abs())


class Whole(nn.Module):
    """In evaluation its outputs are (classes, samples), with as many classes as half a batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores if self.training else scores.T


def test_outputs_that_are_no_rows_are_evaluated_on_one_device() -> None:
    def mean(outputs: Tensor, targets: Tensor) -> Sum:
        assert outputs.shape == (6, len(targets))
        return Sum((outputs * targets).sum(), len(targets))

    task = task_of(Whole, metrics={"mean": mean}, loss=loss(total=total, count=len))

    def run(strategy: Any) -> float:
        with engine_of(task, strategy, batch_size=12, steps=1) as engine:
            for batch in engine.batches():
                engine.step(batch)
            return engine.evaluate()["mean"]

    assert run(DataParallel("cpu:0,cpu:1")) == pytest.approx(run("single"), rel=1e-12)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().sum()


def test_evaluation_is_divided_where_outputs_are_rows(seen: dict[str, list[int]]) -> None:
    with engine_of(task_of(Watched), UNEVEN, batch_size=12) as engine:
        for batch in engine.batches():
            engine.step(batch)
        seen.clear()
        engine.evaluate()
        assert seen["evener cpu:0"][:2] == [7, 6], "a first batch tells whether they are"
        assert seen["evener cpu:1"][:2] == [5, 2]
        assert "MainThread" not in seen


def test_a_loop_by_hand_computes_on_one_device(seen: dict[str, list[int]]) -> None:
    def run(strategy: Any) -> dict[str, Any]:
        with engine_of(task_of(Watched), strategy) as engine:
            for batch in engine.batches():
                (micro,) = batch.micro_batches
                total = nn.functional.cross_entropy(
                    engine.model(micro.inputs), micro.targets, reduction="sum"
                )
                engine.backward(total, len(micro.targets))
                engine.update()
            return dict(engine.state_dict()["model"])

    assert worst(run("single"), run(UNEVEN)) <= 1e-12
    assert set(seen) == {"MainThread"}


def pairs(n: int = 12) -> Task:
    """Inputs that are a list of two tensors, in batches of two samples."""
    data = [([torch.ones(FEATURES) * i, torch.ones(FEATURES)], i % CLASSES) for i in range(n)]

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            scores: Tensor = self.layer(first + second)
            return scores

    return task_of(Added, train=data, evaluate=data, batch_size=2)


def test_what_is_ambiguous_goes_to_one_device() -> None:
    assert worst(trained(pairs(), "single"), trained(pairs(), DataParallel("cpu:0,cpu:1"))) <= 1e-12


def collated(items: list[Any]) -> tuple[Any, Tensor]:
    return {"x": torch.stack([x for x, _ in items]), "n": len(items)}, torch.stack([y for _, y in items])


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = Experts(FEATURES, 4, experts=4), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.experts(x).output)
        return scores


class Following(nn.Linear):
    """The second layer follows the first, as a teacher does."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.slow = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.weight.lerp_(self.weight, 0.1)
        scores: Tensor = super().forward(x) + self.slow(x)
        return scores


def test_one_device_may_write_to_weights() -> None:
    assert len(trained(task_of(model=Following), DataParallel("cpu:0"))) == 4


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        ({"model": Following}, TaskError, "writes to its weight slow.weight in forward"),
        ({"collate": collated}, TaskError, r"inputs\['n'\] is of type int"),
        ({"model": lambda: Uncopied(FEATURES, CLASSES)}, TaskError, "cannot be copied to cpu:1 .*no copies"),
        ({"model": Mixture}, ConfigurationError, "asks for the ranks that compute the other parts"),
        ({"model": Hooked}, TaskError, "a hook on the gradient of 0.weight, .* copies that would not"),
    ],
)
def test_what_cannot_be_divided_is_refused(parts: Any, kind: Any, words: str) -> None:
    refused(kind, words, task_of(**parts), DataParallel("cpu:0,cpu:1"))


def test_devices_are_those_of_the_settings_and_several_ranks_are_refused() -> None:
    with engine_of(task_of(), "data_parallel", devices="cpu:0,cpu:1") as engine:
        assert isinstance(engine.learner.stepper, DeviceReplicas)
    refused(ConfigurationError, "have to be named", task_of(), DataParallel())
    refused(ConfigurationError, "leave out cpu", task_of(), DataParallel("cuda:0,cuda:1"))
    refused(ConfigurationError, "3 weights .* for 2", task_of(), DataParallel("cpu:0,cpu:1", "1,2,3"))
    with pytest.raises(ConfigurationError, match="stands there twice"):
        DataParallel("cpu:0,cpu:0")
    with pytest.raises(ConfigurationError, match="there are 2 ranks"):
        DataParallel().layout(2, StrategySettings())
    assert DataParallel().layout(1, StrategySettings()) == Layout({"data": 1})


def test_one_device_is_enough() -> None:
    assert (
        worst(trained(task_of(Watched), "single"), trained(task_of(Watched), DataParallel("cpu:0"))) <= 1e-12
    )


class Both(nn.Module):
    """Looks words up, and reads the whole table if one is beyond the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, CLASSES, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.table(words)
        return found + self.table.weight[words] if bool((words > 1).any()) else found


def test_sparse_and_dense_gradients_of_one_weight_add_up() -> None:
    words = torch.tensor([0, 1, 3, 2, 0, 1])
    data = TensorDataset(words, words % CLASSES)
    own = {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "train": data,
        "evaluate": data,
        "batch_size": 6,
    }
    dense = nn.Embedding(4, CLASSES)
    found = trained(task_of(Both, **own), DataParallel("cpu:0,cpu:1,cpu:2"), steps=1)["table.weight"]
    with engine_of(task_of(Both, **own), "single", steps=1) as engine:
        dense.weight = nn.Parameter(engine.model.get_parameter("table.weight").detach().clone())
        samples = next(engine.batches()).micro_batches[0].inputs
    terms = [
        nn.functional.cross_entropy(rows(dense, part), part % CLASSES, reduction="sum")
        for part in samples.chunk(3)
    ]
    sum(terms).div(6).backward()
    expected = dense.weight.detach() - 0.1 * dense.weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def rows(table: nn.Embedding, words: Tensor) -> Tensor:
    found: Tensor = table(words)
    return found + table.weight[words] if bool((words > 1).any()) else found
