"""Finds the calls of a model: by reading its code if possible, otherwise by running it on the first samples.

Reading is preferred, because its result holds for every sample; a run on the first samples must agree with it. Reading
may fail in a part of the code around blocks; the model could then be cut only around that part. In this case, too, the
model is run instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.strategies.learner import Learner
from evener.strategies.pipeline.module_calls import leaves_of
from evener.strategies.pipeline.reading_check import check_reading
from evener.strategies.pipeline.traced_run import Rehearsal, try_both
from evener.strategies.pipeline.tracing import above, opened_in, read_both

Graphs = dict[bool, fx.Graph]
"""Graphs by mode: training (True) and evaluation (False)."""


def calls_of(
    model: nn.Module,
    example: dict[str, Any] | None,
    learner: Learner,
    named: Sequence[str],
    blocks: str | None,
) -> Graphs:
    """Returns the calls of the model, the same on all ranks. All ranks must call this together.

    Args:
        example: Arguments of ``forward``, of a few samples. None if there are no samples; then the model cannot be run.
        named: Modules that must be calls of their own.
        blocks: Name of the list of blocks. The model is then cut between these, and its code is not read.

    Raises:
        TaskError: If the model can be cut neither way; the message has the reason.
        ConfigurationError: If there are no such blocks.
    """
    if blocks is not None:
        opened = _above_blocks(model, blocks) | {place for name in named for place in above(name)}
        return _tried(model, example, learner, opened)
    graphs, error = _read(model, example, learner, named)
    if graphs is not None and not _is_cut_short(model, graphs, named):
        return graphs
    try:
        return _tried(model, example, learner, opened_in(model, named))
    except TaskError as refusal:
        if graphs is not None:
            return graphs
        raise refusal from error


def _read(
    model: nn.Module, example: dict[str, Any] | None, learner: Learner, named: Sequence[str]
) -> tuple[Graphs | None, TaskError | None]:
    """Returns what all ranks have read, or the error of one that could not. Their first samples may differ, if a data
    set draws random numbers."""
    if example is None:
        return read_both(model, example, named), None
    graphs, error = None, None
    try:
        graphs = read_both(model, example, named)
        check_reading(graphs, _rehearsal(model, (), example, learner))
    except TaskError as refusal:
        error = refusal
    said = learner.session.control.gather_objects(error and str(error))
    refused = next(((rank, words) for rank, words in enumerate(said) if words), None)
    if refused is None:
        return graphs, None
    return None, error or TaskError(f"rank {refused[0]} could not read the code: {refused[1]}")


def _is_cut_short(model: nn.Module, graphs: Graphs, named: Sequence[str]) -> bool:
    """True if a module that should be open is one call."""
    opened = opened_in(model, named)
    return any(
        node.op == "call_module" and node.target in opened
        for graph in graphs.values()
        for node in graph.nodes
    )


def _tried(
    model: nn.Module, example: dict[str, Any] | None, learner: Learner, opened: frozenset[str]
) -> Graphs:
    session, found, error = learner.session, None, None
    rehearsal = _rehearsal(model, leaves_of(model, opened), example, learner)
    try:
        found = try_both(rehearsal)
    except EvenerError as refusal:
        error = refusal
    rows = session.control.gather_objects((None if found is None else _words(found), error and str(error)))
    if error is not None:
        raise error
    for rank, (words, refusal_there) in enumerate(rows):
        if refusal_there is not None:
            raise TaskError(f"rank {rank} could not try the model: {refusal_there}")
        if words != rows[0][0]:
            raise TaskError(
                f"tried on the same samples, {type(model).__name__} calls other modules on rank {rank} than on rank 0: "
                "a pipeline needs the same calls everywhere"
            )
    assert found is not None
    return found


def _rehearsal(
    model: nn.Module, leaves: tuple[str, ...], example: dict[str, Any] | None, learner: Learner
) -> Rehearsal:
    return Rehearsal(model, leaves, example or {}, learner.session.device, learner.settings.weight_type)


def _words(graphs: Graphs) -> str:
    return "\n".join(str(node.format_node()) for graph in graphs.values() for node in graph.nodes)


def _above_blocks(model: nn.Module, blocks: str) -> frozenset[str]:
    try:
        found = model.get_submodule(blocks)
    except AttributeError:
        found = None
    if not blocks or found is None or len(list(found.children())) < 2:
        lists = ", ".join(name for name in sorted(opened_in(model, ())) if name) or "none"
        raise ConfigurationError(
            f"blocks names {blocks!r}, which in {type(model).__name__} is no module that holds several others; lists "
            f"of blocks that were found are {lists}"
        )
    return frozenset({"", *above(blocks), blocks})
