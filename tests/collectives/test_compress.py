from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.collectives.base import PieceKey, key_of
from evener.collectives.compress import Compressed, Feedback, Int8, TopK, decode, encode
from evener.collectives.registry import COMPRESSIONS, check_compression, make
from evener.collectives.shared_memory import multi_host as two_level_module
from evener.collectives.shared_memory.all_reduce import SharedMemory, shared_nbytes
from evener.errors import ConfigurationError
from tests.tiers import ALWAYS, NIGHTLY, crossed


def terms(numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    scales = 10.0 ** torch.randint(-2, 2, (numel,), generator=generator)
    return [
        (torch.randn(numel, generator=generator) * scales).to(dtype) for _ in range(dist.get_world_size())
    ]


def compressed(compression: str, inner: str, steps: int) -> tuple[list[bytes], float, float]:
    """Results of equal steps as bytes; the error of the first result, and of the mean, to the sum's largest."""
    results = []
    mine = terms(3001)[dist.get_rank()]
    expected = torch.stack(terms(3001)).double().sum(0)
    tensor = torch.empty_like(mine)
    with make(inner, timeout_seconds=20, compression=compression) as all_reduce:
        assert not all_reduce.exact
        assert all_reduce.words == f"{inner}, compressed: {compression}"
        for _ in range(steps):
            tensor.copy_(mine)
            all_reduce(tensor, "a").wait()
            results.append(tensor.clone())
    mean = torch.stack(results).double().mean(0)
    first_error = (results[0] - expected).abs().max() / expected.abs().max()
    mean_error = (mean - expected).abs().max() / expected.abs().max()
    return [result.numpy().tobytes() for result in results], float(first_error), float(mean_error)


def passes_integers_through() -> None:
    for compression in COMPRESSIONS:
        with make("shared-memory", timeout_seconds=20, compression=compression) as all_reduce:
            tensor = torch.arange(1000)
            all_reduce(tensor).wait()
            assert torch.equal(tensor, dist.get_world_size() * torch.arange(1000))
            all_reduce(torch.empty(0)).wait()


def infinity_stays_seen() -> None:
    for compression in ("fp16", "int8", "fp8"):
        with make("shared-memory", timeout_seconds=20, compression=compression) as all_reduce:
            tensor = torch.ones(4)
            if dist.get_rank() == 1:
                tensor[2] = torch.inf
            all_reduce(tensor).wait()
            assert not tensor[2].isfinite()
            tensor.fill_(1.0)
            all_reduce(tensor).wait()
            assert tensor.tolist() == pytest.approx([dist.get_world_size()] * 4, rel=0.02)


def infinities_are_left_behind() -> None:
    """More of them than top-k sends, and as many sums as there may be overflows of float16 in a row."""
    for compression in ("int8", "fp8", "top-k"):
        with make("shared-memory", timeout_seconds=20, compression=compression) as all_reduce:
            found = []
            for value in (torch.inf, torch.nan, -torch.inf, 1.0):
                tensor = torch.full((1000,), value if dist.get_rank() else 1.0)
                all_reduce(tensor, "a").wait()
                found.append(bool(tensor.isfinite().all()))
            assert found == [False, False, False, True]


def sent_nbytes(compression: str) -> int:
    with make("shared-memory", timeout_seconds=20, compression=compression) as all_reduce:
        all_reduce(torch.ones(2560)).wait()
        return all_reduce.sent_nbytes


def held_nbytes(compression: str) -> int:
    """What an all-reduce holds for a tensor of 2560 elements, beside what the inner one holds."""
    with make("shared-memory", timeout_seconds=20, compression=compression) as all_reduce:
        assert isinstance(all_reduce, Compressed)
        for _ in range(2):
            all_reduce(torch.ones(2560), "a").wait()
        return all_reduce.held_nbytes - all_reduce.inner.held_nbytes


def sends_the_largest() -> list[float]:
    with TopK(SharedMemory(timeout_seconds=20), ratio=0.25) as all_reduce:
        tensor = torch.tensor([0.0, 5.0, 1.0, 0.0] if dist.get_rank() else [3.0, 0.0, -1.0, 2.0])
        all_reduce(tensor).wait()
        return tensor.tolist()


def refuses_a_bad_ratio() -> None:
    with SharedMemory(timeout_seconds=20) as inner, pytest.raises(ConfigurationError, match=r"not 1\.5"):
        TopK(inner, ratio=1.5)


BOUNDS = {
    "fp16": (1e-3, 1e-3),
    "bf16": (1e-2, 1e-2),
    "int8": (0.03, 3e-3),
    "fp8": (0.1, 1e-2),
    "top-k": (1.0, 0.6),
}


@pytest.mark.parametrize(
    ("compression", "inner"), crossed(COMPRESSIONS, ["shared-memory", "ring"], lambda _: (ALWAYS, NIGHTLY))
)
def test_same_bits_and_small_errors(ranks: Any, compression: str, inner: str) -> None:
    results = ranks(3).run(compressed, compression, inner, 12)
    bits = [bits for bits, _, _ in results]
    assert bits.count(bits[0]) == 3
    most_first, most_mean = BOUNDS[compression]
    for _, first_error, mean_error in results:
        assert first_error < most_first
        assert mean_error < most_mean


def test_what_is_left_out_is_sent_later(ranks: Any) -> None:
    """Error feedback: the mean of equal steps comes closer to the sum the more there are."""
    for compression in ("int8", "fp8", "top-k"):
        _, _, after_few = ranks(2).run(compressed, compression, "shared-memory", 4)[0]
        _, _, after_many = ranks(2).run(compressed, compression, "shared-memory", 400)[0]
        assert after_many < after_few / 5


def test_what_is_no_float_is_summed_exactly(ranks: Any) -> None:
    ranks(2).run(passes_integers_through)


def test_an_infinity_is_not_hidden_and_does_not_stay(ranks: Any) -> None:
    ranks(2).run(infinity_stays_seen)


def test_infinities_do_not_stay_in_what_is_sent_later(ranks: Any) -> None:
    ranks(2).run(infinities_are_left_behind)


@pytest.mark.parametrize(
    ("compression", "nbytes"),
    [
        ("fp16", 2 * 2560),
        ("bf16", 2 * 2560),
        ("int8", 2560 + 10 * 4),  # and a float32 for each block
        ("fp8", (1 + 1 / 2) * (2560 + 10 * 4)),  # the terms, and half of the sums
        ("top-k", 2 * 26 * (4 + 4)),  # values and places, with room for those of the other rank
    ],
)
def test_the_bytes_that_are_sent_are_counted(ranks: Any, compression: str, nbytes: int) -> None:
    assert ranks(2).run(sent_nbytes, compression) == [nbytes] * 2


@pytest.mark.parametrize(
    ("compression", "nbytes"),
    [("bf16", 0), ("int8", 4 * 2560), ("fp8", 4 * (2560 + 1280)), ("top-k", 4 * 2560)],
)
def test_what_is_kept_to_be_sent_later_is_held(ranks: Any, compression: str, nbytes: int) -> None:
    assert ranks(2).run(held_nbytes, compression) == [nbytes] * 2


def test_top_k_sends_each_rank_s_largest(ranks: Any) -> None:
    assert ranks(2).run(sends_the_largest) == [[3.0, 5.0, 0.0, 0.0]] * 2


def test_ratio_is_checked(ranks: Any) -> None:
    ranks(2).run(refuses_a_bad_ratio)


def two_tensors_at_one_address(keys: tuple[str | None, str | None]) -> list[list[float]]:
    """Two tensors take turns in one buffer, as freed memory does; of each a fourth is sent at a time."""
    results = []
    with TopK(SharedMemory(timeout_seconds=20), ratio=0.25) as all_reduce:
        buffer = torch.empty(4)
        for _ in range(2):
            for key, values in zip(keys, ([4.0, 3.0, 0.0, 0.0], [0.0, 0.0, 80.0, 70.0]), strict=True):
                buffer.copy_(torch.tensor(values))
                all_reduce(buffer, key).wait()
                results.append(buffer.tolist())
    return results


def test_what_is_left_of_a_tensor_stays_its_own(ranks: Any) -> None:
    """The second time 4 of the one tensor has 3 + 3 beside it, and 80 of the other has 70 + 70."""
    first, second = [[8.0, 0, 0, 0], [0, 0, 160.0, 0]], [[0, 12.0, 0, 0], [0, 0, 0, 280.0]]
    assert ranks(2).run(two_tensors_at_one_address, ("small", "large")) == [first + second] * 2


def test_without_a_key_nothing_is_remembered(ranks: Any) -> None:
    first = [[8.0, 0, 0, 0], [0, 0, 160.0, 0]]
    assert ranks(2).run(two_tensors_at_one_address, (None, None)) == [first + first] * 2


def test_memory_does_not_grow_with_fresh_tensors(ranks: Any) -> None:
    def kept() -> int:
        with Int8(SharedMemory(timeout_seconds=20)) as all_reduce:
            alive = []
            for _ in range(20):
                for key in ("a", ("b", "c"), None):
                    alive.append(torch.ones(300))
                    all_reduce(alive[-1], key).wait()
            return len(all_reduce.feedback)

    assert ranks(2).run(kept) == [2, 2]


def left_of(feedback: Feedback, key: Any, numel: int = 4) -> float:
    """Marks what is kept, and returns the mark of the last time."""
    left = feedback.residual(torch.zeros(numel), key)
    mark = float(left[0])
    left.fill_(1.0)
    return mark


def test_each_part_is_remembered_in_one_tensor() -> None:
    """Buckets that are cut anew forget the former ones, and no others."""
    feedback = Feedback()
    assert [left_of(feedback, key) for key in (("a", "b"), ("c",), "d")] == [0, 0, 0]
    assert [left_of(feedback, key) for key in (("a", "b"), ("c",), "d")] == [1, 1, 1]
    assert left_of(feedback, ("a",)) == left_of(feedback, ("b", "c")) == 0
    assert len(feedback) == 3
    assert left_of(feedback, ("a", "b")) == 0
    assert left_of(feedback, "d") == 1


def test_a_tensor_of_another_length_is_another() -> None:
    feedback = Feedback()
    left_of(feedback, "a")
    assert left_of(feedback, "a", numel=5) == 0
    assert len(feedback) == 1


def test_what_belongs_to_parameters_goes_with_them() -> None:
    feedback, stays, goes = Feedback(), torch.zeros(4), torch.zeros(4)
    assert left_of(feedback, key_of([stays])) == left_of(feedback, key_of([goes])) == 0
    assert left_of(feedback, key_of([stays])) == left_of(feedback, key_of([goes])) == 1
    del goes
    assert left_of(feedback, key_of([torch.zeros(4)])) == 0
    assert len(feedback) == 2
    assert left_of(feedback, key_of([stays])) == 1


def test_fp8_holds_what_it_can() -> None:
    """All its numbers times a power of two survive; 448 is the largest, and zeros stay zeros."""
    levels = torch.tensor([448.0, -416.0, 1.0, 0.0, 2.0**-6]).repeat(52)[:256][None]
    blocks = torch.cat([levels, levels * 2.0**20, torch.zeros(1, 256)])
    assert encode(blocks).shape == (3, 260)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(decode(encode(blocks.to(dtype)), dtype), blocks.to(dtype))


def test_pieces_of_a_tensor_are_remembered_side_by_side() -> None:
    """And forgotten together when their parameters are in another tensor."""
    feedback = Feedback()
    first, second = (PieceKey(("a", "b"), place) for place in (0, 1))
    feedback.residual(torch.ones(3), first).fill_(1.0)
    feedback.residual(torch.ones(2), second).fill_(2.0)
    assert feedback.residual(torch.ones(3), first).tolist() == [1.0] * 3
    assert feedback.residual(torch.ones(2), second).tolist() == [2.0] * 2
    feedback.residual(torch.ones(1), PieceKey(("b", "c"), 0))
    assert len(feedback) == 1


TWO_HOSTS = ((0, 1), (2, 3))


def between_hosts(compression: str, hosts: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
    """The first error and that of the mean of some steps, to the largest; bits; words; whether it is exact."""
    mine = terms(3001)[dist.get_rank()]
    expected = torch.stack(terms(3001)).double().sum(0)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_level_module, "hosts_of", lambda group: hosts)
        patch.setattr(two_level_module, "PART_NBYTES", 4096)
        with make(timeout_seconds=20, compression=compression) as all_reduce:
            for _ in range(12):
                tensor = mine.clone()
                all_reduce(tensor, "a").wait()
                results.append(tensor)
            words, exact = all_reduce.words, all_reduce.exact
            kept = all_reduce.held_nbytes > shared_nbytes(2) * 2
            assert kept == (len(hosts) > 1 and dist.get_rank() in [host[0] for host in hosts])
    scale = expected.abs().max()
    mean = torch.stack(results).double().mean(0)
    errors = [float((each - expected).abs().max() / scale) for each in (results[0], mean)]
    return *errors, torch.stack(results).numpy().tobytes(), words, exact


@pytest.mark.parametrize("compression", ["int8-between", "fp8-between"])
def test_between_hosts_alone(ranks: Any, compression: str) -> None:
    """Non-leaders know that it is not exact, and what is lost of each part of the buffer is sent later."""
    of_ranks = ranks(4).run(between_hosts, compression, TWO_HOSTS)
    kind = compression.removesuffix("-between")
    for first, mean, bits, words, exact in of_ranks:
        assert 1e-5 < first < BOUNDS[kind][0]
        assert mean < first / 3
        assert bits == of_ranks[0][2]
        assert words == f"two-level (between hosts ring, compressed: {kind}, inside all shared-memory)"
        assert not exact


def test_between_hosts_nothing_is_lost_on_one(ranks: Any) -> None:
    for first, _, _, words, exact in ranks(2).run(between_hosts, "int8-between", ((0, 1),)):
        assert first < 1e-6
        assert exact
        assert words == "two-level (on one host, inside all shared-memory)"


def test_only_two_level_has_something_between_hosts() -> None:
    with pytest.raises(
        ConfigurationError, match="'ring' has no such part: leave --allreduce out, or use 'int8'"
    ):
        check_compression("int8-between", "ring")
    check_compression("int8-between", "two-level")
