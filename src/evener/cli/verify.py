"""``evener verify``: checks that divided training gives the same weights as training on one device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser, place
from evener.core.text import counted
from evener.errors import ConfigurationError

if TYPE_CHECKING:
    from evener.tools.verify import BitsVerification, Verification
    from evener.tools.verify.replay import ReplayedRun
    from evener.tools.verify_script import ScriptVerification

SETTINGS = (
    "processes",
    "balance",
    "max_shares",
    "share_multiple_of",
    "throttle",
    "strategy",
    "strategy_option",
    "mesh",
    "devices",
    "steps",
    "batch_size",
    "micro_batch",
    "dtype",
    "precision",
    "precision_of",
    "compile",
    "compile_mode",
    "compile_backend",
    "compile_check",
    "recompute",
    "offload",
    "offload_to",
    "optimizer_state",
    *("exact", "grain", "block"),
    "batch_norm",
    "fused_optimizer",
    "update_in_backward",
    "seed",
    "clip_norm",
    "allreduce",
    "compress",
    "bucket_mb",
    "device",
    "workers",
    "timeout_seconds",
)
OF_SCRIPTS = {
    *(
        "processes",
        "balance",
        "max_shares",
        "share_multiple_of",
        "steps",
        "batch_norm",
        "seed",
        "allreduce",
        "compress",
    ),
    *("bucket_mb", "device", "timeout_seconds"),
}
"""Settings that apply to a script. A script has its own task and batch size."""
SHOWN_STEPS = 20


HELP = CommandHelp(
    "verify",
    "prove that dividing the work changes nothing",
    "Take the same steps on one device and on several ranks, and compare losses, gradients and weights. The "
    "tolerance is what rounding alone causes, measured on one device. Exit status 1 if the runs differ by more. A "
    "SCRIPT.py that calls evener.prepare, or with -m a module, is run unchanged; if it trains differently, the line is "
    "named. The script's own options follow --.",
    usage="TASK|SCRIPT.py [OPTIONS] [-- ARGS]",
    examples=(
        "evener verify loop.py",
        "evener verify -m package.loop",
        "evener verify loop.py --processes 2 --shares 3,1 -- --epochs 1",
        "evener verify digits --processes 3",
        "evener verify mytask:task --shares 3,1 --steps 20 --json verified.json",
        "evener verify digits --bits --processes 3",
        "evener verify --replay runs/asynchronous",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_task_options(parser)
    options.add_config_options(parser, *SETTINGS)
    options.add_shares_option(parser)
    parser.option(
        "task", "-m", "--module", action="store_true", help="TASK is a module that is run, as by python -m"
    )
    parser.option(
        "output",
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative weight error (default: that of rounding)",
    )
    parser.option(
        "output",
        "--bits",
        action="store_true",
        help="compare the bits of runs with exact=bits",
        full="train with --exact bits on one rank and on several, with shares drawn in every step, over several "
        "all-reduces and sizes of buckets and after a resume on another number of ranks, and compare the sha256 of all "
        "weights",
    )
    parser.option(
        "output",
        "--replay",
        type=place,
        metavar="RUN",
        help="repeat an asynchronous run on one device, in the order of its records",
        full="repeat the asynchronous run of a run directory on one device, in the order in which its records say that "
        "gradients merged, and compare the weights with its last checkpoint. TASK may be left out if it comes with "
        "Evener or an installed package",
    )
    options.add_json_option(parser, "the result", "passed")
    parser.rest = "script_arguments"


def execute(arguments: argparse.Namespace) -> int:
    """Compares both trainings and prints the result. Returns exit status 1 if the weights differ."""
    if arguments.replay is not None:
        return execute_replay(arguments)
    if arguments.bits:
        return execute_bits(arguments)
    if arguments.module or arguments.task.endswith(".py"):
        return execute_script(arguments)
    if arguments.script_arguments:
        raise ConfigurationError(
            f"{' '.join(arguments.script_arguments)} stands behind --, where a script's own options are, and "
            f"{arguments.task} is no SCRIPT.py: a task takes --option KEY=VALUE"
        )
    config = options.config_of(arguments)
    options.find_modules_here()
    from evener.tools.verify import verify

    result = verify(
        arguments.task,
        config,
        options=options.task_options_of(arguments),
        tolerance=arguments.tolerance,
    )
    return _shown(result, text(result), arguments)


def _shown(
    result: Verification | BitsVerification | ReplayedRun | ScriptVerification,
    words: str,
    arguments: argparse.Namespace,
) -> int:
    import dataclasses

    from evener.files import write_json

    if arguments.json is not None:
        write_json(arguments.json, dataclasses.asdict(result), follow=True)
    print(words, flush=True)
    return 0 if result.passed else 1


def execute_replay(arguments: argparse.Namespace) -> int:
    """Repeats an asynchronous run and prints the result. Returns exit status 1 if the weights differ."""
    given = options.said(arguments, *SETTINGS, "tolerance")
    strange = [option for option, value in given.items() if value is not None]
    strange += ["--bits"] * arguments.bits + ["-m"] * arguments.module
    if strange or arguments.script_arguments:
        raise ConfigurationError(
            f"{(strange or ['--'])[0]} does not go with --replay: how the run was made is in its directory"
        )
    options.find_modules_here()
    from evener.tools.verify.replay import replay

    result = replay(arguments.replay, arguments.task, options=options.task_options_of(arguments) or None)
    return _shown(result, text_of_replay(result), arguments)


def execute_bits(arguments: argparse.Namespace) -> int:
    """Compares the bits of several divisions and prints them. Returns exit status 1 if they differ."""
    is_script = arguments.module or arguments.task.endswith(".py")
    if is_script or arguments.script_arguments or arguments.tolerance is not None:
        raise ConfigurationError(
            "--bits compares the bits of a TASK, without --tolerance: a script divides its batches itself"
        )
    arguments.exact = "bits"
    config = options.config_of(arguments)
    options.find_modules_here()
    from evener.tools.verify import verify_bits

    result = verify_bits(arguments.task, config, options=options.task_options_of(arguments))
    return _shown(result, text_of_bits(result), arguments)


def text_of_bits(result: BitsVerification) -> str:
    """Formats the comparison of bits: the verdict, and one line for each division."""
    verdict = (
        f"PASS: the same bits in {len(result.divisions)} divisions, sha256 {result.digest}"
        if result.passed
        else f"FAIL: not the same bits. {result.difference}"
    )
    lines = [verdict, "", "weights           optimizer         division"]
    lines += [
        f"{digest[:16]}  {result.optimizers[words][:16]}  {words}"
        for words, digest in result.divisions.items()
    ]
    lines += [
        f"{result.task}: {counted(result.steps, 'step')} of {counted(result.batch_size, 'sample')}, "
        f"strategy {result.strategy}; {result.about}"
    ]
    return "\n".join(lines)


def text_of_replay(result: ReplayedRun) -> str:
    """Formats the comparison of a run with its repetition, beginning with the verdict."""
    if result.is_identical:
        verdict = f"PASS: one device that repeats the order of {result.run} gets the same bits"
    elif result.passed:
        verdict = (
            f"PASS: one device that repeats the order of {result.run} gets the same weights to rounding: the largest "
            f"relative difference is {result.max_relative_error:.1e}, in {result.worst}, and rounding alone makes "
            f"{result.floor:.1e}"
        )
    else:
        verdict = (
            f"FAIL: one device that repeats the order of {result.run} gets other weights. The largest relative "
            f"difference is {result.max_relative_error:.1e}, in {result.worst}, and rounding alone makes "
            f"{result.floor:.1e}: the records or the checkpoint were changed, or the task or its data differ"
        )
    return (
        f"{verdict}\n  {result.task}: {result.merges:,} merges in {result.sections:,} sections, {result.samples:,} "
        f"samples, each in one merge; gradients at most {result.oldest} versions old"
    )


def execute_script(arguments: argparse.Namespace) -> int:
    """Compares a script's training with one device, and prints the result. Returns exit status 1 if they differ."""
    _check_options_of_scripts(arguments)
    config = options.config_of(arguments)
    if arguments.module:
        options.find_modules_here()
    from evener.tools.verify_script import verify_script

    result = verify_script(arguments.task, arguments.script_arguments, config, is_module=arguments.module)
    return _shown(result, text_of_script(result), arguments)


def _check_options_of_scripts(arguments: argparse.Namespace) -> None:
    """Raises:
    ConfigurationError: If an option applies to tasks only, not to scripts.
    """
    names = [name for name in (*SETTINGS, "tolerance", "data_dir") if name not in OF_SCRIPTS]
    strange = [option for option, value in options.said(arguments, *names).items() if value is not None]
    if strange or arguments.option:
        raise ConfigurationError(
            f"{(strange or ['--option'])[0]} goes with a TASK, and {arguments.task} is a script, which says so itself; "
            "its own options stand behind --"
        )


def text_of_script(result: ScriptVerification) -> str:
    """Formats the comparison of a script, beginning with the verdict."""
    ended = f"the first {result.steps}" if result.ended_by_limit else "all"
    where = f"{result.processes} ranks with shares {result.shares}"
    if result.passed:
        return (
            f"PASS: {result.script} trains on {where} as on one device\n"
            f"  compared: {ended} steps of its optimizers ({result.steps}), what they were given and made of the "
            f"weights, {len(result.losses)} backward passes, and what rank 0 prints\n"
            f"  {result.times_floor:.3g} times the floor (rounding explains {result.limit:g}){_unseen(result)}"
        )
    differs = f"does not train on {where} as on one device" if result.steps else "could not be compared"
    lines = [f"FAIL: {result.script} {differs}"]
    if result.line:
        lines += [f"  {result.line}", f"    {result.source}"]
    lines += [f"  {result.found}"]
    lines += [f"  hint: {result.hint}"] if result.hint else []
    lines += [f"  and {each}" for each in result.also]
    return "\n".join(lines)


def _unseen(result: ScriptVerification) -> str:
    if not result.ended_by_limit or result.passes:
        return ""
    return (
        "\n  no end of an epoch came within these steps: what the script prints, evaluates or decides later was not "
        "compared; --steps N goes further"
    )


def text(result: Verification) -> str:
    """Formats the comparison of a task: the verdict, the losses, and what was compared."""
    lines = [_verdict(result), "", "step   one device          divided             difference"]
    pairs = list(enumerate(zip(result.reference_losses, result.losses, strict=False)))
    every = max(1, len(pairs) // SHOWN_STEPS)
    lines += [f"{n:>4}   {a:<18.12g}  {b:<18.12g}  {abs(a - b):.1e}" for n, (a, b) in pairs if n % every == 0]
    lines += [
        f"{result.task}: {counted(result.steps, 'step')} of {counted(result.batch_size, 'sample')} in {result.dtype}, "
        f"{result.processes} processes, shares {result.shares}, strategy {result.strategy}",
        f"largest relative weight error {result.max_relative_weight_error:.2e} in {result.worst_parameter} "
        f"({_allowed(result)}); replicas {'bit-identical' if result.replicas_identical else 'DIFFER'}",
        *_absolutely(result.judged_absolutely),
    ]
    return "\n".join(lines)


def _allowed(result: Verification) -> str:
    if result.tolerance is not None:
        return f"allowed {result.tolerance:.0e}"
    return f"by rounding alone {result.floor:.2e}"


def _absolutely(names: list[str]) -> list[str]:
    if not names:
        return []
    from evener.tools.verify.hints import listed

    return [f"no gradient but rounding, so judged absolutely: {listed(names)}"]


def _verdict(result: Verification) -> str:
    times = f"{result.times_floor:.3g} times what rounding alone makes"
    if not result.passed:
        return f"FAIL: not the training of one device. {_sentence(result.worst)} is off by {times}: {result.hint}"
    allowed = f"{result.limit:g} allowed" if result.tolerance is None else "allowed by --tolerance"
    return (
        f"PASS: the training of one device. The largest difference is {times} ({allowed}), in {result.worst}."
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
