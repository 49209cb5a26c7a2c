from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.errors import ConfigurationError
from evener.nn import FeatureParallelLinear, divide_features

SLICES = (range(0, 1), range(1, 5), range(5, 7))


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(7, 4, bias=bias).double()


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def divided(bias: bool, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Output, and gradients of the input, the weight's slice and the bias."""
    mine = SLICES[dist.get_rank()]
    layer = divide_features(linear(bias), mine, lambda tensor: dist.all_reduce(tensor))
    part = features(*shape)[..., mine.start : mine.stop].requires_grad_()
    output = layer(part)
    (output.sin() * output).sum().backward()
    return tuple(
        t.detach() for t in (output, part.grad, layer.weight.grad, layer.bias.grad if bias else output)
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 3), ()], ids=str)
def test_the_parts_make_the_whole(ranks: Any, bias: bool, shape: tuple[int, ...]) -> None:
    layer, whole = linear(bias), features(*shape).requires_grad_()
    output = layer(whole)
    (output.sin() * output).sum().backward()
    found = ranks(3).run(divided, bias, shape)
    for mine, (out, of_input, of_weight, of_bias) in zip(SLICES, found, strict=True):
        columns = slice(mine.start, mine.stop)
        torch.testing.assert_close(out, output.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_input, whole.grad[..., columns], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_weight, layer.weight.grad[:, columns], rtol=1e-13, atol=1e-13)
        if bias:
            torch.testing.assert_close(of_bias, layer.bias.grad, rtol=1e-13, atol=1e-13)
    assert all(out.equal(found[0][0]) for out, *_ in found), "the same bits on all ranks"


def test_undivided_it_is_a_linear_layer() -> None:
    torch.manual_seed(3)
    layer = FeatureParallelLinear(7, 4).double()
    assert layer(features(5)).equal(linear()(features(5)))


def test_dividing_changes_the_module_in_place_and_keeps_no_more_than_the_slice() -> None:
    layer = linear()
    layer.weight.requires_grad_(False)
    whole = layer.weight.clone()
    assert divide_features(layer, range(2, 5), lambda tensor: None) is layer
    assert (type(layer), layer.in_features) == (FeatureParallelLinear, 7)
    assert layer.weight.equal(whole[:, 2:5])
    assert not layer.weight.requires_grad
    assert layer.weight.untyped_storage().nbytes() == 4 * 3 * 8
    assert "columns=2:5" in repr(layer)


class Odd(nn.Linear):
    """Computes something else, as it may."""


@pytest.mark.parametrize(
    "layer", [Odd(7, 4), nn.Bilinear(3, 3, 3), divide_features(linear(), range(2), lambda tensor: None)]
)
def test_what_is_no_whole_linear_layer_is_refused(layer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a torch\.nn\.Linear, undivided"):
        divide_features(layer, range(2), lambda tensor: None)


def test_features_that_are_not_the_slice_are_refused() -> None:
    layer = divide_features(linear(), range(2, 5), lambda tensor: None)
    with pytest.raises(ConfigurationError, match="got 7 features"):
        layer(features(5))


def test_a_copy_sums_too_and_a_pickled_one_says_that_it_cannot() -> None:
    calls: list[Tensor] = []
    layer = divide_features(linear(), range(3), calls.append)
    copy.deepcopy(layer)(features(5)[:, :3])
    assert len(calls) == 1
    with pytest.raises(ConfigurationError, match="copied to another process"):
        pickle.loads(pickle.dumps(layer))(features(5)[:, :3])
