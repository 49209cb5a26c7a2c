"""Loops whose sequences are divided over ranks: the training of one device, or refused before it is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.errors import EvenerError
from tests.tiers import ALWAYS, NIGHTLY, crossed
from tests.training.prepare.running import Weights, prepared
from tests.training.prepare.test_strategies import check


class Words(nn.Module):
    def __init__(self, numbers_itself: bool = False) -> None:
        super().__init__()
        self.words, self.places, self.numbers_itself = (
            nn.Embedding(12, 8),
            nn.Embedding(10, 8),
            numbers_itself,
        )
        layers = [
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        ]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(8, 12)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        length = x.shape[1]
        places = torch.arange(length) if self.numbers_itself else evener.nn.positions(length)
        hidden = self.words(x) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * scale


def data(length: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    words = torch.randint(12, (16, length), generator=drawn)
    targets = words.roll(-1, 1).clone()
    targets[torch.rand(targets.shape, generator=drawn) < 0.3] = -100
    return TensorDataset(words, targets)


def flat(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def transposed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100)


def training(is_prepared: bool, length: int = 8, loss: Any = flat, by_hand: bool = False) -> Weights:
    torch.manual_seed(3)
    model: Any = Words().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, validation = (DataLoader(data(length), size, shuffle=size == 6) for size in (6, 7))
    if is_prepared:
        parts = evener.prepare(model, optimizer, loader, validation, loss)
        model, optimizer, loader, validation, loss = parts
    told = []
    for x, y in loader:
        optimizer.zero_grad()
        if by_hand:
            count = (y != -100).sum() if len(told) % 4 else None  # in every second step
            value = flat(model(x, scale=0.5), y)
            value = evener.global_mean(value, count) if is_prepared else value
        else:
            value = loss(model(x, scale=0.5), y)
        value.backward()
        told += [value.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, y in validation:
            outputs = model(x)
            whole = evener.gather(outputs) if is_prepared else outputs
            told += [float(loss(outputs, y)), float(whole.square().sum())]
            assert whole.shape[1] == length
    return dict(model.state_dict()) | {"told": torch.tensor(told)}


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ring": (2, {"strategy": "context"}),
    "ulysses": (2, {"strategy": "context", "strategy_option": ("method=ulysses", "order=contiguous")}),
    "recomputed": (2, {"strategy": "context", "recompute": "blocks"}),
    "data": (4, {"mesh": "data=2,context=2", "balance": "3,1"}),
    "tensor": (4, {"mesh": "context=2,tensor=2"}),
    "shard": (4, {"mesh": "context=2,shard=2", "balance": "1,2"}),
}
LOOPS = {
    "usual": training,
    "odd": partial(training, length=9, loss=transposed),
    "by hand": partial(training, by_hand=True),
}


@pytest.mark.parametrize(("way", "loop"), crossed(WAYS, list(LOOPS), lambda _: (ALWAYS, NIGHTLY, NIGHTLY)))
def test_it_is_the_loop_of_one_device(ranks: Any, way: str, loop: str) -> None:
    number, settings = WAYS[way]
    expected = LOOPS[loop](False)
    for found in ranks(number).run(prepared, LOOPS[loop], **settings):
        check(found, expected)


def own_batches(is_prepared: bool) -> Weights:
    torch.manual_seed(3)
    model: Any = Words().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loss: Any = flat
    if is_prepared:
        model, optimizer, loss = evener.prepare(model, optimizer, loss)
    words, targets = data(8).tensors
    for start in (0, 6, 12):
        x, y = words[start : start + 6], targets[start : start + 6]
        if is_prepared:
            with evener.batch(x, y) as (own_x, own_y):
                loss(model(own_x), own_y).backward()
        else:
            loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def rows_of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum over the words of each sentence."""
    return F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100, reduction="none").sum(1)


def by_sentences(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean of means, whose parts are no parts of its sums."""
    return (rows_of_words(outputs, targets) / (targets != -100).sum(1).clamp(min=1)).mean()


def by_sentence_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    return rows_of_words(outputs, targets).mean()


def by_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return rows_of_words(outputs, targets).sum() / len(outputs)


def by_words(outputs: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100, reduction="none")
    mask = targets != -100
    return (each * mask).sum() / mask.sum()


def test_batches_that_the_loop_makes_are_divided_too(ranks: Any) -> None:
    expected = own_batches(False)
    for found in ranks(2).run(prepared, own_batches, strategy="context"):
        check(found, expected)


def refused(_: bool, what: str) -> str:
    torch.manual_seed(3)
    made: Any = Words(numbers_itself=what == "numbers").double()
    losses = {
        "a loss of samples": lambda a, b: torch.cdist(a.mean(1), a.mean(1)).max(),
        "means of sentences": by_sentences,
        "sums of sentences": by_sentence_sums,
        "sums over the batch": by_batch,
        "rows": rows_of_words,
        "words": by_words,
    }
    try:
        model, loader, loss = evener.prepare(made, DataLoader(data(8), 6), losses.get(what, flat))
        for x, y in loader:
            outputs = model(x)
            if what == "shifts":
                outputs, y = outputs[:, :-1], y[:, 1:]
            if what == "draws":
                evener.draw(torch.randn, 8)
            if what == "a mean":
                evener.global_mean(outputs.square().mean())
            loss(outputs, y).sum().backward()
    except EvenerError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("numbers", "does not compute from pieces of sequences what it computes from whole ones"),
        ("shifts", r"a tensor of shape \(6, 3, 12\), and this rank has 4 positions"),
        ("draws", "evener.draw draws for whole samples"),
        ("a mean", "weighs by samples unless it is given the count"),
        ("a loss of samples", "is no sum or mean over positions"),
        ("means of sentences", "by_sentences is no sum or mean over positions"),
        ("sums of sentences", "by_sentence_sums is no sum or mean over positions"),
        ("sums over the batch", "by_batch is no sum or mean over positions"),
        ("rows", "rows_of_words "),
        ("words", "^nothing$"),
    ],
)
def test_what_would_be_wrong_at_edges_is_refused(ranks: Any, what: str, words: str) -> None:
    import re

    for said in ranks(2).run(prepared, partial(refused, what=what), strategy="context"):
        assert re.search(words, said), said
