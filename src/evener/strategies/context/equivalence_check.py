"""Tries whether a model computes the same from pieces of sequences as from whole sequences.

Many models do not: positions counted from the start of the piece, a convolution or a recurrence along the sequence, a
mean over its positions, attention that is not PyTorch's. No list of modules covers them all, and each gives wrong
results without an error. But every rank of the axis has loaded the whole samples. So before the first step the model
runs in evaluation mode on a short stretch of them, divided and whole, and the outputs must be the same.

Code that only training runs is tried too, without dropout, unless it draws random numbers of its own.

"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from evener.components.model_trial import state_kept, training_without_dropout, undisturbed
from evener.components.output_difference import alike, difference
from evener.core.losses import Loss
from evener.core.types import Tree
from evener.data.batch import MicroBatch
from evener.errors import EvenerError, TaskError
from evener.hardware import accelerators
from evener.nn.context import scope
from evener.nn.sequence_layout import DividedSequence
from evener.strategies.learner import Learner
from evener.torch_internals.modules import AnyBatchNorm

_LOOKING_ALONG = (nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d)
"""Modules of torch that most probably look along the sequence."""
_WHOLE, _PIECE = "the first positions of the first batch", "a piece of the first sequences"
_CURES = (
    "Attention by torch.nn.functional.scaled_dot_product_attention, nn.MultiheadAttention or evener.nn.attention is "
    "brought together, and positions are told by evener.nn.positions(length), in place of torch.arange(length) or a "
    "slice [:length]"
)


def check_likeness(
    learner: Learner, micro: MicroBatch, piece: MicroBatch, join: Callable[[Tree], Tree]
) -> Tree:
    """Compares the model's outputs for a micro-batch and for the pieces of it. All ranks must call this together.

    Args:
        micro: Micro-batch with whole sequences.
        piece: This rank's piece of it.
        join: Makes the outputs for whole sequences out of the outputs for all pieces.

    Returns:
        The outputs for whole sequences in evaluation mode.

    Raises:
        TaskError: On all ranks, if the outputs differ on one.
    """
    model, device = learner.model, learner.session.device
    trains = [module for module in model.modules() if module.training]
    with learner.synchronizer.forward(), undisturbed(model):
        whole, of_piece = _outputs(learner, micro, _WHOLE), _outputs(learner, piece, _PIECE)
        _compare(learner, whole, join(of_piece), piece, "evaluation")
        if trains:
            before = accelerators.generator_states(device)
            with training_without_dropout(model, trains):
                with state_kept(model):
                    trained = _outputs(learner, micro, _WHOLE)
                with state_kept(model):
                    of_piece = _outputs(learner, piece, _PIECE)
            drew = not all(map(torch.equal, before, accelerators.generator_states(device)))
            if not any(learner.session.control.gather_objects(drew)):
                _compare(learner, trained, join(of_piece), piece, "training")
    return whole


def _compare(learner: Learner, whole: Tree, joined: Tree, piece: MicroBatch, mode: str) -> None:
    sequence: DividedSequence = piece.sequence
    coarsest = learner.settings.precision.coarsest
    said = learner.session.control.gather_objects(
        difference(whole, joined, coarsest, "whole sequences", "pieces")
    )
    if wrong := next(filter(None, said), None):
        raise TaskError(
            "strategy 'context': the model does not compute from pieces of sequences what it computes from whole ones "
            f"({wrong}; tried in {mode} mode on {sequence.length} positions). {_CURES}; "
            f"{_suspects(learner.model)}. If it is only rounding, the option trial=0 leaves the trial out; then prove "
            "it with `evener verify`"
        )


def check_total(
    loss: Loss, whole: tuple[Tree, Tree], pieces: Iterable[tuple[Tree, Tree]], computed: torch.dtype
) -> None:
    """Checks that a loss's totals of pieces add up to its total of whole sequences. Pairs are outputs and targets.

    Raises:
        TaskError: If they do not, or if the loss cannot be computed from a piece.
    """
    total = _total(loss, whole, "whole sequences")
    parts = torch.stack([_total(loss, piece, "a piece of the sequences") for piece in pieces])
    size = torch.maximum(total.abs(), parts.abs().sum())
    if total.isfinite() and not alike(torch.stack([size, total]), torch.stack([size, parts.sum()]), computed):
        raise TaskError(
            f"strategy 'context': the loss's total of whole sequences is {float(total):g}, and its totals of their "
            f"pieces {' + '.join(f'{float(part):g}' for part in parts)}, so it looks along the sequence: it shifts "
            "targets, say, or counts positions, or compares neighbours. Let the data set shift the targets, let the "
            "model return a term for each position, with evener.nn.positions(length) for their numbers, or use "
            "strategy 'ddp'"
        )


def _total(loss: Loss, given: tuple[Tree, Tree], what: str) -> Tensor:
    try:
        with torch.no_grad():
            return torch.as_tensor(loss.total(*given)).detach().reshape(())
    except EvenerError:
        raise
    except Exception as error:
        raise TaskError(
            f"strategy 'context': the loss cannot be computed from {what}: {type(error).__name__}: {error}. It must be "
            "a sum over positions, of whatever positions it is given"
        ) from error


def _outputs(learner: Learner, micro: MicroBatch, what: str) -> Tree:
    sequence: DividedSequence | None = micro.sequence
    group = None if sequence is None else sequence.group
    try:
        with (
            torch.no_grad(),
            scope(micro.samples, 0, learner.settings.seed, 1, lambda: group, sequence),
        ):
            return learner.stepper.outputs(micro)
    except EvenerError:
        raise
    except Exception as error:
        raise TaskError(
            f"strategy 'context': the model cannot run on {what}: {type(error).__name__}: {error}. Take positions from "
            "evener.nn.positions(length), and lengths from the tensors at hand"
        ) from error


def _suspects(model: nn.Module) -> str:
    kinds = (*_LOOKING_ALONG, AnyBatchNorm)
    found = [
        f"{name or 'the model'} ({type(m).__name__})"
        for name, m in model.named_modules()
        if isinstance(m, kinds)
    ]
    if not found:
        return "of torch's modules none looks along the sequence by itself"
    return f"modules that may look along the sequence: {', '.join(found[:5])}"
