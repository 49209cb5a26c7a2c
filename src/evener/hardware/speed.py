"""Measures how fast a device multiplies matrices and copies memory.

The fastest of several rounds counts, since other programs can only slow a round down. Matrices are enlarged until a
product takes so long that the time to launch it is negligible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evener.hardware.survey.facts import Speed

_LEAST_SECONDS = 0.01
"""Minimum duration of one call, so that the time to launch it and to wait for it is negligible."""
_BUDGET_SECONDS = 0.15
_ROUNDS = 20
_SMALLEST, _LARGEST = 256, 8192
"""Minimum and maximum number of rows of a matrix. Three of the largest take 800 MB in float32."""
_HOST_NBYTES, _CARD_NBYTES = 64 << 20, 256 << 20

Clock = Callable[[], float]


def measure(device: torch.device, clock: Clock = time.perf_counter) -> Speed:
    """Measures the speed of a device in one or two seconds. An error ends the measurement and sets ``error``."""
    speed = Speed(str(device))
    try:
        for dtype in dtypes_of(device):
            speed.products[dtype] = product_speed(device, dtype, clock)
        return replace(speed, **_transfers(device, clock))
    except (RuntimeError, MemoryError) as error:  # an unsupported card, or one whose memory is full
        return replace(speed, error=first_line(error))


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """Returns the data types used for training on a device. ``tf32`` is float32 on NVIDIA's tensor cores."""
    if device.type == "cpu":
        return ("float64", "float32", "bfloat16")
    reduced = ("bfloat16", "float16")
    if device.type != "cuda" or torch.version.hip:
        return ("float32", *reduced)
    major, _ = torch.cuda.get_device_capability(device)
    return ("float32", "tf32", *reduced) if major >= 8 else ("float32", "float16")


def product_speed(device: torch.device, dtype: str, clock: Clock = time.perf_counter) -> float:
    """Measures the floating-point operations per second of a product of square matrices, ``2 n^3`` each."""
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    with _tensor_cores(dtype == "tf32"):
        rows = _SMALLEST
        product = _product(rows, kind, device)
        product()  # the first product of a data type loads library code
        while _seconds(product, device, clock) < _LEAST_SECONDS and rows < _LARGEST:
            rows *= 2
            product = _product(rows, kind, device)
            product()
        return 2 * rows**3 / best_seconds(product, device, clock)


def _product(rows: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Creates a product of random matrices. With constant ones a GPU draws less power, and is faster than in
    training.
    """
    a, b = torch.rand(2, rows, rows, device=device).to(dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


@contextmanager
def _tensor_cores(used: bool) -> Iterator[None]:
    """Sets whether float32 products in the block use TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if used else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _transfers(device: torch.device, clock: Clock) -> dict[str, Any]:
    if device.type == "cpu":
        source, target = torch.ones(2, _HOST_NBYTES, dtype=torch.uint8)
        return {"copy": 2 * _bytes_a_second(source, target, device, clock)}
    here, there = torch.ones(2, _CARD_NBYTES, dtype=torch.uint8, device=device)
    host = torch.ones(_CARD_NBYTES, dtype=torch.uint8).pin_memory()
    return {
        "copy": 2 * _bytes_a_second(here, there, device, clock),
        "from_host": _bytes_a_second(host, here, device, clock),
        "to_host": _bytes_a_second(here, host, device, clock),
    }


def _bytes_a_second(source: Tensor, target: Tensor, device: torch.device, clock: Clock) -> float:
    return source.numel() / best_seconds(lambda: target.copy_(source, non_blocking=True), device, clock)


def best_seconds(call: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Returns the shortest time of several calls, in seconds, after one warm-up call.

    Calls up to 20 times, but starts no further call after 0.15 seconds.
    """
    _seconds(call, device, clock)
    began = clock()
    times: list[float] = []
    while not times or (len(times) < _ROUNDS and clock() - began < _BUDGET_SECONDS):
        times.append(_seconds(call, device, clock))
    return max(min(times), 1e-9)


def _seconds(call: Callable[[], object], device: torch.device, clock: Clock) -> float:
    start = clock()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock() - start


def first_line(error: BaseException) -> str:
    """Returns the kind of an error, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
