"""What a loop computes itself beside its prepared losses is that of one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import evener
from evener.training.prepare import prepare as preparing
from tests.training.prepare.running import divided, model_of, prepared, rows
from tests.training.prepare.test_kinds_of_loss import DIVISIONS, Step, check, contrastive, masked, words


def over_all_samples(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """A sum over the samples of the batch, which one device counts by its length."""
    count = evener.batch_size() if preparing.place_or_none() else len(batch[0])
    found: Tensor = 0.5 * loss(model(batch[0]).flatten(0, 1), batch[1].flatten()) / count
    return found


def test_a_sum_is_divided_by_the_samples_of_all(ranks: Any) -> None:
    check(ranks, nn.CrossEntropyLoss(reduction="sum"), over_all_samples)


def of_a_function(model: nn.Module, _: Any, batch: Any) -> Tensor:
    """Given as it is called, anew each time."""
    o, y = model(batch[0]), batch[1]
    if not preparing.place_or_none():
        return contrastive(o, y) + masked(o, y)
    found: Tensor = evener.global_mean(lambda o, y: contrastive(o, y) + masked(o, y), o, y)
    return found


def of_functions_of_one_line(model: nn.Module, _: Any, batch: Any) -> Tensor:
    """Each with something of its own besides its arguments."""
    o, y = model(batch[0]), batch[1]
    own, other = (lambda o, y, scale=scale: scale * contrastive(o, y) for scale in (0.5, 2.0))
    functions = [own, other, functools.partial(own, scale=3.0), functools.partial(other, scale=1.0)]
    is_prepared = preparing.place_or_none()
    return torch.stack([evener.global_mean(f, o, y) if is_prepared else f(o, y) for f in functions]).prod()


def of_half_precision(model: nn.Module, _: Any, batch: Any) -> Tensor:
    """The sum of the terms is beyond the largest number of the type, and the mean is not."""
    each = (model(batch[0]) * 0 + 2**14).half()
    is_prepared = preparing.place_or_none()
    return (
        evener.global_mean(each) + evener.global_mean(each.mean())
        if is_prepared
        else 2 * each.mean().double()
    )


def of_terms(model: nn.Module, _: Any, batch: Any) -> Tensor:
    each = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")[batch[1] != -100]
    return evener.global_mean(each) if preparing.place_or_none() else each.mean()


def of_all_rows(model: nn.Module, _: Any, batch: Any) -> Tensor:
    """A loss that every rank computes from the features of all."""
    made = model(batch[0])
    return contrastive(evener.gather(made) if preparing.place_or_none() else made, made)


def of_what_there_is(model: nn.Module, _: Any, batch: Any) -> Tensor:
    """Of single samples, so that a rank may have none: a mean over nothing is NaN."""
    x, y, _w = batch
    mask = y[:, 0] == 1
    each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").sum(1)
    value = (each * mask).sum() / mask.sum()
    return evener.global_mean(value, mask.sum()) if preparing.place_or_none() else value


def of_what_has_a_graph(model: nn.Module, _: Any, batch: Any) -> Tensor:
    """A rank without such samples has a number that follows from nothing."""
    x, y, _w = batch
    mask, made = y[:, 0] == 1, model(x)
    value = made[mask].square().mean() if mask.any() else torch.zeros((), dtype=x.dtype)
    return evener.global_mean(value, mask.sum()) if preparing.place_or_none() else value


OF_THE_LOOP: tuple[Step, ...] = (
    of_what_there_is,
    of_a_function,
    of_terms,
    of_what_has_a_graph,
    of_all_rows,
    of_functions_of_one_line,
    of_half_precision,
)


@pytest.mark.parametrize(
    ("step", "balance"), divided(((each.__name__, (each,)) for each in OF_THE_LOOP), DIVISIONS)
)
def test_what_the_loop_computes_itself_is_that_of_one_device(ranks: Any, step: Step, balance: str) -> None:
    check(ranks, words, step, balance)


def numbers_of_the_batch_before(is_prepared: bool) -> list[float]:
    """Of 26 samples in batches of 5, the last one of a single sample, of which the other rank has a placeholder."""
    torch.manual_seed(4)
    model, loader, loss = model_of(), DataLoader(rows(), batch_size=5), nn.CrossEntropyLoss(reduction="none")
    if is_prepared:
        model, loader, loss = evener.prepare(model, loader, loss)
    kept, found = torch.ones(1), []
    for _epoch in range(2):
        for x, y in loader:
            found += [kept.mean().item(), kept.detach().max().item()]
            kept = loss(model(x), y)
    return [*found, kept.sum().item(), kept.detach().max().item()]


@pytest.mark.parametrize("balance", ["equal", "0,1"])
def test_rows_that_are_kept_are_of_their_batch(ranks: Any, balance: str) -> None:
    """In a batch with a sample for a rank that had none, and after the last batch."""
    expected = numbers_of_the_batch_before(False)
    for found in ranks(2).run(prepared, numbers_of_the_batch_before, balance=balance):
        assert found == pytest.approx(expected, rel=1e-12)


# A loss that is trained


class Centres(nn.Module):
    """Its parameters are those of no sample, and part of its value does not go through samples."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        apart = torch.cdist(F.normalize(outputs), F.normalize(self.centres))
        return (
            F.cross_entropy(-4 * apart, targets) + contrastive(outputs, targets) + self.centres.square().sum()
        )


def centres_of(is_prepared: bool) -> dict[str, Tensor]:
    torch.manual_seed(4)
    model, loss = model_of(), Centres()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    loader = DataLoader(rows(), batch_size=6)
    if is_prepared:
        model, loss, optimizer, loader = evener.prepare(model, loss, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        value = evener.global_mean(loss, model(x), y) if is_prepared else loss(model(x), y)
        value.backward()
        optimizer.step()
    return {**model.state_dict(), **loss.state_dict()}


def test_a_loss_with_parameters_is_trained_as_on_one_device(ranks: Any) -> None:
    expected = centres_of(False)
    for found in ranks(2).run(functools.partial(prepared, balance="3,1"), centres_of):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)
