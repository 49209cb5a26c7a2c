"""Which of PyTorch's backends moves the tensors of a kind of device: NCCL of a GPU, gloo of a CPU, XCCL of an XPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evener.errors import ConfigurationError


def backend_of(kind: str) -> str:
    """The default one of PyTorch's.

    Raises:
        ConfigurationError: If there is none that moves tensors of this kind, as for MPS.
    """
    try:
        name: str = dist.get_default_backend_for_device(kind)
    except ValueError:
        name = ""
    moves = dist.Backend.backend_capability.get(name, [])
    if kind not in moves:
        raise ConfigurationError(
            f"no backend of PyTorch's moves tensors of {kind!r} between ranks"
            f"{f' (its default, {name}, moves those of {chr(44).join(moves)})' if name else ''}: use one process, or "
            "the cpu device"
        )
    return name


def library_of(kind: str) -> str:
    """What ranks of a kind of device meet by: that of AMD's cards goes by the name of NVIDIA's, and cannot meet it."""
    backend = backend_of(kind)
    return "rccl" if backend == "nccl" and torch.version.hip else backend
