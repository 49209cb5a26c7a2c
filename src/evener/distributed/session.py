"""``Session``: opens what a rank needs while it runs: environment, device, process group, control channel, watchdog.

Everything is opened in one place and closed in reverse order. A run of one rank has the same attributes, with local
stand-ins, so that other code does not depend on the number of ranks. If the user's script has already initialized a
process group, the session uses that one and does not destroy it.

Garbage is collected before the process group is destroyed: a DDP model holds threads and buffers of its group, and gloo
aborts the process ("terminate called without an active exception") if they are destroyed after the group, at
interpreter exit.
"""

from __future__ import annotations

import gc
import os
import warnings
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from evener.core.config.time_limit import TIMEOUT_SECONDS, DefaultLimit
from evener.core.config.validation import positive_seconds
from evener.core.phase_marks import process_watchdogs
from evener.distributed import loopback
from evener.distributed.backends import backend_of, library_of
from evener.distributed.control_channel import Channel, GroupChannel, LocalChannel
from evener.distributed.environment import (
    MIXED,
    Environment,
    check_processes,
    detect,
    kind_taken,
    ranks_per_card,
    refuse_mpi,
    usable_cores,
)
from evener.distributed.failure import is_communication_error
from evener.distributed.hosts import beside_a_handled_error, connected, destroy, host_token
from evener.distributed.mesh import Layout, Mesh
from evener.distributed.preflight import JoinTerms, agree
from evener.distributed.recovery.deferred_free import bury
from evener.distributed.recovery.replacement import RecalledError, Start
from evener.distributed.restart_count import advance_to, generation, next_name
from evener.distributed.watchdog.watchdog import BACKSTOP_SECONDS, Watchdog, current_watchdog
from evener.errors import ConfigurationError, RankTimeoutError
from evener.hardware.accelerators import count, has_float64
from evener.hardware.async_read import is_late
from evener.hardware.gpu_tenants import uuid_of
from evener.hardware.memory.malloc import freed_memory_kept
from evener.torch_internals.elastic import numbers
from evener.torch_internals.process_groups import default_store
from evener.version import evener_version

_PATIENCE = timedelta(hours=24)

RUN_DIR = "EVENER__RUN_DIR"
"""Environment variable with the directory that Evener's launcher shares with its ranks."""


def open_store(environment: Environment, timeout_seconds: float) -> Store:
    """Opens the store of the run, which the launching agent hosts, or else rank 0.

    Raises:
        ConfigurationError: If the launcher has not set the store's address, or is MPI.
        RankTimeoutError: If the store cannot be reached in time.
    """
    if environment.world_size == 1:
        refuse_mpi()
        return HashStore()
    address, port = environment.store_address()
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = environment.rank == 0 and not has_agent
    try:
        if environment.is_on_one_machine and not has_agent:
            store = loopback.store(port, timeout_seconds, keeps)
        else:
            store = TCPStore(
                address,
                port,
                is_master=keeps,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_seconds),
                multi_tenant=True,
            )
    except (dist.DistError, OSError) as error:
        raise RankTimeoutError(
            f"rank {environment.rank} of {environment.world_size} found no run at {address}:{port} within "
            f"{timeout_seconds:g} s: {error}; are all ranks started, and can this host be reached?"
        ) from error
    return PrefixStore(f"evener/{generation()}", store)


def agent_watchdog(environment: Environment, timeout_seconds: float) -> Watchdog:
    """Starts the watchdog of a process that Evener launched. All sessions of the process share it."""
    store = open_store(environment, timeout_seconds)
    return _start_watchdog(environment.rank, environment.world_size, store, timeout_seconds)


def rejoin(start: Start) -> None:
    """Joins ``start``, the next start of the ranks after a rank replacement, and replaces this process's watchdog."""
    before = current_watchdog()
    assert before is not None
    before.stand_down()
    process_watchdogs.remove(before)
    advance_to(start.number)
    if start.world_size:
        os.environ.update(numbers(start.pids.index(os.getpid()), start.world_size))
    agent_watchdog(detect(), before.timeout_seconds)


def _start_watchdog(rank: int, world_size: int, store: Store, timeout_seconds: float) -> Watchdog:
    """Starts a watchdog and makes it the current one of this process."""
    place = os.environ.get(RUN_DIR)
    run_dir = None if place is None else Path(place)
    watchdog = Watchdog(rank, world_size, store, timeout_seconds, run_dir).start()
    process_watchdogs.append(watchdog)
    return watchdog


class Session:
    """Context manager that sets a rank up for distributed training. All ranks must enter it together.

    Args:
        device: ``cpu``, ``cuda`` or another kind that torch.accelerator has; by default cuda if there is a GPU, else
            cpu. Each rank takes the GPU of its local rank. ``mixed`` lets each host take its own kind.
        timeout_seconds: How long a rank waits for others before the run ends with a report on who is missing. The
            default gives way to the limit of the launcher, such as that of ``evener run --timeout-seconds``.
        environment: Rank and world size of this process; detected by default. With an environment of one rank the
            session ignores an existing process group.

    Raises:
        ConfigurationError: If the launcher's variables or the time limit are invalid, the device cannot be used, or the
            ranks took different devices.
        RankTimeoutError: If not all ranks start in time.
    """

    rank: int
    world_size: int
    device: torch.device
    world: dist.ProcessGroup | None
    """Process group of all ranks; None in a run of one rank."""
    mesh: Mesh
    """Mesh over the ranks. It has only the axis ``data`` until a strategy calls `lay`."""
    control: Channel
    watchdog: Watchdog

    def __init__(
        self,
        device: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        environment: Environment | None = None,
    ) -> None:
        positive_seconds("timeout_seconds", timeout_seconds)
        self.environment = detect() if environment is None else environment
        self._apart = environment is not None and environment.world_size == 1
        self.timeout_seconds = timeout_seconds
        self.rank, self.world_size = self.environment.rank, self.environment.world_size
        self._kind, self._asked = kind_taken(device), device
        self.mixed = False
        """True if hosts have different kinds of devices. Then gloo moves all tensors between hosts."""
        self._patient: dist.ProcessGroup | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        launched = current_watchdog()
        if launched is not None and isinstance(self.timeout_seconds, DefaultLimit):
            self.timeout_seconds = launched.timeout_seconds
        with ExitStack() as stack:
            stack.enter_context(beside_a_handled_error())
            self._enter_threads(stack)
            self.device = self._take_device()
            stack.enter_context(freed_memory_kept() if self.device.type == "cpu" else nullcontext())
            if self._finds_group():
                self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            store = self._open_store()
            self.watchdog = self._enter_watchdog(stack, store)
            self.world = self._enter_group(stack, store)
            self.control = self._enter_control(stack)
            stack.callback(gc.collect)
            self._stack = stack.pop_all()
        self.mesh = self._mesh(Layout({"data": self.world_size}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RecalledError):
            bury(self._stack.pop_all(), self.world)
            destroy(None)
        elif error is not None and RUN_DIR in os.environ and is_communication_error(error):
            # The process is about to end. A destructor that hangs would keep the error from being reported.
            gc.disable()
            bury(self._stack.pop_all())
        self._stack.__exit__(kind, error, trace)

    def _enter_threads(self, stack: ExitStack) -> None:
        """Divides the machine's cores among its ranks, unless the user has set ``OMP_NUM_THREADS``."""
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_per_rank(self.environment.local_world_size))

    def _take_device(self) -> torch.device:
        if self._kind == "cpu":
            return torch.device("cpu")
        if self._kind == "meta":
            raise ConfigurationError("device 'meta' has no numbers; use cpu, cuda or another accelerator")
        device = torch.device(self._kind, card_of(self.environment, self._kind))
        torch.accelerator.set_device_index(device)
        if not has_float64(device):
            raise ConfigurationError(
                f"{device} has no float64, in which losses and norms are added up; use cpu"
            )
        return device

    def _finds_group(self) -> bool:
        """Returns True if the session is to use a process group that exists already."""
        return dist.is_initialized() and not self._apart

    def _open_store(self) -> Store:
        if self._finds_group():
            if self._asked == MIXED:
                raise ConfigurationError(
                    "device mixed, and there is a process group already: its backend decides what can meet; leave "
                    "init_process_group to Evener, or name one kind of device"
                )
            self._check_moved()
            return default_store()
        return open_store(self.environment, self.timeout_seconds)

    def _check_moved(self) -> None:
        moved = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
        if self._kind not in (*moved, "meta"):
            raise ConfigurationError(
                f"the process group that exists already moves tensors of {' and '.join(moved)}, not of {self._kind}: "
                "leave init_process_group to Evener, name a backend for each kind of device, as in "
                f"init_process_group('cpu:gloo,cuda:nccl'), or set device to {moved[0]!r}"
            )

    def _enter_watchdog(self, stack: ExitStack, store: Store) -> Watchdog:
        shared = current_watchdog()
        if shared is not None:
            stack.callback(setattr, shared, "timeout_seconds", shared.timeout_seconds)
            shared.timeout_seconds = self.timeout_seconds
            return shared
        watchdog = _start_watchdog(self.rank, self.world_size, store, self.timeout_seconds)
        stack.callback(process_watchdogs.remove, watchdog)
        stack.callback(watchdog.close)
        return watchdog

    def _enter_group(self, stack: ExitStack, store: Store) -> dist.ProcessGroup | None:
        if not self._finds_group():
            if self.world_size == 1:
                return None
            self._init_group(store)
            stack.callback(_destroy_group)
        return dist.group.WORLD

    def _init_group(self, store: Store) -> None:
        store = PrefixStore(f"evener/{next_name('session')}", store)
        if self.environment.is_on_one_machine:
            os.environ.update(loopback.variables())
        if self._kind == "cuda":
            _prepare_nccl(self.environment)
        with self.watchdog.wait("start of the process group"):
            self.mixed = self._agree(PrefixStore("terms", store))
            dist.init_process_group(
                "gloo" if self.mixed else backend_of(self._kind),
                store=PrefixStore("group", store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=self.group_timeout,
                # Makes NCCL connect immediately.
                device_id=self.device if self._kind == "cuda" and not self.mixed else None,
            )

    def lay(self, layout: Layout) -> Mesh:
        """Makes ``layout`` the session's mesh. All ranks must call this together.

        Raises:
            ConfigurationError: If ``layout`` has another number of ranks than the run.
        """
        if layout.world_size != self.world_size:
            raise ConfigurationError(
                f"a mesh of {dict(layout.degrees)} has {layout.world_size} ranks, the run has {self.world_size}"
            )
        self._warn_of_hosts(layout)
        self.mesh = self._mesh(layout)
        return self.mesh

    def _warn_of_hosts(self, layout: Layout) -> None:
        ranks = self.environment.local_world_size
        for axis in layout.across_hosts(ranks) if self.rank == 0 else ():
            warnings.warn(
                f"the {layout.degree(axis)} ranks of axis {axis!r}, which send the most, are not all on one host of "
                f"{ranks} ranks: let the degrees of context and tensor divide {ranks}",
                stacklevel=3,
            )

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Returns the process group along ``axes`` of the mesh. Returns None if this rank is alone there."""
        return self.mesh.group(*axes)

    def _mesh(self, layout: Layout) -> Mesh:
        mesh = Mesh(layout, self.rank, self.world, self.timeout_seconds, self.group_timeout, self._kind)
        self._stack.callback(mesh.close)
        return mesh

    def _agree(self, store: Store) -> bool:
        """Exchanges the ranks' devices. Returns True if hosts have different kinds of devices or backends."""
        card = "" if ranks_per_card() > 1 else uuid_of(self.device)
        device = self._kind, library_of(self._kind), self._asked
        terms = JoinTerms(self.rank, self.environment.host, *device, evener_version(), host_token(), card)
        return agree(store, terms, self.world_size, self.group_timeout.total_seconds())

    @property
    def runs_behind(self) -> bool:
        """True if this rank's device runs behind the host, and so do those of all ranks: then numbers of a step are
        known after its end."""
        return is_late(self.device) and not self.mixed

    @property
    def inner_backend(self) -> str | None:
        """In a mixed run, the backend for communication within this host; otherwise None."""
        return backend_of(self._kind) if self.mixed else None

    @property
    def group_timeout(self) -> timedelta:
        """Timeout of process groups. It is longer than the watchdog's, whose report says more."""
        return timedelta(seconds=self.timeout_seconds + BACKSTOP_SECONDS)

    def patient_group(self) -> dist.ProcessGroup | None:
        """Returns a gloo group of all ranks with a timeout of 24 hours. Returns None in a run of one rank.

        Use it inside `Watchdog.together`, which ends hopeless waits. A rank that dies ends the wait at once. The first
        call creates the group and must be made by all ranks together; the session closes the group.
        """
        if self._patient is None and self.world_size > 1:
            with self.watchdog.wait("start of the patient group"):
                self._patient = connected(dist.new_group(backend="gloo", timeout=_PATIENCE))
            self._stack.callback(destroy, self._patient)
            self._stack.callback(setattr, self, "_patient", None)
        return self._patient

    def _enter_control(self, stack: ExitStack) -> Channel:
        channel: Channel = LocalChannel()
        if self.world is not None and self.world_size > 1:
            with self.watchdog.wait("start of the control channel"):
                group = connected(dist.new_group(backend="gloo", timeout=self.group_timeout))
            assert isinstance(group, dist.ProcessGroup)
            channel = GroupChannel(group, self.watchdog)
        stack.callback(channel.close)
        return channel


def threads_per_rank(local_world_size: int) -> int:
    """Returns the number of usable cores per rank of this machine, at least 1."""
    return max(1, usable_cores() // local_world_size)


def card_of(environment: Environment, kind: str) -> int:
    """Returns the index of this rank's accelerator among those visible to it.

    If this rank has neighbours on its machine but sees only one card, the launcher has bound that card to it, as SLURM
    does. `agree` checks later whether several ranks got the same card.

    Raises:
        ConfigurationError: If there are fewer accelerators than ranks.
    """
    if count(kind) == 1 < environment.local_world_size and environment.launcher != "single":
        return 0
    check_processes(environment.local_world_size, kind)
    return environment.local_rank // ranks_per_card()


def _prepare_nccl(environment: Environment) -> None:
    """Sets environment variables that NCCL and torch read when NCCL starts."""
    # Silences torch's warning that point-to-point messages are serialized with collectives.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if ranks_per_card() > 1:
        # NCCL refuses two ranks on one card of a host, so each rank pretends to be another host.
        os.environ["NCCL_HOSTID"] = f"{environment.host}-{environment.rank}"


def _destroy_group() -> None:
    gc.collect()
    destroy(None)
