"""Which rank this process is, as whoever started it says.

torchrun and SLURM tell a process its place in different variables, and both also leave variables behind in
processes that are not ranks at all. Everything else asks this module, so that the rest of the code knows one
answer and no launcher. Nothing here touches a process group: `detect` is a function of a mapping.
"""

from __future__ import annotations

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
"""More CPU ranks than this are started only when asked for: they compete for memory bandwidth, not for cores."""

PROCESSES_PER_CORE = 64
"""CPU ranks that a usable core may have at most.

Each is a Python process with PyTorch: some 200 MB of memory, a second of one core to start, and a dozen threads. With
more than this a machine is out of memory, or of process ids, before the first step.
"""

RANKS_PER_CARD = "EVENER__RANKS_PER_CARD"
"""How many ranks compute on each accelerator, to rehearse several with one; 1 where it is not set."""

_PORT_BASE, _PORT_SPAN = 15000, 20000


@dataclass(frozen=True)
class Environment:
    """The place of this process among the ranks of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine; the index of its GPU."""
    local_world_size: int = 1
    host: str = "localhost"
    node: int = 0
    """Number of this machine among the machines of the run."""
    master_addr: str | None = None
    """Where rank 0 (or the launching agent) keeps the store; None if the launcher did not say."""
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

    @property
    def is_on_one_machine(self) -> bool:
        """Whether there are several ranks, and all of them on this machine."""
        return 1 < self.world_size == self.local_world_size

    @property
    def variables(self) -> dict[str, str]:
        """As torchrun would have said it, for a script that reads torchrun's variables."""
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


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """The place of this process, from torchrun's variables, else SLURM's, else alone.

    Args:
        variables: The environment to read; that of the process by default.

    Raises:
        ConfigurationError: If variables are missing, are not numbers, or contradict each other.
    """
    variables = os.environ if variables is None else variables
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _from_torchrun(variables)
    if _is_slurm_task(variables):
        return _from_slurm(variables)
    return Environment(host=socket.gethostname())


def usable_cores() -> int:
    """Cores that this process may run on; in a container or under SLURM fewer than the machine has.

    A container's quota of time counts as so many cores: threads beyond it are stopped until the next period.
    """
    quota = cpu_quota()
    return allowed_cores() if quota is None else max(1, min(allowed_cores(), math.ceil(quota)))


def default_device() -> str:
    """``cuda`` where PyTorch sees a GPU of NVIDIA or AMD, else ``cpu``; other kinds are taken when asked for."""
    return "cuda" if torch.cuda.is_available() else "cpu"


MIXED = "mixed"
"""Named as the device of a run whose hosts have different kinds."""


def kind_taken(device: str | None) -> str:
    """The kind of device that ranks of this host take who were told ``device``: its own, if nothing or ``mixed``.

    Raises:
        ConfigurationError: If torch knows none of that name.
    """
    return default_device() if device in (None, MIXED) else kind_of(device)


def ranks_per_card() -> int:
    """From the environment: one, or more where ranks share cards.

    Raises:
        ConfigurationError: If it is no number above 0.
    """
    found = _number(os.environ, RANKS_PER_CARD, 1)
    if found < 1:
        raise ConfigurationError(
            f"{RANKS_PER_CARD} is {found}; it is how many ranks a card serves, at least 1"
        )
    return found


def default_processes(device: str | None = None) -> int:
    """One process per accelerator, or on the CPU one per usable core up to `CPU_PROCESSES`."""
    kind = kind_taken(device)
    if kind != "cpu":
        return max(1, count(kind))
    return min(CPU_PROCESSES, usable_cores())


def check_processes(processes: int, device: str) -> None:
    """Refuses a number of processes that this machine cannot serve.

    Raises:
        ConfigurationError: If there are fewer than one, more than there are accelerators of the kind ``device``, or
            more than `PROCESSES_PER_CORE` for each usable core when it is cpu.
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
    """A shell inside an allocation has SLURM's variables too, but is no task of a step."""
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
    """The same port in every task of a step, and most likely another one in every other step on the machine."""
    step = _number(variables, "SLURM_STEP_ID", 0)
    return _PORT_BASE + (_number(variables, "SLURM_JOB_ID", 0) + 97 * step) % _PORT_SPAN


def tasks_per_node(text: str) -> list[int]:
    """Tasks of every node, from SLURM's short form: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
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
    """The first machine of SLURM's node list: ``gpu[07-09,12],cpu1`` begins with ``gpu07``."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigurationError(
            f"the environment variable {name} is {text!r}, not a number; "
            "torchrun sets RANK and WORLD_SIZE together, SLURM sets SLURM_PROCID and SLURM_NTASKS"
        ) from None
