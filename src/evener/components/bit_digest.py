"""Digests of the bits of tensors, computed where the tensors are.

A digest is the sum, modulo 2^64, of all numbers of a tensor, read as integers and multiplied by odd numbers that depend
on their places. Integers add up to the same in every order. A tensor in which one number is another has another digest,
whatever the difference: an odd number times what is not 0 is not 0 modulo 2^64. Tensors with several differences have
equal digests in about one of 2^64 cases.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

_WIDTH = 2**16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_digest(tensor: Tensor, number: int = 0) -> Tensor:
    """Returns the digest of a dense tensor, one int64 on its device. 0 and -0 count as the same.

    Args:
        number: Digests with different numbers may be added: they are multiplied by different odd numbers.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = (flat + 0.0 if flat.is_floating_point() else flat).view(_INTEGERS[flat.element_size()])
    factors, total = _factors(words.device), None
    for row in range(max(1, -(-len(words) // _WIDTH))):
        piece = words[row * _WIDTH : (row + 1) * _WIDTH]
        part = (piece.long() * factors[: len(piece)]).sum() * _product(row, number)
        total = part if total is None else total + part
    assert total is not None
    return total


@cache
def _product(row: int, number: int) -> int:
    """Returns the product of two odd numbers as a signed number of 64 bits."""
    return (odd_number(row) * odd_number(number) + 2**63) % 2**64 - 2**63


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.Philox(key=1).random_raw(_WIDTH).view(np.int64) | 1).to(device)


@cache
def odd_number(number: int) -> int:
    """Returns a signed odd number of 64 bits for ``number``, always the same."""
    return int(np.random.Philox(key=2, counter=number).random_raw(1).view(np.int64)[0]) | 1
