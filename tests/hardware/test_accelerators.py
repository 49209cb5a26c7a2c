"""Kinds of devices by what PyTorch has for all of them; a made-up one stands for those that are not here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.components.amp.policy import able
from evener.core.config.run_config import RunConfig
from evener.distributed import environment, session
from evener.distributed.backends import backend_of
from evener.distributed.environment import RANKS_PER_CARD, Environment, check_processes, default_processes
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.hardware import accelerators
from evener.hardware import memory_size as memory
from evener.hardware.memory.step_usage import Lap
from evener.hardware.memory.usage import CudaUsage, gauge_of

CPU, XPU = torch.device("cpu"), torch.device("xpu", 1)
BYTES = {"allocated": (300, 900), "reserved": (1000, 1000), "inactive_split": (50, 60)}


class Module:
    """In place of ``torch.xpu``."""

    def __init__(self) -> None:
        self.states = [torch.tensor([n], dtype=torch.uint8) for n in range(2)]
        self.seeded: list[int] = []
        self.fractions: list[float] = []

    def device_count(self) -> int:
        return 2

    def get_device_name(self, device: torch.device) -> str:
        return f"Ponte Vecchio {device.index}"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 10, 64

    def get_rng_state(self, device: Any) -> torch.Tensor:
        return self.states[torch.device(device).index]

    def set_rng_state(self, state: torch.Tensor, device: Any) -> None:
        self.states[torch.device(device).index] = state

    def manual_seed(self, seed: int) -> None:
        self.seeded.append(seed)

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        sizes = {f"{k}_bytes": {"all": {"current": c, "peak": p}} for k, (c, p) in BYTES.items()}
        return {**sizes, "num_alloc_retries": 2, "num_ooms": 1}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    original = torch.get_device_module
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda device: made if torch.device(device).type == "xpu" else original(device),
    )
    return made


def test_a_kind_is_counted_named_and_measured_by_its_own_module(module: Module) -> None:
    assert (accelerators.count("xpu"), accelerators.count("hpu")) == (2, 0)
    assert (accelerators.name_of(XPU), accelerators.name_of(CPU)) == ("Ponte Vecchio 1", "")
    assert accelerators.memory_of(XPU) == (10, 64)
    assert memory.memory_nbytes(XPU, ranks=4) == 64
    assert [accelerators.is_accelerator(torch.device(kind)) for kind in ("cpu", "meta", "mps")] == [
        False,
        False,
        True,
    ]


def test_generators_of_every_kind_are_kept(module: Module) -> None:
    kept = accelerators.generator_states(XPU)
    assert [len(kept), len(accelerators.generator_states(CPU))] == [2, 1]
    before = torch.get_rng_state()
    with accelerators.generators_kept(XPU):
        torch.rand(1)
        module.states[1] = torch.tensor([9], dtype=torch.uint8)
        accelerators.seed(XPU, 7)
        accelerators.seed(CPU, 8)
    assert module.states[1].item() == 1
    assert module.seeded == [7]
    assert torch.equal(torch.get_rng_state(), before)
    module.states[1] = torch.tensor([9], dtype=torch.uint8)
    accelerators.draw_from(kept, XPU)
    assert module.states[1].item() == 1


def test_where_an_allocator_tells_it_is_read(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the nested form where the kind has one, else by the flat one, which says the same."""
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: None)
    flat = {
        f"{k}_bytes.all.{w}": n
        for k, both in BYTES.items()
        for w, n in zip(("current", "peak"), both, strict=True)
    }
    flat |= {"num_alloc_retries": 2, "num_ooms": 1}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: flat)
    for device in (XPU, torch.device("mps")):
        gauge = gauge_of(device)
        assert isinstance(gauge, CudaUsage)
        assert gauge.lap() == Lap(300, 900, 1000, 50, 2, 1)


def test_where_no_allocator_tells_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> None:
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "memory_stats", refuse)
    assert not isinstance(gauge_of(torch.device("mps")), CudaUsage)
    assert type(gauge_of(CPU)) is type(gauge_of(torch.device("mps")))


def test_ranks_take_the_devices_of_the_kind_that_was_asked_for(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(session, "has_float64", lambda device: device.index == 1)
    place = SimpleNamespace(local_world_size=2, local_rank=1, launcher="torchrun")
    assert default_processes("xpu") == 2
    opened = Session("xpu", environment=Environment())
    opened.environment = place  # type: ignore[assignment]
    assert opened._take_device() == XPU
    assert taken == [XPU]
    place.local_rank = 0
    with pytest.raises(ConfigurationError, match="xpu:0 has no float64"):
        opened._take_device()
    place.local_world_size, place.local_rank = 6, 5
    monkeypatch.setenv(RANKS_PER_CARD, "3")
    assert opened._take_device() == XPU
    monkeypatch.delenv(RANKS_PER_CARD)
    monkeypatch.setenv(f"{RANKS_PER_CARD}S", "3")
    with pytest.raises(
        ConfigurationError, match=f"{RANKS_PER_CARD}S, which nothing reads; write {RANKS_PER_CARD}"
    ):
        opened._take_device()
    monkeypatch.delenv(f"{RANKS_PER_CARD}S")
    place.local_world_size = 3
    with pytest.raises(ConfigurationError, match="asked for 3 processes on xpu, 2 GPUs here"):
        opened._take_device()


def test_a_rank_that_is_shown_one_card_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "count", lambda kind: 1)
    monkeypatch.setattr(environment, "count", lambda kind: 1)
    third = Environment(rank=2, world_size=4, local_rank=2, local_world_size=4, launcher="slurm")
    assert session.card_of(third, "cuda") == 0
    with pytest.raises(ConfigurationError, match="asked for 4 processes on cuda, 1 GPUs here"):
        session.card_of(replace(third, launcher="single"), "cuda")


def test_a_kind_that_is_not_here_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match=r"1 processes on mps, of which torch .* sees none here"):
        check_processes(1, "mps")


@pytest.mark.parametrize("name", ["cpu", "cuda", "xpu", "mps", "hpu", None])
def test_kinds_that_torch_has_may_be_asked_for(name: str | None) -> None:
    assert RunConfig(device=name).device == name
    assert name is None or accelerators.kind_of(name) == name


@pytest.mark.parametrize("name", ["meta", "cuda:1"])
def test_what_is_no_kind_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="it must be a type of device without an index"):
        RunConfig(device=name)


def test_a_kind_of_another_spelling_leads_to_that_of_torch() -> None:
    with pytest.raises(ConfigurationError, match="no device is called 'Cuda': it is called cuda here"):
        RunConfig(device="Cuda")


def test_what_torch_does_not_know_is_refused_when_it_is_taken() -> None:
    for take in (default_processes, lambda kind: check_processes(1, kind), Session):
        with pytest.raises(ConfigurationError, match="knows no device of kind 'tpu': ask for cpu"):
            take(RunConfig(device="tpu").device)


def test_each_kind_has_the_backend_that_moves_its_tensors() -> None:
    assert [backend_of(kind) for kind in ("cpu", "cuda", "xpu")] == ["gloo", "nccl", "xccl"]
    with pytest.raises(
        ConfigurationError, match=r"of 'mps' between ranks \(its default, gloo, moves those of cpu"
    ):
        backend_of("mps")
    with pytest.raises(ConfigurationError, match="moves tensors of 'mtia' between ranks: use one process"):
        backend_of("mtia")


def test_precision_of_an_unknown_kind_is_what_was_asked_for() -> None:
    assert able(XPU)[0] == "fp32"
    assert "tf32" not in able(XPU)


def test_a_cpu_has_float64() -> None:
    assert accelerators.has_float64(CPU)
