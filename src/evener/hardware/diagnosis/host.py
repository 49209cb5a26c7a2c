"""Whether the machine has cores and memory for its ranks, and an environment that does not slow them down."""

from __future__ import annotations

from collections.abc import Iterator

from evener.hardware.diagnosis import findings as kinds
from evener.hardware.diagnosis.findings import Finding
from evener.hardware.survey.facts import Survey

_LEAST_NBYTES = 512 << 20
"""Of the machine's memory for a rank, of which a process with torch takes half before it does anything."""
_LEAST_SHM_NBYTES = 1 << 30
"""What NVIDIA's containers are told to have; Docker gives 64 MiB."""
_OFF = ("", "0", "false", "no", "off")
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "HIP_LAUNCH_BLOCKING": "the host waits for every kernel",
    "AMD_SERIALIZE_KERNEL": "kernels wait for each other",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "memory is asked of the driver every time",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "memory is asked of the driver every time",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are compared among the ranks before they run",
    "NCCL_P2P_DISABLE": "cards exchange through the host's memory",
    "NCCL_SHM_DISABLE": "cards exchange through the network's sockets",
    "NCCL_IB_DISABLE": "machines exchange over TCP, although there may be InfiniBand",
}


def core_findings(survey: Survey) -> Iterator[Finding]:
    """Of cores, and of threads that are to run on them."""
    host, plan = survey.host, survey.plan
    usable = host.usable_cores
    words = f"{_of(plan.ranks, 'rank')} of {_of(plan.threads, 'thread')} on {_of(usable, 'usable core')}"
    if plan.ranks * plan.threads > usable and plan.threads > 1:
        yield kinds.OVERSUBSCRIBED.found(words)
    elif plan.ranks > usable and not survey.trains_on_cards:
        yield kinds.RANKS_OVER_CORES.found(words)
    if host.cpu_quota is not None and host.cpu_quota < host.allowed_cores:
        yield kinds.QUOTA.found(
            f"the container sees {host.allowed_cores} cores, and may use the time of {host.cpu_quota:g}"
        )
    if host.vectors in ("DEFAULT", "NO AVX") and host.machine in ("x86_64", "AMD64"):
        yield kinds.NO_VECTORS.found(f"torch computes with plain instructions on this CPU ({host.processor})")


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def memory_findings(survey: Survey) -> Iterator[Finding]:
    """Of the machine's memory, and the part that processes share."""
    host, plan = survey.host, survey.plan
    each = host.usable_nbytes / max(1, plan.ranks)
    if each < _LEAST_NBYTES:
        yield kinds.LITTLE_MEMORY.found(
            f"{_of(plan.ranks, 'rank')} with {each / 2**20:.0f} MiB of memory each"
        )
    if host.memory_limit_nbytes is not None and host.memory_limit_nbytes < host.memory_nbytes:
        yield kinds.MEMORY_LIMIT.found(
            f"the container may use {host.memory_limit_nbytes / 2**30:.1f} of {host.memory_nbytes / 2**30:.1f} GiB"
        )
    if host.shm_nbytes is not None and host.shm_nbytes < _LEAST_SHM_NBYTES and _shares_memory(survey):
        yield kinds.SMALL_SHM.found(f"/dev/shm has {host.shm_nbytes / 2**20:.0f} MiB")


def _shares_memory(survey: Survey) -> bool:
    """Whether anything is put there, or nobody knows; CPU ranks sum their gradients through memory of their own."""
    plan = survey.plan
    return plan.workers != 0 or (plan.ranks > 1 and survey.trains_on_cards)


def variable_findings(survey: Survey) -> Iterator[Finding]:
    """Of switches that somebody left on."""
    for name, effect in _SLOWING.items():
        value = survey.variables.get(name, "")
        slows = value.upper() == "DETAIL" if name == "TORCH_DISTRIBUTED_DEBUG" else value.lower() not in _OFF
        if slows and _is_of_use(name, survey):
            yield kinds.SLOW_VARIABLE.found(f"{name}={value}: {effect}")


def _is_of_use(name: str, survey: Survey) -> bool:
    return name == "TORCH_DISTRIBUTED_DEBUG" or survey.trains_on_cards
