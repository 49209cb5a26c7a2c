"""``transformers.Trainer`` on all devices, by their speed, as if they were one: the same arguments, the same training.

What ``TrainingArguments`` say becomes a task and settings of :func:`evener.fit`. An argument that is not honoured is
refused in words.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer as TheirTrainer
from transformers import TrainingArguments, default_data_collator, get_scheduler

from evener.config import RunConfig
from evener.errors import ConfigurationError, DataError
from evener.fitting import check_plan, fit
from evener.given import check_dataset
from evener.integrations.dictionaries import logits, token_loss
from evener.losses import Loss
from evener.nn import exact_dropout
from evener.records import RunSummary
from evener.runtime.environment import detect
from evener.runtime.launch import is_launched
from evener.task import Task

_ADAM = ("adamw_torch", "adamw_torch_fused")
_HONOURED = {
    *(
        "output_dir",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
    ),
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm"),
    *("seed", "use_cpu", "disable_tqdm", "dataloader_num_workers", "eval_strategy", "save_strategy"),
}
_CHOICES = {
    "optim": _ADAM,
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup", "polynomial"),
    "eval_strategy": ("no", "epoch"),
    "save_strategy": ("no",),
}
"""What these may be. ``save_strategy`` has to be said: without it ``transformers`` saves every 500 steps."""
_SAID = (
    "seed",
    "device",
    "clip_norm",
    "workers",
    "epochs",
    "steps",
    "batch_size",
    "micro_batch",
    "evaluate_every",
)
"""Settings that ``TrainingArguments`` say."""
_COUNTED_BY_NAME = {
    "ForCausalLM": True,
    "LMHeadModel": True,
    "ForMaskedLM": False,
    "ForTokenClassification": False,
}
"""Endings of the names of models, and whether each place is compared with the next label."""


class Trainer:
    """In place of ``transformers.Trainer``.

    Args:
        model: As for ``transformers.Trainer``; its weights are those of the training when that is over.
        loss: The task's loss, for models whose kind does not tell it.
        settings: Of :func:`evener.fit`, besides those that ``args`` say; ``balance`` is ``auto`` where it is left out.

    Raises:
        ConfigurationError: For an argument that is not honoured.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        loss: Loss | None = None,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        check_arguments(args)
        given = sorted(name for name, value in others.items() if value is not None)
        if given:
            raise ConfigurationError(
                f"Trainer does not take {', '.join(given)}; write a Task, which evener.fit trains, for what these say"
            )
        self.model: Any = model  # save_pretrained is not of every Module
        self.args = args
        self._forward: Callable[..., Any] = model.forward
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._collate = data_collator or default_data_collator
        self._given_loss = loss
        self._loss = loss or _loss_of(model)
        self._settings = {"balance": "auto", **(settings or {})}
        clashing = sorted(self._settings.keys() & _SAID)
        if clashing:
            raise ConfigurationError(f"settings say {', '.join(clashing)}, which TrainingArguments say")

    def train(self) -> RunSummary:
        """Trains; the model then has the weights that came of it.

        Raises:
            EvenerError: Whatever ended the run.
        """
        if self.args.eval_strategy == "epoch" and self.eval_dataset is None:
            raise ConfigurationError("eval_strategy is epoch, but Trainer was given no eval_dataset")
        check_dataset(self.train_dataset, "Trainer's train_dataset")
        config = self.config()
        self._check_loss()
        trained = fit(self.task(config), config, show=not self.args.disable_tqdm)
        self.model.load_state_dict(trained.weights)
        return trained.summary

    def save_model(self, output_dir: str | None = None) -> None:
        """Writes the model as ``from_pretrained`` reads it, on one rank."""
        if not is_launched() or detect().rank == 0:
            self.model.save_pretrained(Path(output_dir or self.args.output_dir))

    def _check_loss(self) -> None:
        """The model's own loss on a batch is what is trained on, or it has terms that would be left out."""
        if self._given_loss is not None:
            return
        count = min(self.args.per_device_train_batch_size, len(self.train_dataset))
        first = [self.train_dataset[index] for index in range(count)]
        taken = set(inspect.signature(self._forward).parameters)
        inputs, labels = _taken(self._collate(first), taken)
        device = next(self.model.parameters()).device
        inputs, labels = {name: value.to(device) for name, value in inputs.items()}, labels.to(device)
        training = self.model.training
        with torch.no_grad():
            self.model.eval()
            own = float(self.model(**inputs, labels=labels).loss)
            total = float(self._loss.total(logits(self.model, inputs), labels))
        self.model.train(training)
        terms = float(self._loss.count(labels))
        if terms and not math.isclose(own, total / terms, rel_tol=1e-2):
            raise ConfigurationError(
                f"{type(self.model).__name__}'s own loss of the first {count} samples is {own:.6g}, and the mean over "
                f"their labels is {total / terms:.6g}: it has other terms; give Trainer(loss=...)"
            )

    def config(self) -> RunConfig:
        """The settings of the run."""
        args = self.args
        config = RunConfig(
            seed=args.seed,
            device="cpu" if args.use_cpu else None,
            clip_norm=args.max_grad_norm or None,
            workers=args.dataloader_num_workers,
            evaluate_every=1,
            epochs=None if args.max_steps > 0 else math.ceil(args.num_train_epochs),
            steps=args.max_steps if args.max_steps > 0 else None,
        ).replace(**self._settings)
        together = args.per_device_train_batch_size * _ranks(config)
        accumulated = args.gradient_accumulation_steps
        return config.replace(
            batch_size=together * accumulated, micro_batch=together if accumulated > 1 else None
        )

    def task(self, config: RunConfig) -> Task:
        """What is trained."""
        model, args = self.model, self.args
        steps = config.steps or math.ceil(len(self.train_dataset) / (config.batch_size or 1)) * (
            config.epochs or 1
        )
        taken = set(inspect.signature(self._forward).parameters)
        collate = self._collate
        return Task(
            model=lambda: exact_dropout(copy.deepcopy(model)),
            forward=logits,
            loss=self._loss,
            optimizer=_adam(model, args),
            scheduler=lambda optimizer: get_scheduler(
                args.lr_scheduler_type,
                optimizer,
                args.get_warmup_steps(steps),
                steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,
            ),
            scheduler_interval="step",
            train=self.train_dataset,
            evaluate=self.eval_dataset if args.eval_strategy == "epoch" else None,
            collate=lambda items: _taken(collate(items), taken),
            name=type(model).__name__,
        )


def check_arguments(args: TrainingArguments) -> None:
    """Raises:
    ConfigurationError: For an argument that is not honoured, unless it is as where nothing is said.
    """
    usual = TrainingArguments(args.output_dir, use_cpu=args.use_cpu, eval_strategy=args.eval_strategy)
    names = [field.name for field in fields(args) if field.name not in _HONOURED]
    wrong = [name for name in names if getattr(args, name) != getattr(usual, name)]
    if wrong:
        said = ", ".join(f"{name}={getattr(args, name)!r}" for name in wrong)
        raise ConfigurationError(
            f"TrainingArguments({said}) are not honoured by Evener's Trainer; leave them out"
        )
    for name, allowed in _CHOICES.items():
        value = getattr(args, name)
        if value not in allowed:
            raise ConfigurationError(
                f"TrainingArguments({name}={str(getattr(value, 'value', value))!r}) is not honoured by Evener's "
                f"Trainer; give one of {', '.join(allowed)}"
            )
    if args.num_train_epochs % 1 and args.max_steps <= 0:
        raise ConfigurationError(
            f"num_train_epochs is {args.num_train_epochs}; give a whole number, or max_steps"
        )


def _loss_of(model: nn.Module) -> Loss:
    kind = type(model).__name__
    for ending, causal in _COUNTED_BY_NAME.items():
        if kind.endswith(ending):
            return token_loss(causal=causal)
    raise ConfigurationError(
        f"what {kind}'s loss is a mean over is not known: give Trainer(loss=...) from logits and labels, such as "
        "nn.CrossEntropyLoss() for one label for each sample"
    )


def _adam(model: nn.Module, args: TrainingArguments) -> Callable[[Any], torch.optim.Optimizer]:
    """AdamW without decay of biases and norms, as ``transformers`` makes it."""
    decaying = set(TheirTrainer.get_decay_parameter_names(None, model))

    def make(named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        groups = [
            {"params": [p for name, p in named if name in decaying], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
        ]
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)

    return make


def _taken(batch: Mapping[str, Any], names: set[str]) -> tuple[dict[str, Any], Any]:
    """What the model takes of a batch, and the labels.

    Raises:
        DataError: If there are no labels.
    """
    if "labels" not in batch:
        raise DataError(f"a batch of the collator has {', '.join(batch)}, and no labels; let it make some")
    return {name: value for name, value in batch.items() if name in names and name != "labels"}, batch[
        "labels"
    ]


def _ranks(config: RunConfig) -> int:
    here = check_plan(config)
    return detect().world_size if is_launched() else here
