"""Decides whether a learner's passes may be replayed as CUDA graphs, and tells what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from evener.components import gradients
from evener.components.cuda_graphs.permission import RunFacts, reason_against
from evener.components.cuda_graphs.recorder import RECORDERS
from evener.components.cuda_graphs.replays import Replays
from evener.components.cuda_graphs.unfit import hooked_module
from evener.core.records import Note
from evener.nn.batch_norm import BatchNorm
from evener.nn.dropout import Dropout
from evener.nn.experts import Experts
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner
from evener.strategies.steppers.oom_sizing import sends_in_passes
from evener.strategies.steppers.plain import Plain

_MOST_RANKS = 8
"""Ranks whose graphs a summary describes."""


def replays_of(learner: Learner, permits: bool) -> Replays | None:
    """Returns the CUDA graphs of a learner that is set up but for these; None if they are off.

    Args:
        permits: True if the strategy's passes can be replayed.
    """
    if learner.settings.cuda_graphs == "off":
        return None
    model, task = learner.model, learner.task
    return Replays(
        model,
        next(model.parameters()).device,
        reason_against(facts_of(learner, permits)),
        lambda: {"": model, "the loss": task.exact_loss(), "the task's forward": task.forward},
        lambda: sends_in_passes(learner),
        learner.graphs.slowed,
        norms=learner.unsound.looks and learner.session.world_size == 1,
    )


def facts_of(learner: Learner, permits: bool) -> RunFacts:
    """Returns the facts that decide about CUDA graphs."""
    settings, model = learner.settings, learner.model
    sparse = gradients.sparse_weights(model)
    return RunFacts(
        device=learner.session.device.type,
        records=learner.session.device.type in RECORDERS,
        strategy=learner.name,
        divides_batches_only=permits and type(learner.stepper) is Plain,
        several_passes=settings.fits or settings.limits is not None,
        updates_in_backward=settings.update_in_backward,
        bits=settings.bits is not None,
        recompute=settings.recompute is not None,
        offload=settings.offload.words,
        compiles=settings.compiling.how is not None,
        communicates=_communicating(model) if learner.data.degree > 1 else "",
        of_samples=_name_of(model, lambda module: isinstance(module, Dropout)),
        hooked=hooked_module(model),
        sparse=next((name for p, name in learner.names.items() if p in sparse), ""),
    )


def _communicating(model: nn.Module) -> str:
    """Returns the name of a module that communicates with other ranks in forward; "" if none is known to."""
    kinds = Experts, nn.SyncBatchNorm
    return _name_of(
        model, lambda each: isinstance(each, kinds) or (isinstance(each, BatchNorm) and each.is_exact)
    )


def _name_of(model: nn.Module, fits: Callable[[nn.Module], bool]) -> str:
    return next((clean_name(name) or "the model" for name, each in model.named_modules() if fits(each)), "")


def notes_of(learner: Learner, step: int) -> list[Note]:
    """Returns what is to be told of CUDA graphs since the last call."""
    replays = learner.replays
    if replays is None or not replays.notes:
        return []
    words, replays.notes = replays.notes, []
    return [Note(step, each) for each in words]


def words_of_ranks(words: Sequence[str]) -> str:
    """Returns what the ranks say of their CUDA graphs as one text. ``words`` has a text for each rank."""
    if len(set(words)) < 2:
        return "".join(words[:1])
    more = f"; and on {len(words) - _MOST_RANKS} more" if len(words) > _MOST_RANKS else ""
    return "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(words[:_MOST_RANKS])) + more
