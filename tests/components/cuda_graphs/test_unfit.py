"""Operators that a graph cannot repeat are refused before they run. The meta device stands in for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from evener.components.cuda_graphs.unfit import OperatorWatch, ScopeWatch, UnfitError, hooked_module
from evener.nn.context import current, resumed
from evener.nn.dropout import Dropout

META = torch.device("meta")


def test_ordinary_layers_pass() -> None:
    layers = (
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    model = nn.Sequential(*layers).to(META)
    x, y = torch.zeros(5, 1, 6, 6, device=META), torch.zeros(5, dtype=torch.long, device=META)
    with OperatorWatch(META, {}):
        loss = F.cross_entropy(model(x) * 2 + 1, y, reduction="sum", label_smoothing=0.1)
        torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x: x * torch.tensor(0.5), "host's memory"),
        (lambda x: x + torch.ones(3).to(META), "host's memory"),
        (lambda x: torch.arange(3), "host's memory"),
    ],
    ids=["a number", "a copy", "made there"],
)
def test_tensors_on_the_host_are_refused(forward: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(UnfitError, match=words), OperatorWatch(META, {}):
        forward(torch.zeros(3, device=META))


@pytest.mark.parametrize(
    "forward",
    [lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x if x.sum() > 0 else -x, lambda x: x.sum().item()],
    ids=["mask", "nonzero", "branch", "number"],
)
def test_what_the_host_waits_for_is_refused(forward: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnfitError, match="the host waits"), OperatorWatch(torch.device("cpu"), {}):
        forward(torch.ones(3))


def test_writes_into_what_is_no_buffer_are_refused_before_they_are_made() -> None:
    kept = torch.ones(3)
    watch = OperatorWatch(torch.device("cpu"), {kept.untyped_storage().data_ptr(): "table"})
    with pytest.raises(UnfitError, match="in place to table, no buffer"), watch:
        kept[:1].mul_(2)
    assert kept.tolist() == [1, 1, 1]


def test_communication_is_refused_before_anything_is_sent(tmp_path: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(UnfitError, match="communicates"), OperatorWatch(torch.device("cpu"), {}):
            dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_layers_that_ask_for_the_samples_are_refused() -> None:
    watch = ScopeWatch(torch.arange(3), 0, 0)
    with resumed(watch):
        scope = current()
        assert scope is not None
        assert scope.weight == 1
        assert scope.sequence is None
        with pytest.raises(UnfitError, match="Dropout"):
            Dropout(0.5)(torch.ones(3))


def test_modules_with_hooks_are_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert hooked_module(model) == ""
    handle = model[1].register_full_backward_hook(lambda *_: None)
    assert hooked_module(model) == "1"
    handle.remove()
    model.register_forward_pre_hook(lambda *_: None)
    assert hooked_module(model) == "the model"
