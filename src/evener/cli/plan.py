"""``evener plan``: estimates the memory that a run would use, without running it."""

from __future__ import annotations

import argparse

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser
from evener.core.config.sizes import parse_limits, size_words

HELP = CommandHelp(
    "plan",
    "say what memory a run would take, without running it",
    "Say how many bytes each rank of a run would take, and for what, without running it. Options are those of train; "
    "ranks are as many as --processes says, whether this machine has room for them or not. Exit status 1 if a rank "
    "would need more than --memory-limit.",
    usage="TASK [OPTIONS]",
    examples=(
        "evener plan digits --processes 2",
        "evener plan mytask:task --strategy sharded --memory-limit 24GB",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_task_options(parser)
    parser.option("output", "--memory", action="store_true", help="bytes by rank and purpose, as without it")
    options.add_config_options(parser)
    options.add_shares_option(parser)
    options.add_json_option(parser, "the plan")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the estimate. Returns exit status 1 if a rank would need more than its memory limit."""
    config = options.config_of(arguments)
    options.find_modules_here()
    from evener.files import write_json
    from evener.tools.estimate import estimate_memory

    estimate = estimate_memory(arguments.task, config, options=options.task_options_of(arguments))
    limits = parse_limits(arguments.memory_limit, len(estimate.ranks))
    exceeding = estimate.exceeding(limits)
    if arguments.json is not None:
        write_json(arguments.json, estimate.as_json() | {"limits": limits})
    print(estimate)
    for rank in exceeding:
        limit = limits[rank.rank] or 0
        print(f"rank {rank.rank} would need {size_words(rank.needed)}, and has {size_words(limit)}")
    return 1 if exceeding else 0
