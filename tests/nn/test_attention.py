"""Attention over divided sequences against PyTorch's own over whole ones."""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from evener.errors import ConfigurationError
from evener.nn import attention, positions, ring
from evener.nn import sequence_layout as sequence_module
from evener.nn.attention_dispatch import attending
from evener.nn.context import scope
from evener.nn.sequence_layout import ORDERS, DividedSequence, pieces
from tests.tiers import ALWAYS, NIGHTLY, SLOW, spread

BATCH, WIDTH, VALUES = 2, 5, 3


def drawn(heads: int, of_keys: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(heads, WIDTH), (of_keys, WIDTH), (of_keys, VALUES), (heads, VALUES)]
    return tuple(
        torch.randn(BATCH, h, length, width, generator=generator, dtype=torch.float64).to(dtype)
        for h, width in shapes
    )


def padding_of(length: int) -> Tensor:
    """The first sample whole, of the second the first third and the last two positions hidden."""
    hidden = torch.zeros(BATCH, length, dtype=torch.bool)
    hidden[1, : length // 3] = True
    hidden[1, -2:] = True
    return hidden


def sequence_of(length: int, order: str, method: str) -> DividedSequence:
    group = dist.group.WORLD
    assert group is not None
    return DividedSequence(group, length, order, method, 1)


def here(sequence: DividedSequence) -> Any:
    return scope(torch.arange(BATCH), 0, 0, sequence=sequence)


def penalties(output: Tensor, weight: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output, and the gradients of a function of its gradients."""
    first = torch.autograd.grad((output * weight).sum(), leaves, create_graph=True)
    return output.detach(), *torch.autograd.grad(sum(each.pow(3).sum() for each in first), leaves)


def gradients(output: Tensor, weight: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (output * weight).sum().backward()
    found = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
    assert len(found) == len(leaves)
    return (output.detach(), *found)


def errors(
    length: int,
    heads: tuple[int, int],
    order: str,
    method: str,
    causal: bool,
    padded: bool,
    gradients: Any = gradients,
    **kind: Any,
) -> float:
    """The largest difference of output and gradients to one device, as a part of the largest number."""
    *inputs, weight = drawn(*heads, length, **kind)
    hidden = padding_of(length) if padded else None
    exact = [x.to(torch.float64, copy=True).requires_grad_() for x in inputs]
    whole = gradients(attention(*exact, causal=causal, key_padding=hidden), weight.double(), tuple(exact))
    sequence = sequence_of(length, order, method)
    own = tuple(sequence.part(x, 2).requires_grad_() for x in inputs)
    with here(sequence):
        mine = None if hidden is None else sequence.part(hidden, 1)
        found = gradients(attention(*own, causal=causal, key_padding=mine), sequence.part(weight, 2), own)
    assert all(x.dtype == inputs[0].dtype for x in found)
    pairs = [(sequence.part(one, 2), other.double()) for one, other in zip(whole, found, strict=True)]
    return max(float((one - other).abs().max()) if one.numel() else 0.0 for one, other in pairs)


CASES = [
    (13, (4, 4), "zigzag", "ring", True, True),
    (13, (8, 4), "contiguous", "ring", True, False),
    (8, (6, 3), "zigzag", "ring", False, True),
    (3, (2, 2), "zigzag", "ring", True, False),
    (13, (5, 5), "zigzag", "ulysses", True, True),
    (8, (8, 4), "contiguous", "ulysses", False, True),
    (3, (4, 4), "zigzag", "ulysses", True, False),
]


def all_errors(**kind: Any) -> list[float]:
    return [errors(*case, **kind) for case in CASES]


@pytest.mark.parametrize("size", spread([2, 3, 4], NIGHTLY, ALWAYS, SLOW))
def test_output_and_gradients_are_those_of_one_device(ranks: Any, size: int) -> None:
    for found in ranks(size).run(all_errors):
        assert max(found) <= 1e-13, list(zip(found, CASES, strict=True))


def small_tiles() -> list[float]:
    whole, ring._TILE = ring._TILE, 2
    try:
        return all_errors()
    finally:
        ring._TILE = whole


def test_tiles_change_nothing(ranks: Any) -> None:
    for found in ranks(2).run(small_tiles):
        assert max(found) <= 1e-13, list(zip(found, CASES, strict=True))


def errors_of_second_derivatives() -> list[float]:
    """PyTorch's other kernels have no second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return all_errors(gradients=penalties)


def test_gradients_of_gradients_are_those_of_one_device(ranks: Any) -> None:
    for found in ranks(2).run(errors_of_second_derivatives):
        assert max(found) <= 1e-12, list(zip(found, CASES, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.04)])
def test_types_of_lower_precision(ranks: Any, dtype: torch.dtype, bound: float) -> None:
    for found in ranks(2).run(all_errors, dtype=dtype):
        assert 0 < max(found) <= bound


# On one device


def test_fewer_heads_of_keys_serve_several_of_queries_each() -> None:
    q, k, v, _ = drawn(6, 2, 5)
    found = attention(q, k, v, causal=True, scale=0.7)
    repeated = (x.repeat_interleave(3, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, *repeated, is_causal=True, scale=0.7)
    torch.testing.assert_close(found, expected)


def test_a_query_that_may_see_no_key_gets_zero() -> None:
    q, k, v, _ = drawn(2, 2, 4)
    hidden = torch.tensor([[True, True, False, False], [False] * 4])
    found = attention(q, k, v, causal=True, key_padding=hidden)
    assert found[0, :, :2].abs().max() == 0
    torch.testing.assert_close(found[0, :, 2], v[0, :, 2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": (2, 4, 5)}, "must be \\(batch, heads, length, width\\)"),
        ({"k": (2, 4, 6, 5)}, "do not fit together"),
        ({"k": (2, 3, 7, 5), "v": (2, 3, 7, 5)}, "must divide those of queries"),
        ({"key_padding": (2, 6)}, "key_padding is torch.bool \\(2, 6\\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, tuple[int, ...]], words: str) -> None:
    shapes = {"q": (2, 4, 7, 5), "k": (2, 4, 7, 5), "v": (2, 4, 7, 5), "key_padding": (2, 7)} | change
    given = {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
    with pytest.raises(ConfigurationError, match=words):
        attention(**{name: x if name == "key_padding" else x.double() for name, x in given.items()})  # type: ignore[arg-type]


# Positions


@given(st.integers(0, 60), st.integers(1, 7), st.sampled_from(ORDERS))
def test_each_position_lies_on_one_rank_and_pieces_are_almost_equal(
    length: int, size: int, order: str
) -> None:
    found = pieces(length, size, order)
    assert sorted(n for piece in found for chunk in piece for n in chunk) == list(range(length))
    sizes = [sum(map(len, piece)) for piece in found]
    assert max(sizes) - min(sizes) <= (2 if order == "zigzag" else 1)
    assert all([*chain(*piece)] == sorted(chain(*piece)) for piece in found)


def test_the_documentation_draws_the_orders() -> None:
    drawing = sequence_module.__doc__ or ""
    chunks = [tuple(map(int, chunk.split())) for chunk in re.findall(r"\d+ \d+ +\d+", drawing)]
    for order in ORDERS:
        owners = list(map(int, re.findall(r"rank (\d)", re.search(f"{order} .*", drawing)[0])))  # type: ignore[index]
        expected = [
            rank
            for chunk in chunks
            for rank, piece in enumerate(pieces(12, 2, order))
            if chunk[0] in chain(*piece)
        ]
        assert owners == expected


def test_work_is_equal_in_zigzag_order() -> None:
    work = [sum(n + 1 for chunk in piece for n in chunk) for piece in pieces(48, 4, "zigzag")]
    assert len(set(work)) == 1


def test_positions_of_a_whole_sequence() -> None:
    assert positions(4).tolist() == [0, 1, 2, 3]


# PyTorch's own functions


def torchs(q: Tensor, k: Tensor, v: Tensor, sequence: DividedSequence | None) -> dict[str, Tensor]:
    """What ordinary models call, with masks of the piece that they have."""
    size = q.shape[2]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    padding = padding_of(13)
    padding[:, :1] = False  # a causal mask of a piece must leave each query a key
    hidden = padding if sequence is None else sequence.part(padding, 1)
    torch.manual_seed(0)
    multi = nn.MultiheadAttention(WIDTH * 4, 4, dtype=torch.float64)
    apart = nn.MultiheadAttention(
        WIDTH * 4, 4, kdim=WIDTH * 4, vdim=4 * VALUES, batch_first=True, bias=False
    ).double()
    x, y = q.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2)
    square = torch.zeros(size, size, dtype=torch.float64).masked_fill(~causal, -math.inf)
    both = causal & ~hidden[:, None, None, :]
    attend = F.scaled_dot_product_attention
    return {
        "causal": attend(q, k, v, is_causal=True, scale=0.3),
        "mask": attend(q, k, v, causal),
        "numbers": attend(q, k, v, square[None, None]),
        "lowest": attend(q, k, v, square.clamp(min=torch.finfo(torch.float64).min)),
        "keys": attend(q, k, v, ~hidden[:, None, None, :]),
        "both": attend(q, k, v, both),
        "grouped": attend(q, k[:, :2], v[:, :2], enable_gqa=True),
        "checkpoint": checkpoint(lambda *x: attend(*x, is_causal=True), q, k, v, use_reentrant=False),
        "reentrant": checkpoint(lambda *x: attend(*x, is_causal=True), q, k, v, use_reentrant=True),
        "multi": multi(*[x.transpose(0, 1)] * 3, key_padding_mask=hidden)[0].transpose(0, 1),
        "multi causal": multi(*[x.transpose(0, 1)] * 3, attn_mask=~causal)[0].transpose(0, 1),
        "apart": apart(x, x, y, attn_mask=~causal, is_causal=True, need_weights=False)[0],
    }


def of_torch(method: str) -> dict[str, float]:
    """Differences of outputs and gradients to one device."""
    q, k, v, _ = drawn(4, 4, 13)
    sequence, found = sequence_of(13, "zigzag", method), {}
    for name in torchs(q, k, v, None):
        exact = tuple(x.clone().requires_grad_() for x in (q, k, v))
        own = tuple(sequence.part(x, 2).requires_grad_() for x in (q, k, v))
        whole = torchs(*exact, None)[name]
        weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (whole * weight).sum().backward()
        dim = 2 if whole.dim() == 4 else 1
        with here(sequence), attending(sequence):
            piece = torchs(*own, sequence)[name]
            (piece * sequence.part(weight, dim)).sum().backward()
        pairs = [(sequence.part(whole, dim), piece)]
        pairs += [
            (sequence.part(x.grad, 2), y.grad) for x, y in zip(exact, own, strict=True) if x.grad is not None
        ]
        found[name] = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return found


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_functions_of_torch_attend_to_whole_sequences(ranks: Any, method: str) -> None:
    for found in ranks(2).run(of_torch, method):
        assert max(found.values()) <= 1e-13, found


def refused(how: str) -> str:
    sequence = sequence_of(2 if how == "short" else 13, "zigzag", "ulysses" if how == "heads" else "ring")
    q, k, v = (sequence.part(x, 2) for x in drawn(4, 1 if how == "heads" else 4, sequence.length)[:3])
    size, attend = q.shape[2], F.scaled_dot_product_attention
    calls: dict[str, Any] = {
        "dropout": lambda: attend(q, k, v, dropout_p=0.1),
        "window": lambda: attend(q, k, v, torch.ones(size, size, dtype=torch.bool).triu(-1).tril()),
        "short": lambda: attend(q, k, v, torch.ones(size, size, dtype=torch.bool).tril()),
        "shape": lambda: attend(q, k, v, torch.ones(13, 13, dtype=torch.bool)),
        "learned": lambda: attend(q, k, v, torch.zeros(size, size, dtype=torch.float64, requires_grad=True)),
        "heads": lambda: attend(q, k, v, enable_gqa=True),
        "cross": lambda: attend(q, k[:, :, 1:], v[:, :, 1:]),
        "zero": lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True)(*[torch.ones(size, 1, 4)] * 3),
        "bias": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True)(*[torch.ones(size, 1, 4)] * 3),
        "alone": lambda: nn.MultiheadAttention(4, 2)(*[torch.ones(size, 4)] * 3),
        "positions": lambda: positions(13),
    }
    with here(sequence), attending(sequence), pytest.raises(ConfigurationError) as caught:
        calls[how]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dropout", "dropout 0.1.*use evener.nn.Dropout"),
        ("window", "neither causal nor hides keys"),
        ("short", "in a sequence of 2 positions no rank can tell"),
        ("shape", "a mask of shape \\(13, 13\\) is neither"),
        ("learned", "a learned bias"),
        ("heads", "1 heads of keys cannot be divided over 2 ranks"),
        ("cross", "of the 13 positions of the sequences"),
        ("zero", "add_zero_attn adds keys of no position"),
        ("bias", "bias_k and bias_v adds keys"),
        ("alone", "they must be a batch of sequences"),
        ("positions", "positions\\(13\\): this rank has"),
    ],
)
def test_what_cannot_be_divided_is_refused(ranks: Any, how: str, words: str) -> None:
    for message in ranks(2).run(refused, how):
        assert re.search(words, message), message
