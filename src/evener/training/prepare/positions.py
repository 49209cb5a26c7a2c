"""Sequences that are divided over ranks, in a loop of the user's own: what is checked, since nothing else would tell.

A rank has a piece of each sequence. A loop that shifts targets itself would lose those at the edges of pieces, and a
model that numbers positions itself would number those of the piece. So the first call of the model is tried on whole
sequences, too, and a loss is given tensors of all positions of the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.data.batch import map_leaves
from evener.errors import ConfigurationError
from evener.nn.sequence_layout import DividedSequence
from evener.strategies.interfaces import BatchSlicer, ModelCall
from evener.training.prepare.current_batch import CurrentBatch


def call_model_as(model: nn.Module, given: Any) -> Any:
    """Calls the model with the arguments of a call, or with one input."""
    return model(*given.args, **given.kwargs) if isinstance(given, ModelCall) else model(given)


def try_first_call(
    model: nn.Module, cut: BatchSlicer, current: Callable[[], Sequence[CurrentBatch]]
) -> RemovableHandle:
    """Registers a hook that tries the first call of the model in training within a batch.

    Args:
        current: Returns the current batch, or nothing.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for batch in current() if model.training else ():
            if batch.micro.sequence is not None:
                cut.try_call(ModelCall(args, kwargs), batch.micro)

    return model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def check_positions(given: Any, batch: CurrentBatch) -> None:
    """Raises ConfigurationError if tensors that a loss is given have not all positions of this rank's pieces."""
    sequence: DividedSequence | None = batch.micro.sequence
    if sequence is None:
        return
    samples, size = len(batch.micro.samples), sequence.size

    def check(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        by_sample = leaf.shape[0] == samples and size in (leaf.shape[1:2] + leaf.shape[-1:])
        if not (by_sample and leaf.dim() > 1) and leaf.shape[0] != samples * size:
            raise ConfigurationError(
                f"the loss was given a tensor of shape {tuple(leaf.shape)}, and this rank has {size} positions of each "
                f"of {samples} sequences, which strategy 'context' divides: give it all of them. Targets are shifted "
                "in the data set, before sequences are divided"
            )
        return leaf

    map_leaves(check, given)


def refuse_divided(what: str, batch: CurrentBatch) -> None:
    """Raises ConfigurationError if sequences are divided, of which ``what`` would see pieces."""
    if batch.micro.sequence is not None:
        raise ConfigurationError(
            f"{what}, and strategy 'context' gives each rank pieces of sequences: use 'ddp'"
        )
