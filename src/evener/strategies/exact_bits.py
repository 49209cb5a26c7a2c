"""What a run that is exact in bits asks of the strategy, the model and the ranks. Everything else is refused by name.

The sum of gradients has the same bits on any division if each grain has. A grain has the same bits on any rank if the
same operations compute it, with the same rounding, from the same tensors, whatever the rank has computed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from evener.components.amp.policy import Precision
from evener.components.checks.embeddings import EMBEDDINGS, looks_at_the_batch
from evener.components.determinism import place_of_rounding
from evener.components.exact_sum.grid import GRID
from evener.components.loose_buffers import LooseBuffers
from evener.core.config.exact_bits import ExactBits
from evener.core.task.task import Task
from evener.distributed.session import Session
from evener.errors import ConfigurationError, TaskError
from evener.nn.fqn import clean_name
from evener.nn.grain_norm import GrainNorm
from evener.torch_internals.modules import AnyBatchNorm

_FORWARD = "its passes add up what other ranks send, in an order that depends on their number"
_LOCAL = "each replica takes steps of its own, so that the training depends on their number"
_ONE_PROCESS = "it divides a batch, or the model, over the devices of one process by rules of its own"
STRATEGIES: Mapping[str, str] = {
    **dict.fromkeys(("tensor", "context", "experts", "dimension"), _FORWARD),
    "pipeline": "its stages run micro-batches through parts of the model, which send what they have rounded",
    **dict.fromkeys(("local_sgd", "diloco"), _LOCAL),
    "asynchronous": "gradients merge as they come, in an order of the clock",
    **dict.fromkeys(("data_parallel", "layers"), _ONE_PROCESS),
}
"""Why a strategy is refused, by its name."""
_OTHER = "its sum does not have the same bits on any division (Strategy.sums_bits)"


def check_strategy(label: str, sums_bits: bool, precision: Precision, task: Task, session: Session) -> None:
    """Refuses strategies, precisions and data that depend on the division. Compares the ranks. A collective call.

    Args:
        label: The name of the strategy.
        sums_bits: True if the strategy's sum has the same bits on any division.

    Raises:
        ConfigurationError: Names what does not go with bits, and the way out; or the ranks that are not alike.
    """
    if not sums_bits:
        why = STRATEGIES.get(label, _OTHER)
        _refuse(f"strategy {label!r}", f"{why}; use single, ddp or sharded")
    if precision.is_scaled:
        _refuse(
            f"precision {precision.name}",
            "fp16 leaves out steps whose scaled gradients overflow, which depends on the ranks; use bf16",
        )
    if task.partition != "batch":
        _refuse(
            "Task(partition='sample')",
            "a rank computes the samples that it holds, so that the batches depend on the ranks; let every rank read "
            "all samples",
        )
    check_alike(session.control.gather_objects(place_of_rounding(session.device)))


def check_alike(places: Sequence[Mapping[str, str]]) -> None:
    """Raises ConfigurationError if the ranks, by number, round differently."""
    for what in places[0]:
        found: dict[str, list[str]] = {}
        for rank, place in enumerate(places):
            found.setdefault(place.get(what, "none"), []).append(str(rank))
        if len(found) > 1:
            said = ", ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in found.items())
            _refuse(
                f"ranks that differ in their {what}",
                f"{said}. Such ranks round differently; use hosts and devices of one kind with the same settings "
                "(for threads, the same OMP_NUM_THREADS)",
            )


def check_model(model: nn.Module) -> None:
    """Refuses modules whose results depend on the division.

    Raises:
        TaskError: Names the first such module, and the way out.
    """
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm) and not isinstance(module, GrainNorm):
            raise TaskError(_not_with(_called(name, module), _of_norm(module)))
        if looks_at_the_batch(module):
            why = "max_norm and scale_grad_by_freq look at all samples of a batch; build it without them"
            raise TaskError(_not_with(_called(name, module), why))
        if isinstance(module, EMBEDDINGS) and module.sparse:
            why = "sparse gradients are not summed exactly; build it with sparse=False"
            raise TaskError(_not_with(_called(name, module), why))


def _of_norm(module: nn.Module) -> str:
    if type(module).__module__.startswith(("torch.nn", "evener.nn")):
        return (
            "it normalizes over all samples of a batch, and each grain is computed by itself; say batch_norm=grain "
            "(--batch-norm grain), the statistics of each grain, which is another model, or use GroupNorm or LayerNorm"
        )
    return "it is a class of its own, whose statistics depend on the division; use one of torch.nn"


def refuse_written_buffers(model: nn.Module, loose: LooseBuffers, before: Sequence[tuple[int, int]]) -> None:
    """Refuses a model whose forward pass has written to buffers: how often it does depends on the division.

    Args:
        before: The versions of the loose buffers before the step.

    Raises:
        TaskError: Names the first buffer.
    """
    triples = zip(loose.tensors(), before, loose.versions(), strict=True)
    written = {id(buffer) for buffer, old, new in triples if old != new}
    if not written:
        return
    names = [clean_name(name) for name, buffer in model.named_buffers() if id(buffer) in written]
    raise TaskError(
        _not_with(
            f"buffer {names[0] if names else 'of the model'}",
            "the model's forward writes it once for each grain that a rank has, so that its value depends on the "
            "division; keep it out of forward, or leave out the module that owns it",
        )
    )


def refuse_group() -> NoReturn:
    """Refuses a loss or a layer that asks for the process group of the ranks with the other samples.

    Raises:
        TaskError: Always.
    """
    raise TaskError(
        _not_with(
            "a loss or a layer that computes something of the samples of all ranks together",
            "each grain is computed by itself; use one of single samples",
        )
    )


def words_of(bits: ExactBits | None, device: torch.device) -> str:
    """Returns a text for the record that tells what the bits depend on; "" if the run is not exact in bits."""
    if bits is None:
        return ""
    place = place_of_rounding(device)
    threads = place.get("number of threads")
    of_threads = "" if threads is None else f", {threads} thread{'s' * (threads != '1')}"
    return f"exact in bits: {bits.words}, {GRID}; {place['device']}{of_threads}"


def _called(name: str, module: nn.Module) -> str:
    return f"{clean_name(name) or 'the model'}, a {type(module).__name__}"


def _not_with(what: str, why: str) -> str:
    return f"exact=bits does not go with {what}: {why}"


def _refuse(what: str, why: str) -> NoReturn:
    raise ConfigurationError(_not_with(what, why))
