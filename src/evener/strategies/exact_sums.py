"""Sums of gradients with the same bits on any division of the samples: what single, ddp and sharded share.

:mod:`evener.components.exact_sum` has the sums, and why their bits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evener.components.exact_sum.gradients import ExactGradients
from evener.errors import ConfigurationError
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner


def exact_gradients(learner: Learner, wholes: Mapping[str, Tensor] | None = None) -> ExactGradients | None:
    """Returns what adds up the gradients of this rank's blocks. None if the run is not exact in bits.

    Args:
        wholes: The tensors that get gradients, by name, if they are not the trained parameters themselves.

    Raises:
        ConfigurationError: If a gradient cannot be summed so, or the device does not round as it must.
    """
    if learner.settings.bits is None:
        return None
    if wholes is None:
        wholes = {learner.names[p]: p for p in learner.trained.first}
    for name, tensor in wholes.items():
        if tensor.is_complex():
            raise ConfigurationError(
                f"exact=bits rounds real numbers, and {name} is complex: use two parameters, real and imaginary part"
            )
    return ExactGradients(wholes, learner.session.device)


def check_sums(learner: Learner) -> None:
    """Raises ConfigurationError if a run is to be exact in bits, and the strategy's synchronizer does not add up
    gradients so."""
    if learner.settings.bits is not None and learner.exact is None:
        raise ConfigurationError(
            f"exact=bits: the synchronizer of strategy {learner.name!r} does not use Learner.exact, so that its sums "
            "depend on the ranks; use single, ddp or sharded"
        )


def check_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError if the optimizer updates a piece of a weight to other bits than the whole weight: fused
    kernels compute the last elements of a tensor in another way than those before."""
    if any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigurationError(
            f"exact=bits: a fused {type(optimizer).__name__} updates a piece of a weight to other bits than the whole "
            "weight; build it without fused=True, or use ddp"
        )


def check_layouts(model: nn.Module) -> None:
    """Raises ConfigurationError if a weight of a model that is to be divided is not contiguous: whole weights are put
    together contiguously, and kernels round otherwise for another layout."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_contiguous():
            raise ConfigurationError(
                f"exact=bits: {clean_name(name)} is not contiguous, and its layout is lost where weights are divided, "
                "with which kernels round otherwise; use ddp, or a contiguous weight (no channels_last)"
            )


def begin_step(learner: Learner) -> None:
    """Begins the sums of a step.

    Raises:
        ConfigurationError: If parameters are trained that were not at the start.
    """
    if learner.exact is None:
        return
    if learner.trained.thawed:
        raise ConfigurationError(
            f"exact=bits cannot follow a change of requires_grad in mid-run: {'; '.join(learner.trained.changes)}. Set "
            "it before the first step, and begin another run from this one's weights where it is to change"
        )
    learner.exact.forget()


def add_block(learner: Learner, parameters: Mapping[str, nn.Parameter]) -> None:
    """Adds the gradients that a block has left in ``parameters``, and clears them."""
    assert learner.exact is not None
    learner.exact.add({name: p.grad for name, p in parameters.items() if p.grad is not None})
    for parameter in parameters.values():
        parameter.grad = None
