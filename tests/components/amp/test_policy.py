"""What a model computes in: the policy alone, on one device."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.amp.policy import Precision, able, agreed, products_of
from evener.errors import ConfigurationError
from evener.training.engine import Engine
from tests import tasks
from tests.engines import engine_of

CPU = ("fp32", "bf16", "bf16-true", "fp16", "fp16-true")
AMPERE = ("bf16", "bf16-true", "fp16", "fp16-true", "fp32", "tf32")
VOLTA = ("fp16", "fp16-true", "fp32")


class Seen(nn.Module):
    """Remembers in which types its layer was called and answered."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.types: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.types.append((x.dtype, y.dtype))
        return y


def model() -> nn.Sequential:
    return nn.Sequential(
        Seen(nn.Linear(3, 4)), nn.Sequential(nn.Tanh(), Seen(nn.Linear(4, 4))), nn.Linear(4, 2)
    )


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "modules", "first", "second"),
    [
        ("bf16", (), (F32, BF16), (BF16, BF16)),
        ("fp16", (), (F32, F16), (F16, F16)),
        ("bf16", ("1=fp32",), (F32, BF16), (F32, F32)),
        ("bf16", ("1.*=fp32", "1.1=fp16"), (F32, BF16), (F32, F16)),
        ("fp32", ("1=bf16",), (F32, F32), (F32, BF16)),
        (None, ("0=bf16",), (F32, BF16), (F32, F32)),
        ("fp32", (), (F32, F32), (F32, F32)),
    ],
)
def test_modules_compute_in_their_precision(name: Any, modules: Any, first: Any, second: Any) -> None:
    own = model()
    Precision.from_settings(name, modules).apply(own)
    outputs = own(torch.ones(5, 3))
    assert outputs.dtype == F32
    assert own[0].types == [first]
    assert own[1][1].types == [second]
    outputs.sum().backward()
    assert {p.grad.dtype for p in own.parameters() if p.grad is not None} == {F32}


def test_a_copy_computes_with_its_own_weights() -> None:
    own = model()
    Precision.from_settings("bf16", ("1=fp32",)).apply(own)
    other = copy.deepcopy(own)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(torch.ones(5, 3)).any()
    assert own(torch.ones(5, 3)).any()


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (
            ("2.*=fp32",),
            "precision_of names '2.*', which fits no module of the model; there are 0, 0.layer, 1,",
        ),
        (
            ("blocks=fp32",),
            "names 'blocks', which is a list of modules that is never called itself: name what is in it",
        ),
    ],
)
def test_a_name_that_would_do_nothing_is_refused(modules: Any, words: str) -> None:
    own = model()
    own.add_module("blocks", nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        Precision.from_settings("bf16", modules).apply(own)


def test_a_module_whose_forward_nobody_calls_is_refused_after_the_first_step() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.layer.weight, self.layer.bias)

    with (
        Engine(
            tasks._task(model=Uses), device="cpu", precision="bf16", precision_of=("layer=fp32",)
        ) as engine,
        pytest.raises(
            ConfigurationError, match="precision_of names layer, which no rank has called in a step"
        ),
    ):
        engine.step(next(engine.batches()))


@pytest.mark.parametrize("name", ["bf16", "fp32", "tf32", "fp16"])
def test_weights_of_another_type_are_refused(name: str) -> None:
    own = model()
    own[2].double()
    with pytest.raises(
        ConfigurationError, match=r"weights are of float32, and 2.weight is of float64, and 1 more"
    ):
        Precision.from_settings(name, ()).apply(own)


def test_frozen_weights_may_be_of_any_type() -> None:
    own = nn.Sequential(nn.Linear(3, 3).bfloat16().requires_grad_(False), nn.Linear(3, 2))
    Precision.from_settings("bf16", ()).apply(own)
    assert own(torch.ones(1, 3)).dtype == F32


@pytest.mark.parametrize(
    ("name", "of_ranks", "chosen"),
    [
        ("auto", [AMPERE, AMPERE], "bf16"),
        ("auto", [AMPERE, VOLTA], "fp16"),
        ("auto", [CPU, CPU], "fp32"),
        ("auto", [CPU, VOLTA], "fp32"),
        ("auto", [AMPERE, CPU], "fp32"),
        ("fp16", [CPU, VOLTA], "fp16"),
        (None, [CPU], None),
    ],
)
def test_the_ranks_agree(name: str | None, of_ranks: Any, chosen: str | None) -> None:
    assert agreed(Precision.from_settings(name, ()), of_ranks).name == chosen


@pytest.mark.parametrize("asked", [("tf32", ()), ("fp32", ("0=bf16",)), ("bf16-true", ())])
def test_what_a_device_lacks_is_refused_with_its_rank(asked: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"is not one that the device of rank 1 computes in; it has fp16"
    ):
        agreed(Precision.from_settings(*asked), [AMPERE, VOLTA])


def test_a_processor_has_no_tf32() -> None:
    assert "tf32" not in able(torch.device("cpu"))
    with pytest.raises(
        ConfigurationError, match="precision tf32 is not one that the device of rank 0 computes in"
    ):
        engine_of("plain", dtype=None, precision="tf32")


@pytest.mark.parametrize(
    ("name", "matrices", "convolutions"), [("fp32", "highest", False), ("tf32", "high", True)]
)
def test_products_are_the_processes_own_again(name: str, matrices: str, convolutions: bool) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with products_of(name):
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (
            matrices,
            convolutions,
        )
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_an_engine_puts_them_back() -> None:
    before = torch.backends.cudnn.allow_tf32
    with engine_of("plain", dtype=None, precision="fp32"):
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before


def test_outputs_losses_and_targets_stay_float32() -> None:
    with engine_of("plain", dtype=None, precision="bf16-true", steps=2) as engine:
        assert {p.dtype for p in engine.model.parameters()} == {BF16}
        batch = next(engine.batches())
        assert engine.model(batch.micro_batches[0].inputs).dtype == F32
        fine = engine.step(batch).loss
        assert fine != float(torch.tensor(fine).bfloat16())  # a loss of bfloat16 would have 8 bits
        assert engine.predict(engine.task.train).dtype == F32


def test_a_loop_of_the_users_own_computes_in_it() -> None:
    found = []
    for precision in ("bf16", "fp32"):
        with engine_of("plain", dtype=None, precision=precision) as engine:
            micro = next(engine.batches()).micro_batches[0]
            outputs = engine.model(micro.inputs)
            assert outputs.dtype == F32
            engine.backward(nn.functional.cross_entropy(outputs, micro.targets, reduction="sum"), micro.size)
            engine.update()
            found.append(outputs)
    assert 1e-5 < (found[0] - found[1]).abs().max() < 0.05


def test_float16_is_refused_in_a_loop_of_the_users_own() -> None:
    with engine_of("plain", dtype=None, precision="fp16") as engine:
        micro = next(engine.batches()).micro_batches[0]
        with pytest.raises(ConfigurationError, match=r"fp16 goes with engine\.step"):
            engine.backward(engine.model(micro.inputs).sum(), micro.size)
