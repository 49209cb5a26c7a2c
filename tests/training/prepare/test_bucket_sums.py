"""Sums that begin in backward: the training of one device, and early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evener
from evener.errors import EvenerError
from evener.training.prepare import bucket_sums
from evener.training.prepare import prepare as preparing
from tests.training.prepare import test_prepare, test_silent_errors, test_strategies
from tests.training.prepare.running import Loop, Weights, prepared, with_settings

SETTINGS: dict[str, Any] = {"allreduce": "native", "bucket_mb": 1e-4, "balance": "3,1"}
LOOPS = (
    *(
        test_prepare.plainly,
        test_prepare.accumulating,
        test_prepare.with_a_scaler,
        test_prepare.frozen_and_unused,
    ),
    *(test_prepare.two_losses_of_a_batch, test_prepare.after_an_error, test_silent_errors.thawed),
    *(test_silent_errors.with_another_head, test_silent_errors.assigned, test_silent_errors.scaled_by_hand),
    *(test_silent_errors.with_clamping_hooks, test_silent_errors.stepping_in_backward),
    *(test_strategies.clipping, test_strategies.more_passes_than_one, test_strategies.cleared_between),
    *(test_strategies.with_gaps, test_strategies.looking_at_gradients),
)

AFTER_BACKWARD = (
    *(test_silent_errors.assigned, test_silent_errors.with_clamping_hooks),
    *(test_silent_errors.stepping_in_backward, test_prepare.frozen_and_unused),
)
"""Loops without such passes: they ask for gradients, have hooks, or have frozen a weight."""


def early(loop: Callable[[bool], Any]) -> tuple[Any, int]:
    """What the loop gives, and how many passes sent buckets while they ran."""
    begun = [0]
    during = bucket_sums.BucketSums.during

    def counted(self: bucket_sums.BucketSums) -> Any:
        begun[0] += 1
        return during(self)

    with (
        patch.object(bucket_sums, "LEAST_NBYTES", 0),
        patch.object(bucket_sums.BucketSums, "during", counted),
    ):
        return prepared(loop, **SETTINGS), begun[0]


@pytest.mark.parametrize("loop", LOOPS, ids=[each.__name__ for each in LOOPS])
def test_it_is_the_loop_of_one_device(ranks: Any, loop: Callable[[bool], Weights]) -> None:
    expected = loop(False)
    for found, passes in ranks(2).run(early, loop):
        assert passes > 0 or loop in AFTER_BACKWARD
        test_strategies.check(found, expected)


def events_of(_: bool) -> list[str]:
    loop, seen = (
        Loop(True, model=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()),
        list[str](),
    )
    send = bucket_sums.BucketSums._send

    def sent(self: bucket_sums.BucketSums) -> None:
        seen.append("sent")
        send(self)

    first = lambda gradient: seen.append("the first layer")  # noqa: E731
    loop.model[0].register_forward_hook(lambda module, args, output: output.register_hook(first) and None)
    with patch.object(bucket_sums.BucketSums, "_send", sent):
        for x, y in loop.loader:
            loop.backward(x, y)
            return seen
    raise AssertionError


def test_buckets_are_sent_before_backward_is_over(ranks: Any) -> None:
    for seen, _ in ranks(2).run(early, events_of):
        assert seen.index("sent") < seen.index("the first layer") < len(seen) - 1


class Segmented(nn.Module):
    """Two segments that use the same weights."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.last, self.use_reentrant = nn.Linear(4, 4), nn.Linear(4, 3), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=self.use_reentrant))
        return self.last(x)


def segmented(is_prepared: bool, use_reentrant: bool = False) -> Weights:
    torch.manual_seed(1)
    loop = Loop(is_prepared, model=Segmented(use_reentrant).double())
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        loop.backward(x.requires_grad_(), y)
        loop.optimizer.step()
    return loop.weights()


def twice_in_a_pass(_: bool) -> str:
    try:
        segmented(True, use_reentrant=True)
    except EvenerError as error:
        return str(error)
    return "nothing"


def test_gradients_that_come_twice_are_refused_and_not_lost(ranks: Any) -> None:
    expected = segmented(False)
    for found, _ in ranks(2).run(early, segmented):
        test_strategies.check(found, expected)
    for said, _ in ranks(2).run(early, twice_in_a_pass):
        assert "say use_reentrant=False" in said


def used_of(sizes: list[int]) -> bool:
    """Whether sums begin in backward of models of these sizes."""
    evener.prepare(*[nn.Linear(size, size) for size in sizes])
    return preparing.current("").mean._buckets is not None


def used_with(sizes: list[int], **settings: Any) -> bool:
    with with_settings(**settings):
        return used_of(sizes)


@pytest.mark.parametrize(
    ("sizes", "settings", "expected"),
    [
        ([600], {}, True),
        ([10], {}, False),
        ([600, 600], {}, False),
        ([600], {"allreduce": "shared-memory"}, False),
        ([600], {"compress": "int8"}, False),
    ],
)
def test_small_models_and_several_are_summed_after_backward(
    ranks: Any, sizes: list[int], settings: dict[str, str], expected: bool
) -> None:
    assert ranks(2).run(used_with, sizes, **({"allreduce": "native"} | settings)) == [expected] * 2
