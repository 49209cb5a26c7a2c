"""Detects rank, world size and the like from the environment variables of torchrun or SLURM.

The two launchers use different variables, and both also leave variables behind in processes that are not ranks. All
other code asks this module and does not depend on the launcher. This module creates no process group: `detect` only
reads a mapping.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from evener.errors import ConfigurationError
from evener.hardware.accelerators import count, kind_of
from evener.hardware.cgroups import cpu_quota
from evener.hardware.survey.host import allowed_cores

CPU_PROCESSES = 4
"""Most CPU ranks that are started by default. More would compete for memory bandwidth."""

PROCESSES_PER_CORE = 64
"""Most CPU ranks per usable core.

Each rank is a Python process with PyTorch: about 200 MB of memory, one second of a core to start, and a dozen threads.
With more ranks a machine runs out of memory or of process ids before the first step.
"""

SHARED_CORES = "EVENER__SHARED_CORES"
"""Set by the launcher if ``OMP_NUM_THREADS`` is not the user's, but an equal part of the cores."""
RANKS_PER_CARD = "EVENER__RANKS_PER_CARD"
"""Environment variable with the number of ranks per accelerator, to test several ranks on one card; 1 by default."""

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "HOROVOD_SIZE")
"""Variables with the number of processes that ``mpirun`` (Open MPI, MPICH, Intel MPI, MVAPICH) or ``horovodrun`` has
started."""

_PORT_BASE, _PORT_SPAN = 15000, 20000


@dataclass(frozen=True)
class Environment:
    """Rank, world size and host of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""
    local_world_size: int = 1
    host: str = "localhost"
    node: int = 0
    """Index of this machine among the machines of the run."""
    master_addr: str | None = None
    """Address of the store, which rank 0 or the launching agent hosts; None if the launcher did not set it."""
    master_port: int | None = None
    launcher: str = "single"
    """``torchrun``, ``slurm`` or ``single``."""

    def __post_init__(self) -> None:
        good = (
            0 <= self.rank < self.world_size
            and 0 <= self.local_rank < self.local_world_size <= self.world_size
            and self.node >= 0
        )
        if not good:
            raise ConfigurationError(
                f"the {self.launcher} variables contradict each other: rank {self.rank} of "
                f"{self.world_size}, local rank {self.local_rank} of {self.local_world_size}, "
                f"node {self.node}; "
                "unset them to run as one process, or start all ranks with one launcher"
            )
        if self.master_port is not None and not 0 < self.master_port < 1 << 16:
            raise ConfigurationError(f"MASTER_PORT is {self.master_port}; a port is a number from 1 to 65535")

    @property
    def is_on_one_machine(self) -> bool:
        """True if there are several ranks, all of them on this machine."""
        return 1 < self.world_size == self.local_world_size

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables as torchrun would set them, for scripts that read those."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def store_address(self) -> tuple[str, int]:
        """Returns the host and port of the store.

        Raises:
            ConfigurationError: If the launcher has not set them.
        """
        if self.master_addr is None or self.master_port is None:
            raise ConfigurationError(
                f"rank {self.rank} of {self.world_size} does not know where to meet the others: MASTER_ADDR and "
                "MASTER_PORT are not set; start the ranks with evener, torchrun or srun"
            )
        return self.master_addr, self.master_port


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads torchrun's variables, or else SLURM's. Without either, returns the environment of a single rank.

    Args:
        variables: The variables to read; those of the process by default.

    Raises:
        ConfigurationError: If variables are missing, are not numbers, or contradict each other.
    """
    variables = os.environ if variables is None else variables
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _from_torchrun(variables)
    if _is_slurm_task(variables):
        return _from_slurm(variables)
    return Environment(host=socket.gethostname())


def refuse_mpi(variables: Mapping[str, str] | None = None) -> None:
    """Checks that a process which is no rank is not one of several that MPI or Horovod has started.

    Their variables do not say where ranks meet. Each process would take itself for the only one, and train alone.

    Args:
        variables: The variables to read; those of the process by default.

    Raises:
        ConfigurationError: If it is one of several.
    """
    variables = os.environ if variables is None else variables
    found = [name for name in MPI_SIZES if variables.get(name, "1") != "1"]
    if found and detect(variables).launcher == "single":
        raise ConfigurationError(
            f"this is one of {variables[found[0]]} processes of mpirun or horovodrun ({found[0]}), and each of them "
            "would train alone: start the ranks with `evener run`, torchrun or srun, or set RANK, WORLD_SIZE, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process; or unset "
            f"{' and '.join(found)}, for independent trainings"
        )


def usable_cores() -> int:
    """Returns the number of cores that this process may use. In a container or under SLURM it can be limited.

    A container's CPU quota counts as that many cores, rounded up: more threads would be throttled.
    """
    quota = cpu_quota()
    return allowed_cores() if quota is None else max(1, min(allowed_cores(), math.ceil(quota)))


def default_device() -> str:
    """Returns ``cuda`` if PyTorch sees an NVIDIA or AMD GPU, else ``cpu``. Other kinds must be named explicitly."""
    return "cuda" if torch.cuda.is_available() else "cpu"


MIXED = "mixed"
"""Device name for a run whose hosts have different kinds of devices."""


def kind_taken(device: str | None) -> str:
    """Returns the kind of device that ranks of this host take: this host's default if ``device`` is None or ``mixed``.

    Raises:
        ConfigurationError: If torch knows no device of that name.
    """
    return default_device() if device in (None, MIXED) else kind_of(device)


def ranks_per_card() -> int:
    """Reads the number of ranks per accelerator from the environment variable `RANKS_PER_CARD`; 1 if it is not set.

    Raises:
        ConfigurationError: If it is not a number above 0, or a variable has nearly its name, which would do nothing.
    """
    near = difflib.get_close_matches(RANKS_PER_CARD, os.environ, n=1, cutoff=0.8)
    if near and near[0] != RANKS_PER_CARD:
        raise ConfigurationError(
            f"the environment has {near[0]}, which nothing reads; write {RANKS_PER_CARD}"
        )
    found = _number(os.environ, RANKS_PER_CARD, 1)
    if found < 1:
        raise ConfigurationError(
            f"{RANKS_PER_CARD} is {found}; it is how many ranks a card serves, at least 1"
        )
    return found


def default_processes(device: str | None = None) -> int:
    """Returns the number of accelerators, or on the CPU the number of usable cores, at most `CPU_PROCESSES`."""
    kind = kind_taken(device)
    if kind != "cpu":
        return max(1, count(kind))
    return min(CPU_PROCESSES, usable_cores())


def check_processes(processes: int, device: str) -> None:
    """Checks that this machine can run so many processes.

    Raises:
        ConfigurationError: If ``processes`` is below 1, exceeds `ranks_per_card` for each accelerator, or on the CPU
            exceeds `PROCESSES_PER_CORE` for each usable core.
    """
    if processes < 1:
        raise ConfigurationError(f"asked for {processes} processes; at least 1 is needed")
    kind = kind_taken(device)
    if kind != "cpu":
        cards = count(kind)
        most = cards * ranks_per_card()
        what = f"on {kind}, {cards} GPUs here"
        way_out = (
            f"ask for at most {most}, or for the cpu device, or rehearse with several ranks on a card: "
            f"{RANKS_PER_CARD}={math.ceil(processes / max(1, cards))}"
        )
        if not most:
            what = f"on {kind}, of which torch {torch.__version__} sees none here"
            way_out = "`evener devices` says what there is, and why it is not seen; or ask for the cpu device"
    else:
        cores = usable_cores()
        most = PROCESSES_PER_CORE * cores
        what, way_out = (
            f"on {cores} usable cores",
            f"ask for at most {most}, which is {PROCESSES_PER_CORE} a core",
        )
    if processes > most:
        raise ConfigurationError(f"asked for {processes} processes {what}; {way_out}")


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    local_world_size = _number(variables, "LOCAL_WORLD_SIZE", 1)
    port = variables.get("MASTER_PORT")
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=_number(variables, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        host=socket.gethostname(),
        node=_number(variables, "GROUP_RANK", rank // max(1, local_world_size)),
        master_addr=variables.get("MASTER_ADDR"),
        master_port=None if port is None else _number(variables, "MASTER_PORT"),
        launcher="torchrun",
    )


def _is_slurm_task(variables: Mapping[str, str]) -> bool:
    """Returns True for a task of a SLURM step. A shell inside an allocation has SLURM's variables too, but is none."""
    interactive = variables.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_PROCID" in variables and "SLURM_NTASKS" in variables and not interactive


def _from_slurm(variables: Mapping[str, str]) -> Environment:
    world_size = _number(variables, "SLURM_STEP_NUM_TASKS", _number(variables, "SLURM_NTASKS"))
    node = _number(variables, "SLURM_NODEID", 0)
    nodes = variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", "localhost"))
    port = variables.get("MASTER_PORT")
    return Environment(
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID", 0),
        local_world_size=_slurm_local_world_size(variables, node, world_size),
        host=socket.gethostname(),
        node=node,
        master_addr=variables.get("MASTER_ADDR") or first_host(nodes),
        master_port=_slurm_port(variables) if port is None else _number(variables, "MASTER_PORT"),
        launcher="slurm",
    )


def _slurm_local_world_size(variables: Mapping[str, str], node: int, world_size: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in variables:
            counts = tasks_per_node(variables[name])
            return counts[node] if node < len(counts) else counts[-1]
    return world_size


def _slurm_port(variables: Mapping[str, str]) -> int:
    """Returns a port that is the same in all tasks of a step, and most likely differs between steps on a machine."""
    step = _number(variables, "SLURM_STEP_ID", 0)
    return _PORT_BASE + (_number(variables, "SLURM_JOB_ID", 0) + 97 * step) % _PORT_SPAN


def tasks_per_node(text: str) -> list[int]:
    """Parses SLURM's tasks per node: ``2(x3),1`` becomes ``[2, 2, 2, 1]``. Raises ConfigurationError if it cannot."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ConfigurationError(
                f"SLURM's tasks per node {text!r} cannot be read; expected e.g. '2(x3),1'"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Returns the first host of a SLURM node list: ``gpu07`` for ``gpu[07-09,12],cpu1``."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        found = "not set" if text is None else f"{text!r}, not a number"
        raise ConfigurationError(
            f"the environment variable {name} is {found}; torchrun sets RANK and WORLD_SIZE together, SLURM sets "
            "SLURM_PROCID and SLURM_NTASKS: unset them to run as one process, or start all ranks with one launcher"
        ) from None
