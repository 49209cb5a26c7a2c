"""Adds the gradient of a task's penalty on the weights, such as weight decay on some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from evener.components import gradients
from evener.components.sharded_tensor.local import as_held
from evener.components.sharded_tensor.shard_spec import divided
from evener.distributed.mesh import Mesh
from evener.hardware.async_read import Readout, read
from evener.nn.fqn import clean_name
from evener.torch_internals.modules import own_parameters


def add_penalty(
    penalty: Callable[[nn.Module], Tensor], model: nn.Module, mesh: Mesh, unsound: gradients.Unsound
) -> tuple[Readout, Readout]:
    """Adds the gradient of ``penalty(model)`` to those of the model's parameters. It is equal on all ranks, and added
    after synchronization: it counts once.

    Args:
        unsound: Records the parameters whose gradient of the penalty is not finite.

    Returns:
        The value of the penalty, and a number that is not finite if its gradient is not.
    """
    with _undivided(model, mesh):
        term = penalty(model)
        value = read(term)
        term.backward()  # type: ignore[no-untyped-call]
        found = [(clean_name(name), p) for name, p in model.named_parameters()]
        return value, read(unsound.check_gradients(gradients.named(found)).tensor)


@contextmanager
def _undivided(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Replaces the shards of ``model`` by whole weights within the block. Afterwards restores the shards, and adds to
    them their part of the gradients that came in the block. If something is divided, all ranks must call this
    together. A penalty may be any function of the weights, not only a sum over their elements."""
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
