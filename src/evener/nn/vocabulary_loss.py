"""Cross entropy of scores whose classes are divided over ranks; the scores are never gathered.

Each rank has some columns (classes) of the (N, V) scores, and the ranks exchange a few numbers for each row::

    m = max of all scores      s = Σ exp(score - m)      t = score of the target - m     to smooth, Σ (score - m)
    loss = log s - t

Forward sends one message for the maximum and one for the sums; backward sends none. After Shoeybi et al.,
"Megatron-LM", 2019, section 3. With label smoothing ε, ``(1 - ε) t + ε / V Σ (score - m)`` replaces t (Szegedy et al.,
"Rethinking the Inception Architecture", 2016, section 7).
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
from evener.errors import ConfigurationError, LossError
from evener.nn.checks import check_own_length, dimension, lengths_of, several
from evener.nn.collectives_no_grad import largest, summed
from evener.nn.tensor_parallel import LengthDivision
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
    """Computes ``F.cross_entropy`` of the scores of all ranks, whose classes follow each other in order of rank.

    All ranks must call this together, and get the same result.

    Args:
        scores: The scores of this rank's classes: (N, own), (N, own, d1, ...), or (own) for a single row.
        targets: Class numbers among all classes: (N), (N, d1, ...) or (); the same on all ranks.
        group: The ranks; None for this rank alone.
        sizes: The number of classes of each rank, at least 1; required for a group of several ranks.
        ignore_index: The target value of terms that do not count.
        label_smoothing: As in PyTorch.
        reduction: As in PyTorch.

    Raises:
        ConfigurationError: If ``sizes`` do not fit the group or the scores, or this rank is not in the group.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if (ranks := several(group)) is None:
        whole: Tensor = F.cross_entropy(scores, targets, reduction=reduction, **options)
        return whole
    lengths = lengths_of("vocabulary_parallel_cross_entropy", sizes or [], ranks)
    if 0 in lengths:
        raise ConfigurationError(
            f"vocabulary_parallel_cross_entropy: {lengths} leave a rank without a class; give each at least one"
        )
    dim = dimension("vocabulary_parallel_cross_entropy", scores, min(1, scores.dim() - 1))
    check_own_length("vocabulary_parallel_cross_entropy", scores, dim, lengths[ranks.rank()])
    terms: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        scores.movedim(dim, -1), targets, ranks, lengths, ignore_index, label_smoothing
    )
    if reduction == "none":
        return terms
    return terms.sum() if reduction == "sum" else terms.sum() / (targets != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """Maps scores (..., own) and targets (...) to terms (...). A term is 0 if the target is ignored, and NaN if its
    class does not exist."""

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
        kept, local = targets != ignored, targets.long() - start  # PyTorch's takes uint8, too
        here = kept & (local >= 0) & (local < own)
        place = local.masked_fill(~here, 0)[..., None]
        shifted = scores - largest(scores.amax(-1), group)[..., None]
        exponentials = shifted.exp()
        of_target = shifted.gather(-1, place)[..., 0].masked_fill(~here, 0)
        everything = [shifted.sum(-1)] if smoothing else []  # with a masked class it is infinite
        sums = summed(torch.stack([exponentials.sum(-1), of_target, *everything]), group)
        ctx.save_for_backward(exponentials / sums[0][..., None], place, here, kept)
        ctx.smoothing, ctx.smoothed = smoothing, smoothing / sum(sizes)
        terms = sums[0].log() - (1 - smoothing) * sums[1] - sum(ctx.smoothed * each for each in sums[2:])
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
    """``nn.CrossEntropyLoss`` (mean over terms) for scores that strategy ``tensor`` leaves divided over ranks.

    The model must return the scores of its divided output layer, as they are or reshaped with the classes on dimension
    1. On one device, with another strategy, and in evaluation, each rank has all scores, and this is the plain loss.

    Args:
        ignore_index: The target value of terms that do not count.
        label_smoothing: As in PyTorch.
    """

    def __init__(self, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self._parts = Shared[LengthDivision]()

    def divide(self, parts: LengthDivision | None) -> None:
        """Sets how the classes are divided over ranks from now on; None if they are not."""
        self._parts = Shared(parts)

    def count(self, targets: Tensor) -> Tensor:
        check_targets(targets, "VocabularyParallelCrossEntropy")
        return (targets != self.ignore_index).sum()

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_outputs(outputs, "VocabularyParallelCrossEntropy")
        parts, classes = self._parts.value, outputs.shape[min(1, outputs.dim() - 1)]
        if parts is not None and classes not in (parts.whole, len(parts.local_length)):
            raise LossError(
                f"VocabularyParallelCrossEntropy: outputs of shape {tuple(outputs.shape)} have {classes} classes on "
                f"dimension 1, of which there are {parts.whole}, or {len(parts.local_length)} on this rank"
            )
        divided = parts is not None and classes == len(parts.local_length)
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
