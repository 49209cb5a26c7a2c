"""Loops whose steps would be wrong in silence, or that cannot be divided, are refused in words."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import evener
from evener.errors import ConfigurationError
from tests.ids import placeless
from tests.training.prepare.running import Loop, model_of, rows, said, sgd, with_settings


def with_the_plain_loss(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        F.cross_entropy(loop.model(x), y).backward()
        loop.optimizer.step()


def without_a_step(_: bool) -> None:
    """Nobody would ask about the gradients before the batch is over."""
    loop = Loop(True)
    for x, y in loop.loader:
        F.cross_entropy(loop.model(x), y).backward()


def with_the_plain_loader(_: bool) -> None:
    loop = Loop(True)
    for x, y in DataLoader(rows(), batch_size=6):
        loop.backward(x, y)


def stepping_before_the_sum(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        with evener.no_sync():
            loop.backward(x, y)
            loop.optimizer.step()


def shuffling_apart(_: bool) -> None:
    drawn = torch.Generator().manual_seed(evener.rank())
    loop = Loop(True, generator=drawn)
    for x, y in loop.loader:
        loop.backward(x, y)


def a_loss_that_is_not_finite(_: bool) -> None:
    loop = Loop(True)
    for step, (x, y) in enumerate(loop.loader):
        loop.backward(x * (math.nan if step == 2 and evener.rank() == 1 else 1.0), y)
        loop.optimizer.step()


def a_gradient_that_is_not_finite(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        loop.backward(x, y)
        if evener.rank() == 0:
            loop.model[0].weight.grad.fill_(0)
        loop.model[2].bias.grad[1] = math.inf
        loop.optimizer.step()


def a_loss_on_one_rank_alone(_: bool) -> None:
    """Its numbers would be taken for those of another call."""
    loop = Loop(True)
    for x, y in loop.loader:
        if evener.is_main():
            loop.loss(loop.model(x), y)


def two_loaders_with_other_shares(_: bool) -> None:
    loop = Loop(True)
    others = evener.prepare(DataLoader(rows(), batch_size=1))
    for (x, y), (other, label) in zip(loop.loader, others, strict=False):
        loop.loss(loop.model(x), y) + loop.loss(loop.model(other), label)


def two_loaders_of_other_sizes(_: bool) -> None:
    loop = Loop(True)
    others = evener.prepare(DataLoader(rows(), batch_size=4))
    for (x, y), (other, label) in zip(loop.loader, others, strict=False):
        found = F.cross_entropy(loop.model(x), y) + F.cross_entropy(loop.model(other), label)
        evener.global_mean(found)


def one_loader_twice_at_once(_: bool) -> None:
    loop = Loop(True)
    for (x, y), _other in zip(loop.loader, loop.loader, strict=True):
        loop.backward(x, y)


def saving_on_one_rank_alone(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        if evener.is_main():
            evener.save(os.devnull, model=loop.model)
        loop.backward(x, y)


def gathering_other_rows(_: bool) -> None:
    loop = Loop(True)
    for x, y in loop.loader:
        evener.gather(loop.loss(loop.model(x), y))


def gathering_rows_of_other_lengths(_: bool) -> None:
    loop = Loop(True)
    for x, _y in loop.loader:
        evener.gather(x[:, : 1 + evener.rank()])


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            with_the_plain_loss,
            r"backward was called on 1.2\d+ on rank 0 and on 1.3\d+ on rank 1, and goes with the number of the whole",
        ),
        (
            without_a_step,
            r"went through no prepared loss. Give the loss function to evener.prepare .* evener.global_mean",
        ),
        (with_the_plain_loader, "the loss was called outside of a prepared loader's batch"),
        (
            stepping_before_the_sum,
            r"optimizer.step\(\) with gradients of rank \d's samples alone, the first that of 0.weight: they were put",
        ),
        (shuffling_apart, "the ranks are not working on the same batch: rank 1 has another one than rank 0"),
        (
            a_loss_that_is_not_finite,
            r"DivergenceError: the loss is nan in step 2 on rank 1, and the gradient of \S+ is not finite before",
        ),
        (
            a_gradient_that_is_not_finite,
            "DivergenceError: the gradient of 2.bias is not finite before the update",
        ),
        (
            a_loss_on_one_rank_alone,
            "different places of the loop: rank 0 in the loss, rank 1 in the end of a batch.* must have none of them",
        ),
        (saving_on_one_rank_alone, "different places of the loop: rank 0 in evener.save, rank 1 in the loss"),
        (two_loaders_with_other_shares, "at once, and rank 1 had other numbers of samples of their batches"),
        (two_loaders_of_other_sizes, "other numbers of samples of their batches"),
        (one_loader_twice_at_once, "was iterated anew before the pass at hand was over"),
        (
            gathering_other_rows,
            r"evener.gather takes tensors with a row for each of this rank's 3 samples, not one .*nodes.*global_mean",
        ),
        (
            gathering_rows_of_other_lengths,
            r"rows of another shape or type on rank 1 than on rank 0, \S+ \(2,\) and \S+ \(1,\).* Pad to one length",
        ),
    ],
    ids=placeless,
)
def test_what_would_be_wrong_in_silence_is_refused(ranks: Any, loop: Any, words: str) -> None:
    for message in ranks(2).run(said, loop):
        assert re.search(words, message), message


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from rows()


SHARDS = evener.ShardedDataset(["a", "b"], lambda key: rows(), lengths=[26, 26])


def test_what_cannot_be_divided_is_refused_in_words() -> None:
    model = model_of()
    divided = DistributedSampler(rows(), num_replicas=2, rank=0)
    with warnings.catch_warnings(action="ignore"):  # tracing is deprecated
        traced = torch.jit.trace(model, torch.zeros(1, 4).double())
    with with_settings():
        for wrong, words in (
            ((), "evener.prepare got nothing"),
            ((nn.DataParallel(model),), "a model in DataParallel is divided already"),
            ((traced,), "a model that is a ScriptModule: put it into a module"),
            ((model, 3), "does not know what to do with .*int"),
            ((model, nn.CrossEntropyLoss), "does not know what to do with"),
            ((model, DataLoader(Stream(), batch_size=None)), "this DataLoader has batch_size=None"),
            ((model, DataLoader(SHARDS, shuffle=True)), "shuffles shards opens one for each sample"),
            ((model, DataLoader(rows(), batch_size=None)), "this DataLoader has batch_size=None"),
            ((model, DataLoader(rows(), sampler=divided)), "has a DistributedSampler, .* leave it out"),
            ((model, sgd(model_of())), "an optimizer has 4 parameters, .* of no model .*ParameterList"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                evener.prepare(*wrong)
        with pytest.raises(
            ConfigurationError, match=r"takes no exact=bits: a loop of your own .*use evener.fit"
        ):
            evener.prepare(model, exact="bits")
        with pytest.raises(ConfigurationError, match="takes no balence; did you mean balance"):
            evener.prepare(model, balence="auto")
        with pytest.raises(ConfigurationError, match=r"takes no epochs; is a setting of evener.fit"):
            evener.prepare(model, epochs=3)
    with pytest.raises(ConfigurationError, match="was not called yet with a model"):
        evener.prepare(DataLoader(rows(), batch_size=2))
    with with_settings():
        loop = Loop(True)
        with pytest.raises(
            ConfigurationError, match=r"device goes with the call of evener.prepare that has the model"
        ):
            evener.prepare(DataLoader(rows(), batch_size=2), device="cpu")
        evener.prepare(loop.model)
        with pytest.raises(ConfigurationError, match=r"belongs to an earlier call of evener.prepare"):
            next(iter(loop.loader))


def test_parameters_of_no_optimizer_are_told() -> None:
    model = model_of()
    with (
        with_settings(),
        pytest.warns(UserWarning, match=r"0.weight, one of 2 parameters, is in no optimizer"),
    ):
        evener.prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
