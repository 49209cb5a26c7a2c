"""Finds PyTorch's communication backend for a kind of device: NCCL for a GPU, gloo for a CPU, XCCL for an XPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from evener.errors import ConfigurationError


def backend_of(kind: str) -> str:
    """Returns the name of PyTorch's default backend for devices of ``kind``.

    Raises:
        ConfigurationError: If no backend moves tensors of this kind between ranks, as for MPS.
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
    """Returns the communication library for devices of ``kind``: the backend's name, but ``rccl`` on AMD GPUs.

    PyTorch calls the libraries of NVIDIA and AMD both nccl, but they cannot communicate with each other.
    """
    backend = backend_of(kind)
    return "rccl" if backend == "nccl" and torch.version.hip else backend
