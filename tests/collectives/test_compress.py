from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.collectives.compress import TopK
from evener.collectives.registry import COMPRESSIONS, make
from evener.collectives.shared_memory import SharedMemory
from evener.errors import ConfigurationError


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
        for _ in range(steps):
            tensor.copy_(mine)
            all_reduce(tensor).wait()
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
    for compression in ("fp16", "int8"):
        with make("shared-memory", timeout_seconds=20, compression=compression) as all_reduce:
            tensor = torch.ones(4)
            if dist.get_rank() == 1:
                tensor[2] = torch.inf
            all_reduce(tensor).wait()
            assert not tensor[2].isfinite()
            tensor.fill_(1.0)
            all_reduce(tensor).wait()
            assert tensor.tolist() == pytest.approx([dist.get_world_size()] * 4, rel=0.02)


def sends_the_largest() -> list[float]:
    with TopK(SharedMemory(timeout_seconds=20), ratio=0.25) as all_reduce:
        tensor = torch.tensor([0.0, 5.0, 1.0, 0.0] if dist.get_rank() else [3.0, 0.0, -1.0, 2.0])
        all_reduce(tensor).wait()
        return tensor.tolist()


def refuses_a_bad_ratio() -> None:
    with SharedMemory(timeout_seconds=20) as inner, pytest.raises(ConfigurationError, match=r"not 1\.5"):
        TopK(inner, ratio=1.5)


BOUNDS = {"fp16": (1e-3, 1e-3), "bf16": (1e-2, 1e-2), "int8": (0.03, 3e-3), "top-k": (1.0, 0.6)}


@pytest.mark.parametrize("inner", ["shared-memory", "ring"])
@pytest.mark.parametrize("compression", list(COMPRESSIONS))
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
    for compression in ("int8", "top-k"):
        _, _, after_few = ranks(2).run(compressed, compression, "shared-memory", 4)[0]
        _, _, after_many = ranks(2).run(compressed, compression, "shared-memory", 400)[0]
        assert after_many < after_few / 5


def test_what_is_no_float_is_summed_exactly(ranks: Any) -> None:
    ranks(2).run(passes_integers_through)


def test_an_infinity_is_not_hidden_and_does_not_stay(ranks: Any) -> None:
    ranks(2).run(infinity_stays_seen)


def test_top_k_sends_each_rank_s_largest(ranks: Any) -> None:
    assert ranks(2).run(sends_the_largest) == [[3.0, 5.0, 0.0, 0.0]] * 2


def test_ratio_is_checked(ranks: Any) -> None:
    ranks(2).run(refuses_a_bad_ratio)
