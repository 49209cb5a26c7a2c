"""Losses of users that are no sums over samples are told in the first step."""

from __future__ import annotations

import random
import signal
import warnings
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.components.loss_trial import SumTrial, check_loss, trial_of, try_metrics
from evener.components.model_with_loss import Replica
from evener.core.losses import Loss, Sum, SumLoss, exact
from evener.data.batch import MicroBatch
from evener.distributed import signals
from evener.errors import InterruptedRunError, LossError
from evener.nn import data_group
from evener.nn.context import scope
from tests import tasks
from tests.ranks import RankPool
from tests.training.prepare.running import with_settings

Total = Callable[[Any, Any], Tensor]


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def in_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def of_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs @ outputs.T).logsumexp(1).sum()


def step(loss: Any, samples: int = 6, model: nn.Module | None = None, weight: int = 1) -> Replica:
    """Computes one micro-batch as the engine does."""
    torch.manual_seed(0)
    replica = Replica(model or nn.Linear(5, 3), exact(loss), lambda model, inputs: model(inputs))
    targets, numbers = torch.arange(samples) % 3, torch.arange(samples)
    micro = MicroBatch(torch.randn(samples, 5), targets, numbers, weight)
    with scope(numbers, 1, 0, weight):
        replica(micro).backward()
    return replica


def test_a_signal_that_comes_within_a_trial_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a handler does, it raises wherever the main thread is, and is remembered."""
    stop = InterruptedRunError("stopped", signal.SIGTERM)

    def stopped_in_the_trial(outputs: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            monkeypatch.setattr(signals, "_asked", stop)
            raise stop
        return in_sum(outputs, targets)

    with pytest.raises(InterruptedRunError, match="stopped"):
        step(evener.loss(stopped_in_the_trial))


def test_weights_in_a_list_beside_the_targets_are_not_tried() -> None:
    """They could not be cut with the samples, so the count of a part would be that of all."""

    def weighted(outputs: Tensor, targets: Any) -> Tensor:
        each = F.cross_entropy(outputs, targets["labels"], reduction="none")
        return sum(weight * term for weight, term in zip(targets["weights"], each, strict=False))  # type: ignore

    outputs, targets = torch.randn(4, 3), {"labels": torch.arange(4) % 3, "weights": [1, 2, 3, 4]}
    micro = MicroBatch(torch.randn(4, 5), targets, torch.arange(4))
    with scope(micro.samples, 1, 0, 1):
        found = trial_of(
            lambda *given: Sum(weighted(*given), sum(given[1]["weights"])), outputs, micro, weighted
        )
    assert found is None


@pytest.mark.parametrize("count", [None, lambda targets: 1 + (targets > 0).sum()])
def test_a_mean_is_refused(count: Any) -> None:
    with pytest.raises(LossError, match="their mean, where it must be their sum"):
        step(evener.loss(mean, count=count))


def test_a_mean_over_the_terms_that_count_is_refused() -> None:
    """Two of the first half count, and one of the second."""
    with pytest.raises(LossError, match="their mean"):
        step(
            SumLoss(
                count=lambda targets: (targets != 2).sum(),
                total=lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=2),
            ),
            samples=3,
        )


def test_a_constant_count_is_refused() -> None:
    with pytest.raises(LossError, match='count="sum"'):
        step(SumLoss(count=lambda targets: 1, total=in_sum))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        evener.loss(in_sum),
        evener.loss(in_sum, count="sum"),
        evener.loss(nn.CrossEntropyLoss(), scale=0.5),
        SumLoss(count=lambda targets: (targets != 2).sum(), total=in_sum),
        evener.loss(lambda outputs, targets: (outputs * 0).sum()),
        evener.loss(lambda outputs, targets: (outputs * torch.nan).sum()),
    ],
)
def test_sums_are_taken(loss: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(loss)._trial.is_done


def test_it_is_tried_once_and_on_the_first_samples_that_can_be_cut() -> None:
    sizes = array("i")  # a list would be restored

    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(outputs))
        return in_sum(outputs, targets)

    loss = evener.loss(total)
    assert not step(loss, samples=1)._trial.is_done
    assert not step(loss, weight=0)._trial.is_done
    assert sizes.tolist() == [1, 6]
    replica = step(loss)
    assert sizes.tolist()[2:] == [4, 2, 2, 4, 6]
    assert replica._trial.is_done


@pytest.mark.parametrize(
    "total",
    [
        lambda outputs, targets: mean(outputs, targets) * (1 + torch.rand(())),
        lambda outputs, targets: mean(outputs, targets) * (1 + random.random()),
        lambda outputs, targets: mean(outputs, targets) * (1 if data_group() is None else 2),
    ],
)
def test_what_draws_or_asks_for_others_is_not_judged(total: Total) -> None:
    assert step(evener.loss(total))._trial.is_done


def test_a_loss_with_a_state_finds_the_state_it_would_have_found() -> None:
    class Counting(Loss):
        def __init__(self) -> None:
            self.calls, self.norm = 0, nn.BatchNorm1d(3)

        def count(self, targets: Any) -> float:
            return len(targets)

        def total(self, outputs: Any, targets: Any) -> Tensor:
            self.calls += 1
            self.norm(outputs)
            return in_sum(outputs, targets)

    loss = Counting()
    step(loss)
    assert (loss.calls, int(loss.norm.num_batches_tracked or 0)) == (1, 1)


def test_generators_are_as_without_a_trial() -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return (in_sum(outputs, targets) * torch.rand(())).sum()

    step(evener.loss(noisy))
    tried = torch.rand(1)
    torch.manual_seed(0)
    nn.Linear(5, 3)
    torch.randn(6, 5)
    torch.rand(())  # the loss's own, of the step
    assert torch.equal(tried, torch.rand(1))


def test_a_loss_that_needs_more_samples_than_are_tried_is_not_judged() -> None:
    step(evener.loss(lambda outputs, targets: mean(outputs, targets) * outputs[5].sum()))


def test_outputs_that_are_not_one_for_each_sample_are_not_tried() -> None:
    class Pairs(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).repeat(2, 1)

    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return mean(outputs, targets.repeat(2))

    step(evener.loss(total), model=Pairs(5, 3))


def test_a_loss_of_pairs_is_told_of_on_several_ranks_alone(recwarn: pytest.WarningsRecorder) -> None:
    step(evener.loss(of_pairs))
    assert not recwarn.list
    check_loss(SumTrial((3.0, 1.0, 1.0), (4.0, 2.0, 2.0), (2, 2)))
    assert not recwarn.list


def _of_all(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sends a message of its own, which the other rank would miss: one has a single sample."""
    number = torch.tensor(float(len(targets)))
    torch.distributed.all_reduce(number)
    return in_sum(outputs, targets) * number / number.detach()


def _sums(total: Total) -> list[float]:
    task = tasks._task(loss=evener.loss(total))
    with evener.Engine(task, batch_size=6, epochs=1, balance="5,1") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_half_precision_is_no_difference(dtype: torch.dtype) -> None:
    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.to(dtype), targets, reduction="sum")

    draws = torch.Generator().manual_seed(0)
    for _ in range(50):
        outputs, targets = torch.randn(4, 3, generator=draws), torch.arange(4) % 3
        micro = MicroBatch(outputs, targets, torch.arange(4), 1)
        with scope(torch.arange(4), 1, 0, 1):
            found = trial_of(
                lambda *given: Sum(total(*given), 2 * len(given[1])), outputs.to(dtype), micro, None
            )
            mean_of = trial_of(
                lambda *given: Sum(total(*given) / len(given[1]), len(given[1])),
                outputs.to(dtype),
                micro,
                None,
            )
        assert found is not None
        assert found.adds_up
        assert mean_of is not None
        assert mean_of.is_mean
        assert not mean_of.adds_up


def test_no_message_is_sent_in_a_trial(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(_sums, _of_all)
    assert first == second == pytest.approx(ranks(2).run(_sums, in_sum)[0])


def _warned(total: Total) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        task = tasks._task(loss=evener.loss(total))
        with evener.Engine(task, batch_size=12, epochs=1) as engine:
            for batch in engine.batches():
                engine.step(batch)
    return [str(each.message) for each in told if "do not add up" in str(each.message)]


@pytest.mark.parametrize(("total", "number"), [(of_pairs, 1), (in_sum, 0)])
def test_a_loss_of_pairs_is_told_of_once_by_the_first_rank(
    ranks: Callable[[int], RankPool], total: Total, number: int
) -> None:
    first, second = ranks(2).run(_warned, total)
    assert (len(first), len(second)) == (number, 0)
    assert not number or "all_gather" in first[0]


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (lambda outputs, targets: evener.Sum(mean(outputs, targets), 1), "both must add up"),
        (lambda outputs, targets: evener.Sum(mean(outputs, targets), len(targets)), "both must add up"),
        (partial(lambda outputs, targets, _: evener.Sum(mean(outputs, targets), 1), _=0), "both must add up"),
        (lambda outputs, targets: evener.Sum(of_pairs(outputs, targets), len(targets)), "both must add up"),
        (lambda outputs, targets: evener.Sum(in_sum(outputs, targets), len(targets)), ""),
        (lambda outputs, targets: in_sum(outputs, targets), ""),  # refused elsewhere
    ],
)
def test_a_metric_that_is_no_sum_is_told_once(
    metric: Any, told: str, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    micro = MicroBatch(torch.randn(6, 5), torch.arange(6) % 3, torch.arange(6), 1)
    with scope(micro.samples, 1, 0):
        for _ in range(2):
            try_metrics({"own": metric, "torchmetrics": object()}, torch.randn(6, 3), micro)
    assert [told in str(each.message) for each in recwarn.list] == [True] * bool(told)


class Right:
    """Counts right answers outside of what ranks merge."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right, self.samples = 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.samples += len(targets)

    def compute(self) -> float:
        return self.right + self.samples


def mean_of_means() -> Any:
    import torchmetrics  # here, since it takes long

    class MeanOfBatches(torchmetrics.MeanMetric):
        def update(self, outputs: Tensor, targets: Tensor) -> None:  # type: ignore[override]
            super().update(mean(outputs, targets))

    return MeanOfBatches()


def accuracy_of_samples() -> Any:
    import torchmetrics

    return torchmetrics.Accuracy(task="multiclass", num_classes=3)


@pytest.mark.parametrize(
    ("make", "ranks", "told"),
    [
        (Right, 1, 0),
        (Right, 2, 1),
        (mean_of_means, 1, 1),
        (mean_of_means, 2, 1),
        (accuracy_of_samples, 1, 0),
        (accuracy_of_samples, 2, 0),
    ],
)
def test_an_object_whose_states_do_not_merge_is_told_once(
    make: Callable[[], Any],
    ranks: int,
    told: int,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    torch.manual_seed(0)
    metric, micro = make(), MicroBatch(torch.randn(9, 5), torch.arange(9) % 3, torch.arange(9), 1)
    recwarn.clear()
    with scope(micro.samples, 1, 0):
        for _ in range(2):
            try_metrics({"own": metric}, torch.randn(9, 3), micro)
    assert ["it depends on how its samples are divided" in str(each.message) for each in recwarn] == [
        True
    ] * told


def test_a_metric_is_tried_in_an_evaluation() -> None:
    task = tasks._task(metrics={"own": lambda outputs, targets: evener.Sum(mean(outputs, targets), 1)})
    with evener.Engine(task, batch_size=12) as engine, pytest.warns(UserWarning, match="metric 'own'"):
        engine.evaluate()


@pytest.mark.parametrize("total", [mean, in_sum])
def test_a_loss_with_a_total_is_tried_in_a_prepared_loop(total: Total) -> None:
    data, model = DataLoader(TensorDataset(torch.randn(8, 5), torch.arange(8) % 3), 4), nn.Linear(5, 3)
    refusal = pytest.raises(LossError, match="their mean") if total is mean else nullcontext()
    with with_settings(), refusal:
        model, data, loss = evener.prepare(model, data, evener.loss(total))
        for inputs, targets in data:
            loss(model(inputs), targets).backward()
