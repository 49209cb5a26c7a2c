"""A digest of weights, to compare two sets without keeping them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evener.components.model_init import named_tensors
from evener.components.sharded_tensor.local import local


def weights_digest(weights: nn.Module | Mapping[str, Tensor]) -> str:
    """Returns the sha256 of parameters and buffers in order of name: each name, dtype and shape, then the bytes.

    Every name of a tied parameter counts, and so do buffers that are not saved with the model. For a sparse tensor,
    indices and values count.
    """
    named = named_tensors(weights) if isinstance(weights, nn.Module) else weights
    digest = hashlib.sha256()
    for name in sorted(named):
        tensor = local(named[name]).detach().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for dense in _dense(tensor):
            digest.update(_bytes(dense.contiguous()))
    return digest.hexdigest()


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.strided:
        return (tensor,)
    sparse = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    return sparse.indices(), sparse.values()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
