"""Several hosts on one machine: network namespaces behind a switch, with links as slow as one asks for.

A namespace has interfaces, addresses and a loopback of its own, so ranks in two of them meet over a network, cannot
take one another for neighbors, and find the other host by its name, as on two machines::

    evener-bench-PID-0        evener-bench-PID-switch        evener-bench-PID-1
       lo (fast)                                                lo (fast)
       eth0 10.231.0.1 ── tbf ── port0 ─ bridge ─ port1 ── tbf ── eth0 10.231.0.2

A token bucket (``tc`` tbf) on both ends of a wire limits each direction by itself. Nothing of the machine's own
network is touched. It takes root, and iproute2; the hosts share the machine's cores.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_PREFIX = "evener-bench"
_NETWORK = "10.231.0"
_FILES = Path("/etc/netns")
"""``ip netns exec`` shows a program the files of ``/etc/netns/NAME`` in place of those in ``/etc``."""
_AS_HOST = 'hostname "$0" && exec "$@"'
_PATIENCE_SECONDS = 10.0


class NoNamespacesError(RuntimeError):
    """Network namespaces cannot be made here; the message says why."""


@dataclass(frozen=True)
class Program:
    """What to run on a host: its number, the command, and environment variables besides this process's own."""

    host: int
    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass
class _Running:
    where: str
    process: subprocess.Popen[bytes]
    output: Path
    hurried: bool = False

    @property
    def going(self) -> bool:
        return self.process.poll() is None

    @property
    def verdict(self) -> str:
        return (
            "ended early: another failed, or time was up"
            if self.hurried
            else f"status {self.process.returncode}"
        )

    def end(self) -> None:
        self.hurried = self.going
        if self.hurried:
            self.process.terminate()
        try:
            self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def printed(self) -> str:
        return self.output.read_text(errors="replace")


class Hosts:
    """``count`` hosts, the first of them named ``host0``, from entering to leaving.

    Args:
        count: How many.
        mbit_per_second: Of each direction of each host's wire, one for all or one for each; None for as fast as it
            goes.

    Raises:
        NoNamespacesError: On entering, if this user or this kernel cannot make them.
    """

    def __init__(self, count: int, mbit_per_second: float | Sequence[float | None] | None = None) -> None:
        self.names = [f"host{number}" for number in range(count)]
        one = mbit_per_second is None or isinstance(mbit_per_second, int | float)
        self._rates = [mbit_per_second] * count if one else mbit_per_second
        self._switch = f"{_PREFIX}-{os.getpid()}-switch"
        self._namespaces = [f"{_PREFIX}-{os.getpid()}-{number}" for number in range(count)]

    def __enter__(self) -> Self:
        _check()
        _sweep()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def run(self, programs: Sequence[Program], timeout_seconds: float) -> list[str]:
        """Runs programs at once until all have ended, or one has failed: what each printed.

        Raises:
            RuntimeError: If one fails or takes too long, with the output of all.
        """
        with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-") as name:
            running = [self._start(program, Path(name, str(n))) for n, program in enumerate(programs)]
            try:
                _await(running, time.monotonic() + timeout_seconds)
            finally:
                for each in running:
                    each.end()
            if any(each.process.returncode for each in running):
                raise RuntimeError("\n".join(f"{r.where}, {r.verdict}\n{r.printed()}" for r in running))
            return [each.printed() for each in running]

    def _start(self, program: Program, output: Path) -> _Running:
        inside = ["ip", "netns", "exec", self._namespaces[program.host], "unshare", "--uts"]
        where = self.names[program.host]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*inside, "sh", "-c", _AS_HOST, where, *program.command],
                env={**os.environ, **program.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return _Running(where, process, output)

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, namespace in enumerate(self._namespaces):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            self._plug(namespace, number)
            self._name(namespace)

    def _plug(self, namespace: str, number: int) -> None:
        port = f"port{number}"
        far_end = ["peer", "name", port, "netns", self._switch]
        _ip("-n", namespace, "link", "add", "eth0", "type", "veth", *far_end)
        _ip("-n", namespace, "address", "add", f"{_NETWORK}.{number + 1}/24", "dev", "eth0")
        _ip("-n", self._switch, "link", "set", port, "master", "bridge")
        for owner, device in ((namespace, "eth0"), (self._switch, port)):
            rate = self._rates[number]
            if rate is not None:
                _limit(owner, device, rate)
            _ip("-n", owner, "link", "set", device, "up")

    def _name(self, namespace: str) -> None:
        lines = [f"{_NETWORK}.{number + 1} {name}" for number, name in enumerate(self.names)]
        (_FILES / namespace).mkdir(parents=True, exist_ok=True)
        (_FILES / namespace / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def _remove(self) -> None:
        for namespace in (*self._namespaces, self._switch):
            _remove(namespace)


def _await(running: Sequence[_Running], deadline: float) -> None:
    """Returns when all have ended, one has failed, or time is up."""
    while any(each.going for each in running) and time.monotonic() < deadline:
        if any(each.process.returncode for each in running):
            return
        time.sleep(0.05)


def _check() -> None:
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        raise NoNamespacesError(f"network namespaces take {', '.join(missing)}, which this machine has not")
    if os.geteuid() != 0:
        raise NoNamespacesError("network namespaces take root")


def _sweep() -> None:
    """Removes what runs that were killed have left."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if name.startswith(f"{_PREFIX}-") and owner.isdecimal() and not Path("/proc", owner).exists():
            _remove(name)


def _remove(namespace: str) -> None:
    """Ends all that runs in it, and deletes it, its interfaces and its files."""
    with suppress(NoNamespacesError):
        for pid in map(int, _ip("netns", "pids", namespace).split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "del", namespace)
    shutil.rmtree(_FILES / namespace, ignore_errors=True)
    with suppress(OSError):  # others are using it
        _FILES.rmdir()


def _limit(namespace: str, device: str, mbit_per_second: float) -> None:
    """A bucket of 4 ms, but no less than what the kernel hands over at once (64 KiB), and a queue of 100 ms."""
    burst = max(65536 * 2, round(mbit_per_second * 1e6 / 8 * 0.004))
    shape = ["tbf", "rate", f"{mbit_per_second:g}mbit", "burst", f"{burst}b", "latency", "100ms"]
    _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
