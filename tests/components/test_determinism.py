from __future__ import annotations

import pytest
import torch

from evener.components.determinism import deterministic, fixed_threads, naming_nondeterministic
from evener.distributed.environment import SHARED_CORES
from evener.errors import TaskError

CPU = torch.device("cpu")


def test_threads_are_the_users_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(SHARED_CORES, raising=False)
    assert fixed_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert fixed_threads() == 3
    monkeypatch.setenv(SHARED_CORES, "1")  # as the launcher divided the cores
    assert fixed_threads() == 1


def test_everything_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.set_num_threads(2)
    torch.backends.cudnn.benchmark = True
    try:
        with deterministic(CPU):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert (torch.get_num_threads(), torch.backends.cudnn.benchmark) == (1, False)
        assert not torch.are_deterministic_algorithms_enabled()
        assert (torch.get_num_threads(), torch.backends.cudnn.benchmark) == (2, True)
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.benchmark = before[1]


def test_an_operation_without_a_deterministic_algorithm_is_named() -> None:
    raises = pytest.raises(TaskError, match="for this operation here: put_")
    with deterministic(CPU), raises as caught, naming_nondeterministic():
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    assert "leave exact out" in str(caught.value)
    with pytest.raises(RuntimeError, match="another"), naming_nondeterministic():
        raise RuntimeError("another")
