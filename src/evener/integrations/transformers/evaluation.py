"""Evaluates on all ranks and reports as ``transformers`` does: arrays in the order of the dataset, and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, speed_metrics

from evener.core.config.run_config import RunConfig
from evener.core.losses import Loss
from evener.core.records import EvaluationRecord
from evener.core.task.task import Task
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.integrations.transformers.batches import Collation, Unlabelled
from evener.training.engine import Engine
from evener.training.evaluation import EvaluationResult, examine

_PADDING = -100


@dataclass(frozen=True)
class Assessment:
    """Evaluates a model on a dataset: batch size, collator, metrics and options."""

    batch_size: int
    """Samples per rank in one batch."""
    collation: Collation
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None
    preprocess: Callable[[Any, Any], Any] | None
    """Maps logits and labels of a batch to the predictions that are kept. None to keep the logits."""
    loss_only: bool
    included: tuple[str, ...] = ()
    """Further inputs of ``compute_metrics`` besides predictions and labels: ``inputs``, ``loss``."""
    loss: Loss | None = None
    """Computes the loss per sample if ``included`` has ``loss``."""

    def evaluate(self, engine: Engine, dataset: Any, prefix: str, predicts: bool) -> EvalLoopOutput:
        """Evaluates the model on a dataset. All ranks must call this together.

        Rank 0 gets predictions and labels, other ranks None. Metrics and the number of samples are the same on all
        ranks. If the samples have no labels, the labels are None and ``compute_metrics`` is not called.

        Raises:
            ConfigurationError: If the dataset has no ``__getitem__``.
        """
        began = time.time()
        if not hasattr(dataset, "__getitem__"):
            raise ConfigurationError(
                f"a {type(dataset).__name__} cannot be evaluated by Trainer; give a dataset with __len__ and "
                "__getitem__"
            )
        labelled = self.collation.labelled(dataset)
        wanted = not self.loss_only and (predicts or self.compute_metrics is not None)
        examined = self._examined(engine, dataset, labelled, wanted)
        predictions, labels, metrics = None, None, {}
        if examined.pieces is not None and wanted:
            kept = joined([tree for _, _, tree in examined.pieces])
            predictions, labels = kept["predictions"], kept["labels"] if labelled else None
        if engine.session.rank == 0:
            if predictions is not None and labelled and self.compute_metrics is not None:
                further = self._further(engine, dataset, kept)
                metrics = self.compute_metrics(EvalPrediction(predictions, labels, **further))
            loss = {name: value for name, value in examined.metrics.items() if name == "loss"}
            metrics = _named(prefix, {**denumpify_detensorize(metrics), **loss})
            rounds = -(-examined.samples // (self.batch_size * engine.session.world_size))
            metrics |= speed_metrics(prefix, began, num_samples=examined.samples, num_steps=rounds)
        metrics = engine.session.control.broadcast_object(metrics)
        return EvalLoopOutput(predictions, labels, metrics, examined.samples)

    def _examined(self, engine: Engine, dataset: Any, labelled: bool, wanted: bool) -> EvaluationResult:
        options = replace(
            engine.feed.evaluation_options(engine.steps_done),
            batch_size=self.batch_size * engine.learner.data.degree,
            micro_batch=None,
        )
        options = replace(options, skips=options.skips and not wanted)
        engine.step_sync.finish()
        engine.tell()
        chosen = dataset if labelled else Unlabelled(dataset)
        with engine.session.watchdog.phase("evaluation", step=engine.steps_done):
            return examine(engine.learner, chosen, options, self._kept if wanted else None, labelled)

    def _kept(self, outputs: Any, labels: Any) -> dict[str, Any]:
        scores = outputs["logits"] if isinstance(outputs, dict) else outputs
        chosen = scores if self.preprocess is None else self.preprocess(scores, labels)
        kept = {"predictions": chosen, "labels": labels}
        return kept | ({"losses": self._losses(scores, labels)} if "loss" in self.included else {})

    def _losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of each sample over the sample's own labels; NaN for a sample without labels."""
        assert self.loss is not None
        loss = getattr(self.loss, "tokens", self.loss)
        pairs = [(scores[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]
        means = [loss.total(*pair) / torch.as_tensor(float(loss.count(pair[1]))) for pair in pairs]
        return torch.stack([mean.detach().cpu() for mean in means])

    def _further(self, engine: Engine, dataset: Any, kept: dict[str, Any]) -> dict[str, Any]:
        """Returns the further inputs of ``compute_metrics`` that `included` names, on rank 0, in the dataset's
        order.
        """
        found: dict[str, Any] = {"losses": kept["losses"]} if "loss" in self.included else {}
        if "inputs" in self.included:
            name = getattr(engine.model, "main_input_name", "input_ids")
            indices = [
                range(i, min(i + self.batch_size, len(dataset)))
                for i in range(0, len(dataset), self.batch_size)
            ]
            batches = [self.collation([dataset[index] for index in batch])[0] for batch in indices]
            found["inputs"] = joined([batch[name] for batch in batches])
        return found


@dataclass(frozen=True)
class ModelOutsideRun:
    """A job that evaluates a model, or predicts with it, outside of a training run. It is called on each rank."""

    task: Task
    config: RunConfig
    assessment: Assessment
    dataset: Any
    prefix: str
    predicts: bool
    everywhere: bool
    """True if every rank gets predictions and labels; otherwise rank 0 alone has them."""

    def __call__(self) -> EvalLoopOutput:
        config = self.config
        with (
            Session(device=config.device, timeout_seconds=config.timeout_seconds) as session,
            Engine(self.task, config, session=session) as engine,
        ):
            found = self.assessment.evaluate(engine, self.dataset, self.prefix, self.predicts)
            return session.control.broadcast_object(found) if self.everywhere else found


_OF_THE_CLOCK = ("runtime", "samples_per_second", "steps_per_second")


def notify_observers(engine: Engine, metrics: dict[str, Any], samples: int, seconds: float) -> None:
    """Reports an evaluation to Evener's own observers, without the metrics of its speed."""
    named = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    kept = {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not name.endswith(_OF_THE_CLOCK)
    }
    epoch = max(0, engine.progress.epoch - (engine.progress.position == 0))
    engine.observers.evaluation(EvaluationRecord(engine.steps_done, epoch, kept, samples, seconds))


def _named(prefix: str, metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
        for name, value in metrics.items()
    }


def joined(pieces: list[Any]) -> Any:
    """Concatenates the tensors of several batches into arrays of all samples, also in nested dicts and tuples. Shorter
    arrays are padded with -100 along dimension 1, as ``transformers`` does.
    """
    first = pieces[0]
    if isinstance(first, dict):
        return {name: joined([piece[name] for piece in pieces]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(joined([piece[index] for piece in pieces]) for index in range(len(first)))
    arrays = [_array(piece) for piece in pieces]
    longest = max((array.shape[1] for array in arrays if array.ndim > 1), default=0)
    return np.concatenate([_filled(array, longest) for array in arrays])


def _array(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return np.asarray(value)
    return (value.float() if value.is_floating_point() and value.itemsize == 2 else value).numpy()


def _filled(array: Any, longest: int) -> Any:
    if array.ndim < 2 or array.shape[1] == longest:
        return array
    widths = [(0, 0), (0, longest - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    return np.pad(array, widths, constant_values=_PADDING)
