"""Measured speeds: of a device whose speeds are known, by a clock that only its work moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from evener.hardware import speed
from evener.hardware.speed import best_seconds, dtypes_of, measure, product_speed

CPU, CARD = torch.device("cpu"), torch.device("meta")
"""Tensors of the meta device have no numbers, so it stands for an accelerator with work that nobody does."""

OPERATIONS = {torch.float64: 5e9, torch.float32: 2e10, torch.bfloat16: 8e10, torch.float16: 4e10}
"""Operations per second of a product in each data type."""
COPIES = {("cpu", "cpu"): 3e9, ("meta", "meta"): 5e11, ("cpu", "meta"): 2e10, ("meta", "cpu"): 1e10}
"""Bytes per second that are copied from one device to another."""


class Clock:
    """Advances with each call that is measured, by the given times and then by the last of them."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)
        self.now, self.calls = 100.0, 0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1


class Device:
    """Replaces torch's products and copies by ones that take a known time.

    A CPU works at once. An accelerator only launches its work: the clock advances when it is waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(0.0)
        self.pending = 0.0
        self.rows: list[int] = []
        self.operands: list[tuple[Tensor, Tensor, Tensor]] = []
        self.overhead: Callable[[int], float] = lambda rows: 0.0
        """Seconds that a product of so many rows takes besides its operations."""
        monkeypatch.setattr(speed.torch, "mm", self._mm)
        monkeypatch.setattr(Tensor, "copy_", lambda target, source, **options: self._copy(target, source))
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch.accelerator, "synchronize", self._synchronize)

    def _takes(self, device: torch.device, seconds: float) -> None:
        if device.type == "cpu":
            self.clock.now += seconds
        else:
            self.pending += seconds

    def _mm(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self._takes(a.device, 2 * len(a) ** 3 / OPERATIONS[a.dtype] + self.overhead(len(a)))
        self.rows.append(len(a))
        self.operands = [(a, b, out)]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        kinds = source.device.type, target.device.type
        self._takes(CARD if "meta" in kinds else CPU, source.nbytes / COPIES[kinds])

    def _synchronize(self, device: torch.device) -> None:
        assert device == CARD
        self.clock.now += self.pending
        self.pending = 0.0


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Sets the precision of float32 products in a block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_the_shortest_call_counts_and_the_warm_up_does_not() -> None:
    clock = Clock(0.001, 0.04, 0.03, 0.05)
    assert best_seconds(clock.work, CPU, clock) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("seconds", "timed"),
    [((7.0,), 1), ((1e-6,), 20), ((0.06,), 3), ((7.0, 0.06), 3), ((1e-6, 0.149, 0.002), 2)],
    ids=str,
)
def test_calls_end_after_20_or_after_the_time_without_the_warm_up(
    seconds: Sequence[float], timed: int
) -> None:
    clock = Clock(*seconds)
    assert best_seconds(clock.work, CPU, clock) == pytest.approx(min(seconds[1:] or seconds))
    assert clock.calls == 1 + timed


def test_a_call_that_the_clock_does_not_see_has_a_time_above_zero() -> None:
    clock = Clock(0.0)
    assert best_seconds(clock.work, CPU, clock) == 1e-9


def test_one_call_is_timed_however_late_it_is() -> None:
    """Here each reading of the clock comes 0.2 seconds after the one before, as on a host that is overloaded."""
    readings = iter(range(100))
    assert best_seconds(lambda: None, CPU, lambda: 0.2 * next(readings)) == pytest.approx(0.2)


def test_a_product_grows_until_it_takes_long_enough(known: Device) -> None:
    """On a device that does 2e10 operations a second, 256 rows take 1.7 ms and 512 rows 13 ms."""
    assert product_speed(CPU, "float32", known.clock) == pytest.approx(2e10)
    assert sorted(set(known.rows)) == [256, 512]


def test_a_product_grows_to_the_largest_size_and_no_further(
    known: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATIONS, torch.float32, 1e12)
    monkeypatch.setattr(speed, "_LARGEST", 1024)
    assert product_speed(CPU, "float32", known.clock) == pytest.approx(1e12)
    assert sorted(set(known.rows)) == [256, 512, 1024]


def test_the_largest_matrices_fit_on_a_small_card() -> None:
    assert 3 * 4 * speed._LARGEST**2 < 1 << 30


def test_what_the_first_product_loads_does_not_count(known: Device) -> None:
    """Otherwise 256 rows would do, and the time to launch a product would be a part of the result."""
    known.overhead = lambda rows: 1e-4 if known.rows else 0.5
    assert product_speed(CPU, "float32", known.clock) == pytest.approx(2e10, rel=0.01)
    assert sorted(set(known.rows)) == [256, 512]


def test_the_first_product_of_a_size_does_not_count(known: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU chooses a kernel for each size. With that in its time, 512 rows would do on a device that needs 1024."""
    known.overhead = lambda rows: 0.0 if rows in known.rows else 0.5
    monkeypatch.setitem(OPERATIONS, torch.float32, 1e11)
    assert product_speed(CPU, "float32", known.clock) == pytest.approx(1e11)
    assert max(known.rows) == 1024


def test_matrices_are_random_and_different(known: Device) -> None:
    product_speed(CPU, "float32", known.clock)
    ((a, b, out),) = known.operands
    assert min(float(a.std()), float(b.std())) > 0.2
    assert not torch.equal(a, b)
    assert len({x.data_ptr() for x in (a, b, out)}) == 3


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize(
    ("dtype", "within"), [("float32", "highest"), ("tf32", "high"), ("bfloat16", "highest")]
)
def test_tensor_cores_multiply_float32_for_tf32_alone(
    known: Device, dtype: str, within: str, before: str
) -> None:
    seen = set()

    def overhead(rows: int) -> float:
        seen.add(torch.get_float32_matmul_precision())
        return 0.0

    known.overhead = overhead
    with precision(before):
        product_speed(CPU, dtype, known.clock)
        assert (seen, torch.get_float32_matmul_precision()) == ({within}, before)


def test_a_product_that_fails_leaves_the_precision_as_it_was(known: Device) -> None:
    def overhead(rows: int) -> float:
        raise RuntimeError("out of memory")

    known.overhead = overhead
    with precision("medium"):
        with pytest.raises(RuntimeError, match="out of memory"):
            product_speed(CPU, "tf32", known.clock)
        assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize(
    ("device", "hip", "major", "dtypes"),
    [
        ("cpu", None, 9, ("float64", "float32", "bfloat16")),
        ("cuda", None, 9, ("float32", "tf32", "bfloat16", "float16")),
        ("cuda", None, 8, ("float32", "tf32", "bfloat16", "float16")),
        ("cuda", None, 7, ("float32", "float16")),
        ("cuda", "6.4", 9, ("float32", "bfloat16", "float16")),
        ("xpu", None, 9, ("float32", "bfloat16", "float16")),
    ],
)
def test_a_device_is_measured_in_the_types_that_it_is_trained_in(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, major: int, dtypes: tuple[str, ...]
) -> None:
    """ROCm calls its devices cuda. Cards before Ampere emulate bfloat16 and have no TF32."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert dtypes_of(torch.device(device)) == dtypes


def test_all_speeds_of_a_cpu(known: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy reads and writes each byte, and there is no other memory to copy from."""
    monkeypatch.setattr(speed, "_HOST_NBYTES", 1 << 20)
    found = measure(CPU, known.clock)
    assert found.device == "cpu"
    assert found.products == pytest.approx({"float64": 5e9, "float32": 2e10, "bfloat16": 8e10})
    assert found.copy == pytest.approx(2 * 3e9)
    assert (found.from_host, found.to_host, found.error) == (None, None, "")


def test_all_speeds_of_an_accelerator_which_is_waited_for(
    known: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_CARD_NBYTES", 1 << 20)
    found = measure(CARD, known.clock)
    assert found.products == pytest.approx({"float32": 2e10, "bfloat16": 8e10, "float16": 4e10})
    assert found.copy == pytest.approx(2 * 5e11)
    assert (found.from_host, found.to_host) == (pytest.approx(2e10), pytest.approx(1e10))
    assert found.error == ""
    assert {x.device for x in known.operands[0]} == {CARD}


def test_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real products, copies and clock. Only a broken unit could leave these bounds."""
    monkeypatch.setattr(speed, "_BUDGET_SECONDS", 0.01)
    monkeypatch.setattr(speed, "_HOST_NBYTES", 1 << 20)
    found = measure(CPU)
    assert found.products.keys() == set(dtypes_of(CPU))
    assert all(1e6 < each < 1e15 for each in found.products.values())
    assert found.copy is not None
    assert 1e6 < found.copy < 1e14
    assert (found.from_host, found.to_host, found.error) == (None, None, "")


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RuntimeError("no kernel image is available\nfor execution"),
            "RuntimeError: no kernel image is available",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (MemoryError(), "MemoryError: "),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_device_that_fails_keeps_the_speeds_before_the_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def product(device: torch.device, dtype: str, clock: object) -> float:
        if dtype == "float32":
            raise error
        return 1.0

    monkeypatch.setattr(speed, "product_speed", product)
    found = measure(CPU)
    assert (found.products, found.copy, found.error) == ({"float64": 1.0}, None, text)


def test_a_copy_that_fails_leaves_the_products(known: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", failing(RuntimeError("Cannot access accelerator device")))
    found = measure(CARD, known.clock)
    assert found.products.keys() == {"float32", "bfloat16", "float16"}
    assert found.error == "RuntimeError: Cannot access accelerator device"


def test_a_bug_is_not_taken_for_a_device_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "product_speed", failing(TypeError("a bug")))
    with pytest.raises(TypeError, match="a bug"):
        measure(CPU)


@pytest.mark.gpu
def test_a_card() -> None:
    device = torch.device("cuda", 0)
    found = measure(device)
    assert found.error == ""
    assert found.products.keys() == set(dtypes_of(device))
    assert {name: each for name, each in found.products.items() if not 1e11 < each < 1e16} == {}
    assert found.products["float16"] >= 0.8 * found.products["float32"]
    assert found.products.get("tf32", math.inf) >= 0.8 * found.products["float32"]
    assert found.copy is not None
    assert found.from_host is not None
    assert found.to_host is not None
    assert 1e14 > found.copy > found.from_host > 1e8
    assert found.copy > found.to_host > 1e8
