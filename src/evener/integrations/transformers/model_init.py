"""Prepares the model that the Trainer is given, and chooses a collator if none is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator, set_seed

from evener.errors import ConfigurationError


def model_of(model: nn.Module | None, model_init: Callable[[], nn.Module] | None, seed: int) -> nn.Module:
    """Returns the given model, or the one that ``model_init`` makes. Switches ``use_cache`` off in its config.

    Raises:
        ConfigurationError: If both or neither are given.
    """
    if (model is None) == (model_init is None):
        raise ConfigurationError("Trainer takes either a model or model_init, which makes one")
    if model is None:
        assert model_init is not None
        set_seed(seed)
        model = model_init()
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = False  # training does not use a key-value cache
    return model


def copied(model: nn.Module, deterministic: bool) -> nn.Module:
    """Copies the model for a rank. If ``deterministic``, switches PyTorch to deterministic algorithms."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    config: Any = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        _known(type(model), config)
    return copy.deepcopy(model).train()  # as transformers' Trainer does


def _known(kind: type[nn.Module], config: Any) -> None:
    """Builds a model of this class on the meta device. ``transformers`` records when a model is built which outputs the
    class can return, such as router scores. A process that received the model by pickle has no such record.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        kind(copy.deepcopy(config))


def usual_collator(processing_class: Any) -> Any:
    """Returns the collator that ``transformers`` uses if none is given."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator
