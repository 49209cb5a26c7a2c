"""A model of a prepared loop that mixes samples is told of in its first call; no other one is, and none is changed."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.training.prepare.first_calls import FirstCalls
from tests.ranks import RankPool
from tests.strategies.test_sample_trial import (
    MIXING,
    Brought,
    Centred,
    Chosen,
    Counting,
    Drawing,
    Layers,
    Telling,
    check_told,
    of_samples,
)
from tests.training.prepare.running import with_settings

Ranks = Callable[[int], RankPool]


class Asking(Layers):
    """Asks the loop for the other ranks, and for its own samples, and prints."""

    def between(self, x: Tensor) -> Tensor:
        print(len(x))
        evener.gather(x.detach())
        return x + evener.draw(torch.randn, 8) + torch.rand(())


class WithMask(Centred):
    """Has an input that is of no sample."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * scale)


def trained(
    model: type[nn.Module], tries: bool = True, **settings: Any
) -> tuple[list[str], dict[str, Tensor]]:
    """Returns the warnings of a rank about samples, and the weights after the batches of an epoch."""
    with (
        warnings.catch_warnings(record=True) as told,
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as printed,
        with_settings(**settings),
    ):
        warnings.simplefilter("always")
        if not tries:
            patch.setattr(FirstCalls, "watch", lambda *_: None)
        random.seed(1)
        torch.manual_seed(1)
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        loader = DataLoader(
            TensorDataset(torch.randn(36, 6), torch.randint(3, (36,))), batch_size=12, shuffle=True
        )
        made, optimizer, loader, loss = evener.prepare(made, optimizer, loader, nn.CrossEntropyLoss())
        other = copy.deepcopy(made)
        for x, y in loader:
            with torch.no_grad():
                other(x / 2, *([torch.ones(1, 6)] if model is WithMask else ()))
            optimizer.zero_grad()
            found = made(x / 2, *([torch.ones(1, 6)] if model is WithMask else ()))
            loss(found[0] if isinstance(found, tuple) else found, y).backward()
            optimizer.step()
        weights = {name: value.clone() for name, value in made.state_dict().items()}
    return of_samples(told), weights | {"number of texts": torch.tensor(len(printed.getvalue().split()))}


@pytest.mark.parametrize("model", [*MIXING, WithMask])
def test_a_model_that_mixes_samples_is_told_of_once_by_the_first_rank(
    ranks: Ranks, model: type[nn.Module]
) -> None:
    (first, _), (second, _) = ranks(2).run(trained, model)
    check_told(first, second)


@pytest.mark.parametrize("model", [Layers, Drawing, Chosen, Counting, Telling, Brought, Asking])
def test_no_other_model_is_and_a_trial_changes_no_bit(ranks: Ranks, model: type[nn.Module]) -> None:
    (told, tried), _ = ranks(2).run(trained, model)
    (_, untried), _ = ranks(2).run(trained, model, False)
    assert not told
    assert all(torch.equal(value, untried[name]) for name, value in tried.items())


def prepared_with_rows(model: nn.Module) -> Any:
    rows = TensorDataset(torch.randn(36, 6))
    return evener.prepare(model, DataLoader(rows, batch_size=12, shuffle=True))


def trained_after_a_transform() -> list[str]:
    with warnings.catch_warnings(record=True) as told, with_settings():
        warnings.simplefilter("always")
        torch.manual_seed(1)
        made, loader = prepared_with_rows(Centred())
        for (x,) in loader:
            torch.func.vmap(made)(torch.stack([x, 2 * x]))
            made(x)
    return of_samples(told)


def recomputed_as_a_whole() -> tuple[list[str], bool]:
    with warnings.catch_warnings(record=True) as told, with_settings():
        warnings.simplefilter("always")
        torch.manual_seed(1)
        made, loader = prepared_with_rows(Centred())
        (x,) = next(iter(loader))
        x.requires_grad_()
        (found,) = torch.autograd.grad(checkpoint(made, x, use_reentrant=False)[:1].sum(), x)
        (expected,) = torch.autograd.grad(made(x)[:1].sum(), x)
        return of_samples(told), torch.equal(found, expected)


def test_a_trial_is_no_part_of_a_pass_that_is_recomputed(ranks: Ranks) -> None:
    (first, *are_same), (second, *same_elsewhere) = ranks(2).run(recomputed_as_a_whole)
    check_told(first, second)
    assert all(are_same + same_elsewhere)


def test_a_model_is_tried_in_its_first_call_outside_of_transforms(ranks: Ranks) -> None:
    check_told(*ranks(2).run(trained_after_a_transform))


class Bags(nn.Module):
    """Takes the words of all samples one after another, and where those of each sample begin."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(9, 3)

    def forward(self, words: Tensor, starts: Tensor) -> Tensor:
        found: Tensor = self.words(words, starts)
        return found


def bags(samples: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([length for length, _ in samples])
    words = torch.tensor([(at + target) % 9 for length, target in samples for at in range(length)])
    return torch.tensor([target for _, target in samples]), words, lengths.cumsum(0) - lengths


def trained_on_bags() -> list[str]:
    with warnings.catch_warnings(record=True) as told, with_settings():
        warnings.simplefilter("always")
        torch.manual_seed(1)
        data = [(1 + number % 4, number % 3) for number in range(24)]
        made, loader, loss = evener.prepare(
            Bags(), DataLoader(data, batch_size=6, collate_fn=bags), nn.CrossEntropyLoss()
        )
        for targets, words, starts in loader:
            loss(made(words, starts), targets).backward()
    return of_samples(told)


def test_samples_with_several_rows_of_an_input_are_not_tried(ranks: Ranks) -> None:
    assert ranks(2).run(trained_on_bags) == [[], []]


class Contrasting(Layers):
    """Computes its own loss, in which samples are compared."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return F.cross_entropy(scores @ scores.T, torch.arange(len(x)))


class OwnMean(Layers):
    """Computes its own mean, over terms of which samples have different numbers, and a penalty."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        scores, counts = super().forward(x), x > 0
        mean = (scores.sum(1, keepdim=True) * counts).sum() / counts.sum()
        loss, root = mean + 0.1 * self.first.weight.square().sum(), scores.square().mean().sqrt()
        return {"loss": loss, "root": root, "terms": counts.sum()}


class Balanced(Layers):
    """The mean of choices times the mean of scores, as a mixture of experts has it."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        scores = (3 * super().forward(x)).softmax(1)
        chosen = F.one_hot(scores.argmax(1), scores.shape[1]).to(scores.dtype)
        return {"scores": scores, "loss": (chosen.mean(0) * scores.mean(0)).sum()}


class OwnSum(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


class Denoising(Layers):
    """Draws the noise of each sample in its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x + torch.randn_like(x)), x[:, :3])


def trained_by_own_loss(model: type[nn.Module]) -> list[str]:
    with warnings.catch_warnings(record=True) as told, with_settings():
        warnings.simplefilter("always")
        torch.manual_seed(1)
        made, loader = prepared_with_rows(model())
        for (x,) in loader:
            found = made(x)
            of = (found["loss"], found.get("terms")) if isinstance(found, dict) else (found,)
            evener.global_mean(*of).backward()
    return [str(each.message) for each in told if "mean" in str(each.message)]


@pytest.mark.parametrize(
    ("model", "number"), [(Contrasting, 1), (Balanced, 1), (OwnMean, 0), (OwnSum, 0), (Denoising, 0)], ids=str
)
def test_a_loss_of_the_models_own_that_compares_samples_is_told_of(
    ranks: Ranks, model: type[nn.Module], number: int
) -> None:
    assert [len(told) for told in ranks(2).run(trained_by_own_loss, model)] == [number, 0]
