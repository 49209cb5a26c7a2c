"""The table of possible findings, and the diagnosis of a machine from its survey.

The documentation page on devices shows the same table; a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evener.hardware.diagnosis import checks
from evener.hardware.diagnosis.cuda import version
from evener.hardware.diagnosis.findings import Finding, Level
from evener.hardware.survey.facts import Card, Survey

_PREVIOUS = "https://pytorch.org/get-started/previous-versions"

Look = Callable[[Survey], Iterable[str] | bool]
"""A check of a survey. Returns text with the values found, one text for each place, or a false value if all is well."""


def _cards(text: str, when: Callable[[Card], bool]) -> Look:
    """Creates a check for cards that torch sees and for which ``when`` is true.

    ``text`` is a format string with the :class:`Card` as argument 0.
    """
    return lambda survey: [text.format(card) for card in survey.seen if when(card)]


_WRONG: dict[str, tuple[Look, str]] = {
    "driver-too-old": (
        checks.too_old,
        f"update the driver, or install a torch that was built for an older CUDA ({_PREVIOUS})",
    ),
    "driver-mismatch": (
        checks.mismatch,
        "restart the machine, or load the driver's modules anew; in a container, start it again",
    ),
    "card-unsupported": (
        lambda s: [
            f"{card} is {card.architecture}, and torch {s.software.torch} has code for "
            + " ".join(s.software.architectures)
            for card in checks.running(s, "none")
        ],
        "install a torch that was built for it (for old cards the build for the oldest CUDA has the most: "
        f"{_PREVIOUS}), or hide the card with CUDA_VISIBLE_DEVICES",
    ),
    "ptx-too-new": (
        lambda s: [
            f"{card} is {card.architecture}, for which torch has PTX alone, made by CUDA {s.software.cuda}; "
            f"driver {s.software.nvidia_driver} is older"
            for card in checks.running(s, "ptx")
            if checks.behind(s)
        ],
        "update the driver, or install a torch that was built for the card",
    ),
    "no-access": (
        checks.no_access,
        "look at what torch says; in a container pass the devices on (docker run --gpus all), elsewhere see the "
        "rights on /dev/nvidia*",
    ),
    "library-refused": (
        lambda s: [f"{each.name}: {each.error}" for each in s.software.libraries if each.error and s.seen],
        "take the directory of another version out of LD_LIBRARY_PATH, and install torch again with its packages",
    ),
    "card-fails": (
        lambda s: [f"{speed.device}: {speed.error}" for speed in s.speeds if speed.error],
        "look at what torch says, and at the kernel's log (dmesg) for lines of NVRM or amdgpu",
    ),
    "ranks-fail": (
        lambda s: s.links_error,
        "look at the error; on GPUs run again with NCCL_DEBUG=INFO, and with NCCL_P2P_DISABLE=1 or "
        "NCCL_SHM_DISABLE=1 to find the way that fails",
    ),
    "compute-prohibited": (
        _cards("{0} has the compute mode prohibited", lambda c: c.compute_mode == "prohibited"),
        "nvidia-smi --compute-mode=DEFAULT, as root",
    ),
}
_SLOW: dict[str, tuple[Look, str]] = {
    "cpu-build": (checks.without_cuda, "install a torch for them (https://pytorch.org/get-started)"),
    "unused-kind": (
        lambda s: (
            s.software.accelerator not in (None, "cuda")
            and f"torch sees {len(s.seen)} of kind {s.software.accelerator}; they are left idle without --device"
        ),
        "ask for them with --device, such as --device xpu; they go through torch.accelerator, and nothing was run "
        "on any",
    ),
    "all-hidden": (
        lambda s: not s.seen and checks.hidden(s),
        "unset it, or name cards that are there, counted from 0; it is right where you want the CPU",
    ),
    "threads-oversubscribed": (
        lambda s: s.plan.threads > 1 and checks.threads(s),
        "unset OMP_NUM_THREADS, or set it to the cores of a rank",
    ),
    "little-memory": (
        lambda s: (
            s.host.usable_nbytes < checks.LEAST_NBYTES * s.plan.ranks
            and f"{s.plan.ranks} ranks have {s.host.usable_nbytes / s.plan.ranks / 2**20:.0f} MiB of memory each"
        ),
        "start fewer ranks, or raise the container's limit",
    ),
    "small-shm": (
        lambda s: (
            s.host.shm_nbytes is not None
            and s.host.shm_nbytes < checks.LEAST_SHM_NBYTES
            and (s.plan.workers != 0 or (s.plan.ranks > 1 and s.trains_on_cards))
            and f"/dev/shm has {s.host.shm_nbytes / 2**20:.0f} MiB"
        ),
        "start the container with --shm-size=8g or --ipc=host",
    ),
    "no-vectors": (
        lambda s: (
            s.host.vectors in ("DEFAULT", "NO AVX")
            and s.host.machine in ("x86_64", "AMD64")
            and f"torch computes with plain instructions on this CPU ({s.host.processor})"
        ),
        "unset ATEN_CPU_CAPABILITY; in a virtual machine, let it see the host's CPU",
    ),
    "slow-variable": (checks.slow_variables, "unset it when they are found"),
    "mixed-cards": (
        checks.mixed,
        "leave --balance out, or say auto, where ranks divide samples: each card gets what it can compute; with "
        "--strategy sharded also what it can hold",
    ),
    "card-in-use": (
        lambda s: [f"{card}: {tenants_text}" for card in s.seen if (tenants_text := checks.tenants(card))],
        "end them, or choose other cards with CUDA_VISIBLE_DEVICES",
    ),
    "card-braked": (
        checks.braked,
        "see to fans, dust, air and power cables; until then --balance auto gives it less",
    ),
    "narrow-slot": (
        _cards("{0} uses {0.pcie_width} of {0.pcie_widest} lanes", checks.narrow),
        "push the card home, or move it to a slot with all lanes; the machine's manual says which share theirs",
    ),
    "memory-errors": (
        _cards("{0} tells of {0.memory_errors} uncorrected memory errors", lambda c: c.memory_errors > 0),
        "reset the card (nvidia-smi --gpu-reset) or restart; if it happens again, have the card replaced",
    ),
    "uneven-cards": (
        checks.uneven_cards,
        "look for heat, power limits, other processes, and the slot; --balance auto gives it less",
    ),
    "uneven-links": (
        checks.uneven_links,
        "look at the topology: the way between the two may lead over another socket, or a slot with few lanes",
    ),
}
_NOTES: dict[str, tuple[Look, str]] = {
    "compute-exclusive": (
        _cards("{0} has the compute mode exclusive", lambda c: c.compute_mode == "exclusive"),
        "nvidia-smi --compute-mode=DEFAULT, as root, if that is not meant",
    ),
    "ranks-over-cores": (
        lambda s: s.plan.threads == 1 and not s.trains_on_cards and checks.threads(s),
        "start fewer, unless this is a rehearsal",
    ),
    "driver-behind": (
        lambda s: (
            checks.behind(s)
            and not checks.too_old(s)
            and f"driver {s.software.nvidia_driver} is older than CUDA {s.software.cuda} of torch {s.software.torch}"
            + (f", and knows CUDA {s.software.driver_cuda}" if s.software.driver_cuda else "")
        ),
        "update the driver if a kernel is reported as unsupported",
    ),
    "some-hidden": (lambda s: len(s.seen) > 0 and checks.hidden(s), "unset it if all are to train"),
    "other-library": (
        lambda s: [
            f"{each.name} {each.loaded} is loaded, {each.packaged} was installed with torch"
            for each in s.software.libraries
            if s.seen and each.packaged and not each.error
            if version(each.loaded)[:3] != version(each.packaged)[:3]
        ],
        "look for its directory in LD_LIBRARY_PATH if results or speed are odd",
    ),
    "cpu-quota": (
        lambda s: (
            s.host.cpu_quota is not None
            and s.host.cpu_quota < s.host.allowed_cores
            and f"the container sees {s.host.allowed_cores} cores, and may use the time of {s.host.cpu_quota:g}"
        ),
        "raise the quota; Evener counts the quota",
    ),
    "memory-limit": (
        lambda s: (
            s.host.usable_nbytes < s.host.memory_nbytes
            and f"the container may use {s.host.usable_nbytes / 2**30:.1f} of {s.host.memory_nbytes / 2**30:.1f} GiB"
        ),
        "raise the limit if ranks or workers are killed",
    ),
    "power-limit": (
        _cards("{0} may use {0.power_limit_watts:.0f} W of {0.power_default_watts:.0f} W", checks.held_back),
        "nvidia-smi --power-limit=WATTS, as root, if that is not meant",
    ),
    "card-partitioned": (
        _cards("{0} is divided by MIG", lambda c: c.mig),
        "nvidia-smi --multi-instance-gpu=0, as root, to train on whole cards",
    ),
    "nvml-not-asked": (
        lambda s: (
            len(checks.of_nvidia(s)) > 0
            and not checks.mismatch(s)
            and s.software.nvml
            and f"of NVIDIA's cards little is known: {s.software.nvml}"
        ),
        "pip install nvidia-ml-py",
    ),
}

TABLE: dict[Level, dict[str, tuple[Look, str]]] = {"wrong": _WRONG, "slow": _SLOW, "note": _NOTES}
"""Findings by level (the worst first) and name: the check, and the remedy."""


def diagnose(survey: Survey) -> tuple[Finding, ...]:
    """Returns all findings of a survey, the worst first."""
    return tuple(
        Finding(level, name, seen, remedy)
        for level, entries in TABLE.items()
        for name, (look, remedy) in entries.items()
        for seen in _texts(look(survey))
    )


def _texts(found: Iterable[str] | bool) -> Iterable[str]:
    if isinstance(found, str | bool):
        return [str(found)] if found else []
    return found


def worst(survey: Survey) -> Finding | None:
    """Returns the worst finding that should be acted on. Returns None if there are only notes."""
    return next((finding for finding in diagnose(survey) if finding.level != "note"), None)
