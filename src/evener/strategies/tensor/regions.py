"""Regions of a model that can be divided: layers that make features, elementwise modules, and a layer that reads them.

This module finds regions by the structure of a model: layers in a row in ``nn.Sequential``, and PyTorch's own
transformer layers, whose forward is known. :mod:`evener.strategies.tensor.trace` finds those in the user's forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from evener.components.checks.embeddings import EMBEDDINGS, looks_at_the_batch
from evener.nn.dropout import Dropout, Dropout1d, Dropout2d
from evener.nn.tensor_parallel_conv1d import is_transposed
from evener.torch_internals.modules import AnyBatchNorm, own_parameters

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.Softshrink),
    *(nn.Hardshrink, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Threshold),
)
"""Modules without weights: the single slope of a PReLU would have a part of its gradient on each rank."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, Dropout, Dropout1d, Dropout2d)
_BY_CHANNEL = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_OF_ATTENTION = {
    *(
        "in_proj_weight",
        "in_proj_bias",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "bias_k",
        "bias_v",
    ),
    *("weight", "bias"),
}
_OF_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, Dropout1d, Dropout2d)
ACTIVATIONS = (
    *(F.relu, F.gelu, F.silu, F.mish, F.elu, F.leaky_relu, F.tanh, F.sigmoid),
    *(torch.relu, torch.tanh, torch.sigmoid),
)
"""Elementwise functions."""


@dataclass(frozen=True)
class Region:
    """Layers from those that make features to the one that reads them."""

    columns: tuple[nn.Module, ...]
    between: tuple[nn.Module, ...]
    """Modules that must be told that they see a part: BatchNorm and dropout."""
    row: nn.Module


def width(layer: nn.Module) -> tuple[int, int]:
    """Returns the numbers of features, or channels, that a divisible layer reads and makes."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if is_transposed(layer):
        rows, columns = layer.get_parameter("weight").shape
        return rows, columns
    assert isinstance(layer, CONVOLUTIONS)
    return layer.in_channels, layer.out_channels


def features(layer: nn.Module) -> int:
    """Returns the dimension of the features in the layer's output, counted from the end."""
    return -1 - len(layer.kernel_size) if isinstance(layer, CONVOLUTIONS) else -1


def obstacle(layer: nn.Module) -> str | None:
    """Returns the reason why a linear layer, convolution or embedding cannot be divided; None if it can."""
    if isinstance(layer, RECURRENT):
        return (
            f"it is a {type(layer).__name__}, each step of which needs all features of the one before, so that ranks "
            "would wait for each other at every position; the layers beside it can be divided"
        )
    if type(layer) not in (nn.Linear, *EMBEDDINGS, *CONVOLUTIONS) and not is_transposed(layer):
        return f"it is a {type(layer).__name__}, which may compute something else"
    if own_parameters(layer).keys() - {"bias"} != {"weight"}:
        return "its weight is computed from other parameters"
    if isinstance(layer, CONVOLUTIONS) and (layer.groups > 1 or layer.padding_mode != "zeros"):
        return f"it has groups={layer.groups} and padding_mode={layer.padding_mode!r}, not 1 and 'zeros'"
    if looks_at_the_batch(layer):
        return "it has max_norm or scale_grad_by_freq, which look at more than a rank's rows"
    if isinstance(layer, nn.EmbeddingBag) and layer.mode not in ("sum", "mean"):
        return f"it has mode={layer.mode!r}; of words that are divided there are sums and means"
    return None


def obstacle_of_heads(module: nn.Module) -> str | None:
    """Returns the reason why a module cannot be divided by its heads; None if it can."""
    if type(module) is not nn.MultiheadAttention:
        return f"it is a {type(module).__name__}, which may compute something else than nn.MultiheadAttention"
    if type(module.out_proj) is not NonDynamicallyQuantizableLinear:
        return f"its out_proj is a {type(module.out_proj).__name__}"
    if any(own_parameters(each).keys() - _OF_ATTENTION for each in (module, module.out_proj)):
        return "its weights are computed from other parameters"
    return None


def is_local(module: nn.Module, maker: nn.Module) -> bool:
    """Returns True if each feature that ``module`` makes depends only on one feature that ``maker`` made."""
    if isinstance(maker, CONVOLUTIONS):
        return type(module) in (*ELEMENTWISE, *DROPOUTS, *_BY_CHANNEL) or _is_norm(module)
    return type(module) in ELEMENTWISE or (
        (type(module) in DROPOUTS and type(module) not in _OF_CHANNELS)
        or (_is_norm(module) and isinstance(maker, nn.Linear))
    )


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, AnyBatchNorm) and not isinstance(module, LazyModuleMixin)


def is_told(module: nn.Module) -> bool:
    """Returns True if the module must be told that it sees a part of the features."""
    return _is_norm(module) or type(module) in DROPOUTS


def fit(column: nn.Module, row: nn.Module) -> bool:
    """Returns True if ``row`` reads as many features as ``column`` makes, and both can be divided."""
    alike = type(column) is type(row) and column is not row
    if not alike or type(column) in EMBEDDINGS or obstacle(column) or obstacle(row):
        return False
    return width(column)[1] == width(row)[0]


def in_sequence(model: nn.Sequential) -> Iterator[Region]:
    """Yields regions in ``nn.Sequential``: a layer, modules local to its features, and a layer that reads these."""
    layers, start = list(_flat(model)), 0
    while start < len(layers):
        end = start + 1
        if obstacle(layers[start]) is None and not isinstance(layers[start], EMBEDDINGS):
            while end < len(layers) and is_local(layers[end], layers[start]):
                end += 1
            if end < len(layers) and fit(layers[start], layers[end]):
                told = tuple(filter(is_told, layers[start + 1 : end]))
                yield Region((layers[start],), told, layers[end])
                end += 1
            else:
                end = start + 1
        start = end


def _flat(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        yield from _flat(child) if is_sequence(child) else [child]


def is_sequence(module: nn.Module) -> bool:
    """Returns True if the module runs its children one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def of_transformer(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Iterator[Region]:
    """Yields the feed-forward block, if its activation is known."""
    known = layer.activation in ACTIVATIONS or type(layer.activation) in ELEMENTWISE
    if known and fit(layer.linear1, layer.linear2) and is_local(layer.dropout, layer.linear1):
        yield Region((layer.linear1,), (layer.dropout,), layer.linear2)
