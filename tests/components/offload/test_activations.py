"""What forward saves goes outside once, comes back as it was, and is missed by nobody."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.offload import activations as saved
from evener.components.offload.activations import OffloadedForward, SavedOutside
from evener.components.offload.host_storage import Outside, outside_of
from evener.core.config.offload import Offload
from evener.errors import ConfigurationError, TaskError
from tests.components.offload.late import files
from tests.tasks import draws

PAGE = 4096
SIDE = 64
"""A square of so many numbers has four pages."""


@pytest.fixture(params=[False, True], ids=["computed with", "apart"])
def there(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr(saved, "SMALLEST", PAGE)
    return files(tmp_path, request.param)


def gradients(function: Callable[..., Tensor], *inputs: Tensor, there: Outside | None) -> list[Tensor]:
    """Of the inputs, through ``function``."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    if there is None:
        found = function(*leaves)
    else:
        outside = SavedOutside(there, "cpu")
        with outside.passing(leaves):
            found = function(*leaves)
    return list(torch.autograd.grad(found.sum(), leaves))


def twice(x: Tensor) -> Tensor:
    y = x.exp()
    return y * y.T + y[:32].repeat(2, 1) * y


def parts(x: Tensor) -> Tensor:
    y = x * 2
    return (y[:, ::2] * y[:, 1::2]).sin().sum() + y.expand(2, SIDE, SIDE).tanh().sum()


def complex_numbers(x: Tensor) -> Tensor:
    y = torch.complex(x, x * 2)
    return (y * y.conj()).abs().square()


def again_with_graph(x: Tensor) -> Tensor:
    y = (x * 2).sin().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    return first.exp()


def halves(x: Tensor) -> Tensor:
    return (x.bfloat16().sin().float() + nn.functional.dropout(x, 0.5)).tanh()


@pytest.mark.parametrize("function", [twice, parts, complex_numbers, again_with_graph, halves])
def test_gradients_have_the_same_bits(function: Callable[..., Tensor], there: Outside) -> None:
    torch.manual_seed(0)
    (kept,) = gradients(function, draws(SIDE, SIDE), there=None)
    torch.manual_seed(0)
    (other,) = gradients(function, draws(SIDE, SIDE), there=there)
    assert torch.equal(kept, other)
    assert there.peak


def test_memory_that_is_saved_twice_goes_once(there: Outside) -> None:
    gradients(twice, draws(SIDE, SIDE), there=there)
    assert there.peak == 4 * PAGE + 4 * PAGE  # y, and its first rows repeated


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.register_buffer("scale", torch.ones(SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)) * self.scale)
        return y


def test_weights_buffers_and_inputs_stay(there: Outside) -> None:
    model = Layers()
    OffloadedForward(SavedOutside(there, "cpu"), model)(draws(SIDE, SIDE)).sum().backward()
    assert there.peak == 2 * 4 * PAGE  # what tanh returns, and the product


def test_a_copy_of_the_model_is_one_of_its_own(there: Outside) -> None:
    model = Layers()
    model.forward = OffloadedForward(SavedOutside(there, "cpu"), model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.zero_()
    x = draws(SIDE, SIDE)
    assert not torch.equal(other(x), model(x))
    assert torch.equal(model(x), Layers.forward(model, x))
    before = there._pool._requests
    other(x).sum().backward()
    assert there._pool._requests == before


def test_what_gets_a_gradient_stays_whoever_holds_it(there: Outside) -> None:
    """Such as weights that FSDP2 has gathered, which no model lists."""
    x = draws(SIDE, SIDE).requires_grad_()
    with SavedOutside(there, "cpu").passing([]):
        (x * x.T).sum()
    assert not there.peak


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _ = ctx.saved_tensors  # and those before set out
        raise ValueError("no gradient")


def test_what_is_on_its_way_back_when_backward_fails_is_waited_for(there: Outside) -> None:
    x = draws(SIDE, SIDE).requires_grad_()
    outside = SavedOutside(there, "cpu")

    def fails() -> None:
        with outside.passing([x]):
            y: Any = Failing.apply(x.exp().sin().exp() * 1)  # type: ignore[no-untyped-call]
        y.sum().backward()

    for _ in range(3):
        with pytest.raises(ValueError, match="no gradient"):
            fails()
        gc.collect()
    assert torch.equal(*(gradients(twice, draws(SIDE, SIDE), there=each)[0] for each in (there, None)))


def test_nothing_goes_where_there_is_no_backward(there: Outside) -> None:
    model = Layers()
    forward = OffloadedForward(SavedOutside(there, "cpu"), model)
    with torch.no_grad():
        forward(draws(SIDE, SIDE))
    model.eval()
    forward(draws(SIDE, SIDE))
    assert not there.peak
    with pytest.raises(ConfigurationError, match=r"no rank has called the model .* leave activations out"):
        forward.check(lambda called: [called, False])


def test_a_step_like_the_one_before_makes_no_room(there: Outside) -> None:
    model = Layers()
    forward = OffloadedForward(SavedOutside(there, "cpu"), model)
    for _ in range(4):
        forward(draws(SIDE, SIDE)).sum().backward()
    gc.collect()
    assert there.peak == 2 * 4 * PAGE


def test_an_error_in_the_midst_gives_the_rooms_back(there: Outside) -> None:
    model = Layers()
    forward = OffloadedForward(SavedOutside(there, "cpu"), model)

    def failing() -> None:
        (forward(draws(SIDE, SIDE)) @ torch.ones(3)).sum()

    for _ in range(4):
        with pytest.raises(RuntimeError, match="size mismatch"):
            failing()
        gc.collect()
    forward(draws(SIDE, SIDE)).sum().backward()
    gc.collect()
    assert len(there._there) == 0
    assert there.peak <= 4 * 4 * PAGE  # two of the pass before may still be on their way out


def written(x: Tensor) -> Tensor:
    y = x.exp()
    y += 1
    return y


def small_written(x: Tensor) -> Tensor:
    return written(x[:2, :2])


@pytest.mark.parametrize("function", [written, small_written])
def test_a_write_in_place_is_an_error_as_without(function: Callable[..., Tensor], there: Outside) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(function, draws(SIDE, SIDE), there=None)
    words = r"modified in place after it was saved: float32 of \(\d+, \d+\) is at version 1, and was at 0"
    with pytest.raises(TaskError, match=words):
        gradients(function, draws(SIDE, SIDE), there=there)


def test_a_graph_may_be_kept(there: Outside) -> None:
    x = draws(SIDE, SIDE).requires_grad_()
    with SavedOutside(there, "cpu").passing([x]):
        y = x.exp().sin().sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_graph_that_is_never_used_goes() -> None:
    """An output that is saved by what made it would keep itself alive."""
    outside = SavedOutside(None, "meta")  # type: ignore[arg-type]  # of which nothing goes
    x = draws(3).requires_grad_()
    gc.collect()
    gc.disable()
    try:
        with outside.passing([x]):
            y = x.exp()
        left = weakref.ref(y)
        del y
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_gpu_gets_back_what_went_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "SMALLEST", PAGE)
    device = torch.device("cuda", 0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))).to(device)
    x = draws(2048, 512).to(device)
    model(x).sum().backward()
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    forward = OffloadedForward(
        SavedOutside(outside_of(device, Offload.from_settings("activations", None)), "cuda"), model
    )
    for _ in range(5):
        model.zero_grad()
        forward(x).sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, found, kept))
