"""What strategy context cannot divide is found before the first step, and refused by name."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.core.task.task import Task
from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.strategies.context import context
from evener.strategies.context.context import ContextParallel
from tests.strategies.sentences import (
    LONGEST,
    PADDING,
    WIDTH,
    WORDS,
    Model,
    count,
    pad_all,
    task,
    total,
    trajectory,
)


class Counting(Model):
    """Positions counted from the start of the piece, for an embedding that begins as zeros."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words.clamp(min=0)) + self.place[: words.shape[1]]
        for block in self.blocks:
            x = block(x, words < 0)
        return self.head(x)


class Mixing(nn.Module):
    """Positions brought together by a module, between two layers."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, WIDTH), mix(), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(words.clamp(min=0))))


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Convolving(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Windowed(nn.Module):
    """Attention to the last ``window`` positions, by a mask."""

    window = 10

    def forward(self, x: Tensor) -> Tensor:
        place = evener.nn.positions(x.shape[1])
        distance = place[:, None] - place
        mask = (distance >= 0) & (distance < self.window)
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)[:, 0]


class Causal(Windowed):
    window = 10**6


class Fixed(nn.Module):
    """Of a length that it was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(LONGEST, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.place


class Pooling(nn.Module):
    """A second output, of the piece."""

    def forward(self, x: Tensor) -> Any:
        return x.mean(1)


class PooledToo(Mixing):
    def forward(self, words: Tensor) -> Any:
        x = self.embed(words.clamp(min=0))
        return self.head(x), self.mix(x)


class Gated(nn.Module):
    """A mean over positions, behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(1, keepdim=True)


class InTraining(nn.Module):
    """A mean over positions in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if self.training else x


class Remembering(nn.Module):
    """Code of training that leaves something behind, in attributes, buffers and weights that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.past, self.drop = 0, [0.0], nn.Dropout(0.0)
        self.slow, self.fast = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slow.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.past.append(0.1 * self.calls)
            self.seen += 1
            with torch.no_grad():
                self.slow.weight.lerp_(self.fast.weight, 0.5)
        return self.drop(self.slow(x) + self.fast(x) * (1 + self.past[-1] + self.seen / 8))


def counting() -> Task:
    return task(Counting)


def gated() -> Task:
    return mixing(Gated)


def in_training() -> Task:
    return mixing(InTraining)


def remembering() -> Task:
    return mixing(Remembering)


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that shifts the targets itself, and so lacks those at the end of each piece."""
    return total(outputs[:, :-1], targets[:, 1:])


def shifting() -> Task:
    return task(lambda: Mixing(nn.Identity), loss=evener.loss(total=shifted, count=count))


def by_place(outputs: Tensor, targets: Tensor) -> Tensor:
    terms = nn.functional.cross_entropy(outputs.mT, targets, ignore_index=PADDING, reduction="none")
    return (terms * torch.linspace(1, 2, LONGEST).to(terms)).sum()


def of_fixed_length() -> Task:
    """A loss whose weights are those of the whole length."""
    return task(lambda: Mixing(nn.Identity), collate=pad_all, loss=evener.loss(total=by_place, count=count))


def mixing(mix: Any) -> Task:
    return task(lambda: Mixing(mix), collate=pad_all)


def recurrent() -> Task:
    return mixing(lambda: Recurrent(WIDTH, WIDTH, batch_first=True))


def convolving() -> Task:
    return mixing(lambda: Convolving(WIDTH, WIDTH, 3, padding=1))


def attending_by_hand() -> Task:
    return mixing(ByHand)


def windowed() -> Task:
    return mixing(Windowed)


def causal() -> Task:
    return mixing(Causal)


def fixed() -> Task:
    return mixing(Fixed)


def pooling() -> Task:
    return task(lambda: PooledToo(Pooling))


def of_samples() -> Task:
    """A loss that counts samples, and not their positions."""
    return task(lambda: Mixing(nn.Identity), loss=evener.loss(total=total))


def with_features() -> Task:
    """Inputs of which one is no sequence."""
    data = [((words, torch.ones(4)), targets) for words, targets in task().train]  # type: ignore[attr-defined]
    return task(lambda: Mixing(nn.Identity), train=data, evaluate=None, collate=None, batch_size=1)


def of_numbers() -> Task:
    data = [(torch.ones(()), torch.ones(())) for _ in range(4)]
    return task(lambda: Mixing(nn.Identity), train=data, evaluate=None, collate=None)


def channels() -> Task:
    return task(lambda: Mixing(lambda: Transposed()))


class Transposed(nn.Module):
    """Dropout of a tensor whose positions come last."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = evener.nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x.transpose(1, 2)).transpose(1, 2)


def refused(name: str, **settings: Any) -> tuple[type[BaseException], str]:
    with pytest.raises(EvenerError) as found:
        trajectory(name, module=__name__, **settings)
    return found.type, str(found.value)


DIFFERS = "does not compute from pieces of sequences what it computes from whole ones"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("counting", {}, DIFFERS + ".*evener.nn.positions"),
        ("recurrent", {}, DIFFERS + ".*mix .Recurrent"),
        ("convolving", {}, DIFFERS + ".*mix .Convolving"),
        ("attending_by_hand", {}, DIFFERS),
        ("windowed", {"trial": 6, "order": "contiguous"}, DIFFERS + f".*on {LONGEST} positions"),
        ("windowed", {"trial": 6}, "a mask that is neither causal nor hides keys"),
        ("gated", {}, DIFFERS),
        ("in_training", {}, DIFFERS + ".*in training mode"),
        ("shifting", {}, "the loss's total of whole sequences is .*shifts targets"),
        ("of_fixed_length", {"trial": 99}, "the loss cannot be computed from a piece of the sequences"),
        ("fixed", {}, "cannot run on a piece of the first sequences: RuntimeError"),
        ("pooling", {}, "outputs.1, of shape .5, 6., has no dimension for positions"),
        ("of_samples", {}, "have 5 terms, and their pieces 5 . 5"),
        ("with_features", {}, "inputs.0 has .*, inputs.1 has 4.*cut="),
        ("with_features", {"cut": "inputs.words"}, "cut names inputs.words.*inputs are inputs.0, inputs.1"),
        ("of_numbers", {}, "no tensor of the inputs has one"),
        ("channels", {}, "dropout mix.drop: .*dimension 1 must be"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    ranks: Any, name: str, options: dict[str, Any], words: str
) -> None:
    for kind, message in ranks(2).run(refused, name, strategy=ContextParallel(**options)):
        assert issubclass(kind, TaskError | ConfigurationError), message
        assert re.search(words, message), message


def causal_beyond_the_longest_trial() -> tuple[list[float], list[str]]:
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True, action="always") as told,
    ):
        patch.setattr(context, "_LONGEST", 7)
        found = trajectory("causal", module=__name__, strategy=ContextParallel(trial=6))
    return found.losses, [str(each.message) for each in told]


def test_masks_of_sequences_beyond_the_longest_trial_are_told(ranks: Any) -> None:
    alone = trajectory("causal", module=__name__, strategy="single")
    of_ranks = ranks(2).run(causal_beyond_the_longest_trial)
    for losses, _ in of_ranks:
        assert losses == pytest.approx(alone.losses, rel=1e-12)
    assert [len(told) for _, told in of_ranks] == [1, 0]
    assert f"tried on 7 positions of {LONGEST}" in of_ranks[0][1][0]


def test_a_trial_leaves_no_trace_of_what_training_counts_or_writes(ranks: Any) -> None:
    alone = trajectory("remembering", module=__name__, strategy="single")
    for found in ranks(2).run(trajectory, "remembering", module=__name__):
        assert found.losses == pytest.approx(alone.losses, rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [{"method": "star"}, {"order": "random"}, {"dim": 0}, {"output_dim": 0}, {"trial": -1}],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ContextParallel(**options)
