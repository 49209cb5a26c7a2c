"""``evener bench``: measures all-reduces on ranks of this machine, or simulates them on other topologies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evener.collectives.registry import ALL_REDUCES, find, make, make_all
from evener.collectives.schedules.algorithms import ALGORITHMS, usable_on
from evener.collectives.schedules.schedule import Topology
from evener.collectives.tuning.bench import DTYPES, Row, bench, bus_factor
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.measure import measured_costs
from evener.collectives.tuning.select import MeasuredCosts, predict
from evener.collectives.tuning.simulate import Network
from evener.distributed.launch.launch import launch
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.session import Session
from evener.errors import ConfigurationError, DataError
from evener.files import parsed, read_named
from evener.training.reporting.chart import size_chart


@dataclass(frozen=True)
class BenchResult:
    """Results of a benchmark. ``wrong`` is the number of elements that were not the exact sum."""

    ranks: int
    simulated: bool
    rows: list[Row]
    rank: int = 0
    """Rank that returned this result: 0, or on further hosts the first rank of the host."""
    left_out: dict[str, str] = field(default_factory=dict)
    """All-reduces that would suit these ranks but cannot be made on them, each with the reason."""

    def __repr__(self) -> str:
        """Returns a summary in one line."""
        kind = "simulated" if self.simulated else "measured"
        return (
            f"<BenchResult of {self.ranks} ranks, {kind}: {len(self.rows)} rows, {self.wrong} wrong elements>"
        )

    @property
    def wrong(self) -> int:
        return sum(row.wrong or 0 for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"ranks": self.ranks, "simulated": self.simulated, "rows": rows, "left_out": self.left_out}

    def chart(self) -> str:
        """Returns a chart of bus bandwidth by size, as SVG."""
        names = dict.fromkeys(row.algorithm for row in self.rows)
        lines = {
            name: [(row.size, row.busbw) for row in self.rows if row.algorithm == name] for name in names
        }
        kind = "simulated" if self.simulated else "measured"
        return size_chart(lines, f"all-reduce on {self.ranks} ranks, {kind}", "bus bandwidth, GB/s")


def bench_all_reduce(
    sizes: Sequence[int],
    algorithms: Sequence[str] | None = None,
    *,
    dtype: str = "float32",
    check: bool = True,
    processes: int | None = None,
    device: str | None = None,
    timeout_seconds: float = 300.0,
    rendezvous: Rendezvous | None = None,
) -> BenchResult:
    """Starts ranks and times all-reduces on them.

    Args:
        sizes: Sizes in bytes.
        algorithms: Names of all-reduces, or ``package.module:make``. None for all that suit these ranks.
        dtype: Name of the torch dtype of the elements.
        check: True to count wrong elements.
        processes, device, timeout_seconds, rendezvous: As for :func:`evener.launch`.

    Raises:
        ConfigurationError: If an all-reduce or the dtype does not exist, or there are fewer than 2 ranks.
    """
    for name in algorithms or ():
        find(name)
    _check_names("dtype", [dtype], DTYPES)
    results = launch(
        _bench_on_rank,
        list(sizes),
        list(algorithms or ()),
        dtype,
        check,
        device,
        timeout_seconds,
        processes=processes,
        timeout_seconds=timeout_seconds,
        rendezvous=rendezvous,
        device=device,
    )
    return results[0]


def _bench_on_rank(
    sizes: list[int], names: list[str], dtype: str, check: bool, device: str | None, timeout_seconds: float
) -> BenchResult:
    with Session(device=device, timeout_seconds=timeout_seconds) as session:
        if session.world is None or session.world_size < 2:
            raise ConfigurationError("an all-reduce takes at least two ranks: give --processes 2 or more")
        left_out: dict[str, str] = {}
        if names:
            all_reduces = {name: make(name, session.world, timeout_seconds) for name in names}
        else:
            all_reduces, left_out = make_all(_suitable(session), session.world, timeout_seconds)
        timed = {name: each for name, each in all_reduces.items() if name != "auto"}
        costs = measured_costs(timed, session.world) if timed else None
        rows = bench(all_reduces, sizes, session.world, DTYPES[dtype], check, costs)
        for each in all_reduces.values():
            each.close()
        return BenchResult(session.world_size, False, rows, session.rank, left_out)


def _suitable(session: Session) -> list[str]:
    """Returns the all-reduces to compare on these ranks: no shared memory for GPUs, no hierarchy on one host."""
    one_host = session.world_size == session.environment.local_world_size
    on_cpu = str(dist.get_backend(session.world)) == "gloo"
    left_out = {"two-level", "ring-tree"} if one_host else {"shared-memory"}
    if not on_cpu:
        left_out |= {"shared-memory", "two-level"}
    return [name for name in ALL_REDUCES if name not in left_out]


def simulate_all_reduce(
    sizes: Sequence[int], ranks: int | None, description: Path | None, algorithms: Sequence[str] | None = None
) -> BenchResult:
    """Predicts the times of all-reduces on a described topology, without running them.

    Args:
        sizes: Sizes in bytes.
        ranks: Number of ranks. None for the number in the description.
        description: JSON file, see :func:`read_topology`. None for equal links of 10 us and 10 GB/s.
        algorithms: Names of algorithms. None for all that can run on the topology.

    Raises:
        ConfigurationError: If an algorithm does not exist, or the number of ranks does not fit the description.
        DataError: If the file does not describe a topology.
    """
    _check_names("algorithm", algorithms or (), ALGORITHMS)
    topology, network = read_topology(description, ranks)
    names = list(algorithms or usable_on(topology))
    costs = MeasuredCosts(topology, network, ())
    rows = [_predicted_row(costs, name, size) for size in sizes for name in names]
    return BenchResult(topology.world_size, simulated=True, rows=rows)


def _predicted_row(costs: MeasuredCosts, name: str, size: int) -> Row:
    seconds = predict(costs, name, size).seconds
    algbw = size / seconds / 1e9
    return Row(
        algorithm=name,
        size=size,
        count=size // 4,
        type="float32",
        redop="sum",
        time=seconds,
        algbw=algbw,
        busbw=algbw * bus_factor(costs.topology.world_size),
        wrong=None,
        predicted=seconds,
    )


_DEFAULT_LINK = {"microseconds": 10.0, "gigabytes_per_second": 10.0}
_MOST_RANKS = 1 << 20
_KEYS = ("hosts", "ranks_per_host", "inside", "between", "uplinks", "add_gigabytes_per_second")


def read_topology(path: Path | None, ranks: int | None) -> tuple[Topology, Network]:
    """Reads a topology and its links from a JSON file such as::

        {"hosts": [8, 8, 4],                                                   // ranks of each host
         "inside": {"microseconds": 3, "gigabytes_per_second": 200},           // between ranks of one host
         "between": {"microseconds": 20, "gigabytes_per_second": 25},          // the uplink of a host
         "uplinks": 1, "add_gigabytes_per_second": 100}

    The key ``"ranks_per_host": 8`` replaces ``hosts``; the number of ranks is then required. ``inside`` and ``between``
    may be lists with one link per host.

    Raises:
        ConfigurationError: If the number of ranks does not fit the hosts.
        DataError: If the file does not describe a topology.
    """
    described = _read_json(path) if path else {}
    try:
        _check_keys(described)
        hosts = _hosts(described, ranks)
        inside = _links(described.get("inside", _DEFAULT_LINK), len(hosts))
        network = Network(
            inside=inside,
            between=_links(described["between"], len(hosts)) if "between" in described else inside,
            gamma_seconds_per_byte=_per_byte(described.get("add_gigabytes_per_second")),
            uplinks=int(described.get("uplinks", 1)) if "between" in described else 1 << 32,
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise DataError(f"{path} does not describe a topology: {type(error).__name__}: {error}") from error
    return Topology.of_hosts(hosts), network


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parsed(read_named(path))
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON file: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not an object that describes a topology")
    return value


def _hosts(described: dict[str, Any], ranks: int | None) -> list[int]:
    if (ranks or 0) > _MOST_RANKS:
        raise ConfigurationError(f"--ranks {ranks}: at most {_MOST_RANKS:,} can be simulated")
    if "hosts" in described:
        hosts = [int(size) for size in described["hosts"]]
        if ranks not in (None, sum(hosts)):
            raise ConfigurationError(f"--ranks {ranks}, but the hosts {hosts[:8]} have {sum(hosts)} ranks")
    else:
        if ranks is None:
            raise ConfigurationError("how many ranks? give --ranks N, or a topology that lists its hosts")
        per_host = int(described.get("ranks_per_host", 1))
        if per_host < 1:
            raise ValueError(f"ranks_per_host is {per_host}; it must be at least 1")
        hosts = [per_host] * (ranks // per_host) + ([ranks % per_host] if ranks % per_host else [])
    if not 2 <= sum(hosts) <= _MOST_RANKS or min(hosts) < 1:
        raise ConfigurationError(
            f"an all-reduce takes at least two ranks and one on each host, and at most {_MOST_RANKS:,} can be "
            f"simulated, not {hosts[:8]}"
        )
    return hosts


def _check_keys(described: dict[str, Any]) -> None:
    unknown = sorted(described.keys() - _KEYS)
    if unknown:
        raise ValueError(f"nothing is called {unknown[0]!r}; there are {', '.join(_KEYS)}")


def _links(value: Any, hosts: int) -> Link | tuple[Link, ...]:
    if isinstance(value, list) and len(value) != hosts:
        raise ValueError(f"a list of links has one for each of {hosts} hosts, not {len(value)}")
    return tuple(map(_link, value)) if isinstance(value, list) else _link(value)


def _link(value: dict[str, Any]) -> Link:
    return Link(float(value["microseconds"]) / 1e6, _per_byte(value["gigabytes_per_second"]))


def _per_byte(gigabytes_per_second: float | None) -> float:
    return 1e-9 / float(gigabytes_per_second) if gigabytes_per_second is not None else 0.0


def parse_sizes(text: str) -> list[int]:
    """Parses sizes in bytes: ``64K``, ``4K,1M,25M``, or ``4K:256M`` with a factor of 2 (``4K:256M:4``: a factor of 4).

    Raises:
        ConfigurationError: If the text has none of these forms.
    """
    parts = text.split(":")
    if len(parts) == 1:
        return [_size(part) for part in text.split(",")]
    low, high = _size(parts[0]), _size(parts[1])
    factor = parts[2] if len(parts) == 3 else "2"
    if len(parts) > 3 or low > high or not factor.isdecimal() or int(factor) < 2:
        raise ConfigurationError(f"sizes {text!r} are not FIRST:LAST or FIRST:LAST:FACTOR, such as 4K:256M")
    sizes = [low]
    while sizes[-1] * int(factor) <= high:
        sizes.append(sizes[-1] * int(factor))
    return sizes


def _size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not digits.isdecimal() or int(digits) < 1:
        raise ConfigurationError(f"size {text!r} is not a number of bytes such as 4096, 64K, 25M or 1G")
    return int(digits) * unit


def _check_names(what: str, names: Sequence[str], known: Any) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
