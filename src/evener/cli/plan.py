"""``evener plan``: says what a run would take, in memory and in time, and which way to train is the fastest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser, path
from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.core.config.sizes import parse_limits, size_words
from evener.errors import ConfigurationError

if TYPE_CHECKING:
    from evener.tools.plan import TrainingPlan

HELP = CommandHelp(
    "plan",
    "say what a run would take, and which way to train is the fastest",
    "Say how much memory each rank of a run would need, and how long a step takes with each strategy on up to "
    "--processes devices. Memory is computed without running; for the times, each way takes a few steps, under a "
    "minute together. --cluster predicts machines that you do not have. Options are those of train. Exit status 1 "
    "if a rank would need more than --memory-limit, or if no way fits.",
    usage="TASK [OPTIONS]",
    examples=(
        "evener plan digits --processes 2 --save plan.json",
        "evener plan digits --from plan.json --batch-size 256",
        "evener plan mytask:task --cluster cluster.toml",
        "evener plan mytask:task --memory --strategy sharded --memory-limit 24GB",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_task_options(parser)
    where, output = "devices of the plan", "output"
    parser.option(
        where, "--cluster", type=path, metavar="FILE", help="machines that you do not have, as TOML"
    )
    parser.option(where, "--from", dest="source", type=path, metavar="FILE", help="trials that --save kept")
    parser.option(where, "--budget", type=float, default=40.0, metavar="S", help="seconds for the trials")
    parser.option(
        output, "--memory", action="store_true", help="bytes by rank and purpose alone, without trials"
    )
    parser.option(
        output, "--save", type=path, metavar="FILE", help="keep what the trials show", replaces=("costs",)
    )
    parser.option(output, "--top", type=int, default=5, metavar="N", help="show the N fastest ways")
    parser.option(
        output,
        "--explain",
        nargs="?",
        const="",
        metavar="RUN",
        help="terms of each step; of RUN and --from: beside it",
    )
    options.add_config_options(parser)
    options.add_shares_option(parser)
    options.add_json_option(parser, "the plan", "plan", "peak")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the plan. Returns exit status 1 if a rank would need more than its memory limit, or no way fits."""
    config = options.config_of(arguments)
    _refuse_unused(arguments)
    if arguments.explain:
        return _explain(arguments)
    options.find_modules_here()
    from evener.files import write_json

    if not (arguments.cluster or arguments.source or arguments.memory):
        _check_trials(config)
    found, fits = dict[str, Any](), True
    if not arguments.cluster:
        found, fits = _memory(arguments, config)
    if not arguments.memory:
        from evener.tools.plan import plan_text

        plan, kept = _plan(arguments, config)
        print(plan_text(plan, arguments.top, arguments.explain == ""))
        if isinstance(kept, Path):
            print(
                f"kept in {kept}: evener train takes the fastest way from now on, but not with --strategy ddp"
            )
        elif kept:
            print(f"not kept for later runs: {kept}")
        found["plan"], fits = plan.as_json(), fits and plan.best is not None
    if arguments.json is not None:
        write_json(arguments.json, found, follow=True)
    return 0 if fits else 1


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Raises ConfigurationError for an option that would do nothing beside another one, or has a value that cannot
    be."""
    ways = {"--cluster": arguments.cluster, "--memory": arguments.memory, "--explain RUN": arguments.explain}
    chosen = [name for name, value in ways.items() if value]
    further = {
        "--from": arguments.source and not arguments.explain,
        "--save": arguments.save,
        "--json": arguments.json and arguments.explain,
    }
    unused = [*chosen[1:], *(name for name, value in further.items() if value)]
    if chosen and unused:
        raise ConfigurationError(f"{unused[0]} would do nothing beside {chosen[0]}: leave one of them out")
    if not arguments.budget > 0 or arguments.top < 1:
        raise ConfigurationError("--budget must be above 0, and --top at least 1")


def _check_trials(config: RunConfig) -> None:
    """Raises ConfigurationError if this machine cannot run the trials, before any work is done."""
    from evener.distributed.environment import check_processes, kind_taken

    processes, kind = one_number(config.processes), kind_taken(config.device)
    if processes is not None:
        check_processes(processes, kind)


def _explain(arguments: argparse.Namespace) -> int:
    """Prints the terms of a run's steps beside the predicted ones. Returns exit status 1 if they are farther apart than
    predicted."""
    from evener.tools.plan import Calibration, compared_step

    if not arguments.source:
        raise ConfigurationError(
            "--explain RUN compares with a plan that was saved: name it with --from FILE"
        )
    calibration = Calibration.read(arguments.source)
    found = compared_step(calibration, Path(arguments.explain))
    print(found.table())
    learned = sum(run.counts and run.options == found.candidate.words for run in calibration.runs)
    if learned:
        print(
            f"{arguments.source} has learned from runs in this way ({learned}), as from this one if it chose it"
        )
    return 0 if found.is_within else 1


def _memory(arguments: argparse.Namespace, config: RunConfig) -> tuple[dict[str, Any], bool]:
    """Prints the memory of a run with the settings. Returns it, and True if it is within the limits. Returns nothing if
    it cannot be known, as the plan then notes for each way.

    Raises:
        UnknownMemoryError: If memory alone is asked for, and cannot be known before the run.
    """
    from evener.tools.estimate import UnknownMemoryError, estimate_memory

    try:
        estimate = estimate_memory(arguments.task, config, options=options.task_options_of(arguments))
    except UnknownMemoryError:
        if arguments.memory:
            raise
        return {}, True
    limits = parse_limits(arguments.memory_limit, len(estimate.ranks))
    exceeding = estimate.exceeding(limits)
    print(estimate)
    for rank in exceeding:
        limit = limits[rank.rank] or 0
        print(f"rank {rank.rank} would need {size_words(rank.needed)}, and has {size_words(limit)}")
    return estimate.as_json() | {"limits": limits}, not exceeding


def _plan(arguments: argparse.Namespace, config: RunConfig) -> tuple[TrainingPlan, Path | str]:
    """Returns the plan, and the file in which it was kept for later runs or why it was not. The last is empty for a
    plan without trials."""
    from evener.tools.plan import Calibration, calibrate, keep, make_plan, plan_for_cluster, read_cluster

    task, given, seconds = arguments.task, options.task_options_of(arguments), arguments.budget
    if arguments.cluster:
        cluster = read_cluster(arguments.cluster)
        return plan_for_cluster(task, cluster, config, options=given, seconds=seconds), ""
    kept: Path | str = ""
    if arguments.source:
        calibration = Calibration.read(arguments.source)
    else:
        print(f"trying each way to train for a few steps, about {seconds:.0f} s", file=sys.stderr, flush=True)
        calibration = calibrate(task, config, options=given, seconds=seconds)
        kept = keep(calibration, task, config, given)
    if arguments.save:
        calibration.save(arguments.save)
    return make_plan(task, config, options=given, calibration=calibration), kept
