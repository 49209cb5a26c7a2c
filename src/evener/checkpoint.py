"""What a run can go on from: one file, whole or absent, that says nothing of how many ranks wrote it.

Also the digest by which two sets of weights are compared without keeping them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evener.errors import ConfigurationError, DataError
from evener.strategies.base import named_tensors

FILE_NAME = "latest.pt"


def weights_digest(weights: nn.Module | Mapping[str, Tensor]) -> str:
    """sha256 over the parameters and buffers in order of name: each name, type, shape, then the bytes.

    Every name under which a tied parameter is known counts; buffers that are not saved with the model count too.
    """
    named = named_tensors(weights) if isinstance(weights, nn.Module) else weights
    digest = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def save(state: dict[str, Any], directory: Path) -> Path:
    """Writes a state into ``directory``; a run that is killed meanwhile leaves the one before."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(state, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load(path: Path) -> dict[str, Any]:
    """The state of a run directory, its ``checkpoints`` or the file itself, on the CPU.

    Raises:
        ConfigurationError: If there is none.
        DataError: If the file is no checkpoint.
    """
    candidates = [path, path / FILE_NAME, path / "checkpoints" / FILE_NAME]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise ConfigurationError(f"no checkpoint at {path}: there is no {candidates[-1]}")
    try:
        state = torch.load(found, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(f"{found} cannot be read as a checkpoint: {error}") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "progress"} <= state.keys():
        raise DataError(f"{found} is no checkpoint of Evener: it does not hold model, optimizer and progress")
    return state
