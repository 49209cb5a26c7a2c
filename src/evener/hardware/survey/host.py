"""Reads the host's cores, memory and container limits."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

from evener.hardware.cgroups import cpu_quota, memory_limit
from evener.hardware.procfs import text_of
from evener.hardware.survey.facts import Host

SHM = "/dev/shm"
_CPUINFO = Path("/proc/cpuinfo")


def read_host() -> Host:
    """Describes the host that this process runs on."""
    memory = psutil.virtual_memory()
    return Host(
        name=platform.node(),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        allowed_cores=allowed_cores(),
        memory_nbytes=memory.total,
        available_nbytes=memory.available,
        cpu_quota=cpu_quota(),
        memory_limit_nbytes=memory_limit(),
        shm_nbytes=psutil.disk_usage(SHM).total if os.path.isdir(SHM) else None,
        vectors=torch.backends.cpu.get_cpu_capability(),
    )


def allowed_cores() -> int:
    """Returns the number of cores that this process may run on; under SLURM or taskset fewer than the machine has."""
    return len(cores_allowed())


def cores_allowed() -> frozenset[int]:
    """Returns the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def processor_name() -> str:
    """Returns the name of the processor, from ``/proc/cpuinfo`` or else from Python, which knows it on few systems."""
    names = (
        line.partition(":")[2] for line in text_of(_CPUINFO).splitlines() if line.startswith("model name")
    )
    return next(names, platform.processor()).strip()
