"""Evener's replacement for ``transformers.Trainer``: turns its arguments into a task and settings for a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
    enable_full_determinism,
)
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput, get_last_checkpoint

from evener.core.config.run_config import RunConfig
from evener.core.losses import Loss
from evener.core.records import RunSummary
from evener.core.task.task import Task
from evener.core.task.validation import check_dataset
from evener.distributed.environment import detect
from evener.distributed.launch.launch import is_launched, launch
from evener.distributed.launch.process_count import Headcount
from evener.errors import ConfigurationError
from evener.integrations.transformers.arguments import (
    SAID_OTHERWISE,
    check_arguments,
    check_overridden,
    checked_keys,
    length,
    settings_in,
)
from evener.integrations.transformers.batches import Collation
from evener.integrations.transformers.callbacks import TrainerEvents
from evener.integrations.transformers.evaluation import Assessment, ModelOutsideRun, notify_observers
from evener.integrations.transformers.losses import check_own_loss, loss_of
from evener.integrations.transformers.model_init import copied, model_of, usual_collator
from evener.integrations.transformers.optimizers import bound_again, made_again, optimizer_of, scheduler_of
from evener.integrations.transformers.router_loss import forward_for
from evener.integrations.transformers.sampler import Sampling, sampling_of
from evener.integrations.transformers.trainer_state import ENGINE, Followed, Following
from evener.nn import exact_dropout
from evener.nn.fqn import clean_name
from evener.training.fit import check_plan, fit
from evener.training.run import Trained


class Trainer(TrainerEvents):
    """Replacement for ``transformers.Trainer`` with the same arguments.

    Args:
        model: As for ``transformers.Trainer``. It has the trained weights after :meth:`train`.
        loss: The loss of the task, for models whose class does not determine it.
        settings: Settings of :func:`evener.fit` that ``args`` do not give. ``balance`` defaults to ``auto`` if no
            strategy is given.

    Raises:
        ConfigurationError: If an argument is not supported.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        loss: Loss | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        check_overridden(type(self), Trainer)
        self.args = args = args or TrainingArguments("tmp_trainer")
        check_arguments(args)
        if compute_loss_func is not None:
            raise ConfigurationError(
                "Trainer does not take compute_loss_func, a mean over what one rank has; give loss=, whose sum and "
                "count add up over the ranks"
            )
        if args.full_determinism:
            enable_full_determinism(args.seed)  # ranks inherit its environment variables
        self.model: Any = model_of(model, model_init, args.seed)  # Any: not every Module has save_pretrained
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.compute_metrics = processing_class, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.data_collator = data_collator or usual_collator(processing_class)
        self.collation = Collation(self.data_collator, self.model, args.remove_unused_columns)
        self._given_loss = loss
        if loss is not None and args.label_smoothing_factor:
            raise ConfigurationError(
                "label_smoothing_factor goes with the model's own loss; smooth in loss=, or leave one of them out"
            )
        self._loss = loss or loss_of(self.model, args.label_smoothing_factor)
        self._said, self._settings = settings_in(args), dict(settings or {})
        if "strategy" not in {*self._said, *self._settings}:  # other strategies may not support shares
            self._settings.setdefault("balance", "auto")
        micro = {"micro_batch"} if args.gradient_accumulation_steps > 1 else set()
        clashing = sorted(self._settings.keys() & {*self._said, *SAID_OTHERWISE, *micro})
        if clashing:
            raise ConfigurationError(f"settings say {', '.join(clashing)}, which TrainingArguments say")
        self._make_optimizer = optimizer_of(self.model, args, optimizer_cls_and_kwargs)
        self._make_scheduler: Callable[[Any], Any] | None = None
        self._take_optimizers(*optimizers, optimizer_cls_and_kwargs)
        self.summary: RunSummary | None = None
        """Summary of the last training, as :func:`evener.fit` returns it. None before the first training."""
        super().__init__(args, self.model, processing_class, callbacks or [])

    def _take_optimizers(self, optimizer: Any, scheduler: Any, named: Any) -> None:
        if optimizer is not None and named is not None:
            raise ConfigurationError(
                "optimizers and optimizer_cls_and_kwargs both say the optimizer; give one of them"
            )
        if optimizer is not None:
            self._make_optimizer = made_again(optimizer, self.model)
        if scheduler is not None:
            self._make_scheduler = bound_again(scheduler)

    # Training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains. Afterwards the model has the last weights, or the best ones with ``load_best_model_at_end``.

        Args:
            resume_from_checkpoint: Path of a checkpoint, or True for the last one in ``output_dir``.

        Raises:
            EvenerError: If the run failed.
        """
        if trial is not None:
            raise ConfigurationError("Evener's Trainer has no hyperparameter search: leave trial out")
        if (self.args.eval_strategy != "no" or self.args.eval_on_start) and self.eval_dataset is None:
            raise ConfigurationError(
                f"eval_strategy is {self.args.eval_strategy.value}, but Trainer was given no eval_dataset"
            )
        check_dataset(self.train_dataset, "Trainer's train_dataset")
        if self.args.save_strategy != "no":
            self._check_saves()
        self.ignore_keys = checked_keys(ignore_keys_for_eval)
        resumed = self._checkpoint(resume_from_checkpoint)
        config = self.config(resumed)
        self._check_loss()
        steps = self._steps(config)
        following = Following(self, resumed, steps, self._steps_an_epoch(config))
        try:
            show = not self.args.disable_tqdm
            trained = fit(self.task(config), config, show=show, callback=following)
        finally:
            self.let_go()
        return self._take(trained)

    def _take(self, trained: Trained) -> TrainOutput:
        followed: Followed = trained.callback_result
        self.summary, self.state = trained.summary, followed.state
        for callback, found in zip(self.callback_handler.callbacks, followed.callbacks, strict=True):
            vars(callback).update(found)
        self.model.load_state_dict(trained.weights)
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            self.model.load_state_dict(type(self.model).from_pretrained(best).state_dict())
        return TrainOutput(self.state.global_step, followed.training_loss, followed.metrics)

    def _checkpoint(self, wanted: str | bool | None) -> Path | None:
        if not wanted:
            return None
        home = self.args.output_dir
        found: Any = wanted
        if wanted is True:
            found = get_last_checkpoint(home) if Path(home).is_dir() else None
            if found is None:
                raise ConfigurationError(f"there is no checkpoint in {home} to go on from")
        path = Path(str(found))
        if not (path / ENGINE).is_dir():
            raise ConfigurationError(
                f"{path} is no checkpoint of Evener's Trainer that a training can go on from: it has no directory "
                f"{ENGINE}, which save_only_model leaves out; to begin with its weights give from_pretrained's model"
            )
        return path

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model on rank 0, as ``from_pretrained`` reads it. In a run, all ranks must call this together."""
        if self.engine is not None:
            tensors = self.engine.learner.tensors()
            if self.is_world_process_zero():
                own = self.model.state_dict()
                weights = {name: tensors.get(clean_name(name), value).detach() for name, value in own.items()}
                self.model.load_state_dict(weights)
        if not self.is_world_process_zero():
            return
        self._check_saves()
        path = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(path)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(path)
        torch.save(self.args, path / "training_args.bin")

    def _check_saves(self) -> None:
        """Checks before the training that the model can be saved, and loaded if ``load_best_model_at_end`` is set."""
        kind = type(self.model).__name__
        if not hasattr(self.model, "save_pretrained"):
            raise ConfigurationError(
                f"{kind} has no save_pretrained, by which Trainer saves: give TrainingArguments(save_strategy='no') "
                "and save trainer.model.state_dict() yourself"
            )
        if self.args.load_best_model_at_end and not isinstance(self.model, PreTrainedModel):
            raise ConfigurationError(
                f"load_best_model_at_end reads a checkpoint as a PreTrainedModel, which {kind} is not: leave it out, "
                "and take the weights of state.best_model_checkpoint yourself"
            )

    def _check_loss(self) -> None:
        """Checks on one batch that the model's own loss has no terms that the training would leave out."""
        if self._given_loss is not None:
            return
        count = min(self.args.per_device_train_batch_size, len(self.train_dataset))
        inputs, labels = self.collation([self.train_dataset[index] for index in range(count)])
        own = loss_of(self.model) if self.args.label_smoothing_factor else self._loss
        check_own_loss(self.model, own, forward_for(own), inputs, labels)

    # Evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Returns the loss and the metrics of ``compute_metrics`` over a dataset, or over each dataset of a dict.

        In a run, for example in a callback, all ranks must call this together.
        """
        checked_keys(ignore_keys)
        own = eval_dataset is None
        dataset = self.eval_dataset if own else eval_dataset
        if dataset is None:
            raise ConfigurationError("Trainer was given no eval_dataset: give one to evaluate()")
        if not isinstance(dataset, dict):
            return self._evaluated(dataset, metric_key_prefix, own)
        found: dict[str, float] = {}
        for name, each in dataset.items():
            found |= self._evaluated(each, f"{metric_key_prefix}_{name}", own)
        return found

    def _evaluated(self, dataset: Any, prefix: str, own: bool) -> dict[str, float]:
        began = time.perf_counter()
        output = self._assessed(dataset, prefix, predicts=False)
        metrics: dict[str, float] = output.metrics
        if own and self.engine is not None:
            notify_observers(self.engine, metrics, output.num_samples, time.perf_counter() - began)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Returns the logits of all samples in the order of the dataset; with labels and metrics if it has labels.

        In a run, for example in a callback, all ranks must call this together. Rank 0 alone gets logits and labels.
        """
        checked_keys(ignore_keys)
        output = self._assessed(test_dataset, metric_key_prefix, predicts=True)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def _assessed(self, dataset: Any, prefix: str, predicts: bool) -> EvalLoopOutput:
        check_dataset(dataset, "the dataset")
        assessment = Assessment(
            self.args.per_device_eval_batch_size,
            self.collation,
            self.compute_metrics,
            self.preprocess_logits_for_metrics,
            self.args.prediction_loss_only,
            tuple(self.args.include_for_metrics or ()),
            self._loss,
        )
        if self.engine is not None:
            return assessment.evaluate(self.engine, dataset, prefix, predicts)
        config = self.config().replace(run_dir=None, weights=None, resume=None, **self._dtype_of_evaluation())
        job = ModelOutsideRun(
            self.task(config, dataset), config, assessment, dataset, prefix, predicts, is_launched()
        )
        return launch(
            job,
            processes=Headcount((check_plan(config),)),
            timeout_seconds=config.timeout_seconds,
            device=config.device,
        )[0]

    def _dtype_of_evaluation(self) -> dict[str, Any]:
        """Returns the dtype setting for evaluations outside of a run, from ``bf16_full_eval`` and
        ``fp16_full_eval``.
        """
        asked = {"bf16_full_eval": "bfloat16", "fp16_full_eval": "float16"}
        named = next((dtype for name, dtype in asked.items() if getattr(self.args, name)), None)
        return {} if named is None else {"dtype": named, "precision": None}

    # Settings and task

    def config(self, resumed: Path | None = None) -> RunConfig:
        """Returns the settings of the run.

        Args:
            resumed: The checkpoint to resume from.
        """
        args = self.args
        config = RunConfig(**self._said, evaluate_every=0).replace(**self._settings)
        if resumed is not None:
            config = config.replace(resume=resumed / ENGINE)
        together = args.per_device_train_batch_size * _ranks(config)
        accumulated = args.gradient_accumulation_steps
        config = config.replace(batch_size=together * accumulated)
        config = config if accumulated == 1 else config.replace(micro_batch=together)
        return (
            config
            if self.train_dataset is None
            else config.replace(**length(args, self._steps_an_epoch(config)))
        )

    def _steps_an_epoch(self, config: RunConfig) -> int:
        if not hasattr(self.train_dataset, "__len__"):
            raise ConfigurationError(
                f"a {type(self.train_dataset).__name__} cannot be trained on by Trainer; give a dataset with __len__ "
                "and __getitem__"
            )
        sampling = self._sampling(config)
        listed = len(self.train_dataset) if sampling is None else sampling.listed
        return math.ceil(listed / (config.batch_size or 1))

    def _sampling(self, config: RunConfig) -> Sampling | None:
        size = config.batch_size or 1
        return sampling_of(
            self.args, self.train_dataset, config.samples_at_once or size, size, self.processing_class
        )

    def _steps(self, config: RunConfig) -> int:
        return config.steps or self._steps_an_epoch(config) * (config.epochs or 1)

    def task(self, config: RunConfig, applied_to: Any = None) -> Task:
        """Returns the task to train, or to evaluate on the dataset ``applied_to``."""
        model, args = self.model, self.args
        dataset = self.train_dataset if applied_to is None else applied_to
        steps = 1 if applied_to is not None else self._steps(config)
        return Task(
            model=lambda: exact_dropout(copied(model, args.full_determinism)),
            forward=forward_for(self._loss),
            loss=self._loss,
            order=None if applied_to is not None else self._sampling(config),
            optimizer=self._make_optimizer,
            scheduler=self._make_scheduler or scheduler_of(args, steps),
            scheduler_interval="step",
            train=dataset,
            collate=self.collation,
            name=type(model).__name__,
        )


def _ranks(config: RunConfig) -> int:
    here = check_plan(config)
    return detect().world_size if is_launched() else here
