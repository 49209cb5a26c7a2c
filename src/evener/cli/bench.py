"""``evener bench``: benchmarks of the machine; so far only its all-reduces."""

from __future__ import annotations

import argparse

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser, drawing, path
from evener.core.config.process_range import one_number
from evener.errors import ConfigurationError

HELP = CommandHelp(
    "bench",
    "measure all-reduces, side by side",
    "Time every all-reduce at every size, in the columns of nccl-tests, beside the predicted time. "
    "Exit status 1 if a sum is wrong.",
    usage="[allreduce] [OPTIONS]",
    examples=(
        "evener bench --processes 2",
        "evener bench allreduce --processes 2 --sizes 4K:64M",
        "evener bench allreduce --algorithms native,ring --type int32 --plot found.svg",
        "evener bench allreduce --simulate --ranks 4096 --topology cluster.json",
    ),
)
BENCHMARKS = ("allreduce",)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "what", nargs="?", choices=BENCHMARKS, default="allreduce", help="the benchmark (default: allreduce)"
    )
    sizes = "4K:256M, 4K:256M:4 or 4K,1M (default: 4K:64M)"
    parser.option("what", "--sizes", default="4K:64M", metavar="A:B", help=sizes)
    named = "names, separated by commas (default: all that suit)"
    parser.option("what", "--algorithms", metavar="A,B", help=named)
    elements = "type of the elements (default: float32)"
    parser.option("what", "--type", dest="element", metavar="NAME", help=elements)
    parser.hidden("--dtype", dest="element")
    parser.option(
        "what",
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count wrong elements",
    )
    simulated = "ranks that you do not have"
    parser.option(simulated, "--simulate", action="store_true", help="predict for them")
    parser.option(simulated, "--ranks", type=int, metavar="N", help="how many")
    parser.option(simulated, "--topology", type=path, metavar="FILE", help="hosts and links, as JSON")
    options.add_json_option(parser, "the rows", "rows")
    plotted = "also plot bus bandwidth by size"
    parser.option("output", "--plot", type=drawing, metavar="FILE.svg", help=plotted)
    options.add_config_options(parser, "processes", "device", "timeout_seconds")
    options.add_rendezvous_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Measures or simulates all-reduces, and prints the table. Returns exit status 1 if a sum is wrong."""
    config = options.config_of(arguments)
    options.find_modules_here()
    from evener.collectives.tuning.bench import table
    from evener.files import replace_text, write_json
    from evener.tools.bench import bench_all_reduce, parse_sizes, simulate_all_reduce

    names = None if arguments.algorithms is None else arguments.algorithms.split(",")
    sizes = parse_sizes(arguments.sizes)
    _refuse_unused(arguments)
    if arguments.simulate:
        result = simulate_all_reduce(sizes, arguments.ranks, arguments.topology, names)
    else:
        result = bench_all_reduce(
            sizes,
            names,
            dtype=arguments.element or "float32",
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
            write_json(arguments.json, result.as_json(), follow=True)
        if arguments.plot is not None:
            replace_text(arguments.plot, result.chart(), follow=True)
    return 1 if result.wrong else 0


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Raises ConfigurationError for an option of ranks that run if they are simulated, and the other way round."""
    running = ("processes", "device", "timeout_seconds", *options.RENDEZVOUS)
    said = options.said(arguments, *(running if arguments.simulate else ("ranks", "topology")))
    if arguments.simulate:
        said["--type"] = arguments.element
    given = [name for name, value in said.items() if value is not None]
    if given:
        ways = ("--simulate", "ranks that run are --processes N")
        ways = ("ranks that run", "leave out --simulate") if arguments.simulate else ways
        raise ConfigurationError(f"{' and '.join(given)} go with {'; '.join(ways)}")
