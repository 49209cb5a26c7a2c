"""Operators that take most of a forward pass's time for the bytes that they make: products of matrices, convolutions,
attention.

Attention is several operators, one for each way to compute it, and their names begin with an underscore.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from typing import Any

import torch

NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

PRODUCTS: frozenset[Any] = frozenset(getattr(torch.ops.aten, name).default for name in NAMES)
