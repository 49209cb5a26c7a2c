"""``evener bench``: what the machine can do; so far its all-reduces."""

from __future__ import annotations

import argparse
from typing import Any

from evener.cli import options
from evener.errors import ConfigurationError
from evener.ranges import one_number


def add(commands: Any) -> None:
    """Adds the command's parser."""
    bench: argparse.ArgumentParser = commands.add_parser("bench", help="measure all-reduces, side by side")
    what = bench.add_subparsers(title="what", dest="what", metavar="WHAT", required=True)
    parser = what.add_parser(
        "allreduce",
        help="every algorithm at every size",
        description="Time every all-reduce at every size, in the columns of nccl-tests, beside the predicted time. "
        "Exit status 1 if a sum is wrong.",
    )
    parser.add_argument(
        "--sizes", default="4K:64M", metavar="A:B", help="4K:256M, 4K:256M:4 or 4K,1M (default: 4K:64M)"
    )
    parser.add_argument(
        "--algorithms", metavar="A,B", help="names, separated by commas (default: all that suit)"
    )
    parser.add_argument(
        "--type", "--dtype", dest="element", default="float32", help="of the elements (default: float32)"
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count wrong elements (default: yes)",
    )
    parser.add_argument("--simulate", action="store_true", help="predict for ranks that are not at hand")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --simulate: how many")
    parser.add_argument(
        "--topology", type=options.path, metavar="FILE", help="with --simulate: hosts and links, as JSON"
    )
    parser.add_argument("--json", type=options.path, metavar="PATH", help="also write the rows to this file")
    parser.add_argument(
        "--plot", type=options.path, metavar="FILE.svg", help="also plot bus bandwidth by size"
    )
    options.add_config_options(parser, "processes", "device", "timeout_seconds")
    options.add_rendezvous_options(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Measures or simulates, and prints the table; 1 if a sum is wrong."""
    config = options.config_of(arguments)
    options.find_modules_here()
    from evener.benching import bench_all_reduce, parse_sizes, simulate_all_reduce
    from evener.collectives.choose.bench import table
    from evener.records import write_json

    names = arguments.algorithms.split(",") if arguments.algorithms else None
    sizes = parse_sizes(arguments.sizes)
    if arguments.simulate:
        result = simulate_all_reduce(sizes, arguments.ranks, arguments.topology, names)
    else:
        _refuse(arguments, "ranks", "topology")
        result = bench_all_reduce(
            sizes,
            names,
            dtype=arguments.element,
            check=arguments.check,
            processes=one_number(config.processes),
            device=config.device,
            timeout_seconds=config.timeout_seconds,
            rendezvous=options.rendezvous_of(arguments),
        )
    if result.rank == 0:
        print(f"# {result.ranks} ranks, {'simulated' if result.simulated else 'measured'}")
        for name, reason in result.left_out.items():
            print(f"# without {name}: {reason}")
        print(table(result.rows), flush=True)
        if arguments.json is not None:
            write_json(arguments.json, result.as_json())
        if arguments.plot is not None:
            arguments.plot.write_text(result.chart())
    return 1 if result.wrong else 0


def _refuse(arguments: argparse.Namespace, *names: str) -> None:
    given = [f"--{name}" for name in names if getattr(arguments, name) is not None]
    if given:
        raise ConfigurationError(
            f"{' and '.join(given)} go with --simulate; ranks that run are --processes N"
        )
