"""Computes with deterministic algorithms and a fixed number of threads, for runs that are exact in bits.

A kernel may divide a sum among its threads, and then rounds otherwise with another number of threads. The cores of a
machine are divided among its ranks, so that their number of threads would depend on the number of ranks. So a CPU rank
computes with one thread, unless the user has set ``OMP_NUM_THREADS``: several ranks then use several cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from evener.core.process_variables import variable_set
from evener.distributed.environment import SHARED_CORES
from evener.errors import TaskError
from evener.hardware import accelerators
from evener.hardware.survey.host import processor_name

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def fixed_threads() -> int:
    """Returns the number of threads of a CPU rank that does not depend on the number of ranks."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) and SHARED_CORES not in os.environ else 1


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Context in which an operation without a deterministic algorithm raises an error, no kernel is chosen by its
    speed, and the number of threads is fixed. Restores what it changes."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        if device.type == "cuda" and _WORKSPACE not in os.environ:
            stack.enter_context(variable_set(_WORKSPACE, ":4096:8"))
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark = False
        if not accelerators.is_accelerator(device):
            torch.set_num_threads(fixed_threads())
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=warns)
            cudnn.benchmark = before[1]
            torch.set_num_threads(threads)


@contextmanager
def naming_nondeterministic() -> Iterator[None]:
    """Context in which the error of an operation without a deterministic algorithm says what to do.

    Raises:
        TaskError: Instead of PyTorch's error.
    """
    try:
        yield
    except RuntimeError as error:
        told = str(error)
        if "use_deterministic_algorithms" not in told:
            raise
        operation = told.split(" does not have a deterministic implementation")[0].splitlines()[0]
        raise TaskError(
            f"exact=bits computes with deterministic algorithms alone, and PyTorch has none for this operation here: "
            f"{operation}. Compute it in another way, or on another device, or leave exact out"
        ) from error


def place_of_rounding(device: torch.device) -> dict[str, str]:
    """Describes what must be alike on all ranks, so that the same operation rounds in the same way."""
    products = f"float32 products in {torch.get_float32_matmul_precision()} precision"
    if accelerators.is_accelerator(device):
        tf32 = ", convolutions in TF32" if torch.backends.cudnn.allow_tf32 else ""
        name = accelerators.name_of(device) or device.type
        return {"device": name, "precision of products": products + tf32}
    kind = f"{processor_name() or 'cpu'} with {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": kind,
        "number of threads": str(torch.get_num_threads()),
        "precision of products": products,
    }
