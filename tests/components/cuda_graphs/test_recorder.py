"""How CUDA graphs are recorded, with PyTorch's functions in name only; and the tape that stands in for them."""

from __future__ import annotations

import gc
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor

from evener.components.cuda_graphs.recorder import CudaRecorder
from tests.components.cuda_graphs.tape import TapeRecorder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """PyTorch's functions, which take what the real ones take."""
    names = ("Stream", "stream", "current_stream", "graph_pool_handle", "CUDAGraph", "graph")
    found = {name: mock.create_autospec(getattr(torch.cuda, name)) for name in names}
    for name, function in found.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return found


def test_all_recordings_have_one_stream_and_one_pool(cuda: dict[str, Any]) -> None:
    recorder = CudaRecorder(torch.device("cuda", 0))
    with recorder.warming_up():
        cuda["stream"].assert_called_once_with(cuda["Stream"].return_value)
    results = [recorder.record(lambda number=number: number) for number in range(2)]
    assert [number for number, _ in results] == [0, 1]
    assert {graph for _, graph in results} == {cuda["CUDAGraph"].return_value}
    for call in cuda["graph"].call_args_list:
        assert call.args[1:] == (cuda["graph_pool_handle"].return_value, cuda["Stream"].return_value)
        assert call.kwargs == {"capture_error_mode": "thread_local"}


def test_a_recording_that_fails_leaves_the_generator_and_the_allocator_as_they_were(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generators = mock.create_autospec(torch.Generator), mock.create_autospec(torch.Generator)
    told = mock.Mock(side_effect=RuntimeError("not recording"))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", told, raising=False)
    collects = []

    def fail() -> NoReturn:
        collects.append(gc.isenabled())
        raise ValueError("it reads a number")

    cuda["graph"].return_value.__exit__.return_value = False
    with pytest.raises(ValueError, match="it reads a number"):
        CudaRecorder(torch.device("cuda", 1)).record(fail)
    generators[1].graphsafe_set_state.assert_called_once_with(generators[1].clone_state.return_value)
    generators[0].graphsafe_set_state.assert_not_called()
    told.assert_called_once_with(1, cuda["graph_pool_handle"].return_value)
    assert collects == [False]
    assert gc.isenabled()


@pytest.mark.gpu
def test_after_a_recording_that_failed_on_a_gpu_numbers_are_drawn_and_recorded() -> None:
    device = torch.device("cuda", 0)
    x = torch.ones(1000, device=device)
    with pytest.raises(RuntimeError):
        CudaRecorder(device).record(lambda: x.sum().item())
    assert torch.rand(3, device=device).max() < 1
    drawn, graph = CudaRecorder(device).record(lambda: torch.rand_like(x))
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(drawn.tolist())
    assert seen[0] != seen[1]
    assert set(seen[1]) != {0.0}


def test_a_tape_repeats_operators_and_no_python() -> None:
    x, kept, calls = torch.ones(3), torch.zeros(3), [0.0]

    def run() -> Tensor:
        calls[0] += 1
        kept.add_(x)
        return (x * calls[0]).sum()

    total, tape = TapeRecorder(torch.device("cpu")).record(run)
    x.fill_(2)
    tape.replay()
    assert (total.item(), calls, kept.tolist()) == (6.0, [1.0], [3.0, 3.0, 3.0])
    with pytest.raises(RuntimeError, match="capturing"):
        TapeRecorder(torch.device("cpu")).record(lambda: x.sum().item())
