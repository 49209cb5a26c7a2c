"""Checks ``TrainingArguments``, refuses those that are not supported, and turns the others into settings of Evener."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from transformers import Trainer as TheirTrainer
from transformers import TrainingArguments

from evener.errors import ConfigurationError

_HONOURED = {
    *(
        "output_dir",
        "num_train_epochs",
        "max_steps",
        "seed",
        "use_cpu",
        "disable_tqdm",
        "remove_unused_columns",
    ),
    "length_column_name",
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "max_grad_norm"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "dataloader_num_workers"),
    *("label_names", "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing"),
    *("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    *("logging_strategy", "logging_steps", "logging_first_step", "report_to"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "prediction_loss_only"),
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("label_smoothing_factor", "train_sampling_strategy", "group_by_length", "dataloader_drop_last"),
    *("data_seed", "torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32"),
    *("full_determinism", "include_for_metrics", "bf16_full_eval", "fp16_full_eval", "optim_args"),
    *("fsdp", "fsdp_config"),
}
_CHANGE_NOTHING = {
    *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "use_cache"),
    *("run_name", "project", "logging_dir", "log_level", "log_level_replica", "log_on_each_node"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "logging_nan_inf_filter"),
    *("eval_accumulation_steps", "eval_use_gather_object", "skip_memory_metrics", "torch_empty_cache_steps"),
    *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("ddp_backend", "ddp_timeout", "average_tokens_across_devices"),
    *("save_safetensors", "overwrite_output_dir"),
}
"""Further accepted arguments, which are ignored, since they do not change the training."""
_INSTEAD = {
    "accelerator_config": "Evener reads, divides and accumulates batches itself",
    "auto_find_batch_size": "settings={'micro_batch': 'auto'} finds room for a batch",
    "batch_eval_metrics": "compute_metrics gets the predictions of the whole dataset at once",
    "dataloader_in_order": "batches come in the order of the run on any number of ranks",
    "dataloader_multiprocessing_context": "workers are forked; set multiprocessing's start method in the script",
    "debug": "the run watches for hangs, faults and numbers that are not finite by itself",
    "deepspeed": "fsdp=True, or settings={'strategy': 'sharded'}, divides the state",
    "enable_jit_checkpoint": "a run with settings={'run_dir': ...} saves when it is asked to stop",
    "eval_do_concat_batches": "predictions are those of the whole dataset in its order",
    "ignore_data_skip": "a resumed run goes on with the samples that would have followed",
    "include_num_input_tokens_seen": "count them in a callback, or in the collator",
    "liger_kernel_config": "apply Liger's kernels to the model before you give it to Trainer",
    "neftune_noise_alpha": "add the noise in a forward hook of the model's embedding",
    "optim_target_modules": "give optimizers=, or optimizer_cls_and_kwargs=",
    "parallelism_config": "settings={'strategy': ...} or settings={'mesh': ...} divides the model",
    "push_to_hub": "call trainer.model.push_to_hub() after the training",
    "restore_callback_states_from_checkpoint": "load what the callback needs in its on_train_begin",
    "save_on_each_node": "rank 0 saves; give an output_dir that all nodes see, or copy it",
    "use_liger_kernel": "apply Liger's kernels to the model before you give it to Trainer",
}
_CHOICES = {
    "optim": ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"),
    "lr_scheduler_type": (
        *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"),
        *("inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
    ),
    "save_strategy": ("no", "steps", "epoch", "best"),
}
_OTHER_CHOICES = {
    "optim": "; settings={'optimizer_state': '8bit'} keeps AdamW's state in 8 bits, and optimizers= or "
    "optimizer_cls_and_kwargs= take any optimizer of torch.optim's kind",
    "lr_scheduler_type": "; optimizers=(optimizer, scheduler) takes any scheduler of steps",
}
_FSDP_CHANGES_NOTHING = {
    *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "state_dict_type", "version"),
    *("cpu_ram_efficient_loading", "use_orig_params", "sync_module_states", "forward_prefetch"),
    *("backward_prefetch", "limit_all_gathers", "activation_checkpointing", "cpu_offload"),
    "reshard_after_forward",
}
"""Accepted keys of ``fsdp_config``. Evener wraps and gathers weights in its own way and ignores most of them. It reads
only ``activation_checkpointing``, ``cpu_offload`` and ``reshard_after_forward``.
"""


def check_arguments(args: TrainingArguments) -> None:
    """Checks that Evener's Trainer supports every argument that is not at its default.

    Raises:
        ConfigurationError: If an unsupported argument differs from its default, or an argument has an unsupported
            value.
    """
    usual = TrainingArguments(args.output_dir, use_cpu=args.use_cpu, eval_strategy=args.eval_strategy)
    known = _HONOURED | _CHANGE_NOTHING
    names = [field.name for field in fields(args) if field.name not in known]
    wrong = [name for name in names if getattr(args, name) != getattr(usual, name)]
    if wrong:
        said = ", ".join(f"{name}={getattr(args, name)!r}" for name in wrong)
        instead = "; ".join(f"for {name}: {_INSTEAD[name]}" for name in wrong if name in _INSTEAD)
        raise ConfigurationError(
            f"TrainingArguments({said}) are not honoured by Evener's Trainer; leave them out"
            + (f" ({instead})" if instead else "")
        )
    for name, allowed in _CHOICES.items():
        value = getattr(args, name)
        if value not in allowed:
            raise ConfigurationError(
                f"TrainingArguments({name}={str(getattr(value, 'value', value))!r}) is not honoured by Evener's "
                f"Trainer; give one of {', '.join(allowed)}{_OTHER_CHOICES.get(name, '')}"
            )
    if args.label_names not in (None, ["labels"]):
        raise ConfigurationError(
            f"label_names={args.label_names!r} is not honoured by Evener's Trainer, which takes labels from `labels`; "
            "let the collator call them so"
        )
    _check_checkpointing(args)
    _check_fsdp(args)
    unknown = sorted(set(args.include_for_metrics or ()) - {"inputs", "loss"})
    if unknown:
        raise ConfigurationError(f"include_for_metrics names {', '.join(unknown)}; it takes inputs and loss")


def _check_fsdp(args: TrainingArguments) -> None:
    said = args.fsdp_config if args.fsdp and isinstance(args.fsdp_config, dict) else {}
    strange = sorted(name for name, value in said.items() if value and name not in _FSDP_CHANGES_NOTHING)
    if strange or str(said.get("reshard_after_forward")).startswith(("hybrid", "no_shard")):
        options = ", ".join(strange) or f"reshard_after_forward={said['reshard_after_forward']!r}"
        raise ConfigurationError(
            f"fsdp_config with {options} is not honoured by Evener's Trainer; leave it out, or give settings={{'mesh': "
            "'data=2,shard=4'} for a hybrid of both"
        )


def _check_checkpointing(args: TrainingArguments) -> None:
    """Refuses all options of activation checkpointing but ``use_reentrant``, which does not change results. Evener's
    own setting ``recompute`` says which layers are recomputed.
    """
    said = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
    others = sorted(said.keys() - {"use_reentrant"})
    if others:
        raise ConfigurationError(
            f"gradient_checkpointing_kwargs with {', '.join(others)} are not honoured by Evener's Trainer; leave them "
            "out, or give settings={'recompute': ...}"
        )


def settings_in(args: TrainingArguments) -> dict[str, Any]:
    """Returns the settings of Evener that the arguments give, except for batch size and length of the run."""
    said: dict[str, Any] = {
        "seed": args.seed,
        "device": "cpu" if args.use_cpu else None,
        "clip_norm": args.max_grad_norm or None,
        "workers": args.dataloader_num_workers,
    }
    if args.bf16 or args.fp16:
        said["precision"] = "bf16" if args.bf16 else "fp16"
    elif args.tf32 is not None:
        said["precision"] = "tf32" if args.tf32 else "fp32"
    if getattr(args, "activation_checkpointing", False) or args.gradient_checkpointing:
        said["recompute"] = "blocks"
    if args.torch_compile:
        said |= {"compile": "auto", "compile_backend": args.torch_compile_backend}
        said |= {"compile_mode": args.torch_compile_mode} if args.torch_compile_mode else {}
    return said | (_sharded(args) if args.fsdp else {})


def _sharded(args: TrainingArguments) -> dict[str, Any]:
    """Maps the FSDP arguments to strategy ``sharded``: ZeRO-3, or ZeRO-2 if weights are not resharded after forward."""
    said = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    keeps_weights = str(said.get("reshard_after_forward", True)).lower() in ("false", "shard_grad_op")
    found: dict[str, Any] = {"strategy": "sharded", "strategy_option": (f"zero={2 if keeps_weights else 3}",)}
    if str(said.get("cpu_offload", False)).lower() == "true" and not args.use_cpu:
        found["offload"] = "optimizer"
    if str(said.get("activation_checkpointing", False)).lower() == "true":
        found["recompute"] = "blocks"
    return found


SAID_OTHERWISE = ("batch_size", "epochs", "steps", "evaluate_every", "keep_best")
"""Settings that may not be given, because ``TrainingArguments`` have other names for them."""


def length(args: TrainingArguments, steps_an_epoch: int) -> dict[str, int]:
    """Returns the length of the run as settings of Evener: ``steps`` or ``epochs``."""
    if args.max_steps > 0:
        return {"steps": args.max_steps}
    if args.num_train_epochs % 1:
        return {"steps": math.ceil(args.num_train_epochs * steps_an_epoch)}
    return {"epochs": int(args.num_train_epochs)}


def check_overridden(kind: type, base: type) -> None:
    """Checks that a subclass of ``base`` overrides no method that Evener's Trainer never calls.

    Raises:
        ConfigurationError: If ``kind`` has a method of ``transformers.Trainer`` that ``base`` lacks.
    """
    derived = kind.__mro__[: kind.__mro__.index(base)]
    written = {name for each in derived for name, value in vars(each).items() if callable(value)}
    silent = sorted(name for name in written if hasattr(TheirTrainer, name) and not hasattr(base, name))
    if silent:
        raise ConfigurationError(
            f"{kind.__name__} has {', '.join(silent)}, which Evener's Trainer never calls; give loss=, a collator or "
            "optimizers=, or write an evener.Task"
        )


def checked_keys(ignored: list[str] | None) -> list[str] | None:
    """Returns ``ignored``: names of outputs that are not predictions. Evener keeps the logits alone as predictions.

    Raises:
        ConfigurationError: If ``ignored`` names the logits.
    """
    if "logits" in (ignored or ()):
        raise ConfigurationError("ignore_keys names logits, which are the predictions of Evener's Trainer")
    return ignored
