"""Cross entropy of scores that are divided by their classes, against PyTorch's of whole ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.distributed.mesh import Layout
from evener.distributed.session import Session
from evener.errors import ConfigurationError, LossError
from evener.nn import VocabularyParallelCrossEntropy, vocabulary_parallel_cross_entropy
from evener.nn.collectives import split
from evener.nn.tensor_parallel import LengthDivision

CLASSES, IGNORED = 7, 4


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3


def targets(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))


CASES = [
    (scores(9, CLASSES), targets(9)),
    (scores(2, CLASSES, 3, 4), targets(2, 3, 4)),
    (scores(CLASSES), targets()),
    (scores(9, CLASSES) * 100, targets(9)),
    (scores(9, CLASSES), targets(9).to(torch.uint8)),
]
Loss = Callable[..., Tensor]


def with_gradient(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    value = loss(x)
    (value / 100).sin().sum().backward()
    return value.detach(), x.grad


def of_parts(
    sizes: list[int], options: dict[str, Any], cases: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor | None]]:
    with Session("cpu", 60) as session:
        group = session.lay(Layout({"tensor": session.world_size})).group("tensor")

        def loss(x: Tensor, y: Tensor) -> Tensor:
            part = split(x, group, min(1, x.dim() - 1), sizes)
            return vocabulary_parallel_cross_entropy(part, y, group, sizes, **options)

        return [with_gradient(partial(loss, y=y), x) for x, y in cases]


def masked() -> list[tuple[Tensor, Tensor]]:
    """The scores of a class that does not occur are -inf, as those that fill a vocabulary up."""
    return [
        (x.index_fill(min(1, x.dim() - 1), torch.tensor(CLASSES - 1), -torch.inf), y % (CLASSES - 1))
        for x, y in CASES
    ]


@pytest.mark.parametrize("sizes", [[3, 2, 2], [1, 5, 1]], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_that_of_whole_scores(ranks: Any, sizes: list[int], smoothing: float, reduction: str) -> None:
    options = {"label_smoothing": smoothing, "reduction": reduction, "ignore_index": IGNORED}
    cases = CASES if smoothing else [*CASES, *masked()]
    expected = [with_gradient(partial(F.cross_entropy, target=y, **options), x) for x, y in cases]
    for found in ranks(3).run(of_parts, sizes, options, cases):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_alone_it_is_pytorchs() -> None:
    x, y = scores(5, CLASSES), targets(5)
    found = vocabulary_parallel_cross_entropy(x, y, None, label_smoothing=0.1, ignore_index=IGNORED)
    assert found == F.cross_entropy(x, y, label_smoothing=0.1, ignore_index=IGNORED)
    loss, plain = (
        VocabularyParallelCrossEntropy(IGNORED, 0.1),
        nn.CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=0.1),
    )
    torch.testing.assert_close(loss.total(x, y) / loss.count(y), plain(x, y))


def wrong() -> tuple[str, str, float, str, str]:
    with Session("cpu", 60) as session:
        group = session.lay(Layout({"tensor": session.world_size})).group("tensor")
        assert group is not None
        part = scores(4, 3)
        with pytest.raises(ConfigurationError) as without:
            vocabulary_parallel_cross_entropy(part, targets(4), group)
        with pytest.raises(ConfigurationError) as another:
            vocabulary_parallel_cross_entropy(part, targets(4), group, [2, 2])
        with pytest.raises(ConfigurationError, match=r"\[3, 0\] leave a rank without a class"):
            vocabulary_parallel_cross_entropy(part, targets(4), group, [3, 0])
        strange = vocabulary_parallel_cross_entropy(part, torch.tensor([0, 1, 2, 6]), group, [3, 3])
        loss = VocabularyParallelCrossEntropy()
        loss.divide(LengthDivision(group, (range(2), range(2, 4)), group.rank()))
        with pytest.raises(LossError) as classes:
            loss.total(part, targets(4))
        with pytest.raises(LossError) as several:
            loss.total((part, part), targets(4))  # type: ignore[arg-type]
        return str(without.value), str(another.value), float(strange), str(classes.value), str(several.value)


def test_what_cannot_be(ranks: Any) -> None:
    for without, another, strange, classes, several in ranks(2).run(wrong):
        assert "[] are not the lengths of 2 pieces" in without
        assert "this rank's length is said to be 2, but dimension 1" in another
        assert strange != strange, "a class that there is not is no number"
        assert re.search(r"have 3 classes on dimension 1, of which there are 4, or 2 on this rank", classes)
        assert "the model's outputs are a tuple" in several
