"""Runs a script on one device and on several ranks, and returns the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from evener.core.config.kwargs import Settings
from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.distributed.launch.script import file_of_script
from evener.errors import ConfigurationError, EvenerError, InterruptedRunError
from evener.tools.verify.comparison import LIMIT
from evener.tools.verify.verification import ALL_RUNS, FIRST_RUNS, STRONGER, check_alone
from evener.tools.verify_script.causes import cause, difference, line_of
from evener.tools.verify_script.comparison import (
    Parting,
    ScriptComparison,
    ScriptRuns,
    before_failure,
    compare,
    same_course,
)
from evener.tools.verify_script.events import Record, ScriptLine, What
from evener.tools.verify_script.recorder import RunPlan
from evener.tools.verify_script.script_run import ScriptCommand, ScriptError, alone, together
from evener.training.factory import balancer_called

STEPS = 20
"""Default number of optimizer steps after which a run ends."""
_SETTINGS = (
    "allreduce",
    "batch_norm",
    "bucket_mb",
    "max_shares",
    "compress",
    "device",
    "share_multiple_of",
    "seed",
)
"""Settings of evener.prepare that replace those of the script if they are given."""
_ON_ONE_DEVICE = ("device", "seed")
_UNEVEN = ("3", "1", "2")
"""Default weights of the ranks' shares, repeated in turn."""
_SURE = ("course", "samples", "shape", "replicas")
"""Kinds of difference that no better measurement of rounding would explain."""


@dataclass(frozen=True)
class ScriptVerification:
    """Result of comparing a script on several ranks with the same script on one device."""

    script: str
    """Path of the script."""
    processes: int
    """Number of ranks of the divided run."""
    shares: str
    """Setting ``balance`` that divided the batches."""
    steps: int
    """Number of optimizer steps on one device."""
    ended_by_limit: bool
    """True if the runs were ended after these steps; False if the script came to its end."""
    passed: bool
    """True if the divided run is the same training as on one device."""
    passes: int = 0
    """Number of epochs whose end was compared: training passes through a prepared loader, the last maybe cut short."""
    line: str = ""
    """``FILE:LINE`` of the first difference, or of the failure."""
    source: str = ""
    """Text of that line."""
    found: str = ""
    """Description of the difference, or the error."""
    hint: str = ""
    """Likely cause of the difference."""
    also: list[str] = field(default_factory=list)
    """Descriptions of further differences in printed output."""
    reference_losses: list[float] = field(default_factory=list)
    """Values that one device back-propagated, in order."""
    losses: list[float] = field(default_factory=list)
    """Values that rank 0 back-propagated, in order."""
    times_floor: float = 0.0
    """Largest of all differences (losses, gradients, weights, buffers), each as a multiple of its own floor."""
    limit: float = LIMIT
    """Largest multiple of the floor that rounding explains."""
    judged_absolutely: list[str] = field(default_factory=list)
    """Parameters whose gradient is mathematically zero, so that rounding alone moved them."""
    replicas_identical: bool = False
    """True if all ranks ended with bitwise equal weights."""

    def __repr__(self) -> str:
        """Returns a summary in one line."""
        found = "the same training" if self.passed else f"NOT the same training, {self.line}"
        return f"<ScriptVerification of {self.script}: {found}, {self.steps} steps on {self.processes} processes>"


def verify_script(
    script: str | Path,
    args: Sequence[str] = (),
    config: RunConfig | None = None,
    *,
    is_module: bool = False,
    **settings: Unpack[Settings],
) -> ScriptVerification:
    """Runs a script on one device and on several ranks with uneven shares, and compares its training.

    The script must call :func:`evener.prepare` and must not start ranks itself. It runs unchanged, several times, in a
    copy of the working directory. Differences up to the measured effect of rounding pass.

    Args:
        script: Path of a Python file, or with ``is_module`` a module's dotted name, as for ``python -m``.
        args: Command-line arguments of the script.
        config: Settings: processes (default: 2), balance (default: 3,1 for two ranks), steps (optimizer steps after
            which a run ends; default: 20), and settings of evener.prepare that replace those of the script.
        is_module: True if ``script`` names a module.

    Raises:
        ConfigurationError: If the settings cannot work together, or there is no such script.
    """
    given = (config or RunConfig()).replace(**settings)
    name = str(script)
    path = file_of_script(name, is_module)
    if is_module and path.name == "__init__.py":
        name = f"{name}.__main__"  # of a package
        path = file_of_script(name, is_module)
    check_alone()
    processes = one_number(given.processes) or 2
    if processes < 2:
        raise ConfigurationError("there is nothing to verify with 1 process: give at least --processes 2")
    balance = given.balance or ",".join(_UNEVEN[rank % len(_UNEVEN)] for rank in range(processes))
    balancer_called(balance, given, processes, lookahead=1)
    proof = _Proof(
        ScriptCommand(path.resolve(), tuple(args), given.timeout_seconds, name if is_module else ""),
        given.replace(processes=processes, balance=balance, steps=given.steps or STEPS),
        ScriptVerification(str(script), processes, balance, 0, ended_by_limit=False, passed=False),
    )
    return proof.verdict()


class _Proof:
    """Runs a script and compares the runs.

    Args:
        blank: The verdict, to be filled in.
    """

    def __init__(self, script: ScriptCommand, config: RunConfig, blank: ScriptVerification) -> None:
        self._script, self._config, self._blank = script, config, blank
        self._eps = 0.0
        self._disturbed: list[Record] = []

    def verdict(self) -> ScriptVerification:
        """Runs the script as often as needed and returns the verdict."""
        try:
            reference = self._first_runs()
        except EvenerError as error:
            return self._failed(error, "on one device")
        verification = replace(
            self._blank,
            steps=reference.steps,
            ended_by_limit=reference.ended_by_limit,
            passes=reference.passes,
            reference_losses=reference.losses(),
        )
        if reason := _nothing(reference):
            return replace(verification, found=reason[0], hint=reason[1])
        if (line := _unsteady(reference, self._disturbed)) is not None:
            return replace(
                verification,
                line=str(line),
                source=line.source,
                found="on one device, too, the script does not do the same twice",
                hint="seed it, as with torch.manual_seed(0) before the model is built and the data are drawn, and let "
                "nothing depend on the time or on what other programs do",
            )
        divided = together(
            self._script, self._plan_of_ranks(reference.failed_after_cut), self._blank.processes
        )
        if divided.error is not None:
            where = f"on {self._blank.processes} ranks, and not on one device"
            failed = self._failed(divided.error, where, verification)
            return _led_to(failed, ScriptRuns(reference, self._disturbed, divided.records))
        return self._judged(reference, divided.records, verification)

    def _first_runs(self) -> Record:
        reference, *self._disturbed = alone(self._script, [self._plan(0), *self._plans(FIRST_RUNS)])
        if reference.mixed:  # the compute dtype is coarser than the weights' dtype
            self._eps, self._disturbed = reference.eps, []
            self._measure(FIRST_RUNS)
        return reference

    def _measure(self, runs: int, strength: int = 1) -> None:
        """Adds disturbed runs until there are ``runs`` of them."""
        self._disturbed += alone(self._script, self._plans(runs, strength))

    def _plans(self, runs: int, strength: int = 1) -> list[RunPlan]:
        return [self._plan(seed, strength) for seed in range(len(self._disturbed) + 1, runs + 1)]

    def _plan(self, seed: int, strength: int = 1) -> RunPlan:
        settings = self._settings(_ON_ONE_DEVICE)
        return RunPlan(self._config.steps or STEPS, settings, True, seed, strength, self._eps)

    def _plan_of_ranks(self, forgives: bool) -> RunPlan:
        settings = self._settings(_SETTINGS) | {"balance": self._config.balance}
        return RunPlan(self._config.steps or STEPS, settings, forgives=forgives)

    def _settings(self, names: Sequence[str]) -> dict[str, Any]:
        usual, given = RunConfig(), self._config
        chosen = {n: getattr(given, n) for n in names if getattr(given, n) != getattr(usual, n)}
        return chosen | {"timeout_seconds": given.timeout_seconds}

    def _judged(
        self, reference: Record, divided: list[Record], verification: ScriptVerification
    ) -> ScriptVerification:
        found = compare(ScriptRuns(reference, self._disturbed, divided))
        if found.partings and not _is_sure(reference, found.partings[0]):
            self._measure(ALL_RUNS, STRONGER)
            found = compare(ScriptRuns(reference, self._disturbed, divided))
        verification = replace(
            verification,
            losses=divided[0].losses(),
            times_floor=found.times_floor,
            judged_absolutely=found.noise,
            replicas_identical=len({run.digest for run in divided}) == 1,
            passed=not found.partings,
        )
        return _explained(verification, ScriptRuns(reference, self._disturbed, divided), found)

    def _failed(
        self, error: EvenerError, where: str, verification: ScriptVerification | None = None
    ) -> ScriptVerification:
        """Returns the verdict on a script that ended with an error.

        Raises:
            EvenerError: If the error is due to the settings or an interruption, not the script.
        """
        if isinstance(error, ConfigurationError | InterruptedRunError):
            raise error
        line = error.line if isinstance(error, ScriptError) and error.line is not None else ScriptLine("", 0)
        message = error.message if isinstance(error, ScriptError) and verification is None else str(error)
        refused = isinstance(error, ScriptError) and error.refused
        return replace(
            verification or self._blank,
            line=str(line) if line.file else "",
            source=line.source if line.file else "",
            found=f"{'Evener refuses it' if refused else 'the script fails'} {where}: {message}",
        )


def _nothing(reference: Record) -> tuple[str, str] | None:
    """Returns why there is nothing to compare, and what to do about it. Returns None if there is something."""
    if not reference.prepared:
        return (
            "the script never calls evener.prepare with a model",
            "write `model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss)`, and leave it to "
            "this command to start ranks",
        )
    if not reference.steps and not any(reference.trajectory().moved.values()):
        return (
            "no optimizer took a step, and weights are what they were, so that there is no training to compare",
            "does the loop begin, and is the optimizer one of torch.optim or derived from it?",
        )
    return None


def _unsteady(reference: Record, disturbed: Sequence[Record]) -> ScriptLine | None:
    """Returns the line at which runs on one device differ by more than rounding. Returns None if they do not."""
    for run in disturbed:
        number = same_course(reference, run)
        events = reference.events[:number]
        rough = max(reference.eps, 2.0**-52) ** 0.5
        for a, b in zip(events, run.events, strict=False):
            if a.what is What.STEP:
                break
            if a.what in (What.LOSS, What.BACKWARD) and abs(a.value - b.value) > rough * abs(a.value):
                return a.line
        if number is not None:
            return (reference.events[number:] or reference.events)[
                0 if reference.events[number:] else -1
            ].line
    return None


def _is_sure(reference: Record, parting: Parting) -> bool:
    """Returns True if more disturbed runs cannot explain the difference by rounding. Before the first update, losses
    are continuous in the weights, so their floor has no jumps that a few runs could miss.
    """
    before = reference.events[: parting.event]
    is_first = not any(event.what is What.STEP for event in before)
    return parting.between or parting.kind in _SURE or (is_first and parting.kind in ("loss", "backward"))


def _led_to(failed: ScriptVerification, runs: ScriptRuns) -> ScriptVerification:
    """Adds the first difference before the failure of the ranks to the verdict, for the failure may follow from it."""
    if not runs.divided:
        return failed
    parting = before_failure(runs)
    if parting is None:
        agree = "batches, losses, gradients and weights before it are those of one device"
        return replace(failed, hint=f"{agree}, so look at what the script does between them and this line")
    line = line_of(runs, parting)
    return replace(
        failed,
        line=str(line),
        source=line.source,
        hint=f"the first difference before it: {difference(runs, parting)}: {cause(runs, parting)}",
    )


def _explained(
    verification: ScriptVerification, runs: ScriptRuns, found: ScriptComparison
) -> ScriptVerification:
    if not found.partings:
        return verification
    first, *others = found.partings
    line = line_of(runs, first)
    kinds = {first.kind: None}
    also = []
    for parting in others:
        if parting.kind not in kinds and parting.kind == "printed":
            also.append(f"{line_of(runs, parting).described}: {difference(runs, parting)}")
        kinds[parting.kind] = None
    return replace(
        verification,
        line=str(line),
        source=line.source,
        found=difference(runs, first),
        hint=cause(runs, first),
        also=also,
    )
