from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evener.errors import ConfigurationError
from evener.hardware.timers import HostStopwatch
from evener.nn import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    enter,
    reduce_scatter,
    shift,
    split,
)
from tests.ids import placeless

Tensors = list[Tensor]
World = dist.group

UNEQUAL = {2: [5, 2], 3: [3, 0, 4], 4: [0, 2, 5, 1]}
"""Lengths of pieces, by the number of ranks."""


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shape_of(length: int, dim: int) -> tuple[int, ...]:
    return (length, 3) if dim == 0 else (3, length)


# What each rank gives, and what single-process torch makes of it: the tensors of all ranks in, those of all ranks out.


def alike(n: int) -> Tensors:
    return [numbers(rank, 4, 3) for rank in range(n)]


def scalars(n: int) -> Tensors:
    return [numbers(rank) for rank in range(n)]


def lengths(n: int, kind: str) -> list[int]:
    return {"equal": [3] * n, "unequal": UNEQUAL[n], "none": [0] * n}[kind]


def pieces(n: int, kind: str, dim: int) -> Tensors:
    return [numbers(rank, *shape_of(length, dim)) for rank, length in enumerate(lengths(n, kind))]


def wholes(n: int, kind: str, dim: int) -> Tensors:
    return [numbers(rank, *shape_of(sum(lengths(n, kind)), dim)) for rank in range(n)]


def splits(n: int) -> list[list[int]]:
    """What each rank sends to each."""
    return [[(2 * source + target) % 4 for target in range(n)] for source in range(n)]


def to_exchange(n: int, dim: int) -> Tensors:
    return [numbers(rank, *shape_of(sum(row), dim)) for rank, row in enumerate(splits(n))]


def exchange(xs: Tensors, dim: int) -> Tensors:
    n = len(xs)
    cut = [torch.split(x, row, dim) for x, row in zip(xs, splits(n), strict=True)]
    return [torch.cat([cut[source][target] for source in range(n)], dim) for target in range(n)]


def shapes(n: int) -> Tensors:
    return [numbers(rank, *[(2, 3), (), (0, 2), (5,)][rank]) for rank in range(n)]


class Case:
    """A collective on every rank, with what a single process makes of the same tensors.

    Args:
        given: Every rank's tensor, from the number of ranks.
        call: The collective, on one rank, from its tensor, the group and the rank.
        reference: From the tensors of all ranks, every rank's output.
        once: Whether what follows is the same on all ranks, and counts once.
    """

    def __init__(
        self,
        given: Callable[[int], Tensors],
        call: Callable[[Tensor, Any, int], Tensor],
        reference: Callable[[Tensors], Tensors],
        once: bool = False,
    ) -> None:
        self.given, self.call, self.reference, self.once = given, call, reference, once


def gather_case(kind: str, dim: int, told: bool, once: bool) -> Case:
    return Case(
        lambda n: pieces(n, kind, dim),
        lambda x, group, rank: all_gather(
            x, group, dim, lengths(group.size(), kind) if told else None, replicated=once
        ),
        lambda xs: [torch.cat(xs, dim)] * len(xs),
        once,
    )


def scatter_case(kind: str, dim: int, told: bool) -> Case:
    return Case(
        lambda n: wholes(n, kind, dim),
        lambda x, group, rank: reduce_scatter(x, group, dim, lengths(group.size(), kind) if told else None),
        lambda xs: list(sum(xs).split(lengths(len(xs), kind), dim)),  # type: ignore[union-attr]
    )


def exchange_case(dim: int, told: bool) -> Case:
    def call(x: Tensor, group: Any, rank: int) -> Tensor:
        rows = splits(group.size())
        return all_to_all(x, group, rows[rank], dim, [row[rank] for row in rows] if told else None)

    return Case(lambda n: to_exchange(n, dim), call, lambda xs: exchange(xs, dim))


def shift_case(by: int, given: Callable[[int], Tensors], told: bool) -> Case:
    def call(x: Tensor, group: Any, rank: int) -> Tensor:
        return shift(x, group, by, x.shape if told else None)

    return Case(given, call, lambda xs: [xs[(rank - by) % len(xs)].clone() for rank in range(len(xs))])


CASES = {
    "all_reduce": Case(alike, lambda x, g, r: all_reduce(x, g), lambda xs: [sum(xs)] * len(xs)),  # type: ignore[list-item]
    "all_reduce, numbers": Case(scalars, lambda x, g, r: all_reduce(x, g), lambda xs: [sum(xs)] * len(xs)),  # type: ignore[list-item]
    "all_reduce, replicated": Case(
        alike,
        lambda x, g, r: all_reduce(x, g, replicated=True),
        lambda xs: [sum(xs)] * len(xs),  # type: ignore[list-item]
        once=True,
    ),
    "all_gather, numbers": Case(
        scalars, lambda x, g, r: all_gather(x, g), lambda xs: [torch.stack(xs)] * len(xs)
    ),
    **{
        f"all_gather, {kind}, dim {dim}, {'sizes, ' * told}{'replicated' * once}": gather_case(
            kind, dim, told, once
        )
        for kind in ("equal", "unequal", "none")
        for dim, told, once in ((0, False, False), (-1, True, False), (1, False, True))
    },
    **{
        f"reduce_scatter, {kind}, dim {dim}": scatter_case(kind, dim, kind == "unequal")
        for kind in ("equal", "unequal", "none")
        for dim in (0, -1)
    },
    **{
        f"all_to_all, dim {dim}, {'received' * told}": exchange_case(dim, told)
        for dim, told in ((0, False), (1, True))
    },
    "broadcast": Case(alike, lambda x, g, r: broadcast(x, g, 1), lambda xs: [xs[1].clone()] * len(xs)),
    "broadcast, replicated": Case(
        alike,
        lambda x, g, r: broadcast(x, g, 1, replicated=True),
        lambda xs: [xs[1].clone()] * len(xs),
        once=True,
    ),
    **{f"shift by {by}": shift_case(by, alike, by == 1) for by in (1, -1, 2, 5, 0)},
    "shift, shapes that differ": shift_case(1, shapes, False),
}


def part_of_loss(y: Tensor, seed: int) -> Tensor:
    return (numbers(seed, *y.shape) * y.sin()).sum()


def on_a_rank(name: str, layout: str = "contiguous") -> tuple[Tensor, Tensor]:
    """Output and gradient of the input."""
    case, group, rank = CASES[name], World.WORLD, dist.get_rank()
    x = case.given(dist.get_world_size())[rank]
    if layout == "strided":  # the same numbers, every second of a larger tensor
        x = torch.stack([x, x], -1)[..., 0]
    x.requires_grad_()
    y = case.call(x, group, rank)
    part_of_loss(y, 100 if case.once else 100 + rank).backward()
    assert x.grad is not None
    return y.detach(), x.grad


def in_one_process(name: str, n: int) -> tuple[Tensors, Tensors]:
    case = CASES[name]
    xs = [x.requires_grad_() for x in case.given(n)]
    ys = case.reference(xs)
    parts = [part_of_loss(y, 100 + rank) for rank, y in enumerate(ys)]
    (parts[0] if case.once else sum(parts)).backward()  # type: ignore[union-attr]
    return [y.detach() for y in ys], [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process(ranks: Any, name: str, n: int, layout: str) -> None:
    found = ranks(n).run(on_a_rank, name, layout)
    ys, gradients = in_one_process(name, n)
    close([y for y, _ in found], ys)
    close([gradient for _, gradient in found], gradients)
    assert all(y.is_contiguous() for y, _ in found)


def slope(name: str) -> tuple[float, float]:
    """The derivative of the sum of all ranks' parts, when all inputs go in a direction: by backward, by differences."""
    case, group, rank = CASES[name], World.WORLD, dist.get_rank()
    x = case.given(dist.get_world_size())[rank]
    direction = numbers(50 + rank, *x.shape)

    def along(way: float) -> Tensor:
        return part_of_loss(case.call((x + way * direction).requires_grad_(), group, rank), 100 + rank)

    leaf = x.clone().requires_grad_()
    part_of_loss(case.call(leaf, group, rank), 100 + rank).backward()
    assert leaf.grad is not None
    step = 1e-5
    both = torch.stack([(leaf.grad * direction).sum(), (along(step) - along(-step)).detach() / (2 * step)])
    dist.all_reduce(both)
    return float(both[0]), float(both[1])


@pytest.mark.parametrize(
    "name",
    ["all_gather, unequal, dim 0, ", "reduce_scatter, unequal, dim 0", "all_to_all, dim 0, ", "shift by 1"],
)
def test_gradients_are_slopes(ranks: Any, name: str) -> None:
    by_backward, by_differences = ranks(3).run(slope, name)[0]
    assert by_backward == pytest.approx(by_differences, rel=1e-8)


# Regions of divided layers


def divided_region(begins: str, dim: int) -> tuple[Tensor, Tensor]:
    """A sum of terms of which every rank computes one, of the whole of an ``x`` or of a piece of it."""
    group, rank, n = World.WORLD, dist.get_rank(), dist.get_world_size()
    x = wholes(n, "unequal", dim)[0].requires_grad_()
    begun = enter(x, group) if begins == "enter" else split(x, group, dim, lengths(n, "unequal"))
    whole = all_reduce(part_of_loss(begun, rank), group, replicated=True)
    (
        whole.square() + x.cos().sum()
    ).backward()  # what follows, and what goes past the region, is alike on all
    assert x.grad is not None
    return whole.detach(), x.grad


@pytest.mark.parametrize(("begins", "dim"), [("enter", 0), ("split", 0), ("split", -1)])
@pytest.mark.parametrize("n", [2, 3])
def test_around_divided_layers_all_hold_the_whole_gradient(ranks: Any, n: int, begins: str, dim: int) -> None:
    x = wholes(n, "unequal", dim)[0].requires_grad_()
    parts = [x] * n if begins == "enter" else list(x.split(lengths(n, "unequal"), dim))
    whole = sum(part_of_loss(part, rank) for rank, part in enumerate(parts))
    assert isinstance(whole, Tensor)
    (whole.square() + x.cos().sum()).backward()
    for value, gradient in ranks(n).run(divided_region, begins, dim):
        close(value, whole.detach())
        close(gradient, x.grad)


def messages_of_replicated() -> bool:
    """Rank 0 alone goes backward."""
    group = World.WORLD
    x = numbers(0, 4).requires_grad_()
    outputs = [
        all_reduce(x, group, replicated=True),
        all_gather(x, group, replicated=True),
        broadcast(x, group, replicated=True),
    ]
    if dist.get_rank() == 0:
        torch.cat(outputs).sum().backward()
    return True


def test_backward_of_what_is_replicated_sends_nothing(ranks: Any) -> None:
    assert ranks(2).run(messages_of_replicated, timeout=20) == [True, True]


# Types


def of_type(dtype: torch.dtype) -> list[Tensor]:
    group, rank, n = World.WORLD, dist.get_rank(), dist.get_world_size()
    x = torch.arange(6).view(2, 3).to(dtype) + rank
    if dtype.is_floating_point:
        x.requires_grad_()
    outputs = [
        all_reduce(x, group),
        all_gather(x, group),
        all_gather(x[: rank + 1], group),
        reduce_scatter(x, group, 1),
        all_to_all(x, group, [1] * n),
        broadcast(x, group),
        split(x, group, 1),
        shift(x, group),
        enter(x, group),
    ]
    if x.requires_grad:
        torch.cat([y.reshape(-1) for y in outputs]).sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
    return [y.detach() for y in outputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32])
def test_any_type_and_numbers_without_gradients(ranks: Any, dtype: torch.dtype) -> None:
    exact = ranks(2).run(of_type, torch.float64)
    for found, expected in zip(ranks(2).run(of_type, dtype), exact, strict=True):
        assert {y.dtype for y in found} == {dtype}
        close([y.double() for y in found], expected)


# What the host does


def small_beside_large(dtype: torch.dtype) -> list[float]:
    """A sum of 2 / eps, 1 and 1, in which ones are lost if each addition is rounded to ``dtype``."""
    group, large = dist.group.WORLD, 2.0 / torch.finfo(dtype).eps
    own = torch.tensor([large if dist.get_rank() == 1 else 1.0], dtype=dtype)
    x = torch.zeros(1, dtype=dtype, requires_grad=True)
    broadcast(x, group).backward(own)
    assert x.grad is not None
    sums = [all_reduce(own, group), all_gather(reduce_scatter(own, group), group), broadcast(x.grad, group)]
    return [float(each) - large for each in sums]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_added_in_float32(ranks: Any, dtype: torch.dtype) -> None:
    for found in ranks(3).run(small_beside_large, dtype):
        assert found == [2.0] * 3


def keeps_its_argument() -> bool:
    x = numbers(0, 4).requires_grad_() * 2
    kept, y = weakref.ref(x), shift(x, dist.group.WORLD)
    del x
    return y.requires_grad and kept() is not None


def test_shift_keeps_no_tensor_for_backward(ranks: Any) -> None:
    assert ranks(2).run(keeps_its_argument) == [False] * 2


def standing_still() -> tuple[float, float]:
    """Seconds that count as rank 0's own while rank 1 comes late, forward and backward."""
    group, rank, watch = World.WORLD, dist.get_rank(), HostStopwatch()
    x = numbers(0, 4).requires_grad_()
    began = time.perf_counter()
    with watch:
        time.sleep(0.3 * rank)
        y = all_gather(x, group, sizes=[4, 4])
        time.sleep(0.3 * rank)
        y.sum().backward()
        watch.mark()
    return watch.taken().value(), time.perf_counter() - began


def test_waiting_is_no_work(ranks: Any) -> None:
    own, elapsed = ranks(2).run(standing_still)[0]
    assert elapsed > 0.5
    assert own < 0.3


def in_a_compiled_function() -> tuple[Tensor, Tensor]:
    group, rank = World.WORLD, dist.get_rank()
    torch.compiler.reset()

    def distances(x: Tensor) -> Tensor:
        return (x[:, None] - all_gather(x * 2, group)[None]).square().sum()

    results = []
    for function in (distances, torch.compile(distances, backend="eager")):
        x = numbers(rank, rank + 1, 3).requires_grad_()
        function(x).backward()
        assert x.grad is not None
        results.append(x.grad)
    return results[0], results[1]


def test_a_compiled_function_does_the_same(ranks: Any) -> None:
    for plain, compiled in ranks(2).run(in_a_compiled_function):
        close(compiled, plain)


def penalized_on_a_rank(name: str) -> Tensor:
    """The gradient of a function of gradients."""
    case, group, rank = CASES[name], World.WORLD, dist.get_rank()
    x = case.given(dist.get_world_size())[rank].requires_grad_()
    loss = part_of_loss(case.call(x, group, rank), 100 if case.once else 100 + rank)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    part_of_loss(gradient, 200 + rank).backward()
    assert x.grad is not None
    return x.grad


def penalized_in_one_process(name: str, n: int) -> Tensors:
    case = CASES[name]
    xs = [x.requires_grad_() for x in case.given(n)]
    parts = [part_of_loss(y, 100 + rank) for rank, y in enumerate(case.reference(xs))]
    loss = parts[0] if case.once else sum(parts)
    gradients = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)  # type: ignore[arg-type]
    sum(part_of_loss(each, 200 + rank) for rank, each in enumerate(gradients)).backward()  # type: ignore[union-attr]
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gradients_are_those_of_one_process(ranks: Any, name: str) -> None:
    close(ranks(3).run(penalized_on_a_rank, name), penalized_in_one_process(name, 3))


# Alone


@pytest.mark.parametrize(
    "call",
    [
        all_reduce,
        all_gather,
        reduce_scatter,
        functools.partial(all_to_all, splits=[2]),
        broadcast,
        split,
        shift,
        enter,
    ],
    ids=lambda call: getattr(call, "__name__", "all_to_all"),
)
def test_alone_it_is_the_identity(call: Any) -> None:
    x = numbers(0, 2, 3).requires_grad_()
    y = call(x, group=None)
    assert y is not x
    assert y.equal(x)
    (y * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(3).all()


def test_numbers_alone_come_as_one_dimension() -> None:
    assert all_gather(torch.tensor(2.0), None).tolist() == [2.0]


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: all_gather(x, None, 2), r"all_gather: a tensor of shape \(2, 3\) has no dimension 2"),
        (lambda x: split(x.sum(), None), r"split: a tensor of shape \(\) has no dimension 0"),
        (lambda x: all_gather(x, None, sizes=[1, 1]), r"\[1, 1\] are not the lengths of 1 pieces"),
        (lambda x: all_gather(x, None, sizes=[3]), r"length is said to be 3.*\(2, 3\), has 2"),
        (lambda x: reduce_scatter(x, None, 1, [4]), r"pieces of \[4\] come to 4, but dimension 1.*has 3"),
        (lambda x: all_to_all(x, None, [-2]), r"\[-2\] are not the lengths"),
        (lambda x: broadcast(x, None, 1), "there is no rank 1 in a group of 1"),
        (lambda x: all_reduce(x, object()), "this rank is not in the group"),
    ],
    ids=placeless,
)
def test_what_one_rank_can_see_is_refused_before_anything_is_sent(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call(torch.zeros(2, 3))


def raised(call: Callable[[int], Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call(dist.get_rank())
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda rank: all_gather(torch.zeros(2, 3 + rank), World.WORLD),
            "all_gather: the tensors may differ along dimension 0 only, and are float32 (2, 3), without gradient on "
            "rank 0; float32 (2, 4), without gradient on rank 1",
        ),
        (
            lambda rank: all_gather(torch.zeros([2] * (1 + rank)), World.WORLD),
            "float32 (2,), without gradient on rank 0; float32 (2, 2), without gradient on rank 1",
        ),
        (
            lambda rank: all_to_all(torch.zeros(2, 3 + rank), World.WORLD, [1, 1]),
            "all_to_all: the tensors may differ along dimension 0 only",
        ),
        (
            lambda rank: shift(torch.zeros(2, dtype=(torch.float32, torch.float64)[rank]), World.WORLD),
            "shift: the tensors are of different types: float32 (2,), without gradient on rank 0; float64 (2,)",
        ),
        (
            lambda rank: all_gather(torch.zeros(2, requires_grad=rank == 1), World.WORLD),
            "must require a gradient or none: float32 (2,), without gradient on rank 0; float32 (2,), with gradient "
            "on rank 1. Call requires_grad_()",
        ),
    ],
    ids=["another shape", "more dimensions", "all_to_all", "another type", "without a gradient"],
)
def test_what_the_ranks_tell_each_other_is_refused_on_all(ranks: Any, call: Any, message: str) -> None:
    first, second = ranks(2).run(raised, call)
    assert message in first
    assert first == second


def call_outside_of_the_group() -> str:
    group = dist.new_group([0])
    try:
        if dist.get_rank() == 0:
            return str(all_reduce(torch.ones(()), group).item())
        return raised(lambda rank: all_reduce(torch.ones(()), group))
    finally:
        if dist.get_rank() == 0:
            dist.destroy_process_group(group)


def test_a_group_of_others_is_refused(ranks: Any) -> None:
    first, second = ranks(2).run(call_outside_of_the_group)
    assert first == "1.0"
    assert "this rank is not in the group" in second


def gather_without_grad_mode() -> bool:
    x = torch.ones(2, requires_grad=dist.get_rank() == 0)
    with torch.no_grad():
        return all_gather(x, World.WORLD).requires_grad


def test_without_grad_mode_nothing_requires_a_gradient(ranks: Any) -> None:
    assert ranks(2).run(gather_without_grad_mode) == [False, False]


def short_numbers() -> list[list[Any]]:
    rank, group = dist.get_rank(), World.WORLD
    own = torch.arange(4, dtype=torch.int16).view(2, 2) + 10 * rank
    found = [
        all_gather(own, group),
        all_gather(own[: 2 - rank], group, sizes=[2, 1]),
        all_to_all(own, group, [1 + rank, 1 - rank], received=[1, 2] if rank == 0 else [1, 0]),
        broadcast(own, group, 1),
        shift(own, group),
    ]
    assert all(each.dtype == torch.int16 for each in found)
    return [each.tolist() for each in found]


def test_numbers_that_backends_do_not_know_are_moved(ranks: Any) -> None:
    first, second = [[0, 1], [2, 3]], [[10, 11], [12, 13]]
    assert ranks(2).run(short_numbers) == [
        [first + second, first + second[:1], first[:1] + second, second, second],
        [first + second, first + second[:1], first[1:], second, first],
    ]
