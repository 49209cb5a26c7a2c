"""Digests of the bits of tensors, computed where the tensors are.

A digest is the sum, modulo 2^64, of all numbers of a tensor, read as integers and multiplied by odd numbers that depend
on their places. Integers add up to the same in every order. A tensor in which one number is another has another digest,
whatever the difference: an odd number times what is not 0 is not 0 modulo 2^64. Tensors with several differences have
equal digests in about one of 2^64 cases.

Numbers of a large tensor are read as integers of 64 bits, several in one. Small tensors are read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from evener.core.complex_numbers import as_real

_WIDTH = 2**16
_SMALL = 2**12
"""Tensors of at most so many elements are read together, element by element."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_digest(tensor: Tensor, number: int = 0) -> Tensor:
    """Returns the digest of a dense tensor, one int64 on its device. 0 and -0 count as the same.

    Args:
        number: Digests with different numbers may be added: they are multiplied by different odd numbers.
    """
    return sum_of_digests([tensor], [number])


def sum_of_digests(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """Returns the sum of the digests of tensors on one device, at least one, each with its number."""
    small: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
    found: list[Tensor] = []
    for tensor, number in zip(tensors, numbers, strict=True):
        flat = as_real(tensor.detach()).reshape(-1)
        if flat.numel() <= _SMALL:
            small.setdefault(flat.dtype, []).append((flat, number))
        else:
            found.append(_of_large(flat, number))
    for pairs in small.values():
        flats = [flat for flat, _ in pairs]
        words = _positive(flats[0] if len(flats) == 1 else torch.cat(flats))
        factors = _factors_of(tuple(map(len, flats)), tuple(number for _, number in pairs), words.device)
        found.append((words.view(_INTEGERS[words.element_size()]).long() * factors).sum())
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def _of_large(flat: Tensor, number: int) -> Tensor:
    values = _positive(flat)
    whole = len(values) - len(values) % (8 // values.element_size())
    words, factors = values[:whole].view(torch.int64), _factors(flat.device)
    pieces = [words[start : start + _WIDTH] for start in range(0, len(words), _WIDTH)]
    found = [
        (piece * factors[: len(piece)]).sum() * _product(row, number) for row, piece in enumerate(pieces)
    ]
    if whole < len(values):
        rest = values[whole:].view(_INTEGERS[values.element_size()]).long()
        found.append((rest * factors[: len(rest)]).sum() * _product(len(found), number))
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def _positive(flat: Tensor) -> Tensor:
    """Returns a copy in memory of its own, without -0."""
    return flat + 0.0 if flat.is_floating_point() else flat.clone()


@cache
def _product(row: int, number: int) -> int:
    """Returns the product of two odd numbers as a signed number of 64 bits."""
    return (odd_number(row) * odd_number(number) + 2**63) % 2**64 - 2**63


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.Philox(key=1).random_raw(_WIDTH).view(np.int64) | 1).to(device)


@lru_cache(maxsize=64)
def _factors_of(sizes: tuple[int, ...], numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the factors of small tensors of these sizes, one behind the other."""
    factors = _factors(device)
    parts = [factors[:size] * _product(0, number) for size, number in zip(sizes, numbers, strict=True)]
    return torch.cat(parts)


@cache
def odd_number(number: int) -> int:
    """Returns a signed odd number of 64 bits for ``number``, always the same."""
    return int(np.random.Philox(key=2, counter=number).random_raw(1).view(np.int64)[0]) | 1
