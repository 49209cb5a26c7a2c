"""Checks that reject models whose parameters PyTorch's FSDP2 cannot hold."""

from __future__ import annotations

import torch
from torch import nn

from evener.errors import TaskError


def check_layers(model: nn.Module) -> None:
    """Raises TaskError if the model has sparse gradients or complex weights."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TaskError(
                f"{name or 'the model'} has sparse gradients, which PyTorch's FSDP2 does not sum: make it "
                "sparse=False, or use strategy 'ddp'"
            )
    found = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if found is not None:
        raise TaskError(f"{found} is complex, which PyTorch's FSDP2 does not shard: use strategy 'ddp'")


def check_types(model: nn.Module) -> None:
    """Raises TaskError if the trained parameters have several dtypes."""
    types: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            types.setdefault(parameter.dtype, name)
    if len(types) > 1:
        words = ", ".join(f"{name} of {dtype}" for dtype, name in types.items())
        raise TaskError(
            f"PyTorch's FSDP2 shards parameters of one type, the model has {words}: set dtype, or use strategy 'ddp'"
        )
