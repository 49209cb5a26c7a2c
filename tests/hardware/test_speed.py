from __future__ import annotations

import pytest
import torch

from evener.hardware import speed
from evener.hardware.speed import best_seconds, dtypes_of, measure, product_speed

CPU = torch.device("cpu")


class Clock:
    """Goes forward with each call that is measured, by the times that are given and then by the last."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)
        self.now, self.calls = 100.0, 0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1


def test_the_best_counts_and_the_first_does_not() -> None:
    clock = Clock(0.001, 0.04, 0.03, 0.05)
    assert best_seconds(clock.work, CPU, clock) == pytest.approx(0.03)


def test_it_ends_with_the_time_or_the_rounds() -> None:
    slow, fast = Clock(7.0), Clock(1e-6)
    assert best_seconds(slow.work, CPU, slow) == pytest.approx(7.0)
    assert slow.calls == 2
    best_seconds(fast.work, CPU, fast)
    assert fast.calls == 1 + 20


def test_a_product_grows_until_it_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that does 2e10 operations a second, 512 rows take 13 ms."""
    clock, sizes = Clock(0.0), []

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        sizes.append(len(a))
        clock.now += 2 * len(a) ** 3 / 2e10

    monkeypatch.setattr(speed.torch, "mm", mm)
    assert product_speed(CPU, "float32", clock) == pytest.approx(2e10)
    assert set(sizes) == {256, 512}


def test_what_the_first_product_loads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 256 rows would do, and what was measured would be the time to start a product."""
    clock, sizes = Clock(0.0), []

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        clock.now += 2 * len(a) ** 3 / 2e10 + 1e-4 + (0.0 if sizes else 0.5)
        sizes.append(len(a))

    monkeypatch.setattr(speed.torch, "mm", mm)
    assert product_speed(CPU, "float32", clock) == pytest.approx(2e10, rel=0.01)
    assert set(sizes) == {256, 512}


def test_tensor_cores_are_used_for_their_type_alone_and_then_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(
        speed, "_product", lambda *_: lambda: seen.append(torch.get_float32_matmul_precision())
    )
    before = torch.get_float32_matmul_precision()
    for dtype in ("float32", "tf32"):
        seen.clear()
        product_speed(CPU, dtype)
        assert set(seen) == {"high" if dtype == "tf32" else "highest"}
    assert torch.get_float32_matmul_precision() == before


def test_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_BUDGET_SECONDS", 0.01)
    monkeypatch.setattr(speed, "_HOST_NBYTES", 1 << 20)
    found = measure(CPU)
    assert found.products.keys() == set(dtypes_of(CPU))
    assert all(1e6 < each < 1e15 for each in found.products.values())
    assert found.copy is not None
    assert 1e6 < found.copy < 1e14
    assert (found.from_host, found.to_host, found.error) == (None, None, "")


def test_a_device_that_fails_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(device: torch.device, dtype: str, clock: object) -> float:
        if dtype == "float32":
            raise RuntimeError("no kernel image is available\nfor execution")
        return 1.0

    monkeypatch.setattr(speed, "product_speed", product)
    found = measure(CPU)
    assert found.products == {"float64": 1.0}
    assert found.error == "RuntimeError: no kernel image is available"


@pytest.mark.gpu
def test_a_card() -> None:
    found = measure(torch.device("cuda", 0))
    assert found.error == ""
    assert found.products.keys() == set(dtypes_of(torch.device("cuda", 0)))
    assert found.products["float16"] >= 0.8 * found.products["float32"]
    assert found.copy is not None
    assert found.from_host is not None
    assert found.to_host is not None
    assert found.copy > found.from_host > 1e8
