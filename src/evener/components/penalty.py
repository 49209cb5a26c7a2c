"""Adds the gradient of a task's penalty on the weights, such as weight decay on some of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from evener.components import gradients
from evener.components.sharded_tensor.summon_full import undivided
from evener.distributed.mesh import Mesh
from evener.hardware.async_read import Readout, read
from evener.nn.fqn import clean_name


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
    with undivided(model, mesh):
        term = penalty(model)
        value = read(term)
        term.backward()  # type: ignore[no-untyped-call]
        found = [(clean_name(name), p) for name, p in model.named_parameters()]
        return value, read(unsound.check_gradients(gradients.named(found)).tensor)
