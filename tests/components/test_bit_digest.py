"""Digests of bits: any single difference changes them."""

from __future__ import annotations

import pytest
import torch

from evener.components.bit_digest import bit_digest, sum_of_digests

TYPES = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.mark.parametrize("dtype", TYPES)
def test_each_bit_of_each_number_counts(dtype: torch.dtype) -> None:
    numbers = torch.randn(70_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = bit_digest(numbers)
    for place in (0, 1, 65_535, 65_536, 69_999):
        for bit in range(8 * dtype.itemsize):
            word = -(1 << bit) if bit == 8 * dtype.itemsize - 1 else 1 << bit
            changed = numbers.clone()
            changed.view(TYPES[dtype])[place] ^= word
            assert bit_digest(changed) != before


def test_places_and_numbers_of_digests_count() -> None:
    numbers = torch.arange(131_072.0)
    assert bit_digest(numbers) != bit_digest(numbers.flip(0))
    assert bit_digest(numbers) != bit_digest(numbers.roll(65_536))
    assert bit_digest(numbers, 1) != bit_digest(numbers, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_sum_of_digests_does_not_depend_on_what_is_read_together(dtype: torch.dtype) -> None:
    sizes = [3, 0, 5_001, 4_096, 1, 4_097, 200_003]
    tensors = [(100 * torch.randn(size)).to(dtype) for size in sizes]
    each = [bit_digest(tensor, number) for number, tensor in enumerate(tensors)]
    numbers = list(range(len(sizes)))
    assert sum_of_digests(tensors, numbers) == sum(each)
    assert sum_of_digests(tensors[::-1], numbers[::-1]) == sum(each)
    for tensor in tensors:
        if tensor.numel():
            tensor[-1] += 1
            assert sum_of_digests(tensors, numbers) != sum(each)
            tensor[-1] -= 1
    assert bit_digest(tensors[-1][1:4_999]) == bit_digest(tensors[-1].clone()[1:4_999])


def test_layout_and_the_sign_of_zero_do_not() -> None:
    numbers = torch.randn(30, 40)
    assert bit_digest(numbers.t().contiguous().t()) == bit_digest(numbers)
    assert bit_digest(torch.tensor([0.0, -0.0])) == bit_digest(torch.zeros(2))


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64, torch.complex64, torch.float16])
def test_other_types(kind: torch.dtype) -> None:
    ones = torch.ones(5).to(kind)
    assert bit_digest(ones) == bit_digest(ones.clone())
    assert bit_digest(ones) != bit_digest(torch.zeros(5).to(kind))
    assert int(bit_digest(torch.zeros(0, dtype=kind))) == 0
