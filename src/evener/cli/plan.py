"""``evener plan``: says what a run would take, in memory and in time, and which way to train is the fastest."""

from __future__ import annotations

import argparse

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser
from evener.core.config.sizes import parse_limits, size_words

HELP = CommandHelp(
    "plan",
    "say what a run would take, and which way to train is the fastest",
    "Say how many bytes each rank of a run would take, and how long a step takes with each strategy on up to "
    "--processes devices. Memory is known without running; for the times, each way takes a few steps, for under a "
    "minute together. Options are those of train. Exit status 1 if a rank would need more than --memory-limit.",
    usage="TASK [OPTIONS]",
    examples=(
        "evener plan digits --processes 2",
        "evener plan mytask:task --memory --strategy sharded --memory-limit 24GB",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_task_options(parser)
    parser.option(
        "output", "--memory", action="store_true", help="bytes by rank and purpose alone, without a run"
    )
    parser.option("output", "--top", type=int, default=5, metavar="N", help="the N fastest ways")
    parser.option("output", "--explain", action="store_true", help="the terms of each step")
    parser.option("output", "--budget", type=float, default=40.0, metavar="S", help="seconds for the trials")
    options.add_config_options(parser)
    options.add_shares_option(parser)
    options.add_json_option(parser, "the plan")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the plan. Returns exit status 1 if a rank would need more than its memory limit."""
    config = options.config_of(arguments)
    options.find_modules_here()
    from evener.files import write_json
    from evener.tools.estimate import estimate_memory

    given = options.task_options_of(arguments)
    estimate = estimate_memory(arguments.task, config, options=given)
    limits = parse_limits(arguments.memory_limit, len(estimate.ranks))
    exceeding = estimate.exceeding(limits)
    found = estimate.as_json() | {"limits": limits}
    print(estimate)
    for rank in exceeding:
        limit = limits[rank.rank] or 0
        print(f"rank {rank.rank} would need {size_words(rank.needed)}, and has {size_words(limit)}")
    if not arguments.memory:
        from evener.tools.plan import make_plan, plan_text

        plan = make_plan(arguments.task, config, options=given, seconds=arguments.budget)
        print(plan_text(plan, arguments.top, arguments.explain))
        found["plan"] = plan.as_json()
    if arguments.json is not None:
        write_json(arguments.json, found)
    return 1 if exceeding else 0
