from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from evener.core.losses import Sum
from evener.core.losses.metrics import named_values
from evener.errors import ConfigurationError
from evener.training import evaluation
from evener.training.engine import Engine
from evener.training.evaluation import examine
from tests import tasks
from tests.tiers import ALWAYS, NIGHTLY, spread


@dataclass
class Named:
    """Outputs in a class of the user's own."""

    y: Tensor
    more: dict[str, Tensor]


class Same(nn.Module):
    """Gives back its input, in several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = x * self.weight
        forms = {
            "tensor": y,
            "tuple": (y, [y + 1, "label"]),
            "dict": {"y": y, "sum": y.sum(1)},
            "dataclass": Named(y, {"sum": y.sum(1)}),
            "mean": y.mean(),
            "boxes": [{"boxes": each.expand(1 + int(each[0]) % 3, 2), "name": f"{each[0]:g}"} for each in y],
            "rows": [*y],
            "none": {"y": y, "hidden": None},
            "length": (y, len(y)),
        }
        return forms[self.form]


def numbered(size: int) -> TensorDataset:
    numbers = torch.arange(size, dtype=torch.float64)
    return TensorDataset(numbers.view(size, 1).repeat(1, 2), numbers.long())


def times_counted(sizes: tuple[int, ...], **settings: Any) -> list[str]:
    """For each dataset a number with one digit for each sample: how often that was counted."""
    digits = lambda outputs, targets: Sum((10 ** targets.double()).sum(), len(targets))  # noqa: E731
    task = tasks._task(model=lambda: Same("tensor").double(), loss=None, metrics={"digits": digits})
    with Engine(task, device="cpu", **settings) as engine:
        return [str(round(engine.evaluate(numbered(size))["digits"] * size)) for size in sizes]


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 2}, {"batch_size": 2}], ids=str)
def test_each_sample_counts_once(ranks: Any, settings: dict[str, Any]) -> None:
    sizes = (1, 2, 7, 13)
    once = ["1" * size for size in sizes]
    settings = {"batch_size": 5} | settings
    assert times_counted(sizes, **settings) == once
    assert ranks(2).run(times_counted, sizes, **settings) == [once] * 2
    assert ranks(3).run(times_counted, sizes, balance="0,3,1", **settings) == [once] * 3


def examined(**settings: Any) -> tuple[list[Any], list[Any]]:
    """Pieces with metrics, and without any."""
    task = tasks._task(model=lambda: Same("tensor").double(), loss=nn.MSELoss(), metrics={})
    data = TensorDataset(torch.arange(11.0).double()[:, None], torch.arange(11.0).double()[:, None] + 2)
    with Engine(task, device="cpu", **settings) as engine:
        options = engine.feed.evaluation_options(0)
        keep = lambda outputs, targets: {"both": outputs + targets}  # noqa: E731
        found = examine(engine.learner, data, options, keep)
        bare = examine(engine.learner, data, options, keep, measured=False)
        assert bare.metrics == {}
        assert (found.metrics, found.samples) == ({"loss": pytest.approx(4.0)}, bare.samples)
        return [
            each.pieces
            and [(start, size, kept["both"].flatten().tolist()) for start, size, kept in each.pieces]
            for each in (found, bare)
        ]


def test_what_is_kept_of_an_evaluation_is_in_the_order_of_the_dataset(ranks: Any) -> None:
    first, other = ranks(2).run(examined, batch_size=4, balance="3,1")
    assert other == [None, None]
    for pieces in first:
        assert [start for start, _, _ in pieces] == sorted(start for start, _, _ in pieces)
        kept = [value for _, _, values in pieces for value in values]
        assert kept == [2.0 * index + 2 for index in range(11)]


class RankIsSlow:
    """A stopwatch for which each rank takes three times as long as the one before."""

    def __init__(self, _: torch.device) -> None:
        self.mark = self.__enter__

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def seconds(self) -> float:
        return 3.0 ** torch.distributed.get_rank()


def shares_of(size: int, **settings: Any) -> list[int]:
    """The samples of each micro-batch of an evaluation without steps, in the order of the dataset."""
    task = tasks._task(model=lambda: Same("tensor").double(), loss=None, metrics={})
    keep = lambda outputs, _: outputs  # noqa: E731
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine(task, device="cpu", **{"batch_size": 8} | settings) as engine,
    ):
        patch.setattr(evaluation, "stopwatch", RankIsSlow)
        options = engine.feed.evaluation_options(0)
        found = examine(engine.learner, numbered(size), options, keep, measured=False, everywhere=True)
        assert found.pieces is not None
        return [count for _, count, _ in found.pieces][:4]


@pytest.mark.parametrize(
    ("size", "settings", "shares"),
    [
        (20, {"balance": "3,1"}, [6, 2, 6, 2]),
        (20, {"balance": "3,1", "max_shares": "5,-"}, [5, 3, 5, 3]),
        (240, {"balance": "auto"}, [6, 2, 6, 2]),
        (240, {"balance": "auto", "max_shares": "5,-"}, [5, 3, 5, 3]),
        (239, {"balance": "auto", "share_multiple_of": 3}, [5, 3, 5, 3]),
        (240, {"balance": "equal"}, [4, 4, 4, 4]),
        (20, {"balance": "equal", "max_shares": "-,3"}, [5, 3, 5, 3]),
    ],
    ids=str,
)
def test_an_evaluation_without_steps_is_divided_as_the_settings_say(
    ranks: Any, size: int, settings: dict[str, Any], shares: list[int]
) -> None:
    assert ranks(2).run(shares_of, size, **settings) == [shares] * 2


def test_shares_are_equal_if_a_rank_has_no_sample_to_measure(ranks: Any) -> None:
    assert ranks(3).run(shares_of, 60, balance="auto", batch_size=2) == [[1, 1, 1, 1]] * 3


def evaluated(**settings: Any) -> dict[str, float]:
    import torchmetrics  # here, since each rank that runs another test of this file imports the file, too

    metrics = {
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=3),
        "each": torchmetrics.Accuracy(task="multiclass", num_classes=3, average=None),
        "together": torchmetrics.MetricCollection([torchmetrics.F1Score(task="multiclass", num_classes=3)]),
    }
    task = tasks._task(metrics=metrics)
    with Engine(task, device="cpu", dtype="float64", **settings) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()


def test_two_metrics_with_numbers_of_one_name_are_refused() -> None:
    assert named_values({"f1": {"macro": 0.5}, "f": 1}) == {"f1.macro": 0.5, "f": 1.0}
    with pytest.raises(ConfigurationError, match=r"two metrics .* a number with the name 'f1.macro'"):
        named_values({"f1": {"macro": 0.5}, "f1.macro": 0.7})


def test_torchmetrics_do_not_depend_on_the_division(ranks: Any) -> None:
    reference = evaluated(steps=3)
    assert {"loss", "accuracy", "auroc", "each.0", "each.2", "together.MulticlassF1Score"} <= reference.keys()
    for values in ranks(2).run(evaluated, steps=3, balance="3,1"):
        assert values == pytest.approx(reference, rel=1e-6)


class Samples:
    """Counts samples in an attribute."""

    number = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.number += len(targets)

    def compute(self) -> int:
        return self.number

    def reset(self) -> None:
        self.number = 0


def counted() -> float:
    with Engine(tasks._task(metrics={"number": Samples()}), device="cpu") as engine:
        return engine.evaluate(TensorDataset(torch.zeros(9, 6), torch.zeros(9).long()))["number"]


def refused() -> str:
    with pytest.raises(ConfigurationError) as raised:
        counted()
    return str(raised.value)


def test_an_object_without_states_to_merge_is_refused_on_several_ranks(ranks: Any) -> None:
    """Each rank had the value of its own samples."""
    assert counted() == 9
    for message in ranks(2).run(refused):
        assert "'number' is of type Samples, which has no state that ranks could merge" in message


class Inputs(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, 10.0 * index])


def predicted(form: str, size: int, targets: bool, **settings: Any) -> Any:
    task = tasks._task(model=lambda: Same(form))
    with Engine(task, device="cpu", **settings) as engine:
        data: Dataset[Any] = numbered(size) if targets else Inputs(size)
        return engine.predict(data, targets=targets, everywhere=True)


def predicted_once() -> Any:
    with Engine(tasks._task(model=lambda: Same("tensor")), device="cpu") as engine:
        return engine.predict(Inputs(5), targets=False)


def test_predictions_travel_to_rank_0_alone_unless_all_want_them(ranks: Any) -> None:
    first, second = ranks(2).run(predicted_once)
    assert first[:, 0].tolist() == list(range(5))
    assert second is None
    assert predicted_once()[:, 0].tolist() == list(range(5))


@pytest.mark.parametrize("size", spread([1, 2, 11], ALWAYS, NIGHTLY))
def test_predictions_are_in_order(ranks: Any, size: int) -> None:
    for settings in ({"batch_size": 4}, {"batch_size": 6, "micro_batch": 4, "balance": "2,1"}):
        for outputs in ranks(2).run(predicted, "tensor", size, False, **settings):
            assert outputs[:, 0].tolist() == list(range(size))
            assert not outputs.requires_grad
        for y, (more, labels) in ranks(2).run(predicted, "tuple", size, True, **settings):
            assert y[:, 0].tolist() == list(range(size))
            torch.testing.assert_close(more, y + 1)
            assert labels == "label"
        for tree in ranks(2).run(predicted, "dict", size, True, **settings):
            assert tree["sum"].tolist() == [2 * i for i in range(size)]
        for named in ranks(2).run(predicted, "dataclass", size, True, **settings):
            assert named.y[:, 0].tolist() == list(range(size))
            assert named.more["sum"].tolist() == [2 * i for i in range(size)]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_lists_of_an_entry_for_each_sample_are_joined_by_samples(ranks: Any, size: int) -> None:
    for settings in ({"batch_size": 4}, {"batch_size": 6, "micro_batch": 4, "balance": "2,1"}):
        for found in ranks(2).run(predicted, "boxes", size, True, **settings):
            assert [each["name"] for each in found] == [str(number) for number in range(size)]
            assert [len(each["boxes"]) for each in found] == [1 + number % 3 for number in range(size)]
        for rows in ranks(2).run(predicted, "rows", size, True, **settings):
            assert [row[0].item() for row in rows] == [*range(size)]
            assert all(row.untyped_storage().nbytes() == row.nbytes for row in rows)
        for tree in ranks(2).run(predicted, "none", size, True, **settings):
            assert tree["hidden"] is None
            assert tree["y"][:, 0].tolist() == [*range(size)]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("mean", "dimension 0 must be the samples.*Let Task.forward leave out"),
        ("length", "3 for the 3 samples from 4 on"),
    ],
)
def test_an_output_that_is_not_by_sample_is_refused(form: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        predicted(form, 7, True, batch_size=4)


def refused_on_rank_0(form: str) -> str:
    with Engine(tasks._task(model=lambda: Same(form)), device="cpu", batch_size=4) as engine:
        with pytest.raises(ConfigurationError) as caught:
            engine.predict(Inputs(7), targets=False)
        assert len(engine.session.control.gather_objects("here")) == 2
    return str(caught.value)


def test_outputs_that_rank_0_cannot_join_are_refused_on_all_ranks(ranks: Any) -> None:
    """Those that went on alone would wait for it."""
    for words in ranks(2).run(refused_on_rank_0, "mean"):
        assert "dimension 0 must be the samples" in words


class Padded(nn.Module):
    """As many outputs as the largest number among the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), int(x[:, 0].max()) + 1)


def test_outputs_of_several_lengths_are_refused() -> None:
    words = r"samples from 4 on are of shape \(4, 8\), those for the first 4 of shape \(4, 4\)"
    with (
        Engine(tasks._task(model=Padded), device="cpu", batch_size=4) as engine,
        pytest.raises(ConfigurationError, match=words),
    ):
        engine.predict(Inputs(8), targets=False)


@pytest.mark.parametrize("targets", [True, False])
def test_a_stream_has_no_order_to_predict_in(targets: bool) -> None:
    with (
        Engine(tasks.plain(), device="cpu") as engine,
        pytest.raises(ConfigurationError, match="iterable"),
    ):
        engine.predict(tasks.Stream(), targets=targets)


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_in_their_modes_again(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    metrics = {"none": lambda outputs, targets: 1 / 0} if fails else {}
    with Engine(tasks._task(model=lambda: model, metrics=metrics), device="cpu") as engine:
        model[1].eval()
        before, statistics = [m.training for m in model.modules()], model[2].running_mean.clone()  # type: ignore[union-attr, operator]
        try:
            engine.evaluate()
        except ZeroDivisionError:
            assert fails
        assert [module.training for module in model.modules()] == before == [True, True, False, True]
        assert torch.equal(statistics, model[2].running_mean)  # type: ignore[arg-type]
        assert torch.is_grad_enabled()
