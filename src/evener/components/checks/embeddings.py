"""Refuses embeddings that depend on all ids of a batch, when ranks see only the ids of their own samples."""

from __future__ import annotations

from torch import nn

from evener.distributed.mesh import DIVIDING_TERMS, Mesh
from evener.errors import TaskError

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def looks_at_the_batch(layer: nn.Module) -> bool:
    """Returns True if the layer's output for a sample depends on the ids of others, or if it changes its weight by
    them."""
    return isinstance(layer, EMBEDDINGS) and (layer.max_norm is not None or layer.scale_grad_by_freq)


def refuse_lookups(model: nn.Module, mesh: Mesh, devices: int = 1) -> None:
    """Refuses embeddings that need all samples of a batch, if ranks or devices divide these.

    Args:
        devices: The number of devices of this process that divide the samples of a rank.

    Raises:
        TaskError: If the model has such an embedding, and the samples are divided.
    """
    group = mesh.group(*DIVIDING_TERMS)
    if devices == 1 and (group is None or group.size() == 1):
        return
    for name, layer in model.named_modules():
        if looks_at_the_batch(layer):
            assert isinstance(layer, EMBEDDINGS)
            raise TaskError(
                f"the embedding {name} {_reason(layer)}, and each rank would see the ids of its own samples alone. "
                "Leave it out, or train with strategy 'single'"
            )


def _reason(layer: nn.Embedding | nn.EmbeddingBag) -> str:
    if layer.max_norm is None:
        return "has scale_grad_by_freq, which divides gradients by how often an id is in the batch"
    return (
        f"has max_norm={layer.max_norm:g}, which in each forward pass shortens the rows of its weight that the batch "
        "uses (shortening what comes out does not need it: "
        "x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1))"
    )
