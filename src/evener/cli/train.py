"""``evener train``: trains a task."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser, path
from evener.core.collector import collector_paused
from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import is_url, place_of, shown
from evener.core.stdio import unheard
from evener.core.text import from_here
from evener.errors import ConfigurationError, DataError, InterruptedRunError
from evener.training.reporting.width import fitted

if TYPE_CHECKING:
    from evener.tools.plan import Way

HELP = CommandHelp(
    "train",
    "train a task on all devices",
    "Train a task on all devices, equal or not, as if they were one.",
    usage="TASK [OPTIONS]",
    examples=(
        "evener train digits --processes 2 --epochs 1",
        "evener train mytask:task --balance auto --run-dir runs/first",
        "evener train mytask:task --resume runs/first --epochs 20",
        "evener train --config run.toml --batch-size 128",
    ),
)
_PLACES = ("--run-dir", "--resume", "--weights")
"""Options that are removed from the command line that continues a run; each has a value."""
_REPLACING = ("--overwrite", "--no-overwrite")


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_task_options(parser)
    options.add_config_options(parser)
    options.add_shares_option(parser)
    parser.option(
        "devices",
        "--plan",
        type=path,
        metavar="FILE",
        help="train in the fastest way of evener plan TASK --save FILE",
    )
    options.add_rendezvous_options(parser)
    options.add_json_option(parser, "the summary", "final_loss")
    options.add_report_option(parser, "write report.html into the run directory at the end")


def execute(arguments: argparse.Namespace) -> int:
    """Trains and prints the summary."""
    config = options.config_of(arguments)
    if speaks(os.environ):
        print(fitted(first_line(arguments.task, config), sys.stderr), file=unheard(sys.stderr), flush=True)
    options.find_modules_here()
    with collector_paused():
        from evener.cli.report_at_end import report_at_end
        from evener.core.records import as_json
        from evener.files import write_json
        from evener.tools.plan import chosen_way, load_now
        from evener.tools.plan.text import prediction_text
        from evener.training.fit import fit
        from evener.training.reporting.terminal import summary_text

    way, load, plan = None, load_now(), arguments.plan
    if plan is not None:
        given = options.task_options_of(arguments)
        config, way = chosen_way(arguments.plan, config, arguments.task, given)
        if speaks(os.environ):
            print(prediction_text(arguments.plan, way), file=unheard(sys.stderr), flush=True)
    elif arguments.nnodes is None:
        config, way, plan = _by_kept_plan(arguments, config)
        config = config if way is not None else _fitting(arguments, config)
    if config.run_dir is None:
        config = config.replace(run_dir=_resumed(config))
    with saying_how_to_continue(arguments.given), report_at_end(bool(arguments.report)) as observers:
        trained = fit(
            arguments.task,
            config,
            options=options.task_options_of(arguments),
            rendezvous=options.rendezvous_of(arguments),
            observers=observers,
            run_home=Path("runs"),
        )
    if trained.rank == 0:
        print(fitted(summary_text(trained.summary), sys.stdout), flush=True)
        if way is not None and trained.summary.run_dir is not None:
            run_dir = place_of("run_dir", trained.summary.run_dir)
            print(_beside_prediction(arguments, plan, run_dir, load), flush=True)
        if arguments.json:
            write_json(arguments.json, as_json(trained.summary), follow=True)
    return 0


def _fitting(arguments: argparse.Namespace, config: RunConfig) -> RunConfig:
    """Returns settings with which the run fits into memory, if those given do not and others do."""
    from evener.tools.plan import fitting_strategy

    config, words = fitting_strategy(arguments.task, config, options.task_options_of(arguments))
    if words and speaks(os.environ):
        print(words, file=unheard(sys.stderr), flush=True)
    return config


def _by_kept_plan(
    arguments: argparse.Namespace, config: RunConfig
) -> tuple[RunConfig, Way | None, Path | None]:
    """Returns the settings by a plan that an earlier command has kept for this task, if there is one."""
    from evener.tools.plan import Calibration, cached_way
    from evener.tools.plan.text import kept_text

    said = ""
    try:
        found = cached_way(arguments.task, config, options.task_options_of(arguments))
        if found is not None:
            said = kept_text(found[2], Calibration.read(found[2]).made, found[1])
    except (ConfigurationError, DataError) as error:
        found, said = None, f"without a plan: {error}"
    except Exception:  # of the task, which the ranks build and explain
        found = None
    if said and speaks(os.environ):
        print(said, file=unheard(sys.stderr), flush=True)
    return found or (config, None, None)


def _beside_prediction(arguments: argparse.Namespace, plan: Path, run: Path, load: float) -> str:
    """Returns a line that has what the steps of a run took, and what was predicted. The plan learns from the run, and
    one that was named is kept for later runs.

    Args:
        load: The number of programs that wanted to compute before it began.
    """
    from evener.tools.plan import Calibration, compared_step, keep, with_run

    try:
        calibration = Calibration.read(plan)
        found = compared_step(calibration, run)
        learned = with_run(calibration, found, found.batch_size, load)
        learned.save(plan)
        if arguments.plan is not None:
            given = options.config_of(arguments), options.task_options_of(arguments)
            keep(learned, arguments.task, *given)
    except (ConfigurationError, DataError) as error:
        return f"  not compared with the plan: {error}"
    except OSError as error:
        return f"  {found.words()}; {plan} cannot be written and learns nothing: {error}"
    return f"  {found.words()}"


@contextmanager
def saying_how_to_continue(given: Sequence[str]) -> Iterator[None]:
    """If the run is interrupted and was saved, adds the command that continues it to the error's message. To another
    error of a run that has saved before, adds it as a note.

    Args:
        given: The arguments of the command line.

    Raises:
        InterruptedRunError: If the block raises it.
    """
    from evener.distributed.launch.fault_note import noted_directory

    earlier = noted_directory()
    try:
        yield
    except InterruptedRunError as error:
        before, saved, directory = error.message.partition("Continue with --resume ")
        if not saved:
            raise
        message = f"{before}Continue: {command_that_continues(given, directory)}"
        raise InterruptedRunError(message, error.exit_status - 128) from error
    except Exception as error:
        place = noted_directory()
        words = "" if place is None or place is earlier else _what_was_saved(place, given)
        if words:
            error.add_note(words)
        raise


def _what_was_saved(directory: Path, given: Sequence[str]) -> str:
    """Returns which checkpoint the run that has failed has left in its directory, and the command that continues from
    it; empty if there is none here."""
    from evener.checkpoint.layout import CHECKPOINTS, complete

    if any(is_url(argument.rpartition("=")[2]) for argument in given):
        return ""
    try:
        saved = complete(directory / CHECKPOINTS)
    except (ConfigurationError, OSError):
        return ""
    if not saved:
        return ""
    return f"The last checkpoint is {saved[0].name}. Continue: {command_that_continues(given, from_here(directory))}"


def command_that_continues(given: Sequence[str], directory: str) -> str:
    """Returns the command line that resumes from ``directory``, quoted for a shell.

    It does not contain settings from a file or environment variables, which will be read again.
    """
    kept, arguments = ["evener"], iter(given)
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if option in _PLACES:
            if not equals:
                next(arguments, None)
        elif option not in _REPLACING:
            kept.append(argument)
    return shlex.join([*kept, "--resume", directory])


def speaks(variables: Mapping[str, str]) -> bool:
    """Returns True unless torchrun's or SLURM's variables give this process a rank other than 0."""
    rank = variables.get("RANK", variables.get("SLURM_PROCID", "0"))
    return rank in ("", "0")


def first_line(task: str, config: RunConfig) -> str:
    """Returns the first line of output, printed before PyTorch is imported, which takes seconds."""
    from evener.version import evener_version

    ranks = f" on {config.processes} processes" if config.processes not in (None, 1, "1") else ""
    kept = f", kept in {shown(config.run_dir)}" if config.run_dir is not None else ""
    return f"training {task}{ranks} with evener {evener_version()}{kept}"


def _resumed(config: RunConfig) -> Path | None:
    """Returns the run directory to resume. Returns None without ``--resume``, or if that names a single checkpoint."""
    resume = config.resume
    from evener.checkpoint.remote.fetch import is_run_directory

    return resume if resume is not None and is_run_directory(resume) else None
