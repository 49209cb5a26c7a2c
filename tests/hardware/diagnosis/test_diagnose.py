"""Every finding on a machine that has it, and none on machines that are well."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.hardware.diagnosis.diagnose import TABLE, diagnose, worst
from evener.hardware.diagnosis.findings import LEVELS
from evener.hardware.survey.facts import Library, MeasuredLink, Plan, Software, Speed, Survey, Tenant
from tests.hardware.survey.machines import (
    CU126,
    GIB,
    card,
    h100_node,
    host,
    k80,
    mixed_cards,
    on_cpu,
    software,
    survey,
)

MIB = 1 << 20
NOT_SEEN: dict[str, Any] = {"accelerator": None, "refusal": "CUDA initialization: Unexpected error"}
ROCM = Software(
    "0.1.0", "3.12.3", "2.13.0+rocm6.4", hip="6.4.1", architectures=("gfx90a", "gfx942"), accelerator="cuda"
)


def amd(number: int = 0, architecture: str = "gfx942") -> Any:
    return card(
        number, "AMD Instinct MI300X", architecture, kind="amd", memory_nbytes=192 * GIB, pcie_width=None
    )


def hidden(**variables: str) -> Survey:
    """Of two cards torch sees the second."""
    cards = (card(0, device=None), card(1, device="cuda:0"))
    return survey(*cards, ranks=1, variables=variables)


def cpu_with(**changes: Any) -> Survey:
    return on_cpu(host=host(**changes))


def links(*speeds: float) -> Survey:
    return replace(
        on_cpu(), links=tuple(MeasuredLink(0, n + 1, 1e-5, speed) for n, speed in enumerate(speeds))
    )


def speeds(*products: float, names: tuple[str, ...] = ()) -> Survey:
    cards = [card(n, *names[n : n + 1]) for n in range(len(products))]
    measured = tuple(Speed(f"cuda:{n}", {"float32": each}) for n, each in enumerate(products))
    return survey(*cards, speeds=measured)


MACHINES: list[tuple[str, Survey, dict[str, str]]] = [
    ("an ordinary CPU machine", on_cpu(), {}),
    ("two cores and two ranks", replace(cpu_with(cores=2, allowed_cores=2), plan=Plan(2, 1, "cpu")), {}),
    ("eight H100 with NVLink", h100_node(), {}),
    ("one card", survey(card()), {}),
    ("two MI300X", survey(amd(0), amd(1), software=ROCM), {}),
    # Drivers and builds
    (
        "a driver of the CUDA before",
        survey(
            card(device=None),
            software=software(nvidia_driver="515.65.01", driver_cuda="11.7", **NOT_SEEN),
        ),
        {"driver-too-old": "515.65.01 525.60.13 12.8"},
    ),
    (
        "CUDA 13 on a driver for 12",
        survey(card(device=None), software=software(cuda="13.0", **NOT_SEEN)),
        {"driver-too-old": "570.124.06 580 13.0"},
    ),
    (
        "a driver of the same major version",
        survey(card(), software=software(nvidia_driver="535.104.05", driver_cuda="12.2")),
        {"driver-behind": "535.104.05 12.8 2.13.0+cu128 12.2"},
    ),
    (
        "the same, known by the table alone",
        survey(card(), software=software(nvidia_driver="535.104.05", driver_cuda=None)),
        {"driver-behind": "535.104.05 12.8"},
    ),
    (
        "a driver that is newer",
        survey(card(), software=software(nvidia_driver="580.65.06", driver_cuda="13.0")),
        {},
    ),
    (
        "PTX on a driver that cannot translate it",
        survey(
            card(0, "RTX 5090", "sm_120"),
            software=software(
                architectures=("sm_90", "compute_90"), nvidia_driver="550.54.14", driver_cuda="12.4"
            ),
        ),
        {
            "ptx-too-new": "cuda:0 5090 sm_120 PTX 12.8 550.54.14",
            "driver-behind": "",
        },
    ),
    (
        "PTX on a driver that can",
        survey(card(0, "RTX 5090", "sm_120"), software=software(architectures=("sm_90", "compute_90"))),
        {},
    ),
    (
        "a K80 and its last driver",
        k80(),
        {"driver-too-old": "470.256.02", "card-unsupported": "0000:01:00.0 K80 sm_37"},
    ),
    ("a K80 that was hidden", replace(k80(), cards=(card(), *k80().cards), software=software()), {}),
    (
        "a card that is newer than the wheel",
        survey(
            card(0, "RTX 5090", "sm_120"),
            software=software(torch="2.13.0+cu126", cuda="12.6", architectures=CU126),
        ),
        {"card-unsupported": "cuda:0 5090 sm_120 2.13.0+cu126 sm_50"},
    ),
    (
        "a Pascal card and the newest wheel",
        survey(card(0, "Tesla P100", "sm_60")),
        {"card-unsupported": "sm_60"},
    ),
    (
        "a card of AMD that ROCm does not build for",
        survey(amd(0, "gfx1031"), software=ROCM),
        {"card-unsupported": "gfx1031 2.13.0+rocm6.4 gfx90a gfx942"},
    ),
    (
        "the same, overridden",
        survey(amd(0, "gfx1031"), software=ROCM, variables={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}),
        {},
    ),
    (
        "a kernel module from before the update",
        survey(card(device=None), software=software(nvml="Driver/library version mismatch", **NOT_SEEN)),
        {"driver-mismatch": "mismatch"},
    ),
    (
        "a CPU wheel beside a driver",
        on_cpu(
            cards=(card(0, device=None), card(1, device=None)),
            software=Software("0", "3", "2.13.0+cpu", nvidia_driver="570.1"),
        ),
        {"cpu-build": "2.13.0+cpu 2"},
    ),
    (
        "a card of NVIDIA's, and one of AMD's on the processor",
        survey(card(), replace(amd(), device=None), ranks=1),
        {},
    ),
    (
        "a container without its cards",
        survey(card(device=None), software=software(**NOT_SEEN)),
        {"no-access": "2.13.0+cu128 1 Unexpected"},
    ),
    (
        "one card hidden",
        hidden(CUDA_VISIBLE_DEVICES="1"),
        {"some-hidden": "CUDA_VISIBLE_DEVICES='1' 1 2"},
    ),
    ("one card not there, and nothing said", hidden(), {}),
    (
        "all hidden",
        survey(card(device=None), software=software(**NOT_SEEN), variables={"CUDA_VISIBLE_DEVICES": "7"}),
        {"all-hidden": "CUDA_VISIBLE_DEVICES='7' 0 1"},
    ),
    (
        "an XPU",
        survey(
            card(0, "Arc", "", kind="xpu", device="xpu:0"),
            software=Software("0", "3", "2.13.0+xpu", accelerator="xpu"),
        ),
        {"unused-kind": "1 xpu"},
    ),
    (
        "cuDNN that torch refuses",
        survey(
            card(), software=software(libraries=(Library("cuDNN", "", "9.10", "version incompatibility"),))
        ),
        {"library-refused": "cuDNN incompatibility"},
    ),
    (
        "another cuDNN",
        survey(card(), software=software(libraries=(Library("cuDNN", "9.1.0", "9.10.2.21"),))),
        {"other-library": "cuDNN 9.1.0 9.10.2.21"},
    ),
    (
        "a build without packages",
        survey(card(), software=software(libraries=(Library("cuDNN", "9.1.0"),))),
        {},
    ),
    (
        "no nvidia-ml-py",
        survey(card(), software=software(nvml="nvidia-ml-py is not installed")),
        {"nvml-not-asked": "nvidia-ml-py"},
    ),
    # Cards
    (
        "a 3090 and a 4090",
        mixed_cards(),
        {"mixed-cards": "3090 4090 24"},
    ),
    ("the same, balanced", replace(mixed_cards(), plan=Plan(2, 1, "cuda", balanced=True)), {}),
    ("the same, of which one trains", replace(mixed_cards(), plan=Plan(1, 1, "cuda")), {}),
    ("the same, and the CPU trains", replace(mixed_cards(), plan=Plan(2, 1, "cpu")), {}),
    (
        "a card with half the memory",
        survey(card(0), card(1, memory_nbytes=12 * GIB)),
        {"mixed-cards": "24 12"},
    ),
    ("a card with a display", survey(card(0), card(1, memory_nbytes=24 * GIB - 300 * MIB)), {}),
    ("prohibited", survey(card(compute_mode="prohibited")), {"compute-prohibited": "cuda:0"}),
    ("exclusive", survey(card(compute_mode="exclusive")), {"compute-exclusive": "cuda:0"}),
    ("divided", survey(card(mig=True)), {"card-partitioned": "cuda:0"}),
    (
        "in use",
        survey(card(tenants=(Tenant(77, 3 * GIB), Tenant(78, GIB)))),
        {"card-in-use": "4.0 77 78"},
    ),
    ("a display server", survey(card(tenants=(Tenant(77, 200 * MIB),))), {}),
    ("hot", survey(card(brakes=("heat",), temperature=91)), {"card-braked": "heat 91"}),
    ("errors", survey(card(memory_errors=2)), {"memory-errors": "2"}),
    ("four lanes", survey(card(pcie_width=4)), {"narrow-slot": "4 16"}),
    (
        "less power",
        survey(card(power_limit_watts=200.0, power_default_watts=350.0)),
        {"power-limit": "200 350"},
    ),
    (
        "a hot card that torch does not see",
        survey(card(0), card(1, device=None, brakes=("heat",)), ranks=1),
        {},
    ),
    # Cores and memory
    (
        "one core of time, and threads for all",
        replace(cpu_with(cpu_quota=1.0), plan=Plan(4, 16, "cpu")),
        {
            "threads-oversubscribed": "4 16 1",
            "cpu-quota": "64 1",
        },
    ),
    (
        "more ranks than cores",
        replace(cpu_with(cores=2, allowed_cores=2), plan=Plan(4, 1, "cpu")),
        {"ranks-over-cores": "4 1 2"},
    ),
    (
        "half a core more",
        replace(cpu_with(cpu_quota=1.5), plan=Plan(2, 1, "cpu")),
        {"cpu-quota": "1.5"},
    ),
    (
        "a small container",
        replace(cpu_with(memory_limit_nbytes=1 * GIB), plan=Plan(4, 1, "cpu")),
        {"little-memory": "4 256", "memory-limit": "1.0 512.0"},
    ),
    ("Docker's /dev/shm", cpu_with(shm_nbytes=64 * MIB), {"small-shm": "64"}),
    (
        "the same, without workers",
        replace(cpu_with(shm_nbytes=64 * MIB), plan=Plan(4, 1, "cpu", workers=0)),
        {},
    ),
    (
        "the same, with workers",
        replace(cpu_with(shm_nbytes=64 * MIB), plan=Plan(4, 1, "cpu", workers=2)),
        {"small-shm": "64"},
    ),
    (
        "the same, and NCCL",
        survey(card(0), card(1), host=host(shm_nbytes=64 * MIB), plan=Plan(2, 1, "cuda", workers=0)),
        {"small-shm": "64"},
    ),
    ("no vectors", cpu_with(vectors="DEFAULT"), {"no-vectors": ""}),
    ("an ARM", cpu_with(vectors="DEFAULT", machine="aarch64"), {}),
    # Variables
    (
        "launches that block",
        survey(card(), variables={"CUDA_LAUNCH_BLOCKING": "1"}),
        {"slow-variable": "CUDA_LAUNCH_BLOCKING=1"},
    ),
    ("launches that do not", survey(card(), variables={"CUDA_LAUNCH_BLOCKING": "0"}), {}),
    ("launches on the CPU", on_cpu(variables={"CUDA_LAUNCH_BLOCKING": "1"}), {}),
    (
        "details",
        on_cpu(variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
        {"slow-variable": "TORCH_DISTRIBUTED_DEBUG=DETAIL"},
    ),
    ("no details", on_cpu(variables={"TORCH_DISTRIBUTED_DEBUG": "INFO"}), {}),
    # Measured
    ("a slow card", speeds(1e13, 0.7e13, 1e13), {"uneven-cards": "cuda:1 70% float32"}),
    ("cards that differ a little", speeds(1e13, 0.9e13), {}),
    ("other cards may be slower", speeds(1e13, 0.2e13, names=("A", "B")), {"mixed-cards": ""}),
    (
        "a product that fails",
        replace(survey(card()), speeds=(Speed("cuda:0", error="RuntimeError: no kernel image"),)),
        {"card-fails": "cuda:0 RuntimeError"},
    ),
    ("a slow link", links(4e9, 4e9, 1e9), {"uneven-links": "0 3 1.00 4.00"}),
    ("links that differ a little", links(4e9, 2e9, 3e9), {}),
    ("ranks that do not start", on_cpu(links_error="RankError: no"), {"ranks-fail": "RankError"}),
]


@pytest.mark.parametrize(
    ("machine", "expected"), [case[1:] for case in MACHINES], ids=[case[0] for case in MACHINES]
)
def test_what_is_found(machine: Survey, expected: dict[str, str]) -> None:
    found = {finding.name: finding for finding in diagnose(machine)}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        for value in values.split():
            alone = rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)"
            assert re.search(alone, found[name].seen), (value, found[name].seen)
        assert found[name].remedy in found[name].message


def test_every_entry_of_the_table_is_found_on_some_machine() -> None:
    names = [name for entries in TABLE.values() for name in entries]
    assert len(set(names)) == len(names) == 34
    assert set(names) == {name for _, _, expected in MACHINES for name in expected}
    assert list(TABLE) == list(LEVELS)


def test_the_worst_comes_first_and_notes_are_no_reason_to_speak() -> None:
    both = replace(mixed_cards(), links_error="RankError: no", variables={"CUDA_VISIBLE_DEVICES": "0"})
    both = replace(both, cards=(*both.cards, card(2, device=None)))
    levels = [finding.level for finding in diagnose(both)]
    assert levels == sorted(levels, key=list(LEVELS).index)
    found = worst(both)
    assert found is not None
    assert (found.level, found.name, found.seen) == ("wrong", "ranks-fail", "RankError: no")
    assert set(levels) == set(LEVELS)
    assert worst(h100_node()) is None
    assert worst(hidden(CUDA_VISIBLE_DEVICES="1")) is None


@given(
    ranks=st.integers(1, 300),
    threads=st.integers(1, 300),
    cores=st.integers(1, 256),
    quota=st.floats(0.1, 300),
)
def test_threads_are_too_many_where_they_do_not_fit_the_cores(
    ranks: int, threads: int, cores: int, quota: float
) -> None:
    machine = replace(
        cpu_with(cores=256, allowed_cores=cores, cpu_quota=quota), plan=Plan(ranks, threads, "cpu")
    )
    names = {finding.name for finding in diagnose(machine)}
    fits = ranks * threads <= machine.host.usable_cores
    assert ("threads-oversubscribed" in names or "ranks-over-cores" in names) == (not fits)
    assert ("cpu-quota" in names) == (quota < cores)
