"""Gathers the whole weights of a divided model for a while. A penalty may be any function of them, not only a sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from evener.components.sharded_tensor.local import as_held
from evener.components.sharded_tensor.shard_spec import divided
from evener.distributed.mesh import Mesh
from evener.torch_internals.modules import own_parameters


@contextmanager
def undivided(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Replaces the shards of ``model`` by whole weights within the block. Afterwards restores the shards, and adds to
    them their part of the gradients that came in the block. If something is divided, all ranks must call this
    together."""
    held, wholes = list(divided(model)), dict[nn.Parameter, nn.Parameter]()
    for module, name, part, piece in held:
        if part not in wholes:  # otherwise a tied weight
            wholes[part] = nn.Parameter(piece.gather(part, mesh), part.requires_grad)
        own_parameters(module)[name] = wholes[part]
    try:
        yield
    finally:
        for module, name, part, piece in held:
            own_parameters(module)[name] = part
            whole = wholes.pop(part, None)
            if whole is not None and whole.grad is not None:
                gradient = as_held(piece.part(whole.grad), part)
                part.grad = gradient if part.grad is None else part.grad + gradient
