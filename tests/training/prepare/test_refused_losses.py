"""Losses that cannot be made those of one device are refused in words."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.errors import DivergenceError, EvenerError
from tests.ids import placeless
from tests.training.prepare.running import with_settings
from tests.training.prepare.test_kinds_of_loss import (
    LENGTH,
    Model,
    Step,
    contrastive,
    data,
    selected,
    together,
    words,
)


def by_own_length(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = loss(model(batch[0]).flatten(0, 1), batch[1].flatten()) / len(batch[0])
    return found


def by_own_words(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """A number from outside of the function."""
    x, y, _ = batch
    count = float((y != -100).sum()) + 0.5
    found: Tensor = evener.global_mean(
        lambda o, y: F.cross_entropy(o.transpose(1, 2), y, reduction="sum") / count, model(x), y
    )
    return found


def by_a_length_from_outside(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    x, y, _ = batch
    found: Tensor = evener.global_mean(
        lambda o, y: selected(o, y) * 0 + o.square().sum() / len(x), model(x), y
    )
    return found


def of_the_hardest(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    each = loss(model(batch[0]).flatten(0, 1), batch[1].flatten())
    found: Tensor = each.topk(2)[0].mean()
    return found


def of_ragged_rows(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = loss(model(batch[0])[:, : 2 + evener.rank()].flatten(1), batch[1])
    return found


def of_no_rows(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = loss(model(batch[0]).transpose(0, 1), batch[1])
    return found


def of_several_passes(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """Nobody knows which of two passes a number without a graph stands for."""
    made = model(batch[0]), model(batch[0] + 1)
    found: Tensor = evener.global_mean(
        made[0].mean() if evener.rank() else torch.zeros(()).double(), 2 - evener.rank()
    )
    return found


def weighted(o: Tensor, y: Tensor, weight: Any) -> Tensor:
    """A sum over samples, with a weight for each place or for all."""
    return (F.cross_entropy(o.transpose(1, 2), y, reduction="none") * weight).mean()


def by_own_weights(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = loss(model(batch[0]), batch[1], batch[2].sum().expand(LENGTH))
    return found


def by_an_own_factor(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = loss(model(batch[0]), batch[1], float(batch[2].sum()))
    return found


def by_an_own_mean(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """A mean that moves with the samples of a rank, and is the same on all ranks in the first batch."""
    held = vars(model).setdefault("held", [torch.ones(LENGTH).double()])
    found: Tensor = loss(model(batch[0]), batch[1], held[0])
    held[0] = 0.9 * held[0] + 0.1 * batch[2].mean()
    return found


def crowded(o: Tensor, _: Tensor) -> Tensor:
    """A row for each sample, of all samples."""
    flat = o.flatten(1)
    return F.cross_entropy(flat @ flat.T, torch.arange(len(o)), reduction="none")


def by_global_mean(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = evener.global_mean(loss(model(batch[0]), batch[1]))
    return found


def counted_twice(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """A sum of all ranks, divided by what one has."""
    each = loss(model(batch[0]).flatten(0, 1), batch[1].flatten())
    found: Tensor = evener.global_mean(each.sum() / len(each))
    return found


def beside_all_rows(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """This rank's rows are compared with those of all."""
    made = model(batch[0]).flatten(1)
    found: Tensor = loss(made @ evener.gather(made).T, batch[1][:, 0].clamp(min=0))
    return found


def slope(x: Tensor, o: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(o.sum(), x, create_graph=True)
    return ((found.norm(dim=1) - 1) ** 2).mean()


def of_slopes(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """A penalty on the gradient of inputs."""
    x = batch[0].requires_grad_()
    found: Tensor = loss(x, model(x))
    return found


REFUSED: tuple[tuple[Any, Step, str, str], ...] = (
    (
        nn.CrossEntropyLoss(reduction="sum"),
        by_own_length,
        "equal",
        "is a sum over the samples of all ranks, and is divided by 3.*evener.batch_size",
    ),
    (
        nn.CrossEntropyLoss(reduction="sum"),
        by_own_length,
        "2,1",
        "backward was called on .* is divided by evener.batch_size",
    ),
    (words, by_own_words, "2,1", "came to different values of the loss.*, .* on rank 0"),
    (words, by_a_length_from_outside, "equal", "is divided by 3.*, which is how many rank"),
    (nn.CrossEntropyLoss(reduction="none"), of_the_hardest, "2,1", "went through no prepared loss"),
    (
        lambda o, y: (o @ o.T).logsumexp(1).mean(),
        of_ragged_rows,
        "2,1",
        "rows of all ranks, which are not of one",
    ),
    (crowded, by_global_mean, "2,1", "crowded returns a row for each sample that depends on other samples"),
    (
        nn.CrossEntropyLoss(reduction="none"),
        counted_twice,
        "2,1",
        "is of all ranks already, .* once for each",
    ),
    (
        nn.CrossEntropyLoss(),
        beside_all_rows,
        "equal",
        "rows that evener.gather gave have other gradients on rank 1",
    ),
    (slope, of_slopes, "2,1", r"slope takes gradients of .*Take them in the loop.*evener\.global_mean"),
    (weighted, by_own_weights, "2,1", "no row of samples and differs between ranks, argument 3"),
    (weighted, by_an_own_factor, "equal", "no row of samples and differs between ranks, argument 3"),
    (
        weighted,
        by_an_own_mean,
        "equal",
        "no row of samples and differs between ranks, (argument 3|something)",
    ),
    (
        contrastive,
        of_no_rows,
        "equal",
        r"has no row for each of a rank's samples.* as outputs\[mask\], pass all rows",
    ),
    (words, of_several_passes, "2,1", "the loss of rank 0 follows from none of its model's outputs"),
)


def refusal(loss: Any, step: Step, balance: str) -> str:
    try:
        together(loss, step, balance)
    except EvenerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("loss", "step", "balance", "words"), REFUSED, ids=[f"{step.__name__}-{b}" for _, step, b, _ in REFUSED]
)
def test_what_cannot_be_made_right_is_refused(
    ranks: Any, loss: Any, step: Step, balance: str, words: str
) -> None:
    for message in ranks(2).run(refusal, loss, step, balance):
        assert re.search(words, message), message


def test_a_module_without_parameters_is_a_loss_and_says_so() -> None:
    with with_settings():
        _, prepared = evener.prepare(Model(), nn.Dropout())
        with pytest.raises(
            AttributeError, match=r"has no 'eval'.* if it is a model, leave it out of evener.prepare"
        ):
            prepared.eval()


def by_pairs() -> tuple[list[str], list[str]]:
    """The rows of a rank compared with each other; as many classes as samples, with targets of the batch."""
    told = []
    for is_compared in (True, False):
        with with_settings(balance="2,1"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            numbered = TensorDataset(torch.eye(12, 8), torch.arange(12) % 8)
            loss, loader, model = evener.prepare(
                nn.CrossEntropyLoss(), DataLoader(numbered, 12), nn.Linear(8, 8)
            )
            for x, y in loader:
                rows = model(x)
                targets = torch.arange(len(x)) if is_compared else y
                loss(rows @ rows.T if is_compared else rows, targets).backward()
            told.append([str(each.message) for each in caught if "compares its samples" in str(each.message)])
    return told[0], told[1]


def test_a_loss_that_compares_the_samples_of_one_rank_is_told(ranks: Any) -> None:
    first, second = ranks(2).run(by_pairs)
    assert len(first[0]) == 1
    assert (first[1], second) == ([], ([], []))


def epoch_sum(balance: str) -> list[str]:
    """A mean times what one rank has, as an epoch's sum is often taken."""
    with with_settings(balance=balance), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss, loader, model = evener.prepare(nn.MSELoss(), DataLoader(data(), batch_size=6), Model().double())
        for x, _, weight in loader:
            value = loss(model(x).mean((1, 2)), weight)
            value.detach() * evener.batch_size()
            value.detach() * len(x)
        return [str(each.message) for each in caught]


def test_a_mean_times_the_samples_of_one_rank_is_told(ranks: Any) -> None:
    for said in ranks(2).run(epoch_sum, "2,1"):
        assert any("multiplied by" in each and "evener.batch_size()" in each for each in said), said


def by_numbers_in_the_code(balance: str) -> list[str]:
    """Each rank has three samples, which is the number of neither line."""
    with with_settings(balance=balance), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = nn.MSELoss(), nn.MSELoss(reduction="sum"), DataLoader(data(), batch_size=6, drop_last=True)
        loss, total, loader, model = evener.prepare(*given, Model().double())
        for x, _, weight in loader:
            outputs = model(x).mean((1, 2))
            mean, added = loss(outputs, weight), total(outputs, weight)
            value = mean + 3 * mean + added / 3 + mean.mul(2) + added * (1 / 3)
            value.backward()
            total_of_batch = added.detach()
            total_of_batch /= 3
        return [str(each.message) for each in caught]


def test_a_number_that_stands_in_the_code_is_no_number_of_samples(ranks: Any) -> None:
    assert ranks(2).run(by_numbers_in_the_code, "equal") == [[], []]


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    counts = targets != targets[0]
    return ((outputs - targets).square() * counts).sum() / counts.sum()


def means_divided_by(steps: int) -> list[str]:
    with with_settings(balance="equal"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = masked, nn.MSELoss(reduction="sum"), DataLoader(data(), batch_size=6, drop_last=True)
        loss, total, loader, model = evener.prepare(*given, Model().double())
        for x, _, weight in loader:
            outputs = model(x).mean((1, 2))
            value = loss(outputs, weight) / steps + total(outputs, weight) / evener.batch_size() / steps
            value.backward()
        return [str(each.message) for each in caught]


def test_a_mean_may_be_divided_by_as_many_steps_as_a_rank_has_samples(ranks: Any) -> None:
    assert ranks(2).run(means_divided_by, 3) == [[], []]


@pytest.mark.parametrize("function", [words, contrastive], ids=placeless)
def test_a_loss_that_is_not_finite_ends_the_loop_alone_too(function: Any) -> None:
    with with_settings():
        loss, loader, model = evener.prepare(function, DataLoader(data(), batch_size=6), Model().double())
        optimizer = torch.optim.SGD(model.parameters())
        for x, y, _ in loader:
            loss(model(x) * torch.nan, y).backward()
            with pytest.raises(DivergenceError, match="the loss is nan in step 0, and the gradient of"):
                optimizer.step()
            break
