"""Forward passes only: metrics over a dataset, each sample counted once, and predictions in dataset order.

No sampler pads the dataset to a multiple of the ranks, and a rank counts only its own samples. So a metric does not
depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from evener.balance.base import Fixed
from evener.components.loss_trial import try_metrics
from evener.components.model_trial import forward_state_kept
from evener.components.modes import modes_kept
from evener.core.losses import Accumulator, metric
from evener.core.losses.metrics import named_values
from evener.core.plugins import kind_of
from evener.core.records import EvaluationRecord
from evener.core.task.validation import as_dataset, check_dataset
from evener.core.types import Tree
from evener.data.batch import MicroBatch, map_leaves
from evener.data.loader import Loader
from evener.errors import ConfigurationError
from evener.hardware.generators import all_kept
from evener.hardware.timers import stopwatch
from evener.strategies.dataset_view import Reading
from evener.strategies.learner import Learner
from evener.training.batches.evaluation_options import EvaluationOptions
from evener.training.batches.progress import Progress
from evener.training.batches.skipped_samples import Announcer
from evener.training.step.divisions import check_widths, width_of

_WORTH_MEASURING = 30
"""Number of batches of an evaluation for which speeds are measured."""
_PASSES = 3
"""Number of passes over a batch that are measured, of which the quickest counts."""
AVERAGE = "average."
"""The beginning of the names of the average's metrics."""


class InputsOnly(Dataset[Any]):
    """Wraps a dataset whose items are inputs without targets, and returns pairs."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        _check_ordered(dataset)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._dataset[index], 0


Piece = tuple[int, int, Tree]
"""Index of the first sample in the dataset, number of samples, and the data kept for them, on the CPU."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of :func:`examine`."""

    metrics: dict[str, float]
    samples: int
    pieces: list[Piece] | None
    """Kept data in dataset order, on rank 0 or on every rank. None on other ranks, and if nothing was to be kept."""


def record_of(found: EvaluationResult, progress: Progress, seconds: float) -> EvaluationRecord:
    """Returns the record of an evaluation after the steps of ``progress``, which took ``seconds``."""
    epoch = max(0, progress.epoch - (progress.position == 0))
    return EvaluationRecord(progress.steps, epoch, found.metrics, found.samples, seconds)


def examine(
    learner: Learner,
    dataset: Dataset[Any],
    options: EvaluationOptions,
    keep: Callable[[Tree, Tree], Tree] | None = None,
    measured: bool = True,
    everywhere: bool = False,
    batches: int | None = None,
) -> EvaluationResult:
    """Computes the task's loss and metrics over ``dataset``, the same on every rank, and keeps data from the same
    forward passes. A collective call.

    Args:
        keep: Maps the outputs and targets of a forward pass to the data to keep. If None, nothing is kept.
        measured: Whether the dataset has targets; without them there are no metrics.
        everywhere: Whether every rank gets the kept data.
        batches: The number of batches to read, from the beginning; None for all.

    Raises:
        ConfigurationError: If there are several ranks, and a metric has no state that they could merge.
        LossError: If ranks have padded a batch to different lengths, and a mean is over what is padded, too.
    """
    check_dataset(dataset, "the dataset")
    dataset = as_dataset(dataset)
    accumulators, samples = _accumulators(learner) if measured else {}, 0
    is_over_elements = any(each.is_over_elements for each in accumulators.values())
    widths: dict[int, float] = {}
    pieces: list[Piece] = []
    with evaluating(learner.model):
        for number, micro, outputs in _forward(learner, dataset, options, batches):
            samples += micro.size
            if is_over_elements:
                widths[number] = max(width_of([micro]), widths.get(number, 0.0))
            if _speaks(learner):
                if measured:
                    try_metrics(learner.task.metrics, outputs, micro)
                # A placeholder's result does not count, but other ranks may wait for its computation.
                for name, accumulator in (accumulators if micro.weight else _accumulators(learner)).items():
                    if name in accumulators:
                        accumulator.update(outputs, micro.targets)
                if keep is not None and micro.weight:
                    kept = map_leaves(_to_cpu, keep(outputs, micro.targets))
                    pieces.append((int(micro.samples[0]), micro.size, kept))
            del micro, outputs  # frees their memory before the next are computed
    own = samples, [accumulator.state() for accumulator in accumulators.values()], widths
    learner.graphs.agree(learner.session.control.gather_objects)
    all_parts = learner.data.of_parts(learner.session.control.gather_objects(own))
    for number in sorted({number for *_, of_part in all_parts for number in of_part}):
        check_widths([of_part.get(number, 0.0) for *_, of_part in all_parts])
    for index, accumulator in enumerate(accumulators.values()):
        accumulator.merge([states[index] for _, states, _ in all_parts])
    values = {name: accumulator.compute() for name, accumulator in accumulators.items()}
    ordered = None if keep is None else _in_order(learner, pieces, everywhere)
    return EvaluationResult(named_values(values), sum(count for count, *_ in all_parts), ordered)


def try_evaluation(
    learner: Learner, dataset: Dataset[Any], options: EvaluationOptions
) -> Mapping[str, float]:
    """Evaluates the first batch, so that what is wrong with a metric or the evaluation set is found before training,
    and not after an epoch of it. A collective call.

    A stream is left alone, because it may not begin anew.

    Returns:
        The metrics of the batch; none of a stream.
    """
    if isinstance(dataset, IterableDataset):
        return {}
    with all_kept(learner.session.device), forward_state_kept(learner.model):
        return examine(learner, dataset, replace(options, workers=0), batches=1).metrics


def examine_both(learner: Learner, dataset: Dataset[Any], options: EvaluationOptions) -> EvaluationResult:
    """Does the same as :func:`examine` for the weights and, beside or instead of them, for their average."""
    how = learner.average.how
    if how is None or not learner.average.number:
        return examine(learner, dataset, options)
    of_weights = None if how.instead else examine(learner, dataset, options)
    with learner.average.shown():
        found = examine(learner, dataset, options)
    if of_weights is None:
        return found
    of_average = {f"{AVERAGE}{name}": value for name, value in found.metrics.items()}
    return replace(of_weights, metrics=of_weights.metrics | of_average)


def _in_order(learner: Learner, pieces: list[Piece], everywhere: bool) -> list[Piece] | None:
    """Gathers the pieces of all parts in order, on rank 0 or everywhere. Returns None on ranks that get nothing.

    If the ranks own samples of their own, those of rank 0's part come first.
    """
    control = learner.session.control
    of_ranks = control.gather_objects(pieces) if everywhere else control.gather_to(pieces, 0)
    if of_ranks is None:
        return None
    gathered = [piece for of_rank in learner.data.of_parts(of_ranks) for piece in of_rank]
    return sorted(gathered, key=lambda piece: piece[0])


def predict(
    learner: Learner, dataset: Dataset[Any], options: EvaluationOptions, everywhere: bool = False
) -> Tree | None:
    """Returns the outputs for all samples of ``dataset`` in its order, on the CPU of rank 0, or of all with
    ``everywhere``.

    All ranks must call this together. If the ranks own samples of their own, those of rank 0's part come first.

    Tensor outputs, also in tuples, lists, dicts and dataclasses, are concatenated along dimension 0. A list of one
    entry for each sample, as models that detect objects return, becomes such a list of the whole dataset. Other outputs
    must be the same for all samples, and are returned once.

    Raises:
        ConfigurationError: On all ranks, if dimension 0 of an output is not the samples, other dimensions differ
            between batches, an output that is no tensor differs between them, or the dataset has no order.
    """
    _check_ordered(dataset)
    average = learner.average
    instead = average.how is not None and average.how.instead and average.number
    with learner.average.shown() if instead else nullcontext():
        found = examine(
            learner,
            dataset,
            replace(options, skips=False),
            keep=lambda outputs, _: outputs,
            measured=False,
            everywhere=everywhere,
        )
    made, wrong = None, ""
    try:
        made = None if found.pieces is None else _joined(found.pieces)
    except ConfigurationError as error:  # on rank 0, if it alone has the outputs
        wrong = str(error)
    if wrong := learner.session.control.broadcast_object(wrong):
        raise ConfigurationError(wrong)
    return made


def _speaks(learner: Learner) -> bool:
    """Returns True if this rank reports the outputs of its part of the batch."""
    return learner.session.rank in learner.data.speakers


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode without gradients, and afterwards restores the mode of each module."""
    with modes_kept(model):
        model.eval()
        with torch.no_grad():
            yield


def _forward(
    learner: Learner, dataset: Dataset[Any], options: EvaluationOptions, batches: int | None
) -> Iterator[tuple[int, MicroBatch, Tree]]:
    """Yields this rank's micro-batches, of the first ``batches`` or of all, with the number of the batch and their
    outputs, each within its own micro-batch scope."""
    reading = Reading.from_learner(learner, dataset, "evaluation set")
    if options.measures and batches is None and _are_enough(reading, options.batch_size):
        options = replace(options, weights=_speeds(learner, dataset, options))
    balancer = Fixed(
        (options.weights if reading.balanced else None) or [1.0] * reading.ranks,
        max_shares=options.max_shares,
        share_multiple_of=options.share_multiple_of,
    )
    loader = Loader(
        reading.dataset,
        None,
        name=reading.name,
        rank=reading.rank,
        world_size=reading.ranks,
        parts=reading.parts,
        agree=reading.agree,
        batch_size=options.batch_size,
        shares=balancer.shares,
        micro_batch=options.micro_batch,
        collate=learner.task.collate,
        workers=options.workers,
        device=learner.session.device,
        convert=learner.convert,
        skips=options.skips,
        bits=learner.settings.bits,
        equally_many=learner.synchronizer.gathers_in_passes,
    )
    announcer = Announcer(learner.session.rank)
    with loader:
        for number, batch in enumerate(islice(loader, batches)):
            if batches is None:
                announcer.tell(batch)
            for micro in map(learner.cut.evaluated, batch.micro_batches):
                with learner.micro_scope(micro, 0):
                    yield number, micro, learner.outputs(micro)


def _are_enough(reading: Reading, batch_size: int) -> bool:
    is_stream = isinstance(reading.dataset, IterableDataset)
    return not is_stream and reading.size is not None and reading.size >= _WORTH_MEASURING * batch_size


def _speeds(learner: Learner, dataset: Dataset[Any], options: EvaluationOptions) -> Sequence[float]:
    """Returns the samples per second of the parts of a batch, from passes over the first one. A collective call."""
    options = replace(options, workers=0, measures=False)
    watch, taken = stopwatch(learner.session.device), list[float]()
    with all_kept(learner.session.device), forward_state_kept(learner.model):
        micros = [micro for _, micro, _ in _forward(learner, dataset, options, 1)]
        samples = sum(micro.size for micro in micros)
        for _ in range(_PASSES):
            with watch:
                for micro in micros:
                    with learner.micro_scope(micro, 0):
                        learner.outputs(micro)
                watch.mark()
            taken.append(watch.seconds())
    own = min(taken) / samples if samples else math.nan
    rows = learner.session.control.exchange([own]).wait()
    of_parts = learner.data.slowest([row[0] for row in rows])
    are_known = all(seconds > 0 for seconds in of_parts)  # NaN is not
    return [1 / seconds if are_known else 1.0 for seconds in of_parts]


def _accumulators(learner: Learner) -> dict[str, Accumulator]:
    task = learner.task
    loss: Mapping[str, Any] = {} if task.loss is None else {"loss": task.exact_loss()}
    exact = learner.settings.bits is not None
    sources = loss | dict(task.metrics)  # type: ignore[operator]
    found = {name: metric(source, exact) for name, source in sources.items()}
    alone = [name for name, each in found.items() if not each.can_merge]
    if alone and learner.session.world_size > 1:
        raise ConfigurationError(
            f"metric {alone[0]!r} is {kind_of(sources[alone[0]])}, which has no state that ranks could merge: each "
            "would have the value of its own samples. Derive its class from torchmetrics.Metric and keep all that "
            "update() collects in states of add_state, or give a function (outputs, targets) -> evener.Sum(total, "
            "count)"
        )
    return found


def _to_cpu(leaf: Any) -> Any:
    """Returns a leaf to keep. A part of a larger tensor is copied, or that tensor would be kept and sent with it."""
    if not isinstance(leaf, Tensor):
        return leaf
    kept = leaf.detach().cpu()
    is_part = kept.layout is torch.strided and kept.untyped_storage().nbytes() > kept.nbytes
    return kept.clone() if is_part else kept


def _joined(pieces: list[Piece]) -> Tree:
    first = pieces[0][2]
    if isinstance(first, Tensor):
        _check_rows(pieces)
        return torch.cat([outputs for _, _, outputs in pieces])
    if isinstance(first, Mapping):
        return {key: _joined([(start, size, tree[key]) for start, size, tree in pieces]) for key in first}
    if isinstance(first, tuple | list):
        if _is_by_sample(pieces):
            return [entry for _, _, entries in pieces for entry in entries]
        columns = range(len(first))
        joined = [_joined([(start, size, tree[i]) for start, size, tree in pieces]) for i in columns]
        return joined if isinstance(first, list) else tuple(joined)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        of_names = {
            name: [(start, size, getattr(tree, name)) for start, size, tree in pieces] for name in names
        }
        return replace(first, **{name: _joined(column) for name, column in of_names.items()})
    for start, size, other in pieces:
        if other is not first and not (type(other) is type(first) and bool(other == first)):
            raise ConfigurationError(
                f"predict: the outputs hold {first!r} for the first {pieces[0][1]} samples and {other!r} for the "
                f"{size} samples from {start} on, which are no tensors and cannot be joined: have the model return a "
                "tensor of one row for each sample, or a list of one entry for each"
            )
    return first


def _is_by_sample(pieces: list[Piece]) -> bool:
    """Returns True if the outputs are lists of one entry for each sample, and not some tensors of one row for each."""

    def has_rows(entry: Tree, size: int) -> bool:
        return isinstance(entry, Tensor) and entry.ndim > 0 and len(entry) == size

    if not all(isinstance(entries, list) and len(entries) == size for _, size, entries in pieces):
        return False
    of_one_kind = len({type(entry) for _, _, entries in pieces for entry in entries}) == 1
    return of_one_kind and not all(has_rows(entry, size) for _, size, entries in pieces for entry in entries)


def _check_ordered(dataset: Dataset[Any]) -> None:
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError(
            "predict: an iterable dataset is dealt out to the ranks and has no order in which its outputs could be "
            "given back; use a map-style dataset, with __len__ and __getitem__"
        )


def _check_rows(pieces: list[tuple[int, int, Tensor]]) -> None:
    for start, size, outputs in pieces:
        if outputs.ndim == 0 or len(outputs) != size:
            raise ConfigurationError(
                f"predict: the outputs for the {size} samples from {start} on are of shape {tuple(outputs.shape)}; "
                "their dimension 0 must be the samples, so that they can be put in order. Let Task.forward leave out "
                "what a model returns for a batch as a whole, in a task for prediction"
            )
        other = pieces[0][2]
        if outputs.shape[1:] != other.shape[1:]:
            raise ConfigurationError(
                f"predict: the outputs for the {size} samples from {start} on are of shape {tuple(outputs.shape)}, "
                f"those for the first {pieces[0][1]} of shape {tuple(other.shape)}, and cannot be joined: have the "
                "task's collate function pad all samples to one length"
            )
