"""Cross entropy of scores that are divided over ranks by their classes, which are never gathered.

Of (N, V) scores each rank has some columns of every row, and the ranks exchange three numbers a row::

    m = max of all scores      s = Σ exp(score - m)      t = score of the target - m     to smooth, Σ (score - m)
    loss = log s - t

The largest takes a message, the sums another; backward takes none. After Shoeybi et al., "Megatron-LM", 2019, section
3; with smoothing ε the target's t is ``(1 - ε) t + ε / V Σ (score - m)`` (Szegedy et al., "Rethinking the Inception
Architecture", 2016, section 7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from evener.core.losses.sums import Loss
from evener.core.losses.type_checks import check_outputs, check_targets
from evener.errors import LossError
from evener.nn.checks import check_own_length, dimension, lengths_of, several
from evener.nn.collectives_no_grad import largest, summed
from evener.nn.tensor_parallel import Parts
from evener.nn.unowned import Shared
from evener.torch_internals.compiling import outside_of_graphs


@outside_of_graphs  # a graph cannot wait for other ranks
def vocabulary_parallel_cross_entropy(
    scores: Tensor,
    targets: Tensor,
    group: ProcessGroup | None,
    sizes: Sequence[int] | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """``F.cross_entropy`` of the scores of all ranks, side by side in order of rank; the same on all.

    Args:
        scores: This rank's classes of all rows, (N, own) or (N, own, d1, ...), or (own) of one row.
        targets: Of all classes: (N), (N, d1, ...) or (), alike on all ranks.
        group: The ranks; None for this rank alone.
        sizes: How many classes each rank has; needed for a group of several.
        ignore_index: Targets that are no terms.
        label_smoothing: As in PyTorch.
        reduction: As in PyTorch.

    Raises:
        ConfigurationError: If the sizes are not those of the scores, or this rank is not in the group.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if (ranks := several(group)) is None:
        whole: Tensor = F.cross_entropy(scores, targets, reduction=reduction, **options)
        return whole
    lengths = lengths_of("vocabulary_parallel_cross_entropy", sizes or [], ranks)
    dim = dimension("vocabulary_parallel_cross_entropy", scores, min(1, scores.dim() - 1))
    check_own_length("vocabulary_parallel_cross_entropy", scores, dim, lengths[ranks.rank()])
    terms: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        scores.movedim(dim, -1), targets, ranks, lengths, ignore_index, label_smoothing
    )
    if reduction == "none":
        return terms
    return terms.sum() if reduction == "sum" else terms.sum() / (targets != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """From (..., own) scores and (...) targets, (...) terms: 0 where the target is ignored, and no number where
    there is no such class."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        targets: Tensor,
        group: ProcessGroup,
        sizes: list[int],
        ignored: int,
        smoothing: float,
    ) -> Tensor:
        start, own = sum(sizes[: group.rank()]), scores.shape[-1]
        kept, local = targets != ignored, targets - start
        here = kept & (local >= 0) & (local < own)
        place = local.masked_fill(~here, 0)[..., None]
        shifted = scores - largest(scores.amax(-1), group)[..., None]
        exponentials = shifted.exp()
        of_target = shifted.gather(-1, place)[..., 0].masked_fill(~here, 0)
        sums = summed(torch.stack([exponentials.sum(-1), of_target, shifted.sum(-1)]), group)
        ctx.save_for_backward(exponentials / sums[0][..., None], place, here, kept)
        ctx.smoothing, ctx.smoothed = smoothing, smoothing / sum(sizes)
        terms = sums[0].log() - (1 - smoothing) * sums[1] - ctx.smoothed * sums[2]
        nobodys = kept & ((targets < 0) | (targets >= sum(sizes)))
        result: Tensor = terms.masked_fill(~kept, 0).masked_fill(nobodys, math.nan)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, place, here, kept = ctx.saved_tensors
        gradient = probabilities - ctx.smoothed
        chosen = here[..., None].to(gradient.dtype) * (1 - ctx.smoothing)
        gradient.scatter_add_(-1, place, -chosen)
        return (gradient * dy.masked_fill(~kept, 0)[..., None], *[None] * 5)


class VocabularyParallelCrossEntropy(Loss):
    """``nn.CrossEntropyLoss`` as a mean over terms, of scores that strategy ``tensor`` leaves divided in training.

    It is the loss of a model whose outputs are the scores of a divided output layer as they are, or reshaped with the
    classes on dimension 1. On one device, with another strategy, and in evaluation, where the scores are whole, it is
    the plain loss.

    Args:
        ignore_index: Targets that are no terms.
        label_smoothing: As in PyTorch.
    """

    def __init__(self, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self._parts = Shared[Parts]()

    def divide(self, parts: Parts | None) -> None:
        """Says how the classes are divided from now on; None if they are not."""
        self._parts = Shared(parts)

    def count(self, targets: Tensor) -> Tensor:
        check_targets(targets, "VocabularyParallelCrossEntropy")
        return (targets != self.ignore_index).sum()

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_outputs(outputs, "VocabularyParallelCrossEntropy")
        parts, classes = self._parts.value, outputs.shape[min(1, outputs.dim() - 1)]
        if parts is not None and classes not in (parts.whole, len(parts.own)):
            raise LossError(
                f"VocabularyParallelCrossEntropy: outputs of shape {tuple(outputs.shape)} have {classes} classes on "
                f"dimension 1, of which there are {parts.whole}, or {len(parts.own)} on this rank"
            )
        divided = parts is not None and classes == len(parts.own)
        total: Tensor = vocabulary_parallel_cross_entropy(
            outputs.to(torch.promote_types(outputs.dtype, torch.float32)),
            targets,
            parts.group if parts is not None and divided else None,
            parts.sizes if parts is not None else None,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return total
