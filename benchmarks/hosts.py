"""All-reduces over several hosts whose links are slower than those inside: network namespaces of this machine.

    sudo python -m benchmarks.hosts [--layouts 2x2:block,2x2:cyclic,4x1:block] [--mbit 500] [--sizes 64K,1M,8M]

``2x2:block`` is 2 hosts of 2 ranks, of which ranks 0 and 1 share one, as torchrun numbers them; ``cyclic`` deals the
ranks out one by one, as ``srun --distribution=cyclic`` does, so that ranks 0 and 2 share a host.

What to expect. With h hosts of g ranks and one uplink a host, an all-reduce of n bytes puts on the uplink, each way:

====================  =====================================================================================
ring in host order    ``2 (hg - 1) / (hg) n``: it leaves a host once, whatever g is; 2 (hg - 1) latencies
ring that zigzags     g times that: every message crosses (a ring in order of rank, where ranks are dealt out)
ring-tree             ``n`` for 2 hosts, up to ``2n`` for more; 2 log2(h) latencies between hosts
two-level             ``2 (h - 1) / h n``: the leaders' ring; 2 (h - 1) latencies between hosts
====================  =====================================================================================

So ring-tree and two-level beat the flat ring by up to 1.5x on 2 hosts of 2 ranks, by less on more hosts, where a
ring in host order of a large buffer is as good as any; and a ring that zigzags loses to all of them, by a factor that
grows with g. Evener's own ring follows the hosts whatever the ranks' order; gloo's follows the ranks.

All the hosts here share the cores of one machine, whose kernel is the network too: where those are the limit and not
the links, as for small buffers, the model says too little. A token bucket lets a burst through at full speed, which
flatters buffers of less than 256 KiB.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import results
from benchmarks.namespaces import Hosts, NoNamespacesError, Program
from evener.collectives.registry import make, tree_segment_nbytes
from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.collectives.schedules.ring import ring
from evener.collectives.schedules.schedule import Schedule, Topology
from evener.collectives.tuning.bench import Row, bench
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.measure import measure_network
from evener.collectives.tuning.simulate import Network, simulate
from evener.distributed.hosts import hosts_of
from evener.distributed.session import Session
from evener.tools.bench import parse_sizes
from evener.training.reporting.chart import size_text

NAMES = ("native", "ring", "tree", "halving", "ring-tree", "direct", "two-level", "auto")
PEER = "ring"
PORT = 29400
TIMEOUT_SECONDS = 120.0
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Layout:
    """How many hosts of how many ranks, and how the ranks are numbered."""

    hosts: int
    ranks: int
    placement: str

    @classmethod
    def parse(cls, text: str) -> Layout:
        shape, _, placement = text.partition(":")
        hosts, _, ranks = shape.partition("x")
        if not (hosts.isdecimal() and ranks.isdecimal()) or placement not in ("", "block", "cyclic"):
            raise SystemExit(f"layout {text!r} is not HOSTSxRANKS, HOSTSxRANKS:block or HOSTSxRANKS:cyclic")
        return cls(int(hosts), int(ranks), placement or "block")

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks

    def rank(self, host: int, place: int) -> int:
        return host + self.hosts * place if self.placement == "cyclic" else host * self.ranks + place

    def environment(self, host: int, place: int) -> dict[str, str]:
        """torchrun's variables."""
        values = {
            "RANK": self.rank(host, place),
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": place,
            "LOCAL_WORLD_SIZE": self.ranks,
            "GROUP_RANK": host,
            "MASTER_ADDR": "host0",
            "MASTER_PORT": PORT,
            "OMP_NUM_THREADS": 1,
        }
        return {name: str(value) for name, value in values.items()} | {"TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Cell:
    """One all-reduce at one size: measured and simulated seconds, and how many elements were wrong."""

    name: str
    nbytes: int
    seconds: float
    simulated: float
    wrong: int


def run_rank(sizes: Sequence[int]) -> None:
    """What each rank does; rank 0 prints what came out, as JSON."""
    with Session(device="cpu", timeout_seconds=TIMEOUT_SECONDS) as session:
        assert session.world is not None
        topology = Topology(hosts_of(session.world))
        network = measure_network(topology, session.world)
        all_reduces = {name: make(name, session.world, TIMEOUT_SECONDS) for name in NAMES}
        rows = bench(all_reduces, sizes, session.world)
        words = all_reduces["auto"].words
        for each in all_reduces.values():
            each.close()
    if session.rank == 0:
        simulated = [row.predicted or expected(row, topology, network) for row in rows]
        cells = [
            Cell(r.algorithm, r.size, r.time, s, r.wrong or 0) for r, s in zip(rows, simulated, strict=True)
        ]
        print(json.dumps({"links": links(network), "cells": [asdict(cell) for cell in cells], "auto": words}))


def expected(row: Row, topology: Topology, network: Network) -> float:
    """Seconds, by the simulation."""
    return simulate(schedule(row.algorithm, topology, row.size), row.size, network)


def schedule(name: str, topology: Topology, nbytes: int) -> Schedule:
    """What an all-reduce sends between hosts: gloo's own is a ring in order of rank, two-level's the leaders' ring."""
    if name == "native":
        return replace(ring(Topology.flat(topology.world_size)), topology=topology)
    if name == "two-level":
        return ring(Topology.of_hosts([1] * len(topology.hosts)))
    return ALGORITHMS[name](topology, segments=max(1, nbytes // tree_segment_nbytes(topology)))


def links(network: Network) -> str:
    """The links as messages between two ranks found them."""
    parts = []
    for where, link in (("inside", network.inside), ("between", network.between)):
        assert isinstance(link, Link)
        speed = 8e-6 / max(link.beta_seconds_per_byte, 1e-15)
        parts.append(f"{where} hosts {link.alpha_seconds * 1e6:.0f} us and {speed:,.0f} Mbit/s")
    return ", ".join(parts)


def measure(layout: Layout, mbit_per_second: float, sizes: str) -> None:
    """Shows one layout. Makes the hosts, runs the ranks on them, and removes all."""
    order = sorted(
        (layout.rank(host, place), host, place)
        for host in range(layout.hosts)
        for place in range(layout.ranks)
    )
    command = [sys.executable, "-m", "benchmarks.hosts", "--as-rank", "--sizes", sizes]
    with Hosts(layout.hosts, mbit_per_second) as hosts, tempfile.TemporaryDirectory() as cache:
        environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "XDG_CACHE_HOME": cache}
        programs = [
            Program(host, command, {**layout.environment(host, place), **environment})
            for _, host, place in order
        ]
        outputs = hosts.run(programs, 4 * TIMEOUT_SECONDS)
    found = json.loads(outputs[0].splitlines()[-1])
    cells = [Cell(**cell) for cell in found["cells"]]
    if wrong := sum(cell.wrong for cell in cells):
        raise SystemExit(f"{wrong} elements of the sums are wrong")
    title = f"{layout.hosts} hosts of {layout.ranks} ranks, {layout.placement}"
    beside = f"uplinks of {mbit_per_second:g} Mbit/s, measured {found['links']}"
    results.record("hosts", title, table(cells), beside=beside)
    print(f"\n{found['auto']}\n", flush=True)


def table(cells: Sequence[Cell]) -> results.Table:
    """A row a size: measured ms, how many times as fast as the ring, and ms as simulated, or for ``auto`` as measured
    before; and the time of ``auto`` over that of the best."""
    names, rows = list(dict.fromkeys(cell.name for cell in cells)), []
    for nbytes in dict.fromkeys(cell.nbytes for cell in cells):
        row = {cell.name: cell for cell in cells if cell.nbytes == nbytes}
        times: list[results.Value] = [
            results.cell(
                1e3 * cell.seconds,
                "ms",
                ratio=row[PEER].seconds / cell.seconds,
                predicted=1e3 * cell.simulated,
            )
            for cell in row.values()
        ]
        best = min(cell.seconds for cell in row.values() if cell.name != "auto")
        ratio = results.cell(row["auto"].seconds / best) if "auto" in row else None
        rows.append([size_text(nbytes), *times, ratio])
    return results.Table(["size", *names, "auto / best"], rows, "times as fast as the flat ring")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", default="2x2:block,2x2:cyclic,4x1:block", metavar="HxG:PLACEMENT,...")
    parser.add_argument("--mbit", type=float, default=500.0, help="of each host's uplink, each way")
    parser.add_argument("--sizes", default="64K,1M,8M")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        run_rank(parse_sizes(arguments.sizes))
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is removed
    try:
        for layout in [Layout.parse(text) for text in arguments.layouts.split(",")]:
            measure(layout, arguments.mbit, arguments.sizes)
    except NoNamespacesError as error:
        print(f"skipped: {error}")


if __name__ == "__main__":
    main()
