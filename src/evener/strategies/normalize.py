"""BatchNorm over all ranks that divide the samples of a batch, or the positions of these."""

from __future__ import annotations

from torch import nn

from evener.borrowed.layers import AnyBatchNorm
from evener.nn.batch_norm import exact_batch_norm
from evener.runtime.mesh import DIVIDING_TERMS, Mesh


def normalize_together(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Makes the model's BatchNorm modules exact, where it has any."""
    several = mesh.group(*DIVIDING_TERMS) is not None
    if not several or not any(isinstance(module, AnyBatchNorm) for module in model.modules()):
        return model
    # A group of its own, so that its messages in backward never meet those of the buckets.
    return exact_batch_norm(model, mesh.group(*DIVIDING_TERMS, use="normalization"))
