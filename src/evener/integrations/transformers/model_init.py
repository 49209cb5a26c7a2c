"""What the Trainer is given, or takes where it is given nothing: a model and a collator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator, set_seed

from evener.errors import ConfigurationError


def model_of(model: nn.Module | None, model_init: Callable[[], nn.Module] | None, seed: int) -> nn.Module:
    """The model that was given, or the one that ``model_init`` makes.

    Raises:
        ConfigurationError: If there are both, or none.
    """
    if (model is None) == (model_init is None):
        raise ConfigurationError("Trainer takes either a model or model_init, which makes one")
    if model is None:
        assert model_init is not None
        set_seed(seed)
        model = model_init()
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = False  # of keys and values, which training has no use for
    return model


def copied(model: nn.Module, deterministic: bool) -> nn.Module:
    """The model of a rank, which computes by deterministic algorithms alone if that is asked for."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    config: Any = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        _known(type(model), config)
    return copy.deepcopy(model)


def _known(kind: type[nn.Module], config: Any) -> None:
    """Makes a model of this kind without memory: ``transformers`` notes when it makes one which outputs, such as the
    scores of routers, models of the kind can return, and has noted nothing in a process to which one was sent."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        kind(copy.deepcopy(config))


def usual_collator(processing_class: Any) -> Any:
    """The collator where none was given, as ``transformers`` chooses it."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator
