"""Samples of unequal lengths, whose shares each rank fills up to a length of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import evener
from evener.errors import LossError
from tests.ids import placeless
from tests.tiers import ALWAYS, NIGHTLY, spread
from tests.training.prepare.running import Weights, prepared

LENGTHS = (5, 2, 3, 1, 4, 4, 6, 1, 2, 2, 3)


def samples(lengths: Sequence[int]) -> Any:
    drawn = torch.Generator().manual_seed(3)
    options: Any = {"generator": drawn, "dtype": torch.float64}
    return [(torch.randn(length, 3, **options), torch.randn(length, **options)) for length in lengths]


def filled(items: Any) -> Any:
    """Returns inputs, a mask of what is not filled in, and targets."""
    inputs = pad_sequence([x for x, _ in items], batch_first=True)
    mask = pad_sequence([torch.ones_like(y) for _, y in items], batch_first=True)
    return inputs, mask, pad_sequence([y for _, y in items], batch_first=True)


def masked(o: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return ((o - y) ** 2 * mask).sum() / mask.sum()


def chosen(o: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(o[mask > 0], y[mask > 0])


def of_each(o: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return (F.l1_loss(o, y, reduction="none") * mask).sum(1).div(mask.sum(1)).mean()


def by_sign(o: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    signs = torch.where(mask > 0, (y > 0).long(), -100)
    return F.cross_entropy(torch.stack([o, -o], 1), signs)


def take_as_is(loss: Any, *given: Tensor) -> Any:
    return loss(*given)


def steps(
    is_prepared: bool,
    loss: Any,
    take: Callable[..., Any] = take_as_is,
    lengths: Sequence[int] = LENGTHS,
) -> Weights:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 1), nn.Flatten(1)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(samples(lengths), batch_size=4, collate_fn=filled)
    if is_prepared:
        model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss)
    for x, mask, y in loader:
        optimizer.zero_grad()
        take(loss, model(x), mask, y).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("loss", spread((masked, chosen, of_each, by_sign), NIGHTLY, ALWAYS), ids=placeless)
def test_a_loss_of_what_is_not_filled_in_is_that_of_one_device(ranks: Any, loss: Any) -> None:
    expected = steps(False, loss)
    for found in ranks(2).run(prepared, steps, loss, balance="3,1"):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def weighted(o: Tensor, mask: Tensor, y: Tensor) -> Any:
    of_torch: Any = F.mse_loss  # whose types leave the weight out
    return of_torch(o, y, weight=mask)


def counted(loss: Any, o: Tensor, mask: Tensor, y: Tensor) -> Any:
    return loss(((o - y) ** 2 * mask), int(mask.sum()))


def over_count(each: Tensor, count: int) -> Tensor:
    return each.sum() / count


def take_prepared_count(loss: Any, *given: Tensor) -> Any:
    return counted(evener.global_mean, *given)


@pytest.mark.parametrize("is_counted", [False, True])
def test_weights_may_leave_nothing_out_on_each_rank(ranks: Any, is_counted: bool) -> None:
    """The samples of a rank are of one length, and those of the other of another."""
    lengths, given = (3, 3, 5, 5), tuple[Any, ...]()
    if is_counted:
        expected = steps(False, over_count, counted, lengths)
        given = nn.MSELoss(), take_prepared_count, lengths
    else:
        expected = steps(False, weighted, lengths=lengths)
        given = weighted, take_as_is, lengths
    for found in ranks(2).run(prepared, steps, *given, balance="equal"):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def squeezed(loss: Any, o: Tensor, _: Tensor, y: Tensor) -> Any:
    return loss(o.squeeze(), y.squeeze())


def test_the_only_sample_of_a_rank_may_be_a_number(ranks: Any) -> None:
    lengths = (1,) * 8
    expected = steps(False, nn.MSELoss(), squeezed, lengths)
    for found in ranks(2).run(prepared, steps, nn.MSELoss(), squeezed, lengths, balance="3,1"):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def of_all(loss: Any, o: Tensor, _: Tensor, y: Tensor) -> Any:
    return loss(o, y)


def mean_of_each(loss: Any, o: Tensor, _: Tensor, y: Tensor) -> Any:
    return loss(o, y).mean()


def global_mean(loss: Any, o: Tensor, _: Tensor, y: Tensor) -> Any:
    return evener.global_mean((o - y) ** 2)


MEANS = (
    (nn.MSELoss(), of_all),
    (lambda o, y: F.mse_loss(o, y), of_all),
    (lambda o, y: ((o - y) ** 2).mean(), of_all),
    (nn.MSELoss(reduction="none"), mean_of_each),
    (nn.MSELoss(), global_mean),
)


def refusal(loss: Any, take: Any) -> str:
    try:
        prepared(steps, loss, take, balance="3,1")
    except LossError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("loss", "take"), spread(MEANS, NIGHTLY, ALWAYS), ids=placeless)
def test_a_mean_over_what_is_filled_in_is_refused(ranks: Any, loss: Any, take: Any) -> None:
    for message in ranks(2).run(refusal, loss, take):
        assert "a sample has 5 on rank 0, 1 on rank 1: the collate function fills up to" in message
