"""The layer on one device, against what it is defined to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evener.errors import ConfigurationError
from evener.nn import Experts, Mixed
from evener.nn.context import scope


def layer(**options: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(**{"width": 4, "hidden": 7, "experts": 3, **options}).double()


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def expected(mixture: Experts, tokens: Tensor) -> Tensor:
    """Every expert of every token, of which the unchosen count for nothing."""
    probabilities = mixture.router(tokens).softmax(-1)
    weights, chosen = probabilities.topk(mixture.top)
    if mixture.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    share = torch.zeros_like(probabilities).scatter(1, chosen, weights)
    inner = F.gelu(torch.einsum("tw,ehw->teh", tokens, mixture.up) + mixture.up_bias)
    made = torch.einsum("teh,ewh->tew", inner, mixture.down) + mixture.down_bias
    return torch.einsum("te,tew->tw", share, made)


@pytest.mark.parametrize(
    "options", [{}, {"top": 1, "normalized": False}, {"top": 3}, {"normalized": False}], ids=str
)
def test_it_is_the_weighed_sum_of_the_chosen_experts(options: dict[str, Any]) -> None:
    mixture, x = layer(**options), draws(5, 2, 4).requires_grad_()
    found = mixture(x)
    wanted = expected(mixture, x.view(-1, 4)).view_as(x)
    torch.testing.assert_close(found.output, wanted, rtol=1e-12, atol=1e-12)
    inputs = [x, *mixture.parameters()]
    for gradient, other in zip(
        torch.autograd.grad(found.output.sin().sum(), inputs),
        torch.autograd.grad(wanted.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)
    assert found.dropped == 0


def test_the_balance_is_one_where_all_are_used_alike_and_more_otherwise() -> None:
    mixture = layer(top=1, normalized=False)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[0, 0] = 100.0
    x = torch.zeros(9, 4, dtype=torch.float64)
    x[:, 0] = 1
    assert mixture(x).balance.item() == pytest.approx(3)
    with torch.no_grad():
        mixture.router.weight.copy_(100 * torch.eye(3, 4))
    assert mixture(torch.eye(3, 4, dtype=torch.float64).repeat(3, 1)).balance.item() == pytest.approx(1)


def choosing_the_first(scores: list[float], **options: Any) -> Mixed:
    mixture = layer(top=1, normalized=False, **options)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[0, 0] = 1
    x = torch.zeros(len(scores), 4, dtype=torch.float64)
    x[:, 0] = torch.tensor(scores)
    found: Mixed = mixture(x)
    return found


def test_the_largest_weights_find_room_and_of_equal_ones_none() -> None:
    """Six tokens ask the first of three experts, which has room for 1 * 6 / 3 of them, and then for twice as many."""
    scores = [3.0, 5.0, 1.0, 4.0, 2.0, 6.0]
    found = choosing_the_first(scores, capacity=1.0)
    assert found.output.abs().sum(1).ne(0).tolist() == [score >= 5 for score in scores]
    assert found.dropped == pytest.approx(4 / 6)
    found = choosing_the_first([3.0, 3.0, 1.0, 4.0, 3.0, 6.0], capacity=2.0)
    assert found.output.abs().sum(1).ne(0).tolist() == [False, False, False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("top", "normalized"), [(1, False), (2, True)])
def test_room_is_filled_where_all_are_nearly_certain(top: int, normalized: bool, dtype: torch.dtype) -> None:
    """Twelve tokens, whose weights are 1 to a few bits, ask an expert that has room for a third of their choices."""
    mixture = layer(top=top, normalized=normalized, capacity=1.0).to(dtype)
    with torch.no_grad():
        mixture.router.weight.copy_(torch.eye(3, 4))
    x = torch.zeros(12, 4, dtype=dtype)
    x[:, 0] = 40 + 4 * torch.arange(12)
    found = mixture(x)
    found_room = found.output.abs().sum(1).ne(0)
    assert found_room.sum() >= 12 * top // 3
    assert found_room[-4:].all()
    assert top == 2 or not found_room[:-8].any()


@pytest.mark.parametrize("top", [1, 2])
def test_choices_do_not_turn_with_rounding(top: int) -> None:
    """Equal tokens and equal experts, with scores that are as far apart as other orders of sums bring them."""
    mixture = layer(top=top, normalized=top > 1, capacity=1.0).float()
    with torch.no_grad():
        mixture.router.weight[1] = mixture.router.weight[0]
    x = draws(6, 4).float().repeat(2, 1)

    def dropped_and_chosen(seed: int) -> tuple[list[int], Tensor]:
        def rounded(module: Any, given: Any, scores: Tensor) -> Tensor:
            noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
            return scores + noise * 3e-7

        with mixture.router.register_forward_hook(rounded):
            found = mixture(x)
        return found.output.abs().sum(1).eq(0).tolist(), found.dropped

    assert len({str(dropped_and_chosen(seed)) for seed in range(20)}) == 1


def test_padding_goes_nowhere() -> None:
    mixture, x = layer(capacity=1.0), draws(3, 4, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    found, dense = mixture(x, mask), mixture(x[mask][:, None])
    assert found.output[~mask].eq(0).all()
    torch.testing.assert_close(found.output[mask], dense.output[:, 0])
    assert (found.balance, found.dropped) == (dense.balance, dense.dropped)


def test_a_placeholder_is_no_token_and_has_a_gradient() -> None:
    mixture, x = layer(), draws(1, 4).requires_grad_()
    with scope(torch.arange(1), 0, 0, weight=0):
        found = mixture(x)
    assert found.output.eq(0).all()
    (found.output.sum() + found.balance).backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in mixture.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top": 4}, "4 of 3 experts"),
        ({"top": 0}, "0 of 3"),
        ({"top": 1}, "router learns nothing"),
        ({"capacity": 0.0}, "capacity .* 0.0"),
    ],
)
def test_numbers_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        layer(**options)


@pytest.mark.parametrize(
    ("shape", "mask", "words"),
    [
        ((2, 5), None, r"got \(2, 5\); it takes \(samples, ..., 4\)"),
        ((4,), None, r"got \(4,\)"),
        ((2, 3, 4), torch.ones(2, dtype=torch.bool), r"a mask \(2,\)"),
        ((2, 3, 4), torch.ones(2, 3), "of torch.float32"),
    ],
)
def test_inputs_that_do_not_fit(shape: tuple[int, ...], mask: Tensor | None, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        layer()(draws(*shape), mask)
