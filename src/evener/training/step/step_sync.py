"""Exchanges numbers about every step between the ranks, and tells when they are known.

In each step every rank posts one short row of numbers (:class:`~evener.training.step.step.RankStats`) right after
backward. It is read after the next forward pass, so that sending it costs no time. It holds the number of terms of the
next batch, by which all ranks have to divide, and the results of the step. A rank waits for the rows at once only if it
must know them before the update: if its own numbers are not finite, or some parameter got no gradient.

On a device that runs behind the host, such as a GPU, no result of a step is known when its row is posted, and waiting
for one would stop the host in every step. There the loss is sent from device to device and read when somebody asks for
it, and the times of a step are sent with the row of the next::

    CPU    step n: forward, backward ─ post n: count of n + 1, results of n     ─ update ─ tell of step n - 1
    GPU    step n: (queued)          ─ post n: count of n + 1, times of n - 1   ─ (queued) ─ tell of step n - 2
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from itertools import chain

import torch

from evener.components.compile import Graphs
from evener.core.exact_numbers import Added, plain_total, total_and_rest
from evener.core.losses import Loss
from evener.data.batch import Batch
from evener.distributed.hosts import all_gather
from evener.distributed.mesh import DIVIDING_TERMS, Mesh
from evener.hardware.async_read import Readout, is_late, read
from evener.hardware.memory.step_usage import NOTHING
from evener.hardware.timers import waiting
from evener.strategies.interfaces import StepOutcome
from evener.training.step.divisions import check_divisions, check_widths, code_of, width_of
from evener.training.step.exchange import ByRows, Exchange, GatheredStep, Hearing, Telling
from evener.training.step.late_results import results_alone, row_on_device
from evener.training.step.step import RankStats, RankTimes, Results, Step

Observe = Callable[[Step], None]


class StepSync:
    """Posts and reads the rows of one run.

    Args:
        control: Exchanges numbers between all ranks.
        mesh: Says which ranks contribute what.
        device: Device of this rank.
        loss: Gives the loss, which counts the terms of a batch.
        observe: Called with each step when the times of all ranks are known, in order and alike on every rank.
        waits: Whether to wait for each row at once. Then the caller checks the results.
        graphs: What this rank has compiled, and its findings.
        telling: How the ranks exchange rows; ``ByRows`` if None.
        prompt: Whether to wait for a device that runs behind, because those of other ranks do not.
        exact: Whether sums must have the same bits on any division. Their counts make the host wait for the device.
    """

    def __init__(
        self,
        control: Exchange,
        mesh: Mesh,
        device: torch.device,
        loss: Callable[[], Loss],
        observe: Observe,
        waits: bool = False,
        graphs: Graphs | None = None,
        telling: Telling | None = None,
        prompt: bool = False,
        exact: bool = False,
    ) -> None:
        self.control, self._mesh, self._loss, self._observe = control, mesh, loss, observe
        self._alone = mesh.layout.world_size == 1
        self._device, self._late = device, is_late(device) and not (prompt or exact)
        self._added: Added = total_and_rest if exact else plain_total
        self._counts: dict[tuple[int, int], float] = {}
        self._telling = telling or ByRows(control, mesh)
        self._in_flight: tuple[Step, Batch | None, Hearing] | None = None
        self._unread: Step | None = None
        self._unmeasured: tuple[Readout, Readout, Readout] | None = None
        self._measured: deque[Step] = deque()
        self._before: Step | None = None
        self._waits, self._begun, self._graphs, self._made = waits, False, graphs or Graphs(), 0
        self.wish = 0.0
        """This rank's request for what all ranks do, sent with each step."""
        self._wishes: dict[int, float] = {}
        self.buffers_changed = False
        """True if a forward pass on any rank has changed buffers that nothing keeps equal."""

    @property
    def steps_late(self) -> int:
        """Number of steps after which the times of a step are known."""
        return 2 if self._late else 1

    # Before backward

    def divisor(self, step: Step, loss_scale: float = 1.0) -> float:
        """Returns the divisor for the sum of all terms, with which they get the scale of the loss. All ranks need it
        before backward, and call this together."""
        if self._alone:
            step.terms = self._terms(step.batch)
        else:
            with waiting():
                step.terms = self._terms(step.batch)
        step.count = self._loss().divisor(step.terms)
        return (step.count or 1.0) / loss_scale

    def _terms(self, batch: Batch) -> float:
        """Returns the number of terms of a global batch. All ranks must call this together."""
        self.settle()
        place = (batch.epoch, batch.index)
        if place not in self._counts:
            own = self._added(_values(self.count(batch)))
            rows = self._mesh.data.of_contributors(self.control.exchange(own).wait())
            self._counts = {place: self._added(chain.from_iterable(rows))[0]}
        return self._counts[place]

    def count(self, batch: Batch | None) -> list[Readout]:
        """Returns the numbers of terms of this rank's micro-batches, counted on the host if the targets are there."""
        if batch is None:
            return []
        micros = (batch.on_host or batch).micro_batches
        return [read(self._loss().count(micro.targets)) for micro in micros if micro.weight]

    # After backward

    def post(
        self,
        step: Step,
        outcome: StepOutcome,
        upcoming: Batch | None,
        next_count: list[Readout],
        elapsed: Readout,
        input_seconds: float,
    ) -> Iterable[str]:
        """Sends the numbers of the step to all ranks. Returns the parameters that have no gradient on any rank.

        Raises:
            DivergenceError: If a number is not finite, as far as that is known at once.
        """
        if outcome.terms is not None:  # the stepper has counted them, and has not asked for a divisor
            with waiting():
                self.settle()
            step.terms, step.count = outcome.terms, self._loss().divisor(outcome.terms)
        step.merge_spread, step.wasted = outcome.merge_spread, outcome.wasted
        step.merge_ranks, step.merge_bytes = outcome.merge_ranks, outcome.merge_bytes
        if outcome.merges:
            step.merges = tuple(tuple(astuple(each) for each in held) for held in outcome.merges)
        total = soundness = unsound = 0.0
        rests: list[float] = []
        if self._late:
            step.results = self._late_results(outcome)
            measured, times = self._before, self._times()
            self._unmeasured = outcome.compute_seconds, elapsed, outcome.forward_seconds
        else:
            self._unmeasured = outcome.compute_seconds, elapsed, outcome.forward_seconds
            unsound = max(_values(outcome.unsound)) if outcome.unsound else 0.0
            (total, *rests), soundness = self._added(_values(outcome.totals)), sum(_values(outcome.soundness))
            measured, times = step, self._times()
        doubtful = not (math.isfinite(total) and math.isfinite(soundness))
        graphs, differing = self._graphs.made, float(self._graphs.untold)
        step.only_work, self._made = graphs == self._made and not outcome.retries, graphs
        read_seconds = input_seconds + outcome.input_seconds
        count, *count_rest = self._added(_values(next_count))
        counts = (count, outcome.missing_code, float(outcome.buffers_changed), read_seconds)
        asked = (self.wish, len(step.batch.skipped), outcome.retries, outcome.piece, graphs, differing)
        code = 0.0 if self._alone else code_of(step.batch, upcoming, outcome.changes)
        is_over = not self._alone and outcome.terms is None and self._loss().is_over_elements
        width = width_of(step.batch.micro_batches) if is_over else 0.0
        row = RankStats(*counts, total, soundness, unsound, *times, *asked, code, width, *count_rest, *rests)
        step.changes = outcome.changes
        step.batch = outcome.batch or step.batch.without_samples()  # reported while later ones are computed
        step.asked_to_stop = outcome.asked_to_stop
        if measured is not None:
            measured.own_seconds = RankTimes(*times)
        self._in_flight = step, upcoming, self._telling.start(step.number, row, outcome.memory, measured)
        if outcome.missing or doubtful or outcome.has_changed or self._waits or not self._begun:
            self._begun = True
            return self._missing_everywhere(outcome, self.settle())
        return ()

    def _times(self) -> tuple[float, float, float]:
        """Returns compute, wait and forward seconds; NaN if they are not measured yet."""
        if self._unmeasured is None:
            return math.nan, math.nan, math.nan
        compute, elapsed, forward = (each.value() for each in self._unmeasured)
        return compute, max(0.0, elapsed - compute), forward

    def _late_results(self, outcome: StepOutcome) -> Callable[[], Results]:
        """Starts to send the results of a step from device to device, and to the host."""
        if self._alone:
            return results_alone(outcome, self._device)
        return self._telling.results(row_on_device(outcome, self._device))

    def _missing_everywhere(self, outcome: StepOutcome, heard: GatheredStep | None) -> Iterable[str]:
        """Returns the parameters without a gradient on all ranks that hold them."""
        codes = set(heard.missing) if heard else {0.0}
        if 0.0 in codes:
            return ()
        group = self._mesh.group(*DIVIDING_TERMS)
        if len(codes) == 1 or group is None:
            return outcome.missing
        return set.intersection(*map(set, all_gather(outcome.missing, group)))

    # Reading

    def settle(self) -> GatheredStep | None:
        """Waits for the rows of the last step. Returns None if none are outstanding.

        Raises:
            DivergenceError: If the loss or a gradient of a rank was not finite, as far as that is known.
            LossError: If they have padded it to different lengths, and the mean is over what is padded too.
            ShareError: If the ranks have divided the batch, or the next one, in different ways.
        """
        if self._in_flight is None:
            return None
        (step, upcoming, hearing), self._in_flight = self._in_flight, None
        self._unread = step
        heard = hearing()
        self._unread = None
        check_divisions(heard.divisions, step, upcoming, self._mesh.world)
        if heard.rows is not None:
            check_widths(heard.rows.width)
        if not self._late:
            step.results = lambda: heard.results
            if not self._waits:
                step.check_finite()
        self._counts = {}
        if upcoming is not None:
            self._counts[upcoming.epoch, upcoming.index] = heard.next_count
        self.buffers_changed |= heard.buffers_changed
        self._take_findings(step, heard)
        _take_rows(step, heard)
        self._wishes = {step.number - 1: self.wished(step.number - 1), step.number: heard.wish}
        step.skipped = int(heard.skipped)
        self._times_known(step, heard)
        return heard

    def _take_findings(self, step: Step, heard: GatheredStep) -> None:
        if heard.differing:
            self._graphs.heard(step.number)

    def _times_known(self, step: Step, heard: GatheredStep) -> None:
        """Processes the times in a row: those of its step, or on a late device those of the step before."""
        measured = self._before if self._late else step
        self._before = step
        if measured is not None:
            _take_times(measured, heard)
            self._observe(measured)
            self._measured.append(measured)

    def tell_times(self, step: Step, seconds: float) -> Step:
        """Exchanges the times of a step that the user's own loop took, and returns it. A collective call that waits.

        Args:
            step: Gets the times of all ranks.
            seconds: This rank's own work.
        """
        own = {
            "compute_seconds": seconds,
            "forward_seconds": 0.0,
            "graphs": self._graphs.made,
            "differing": self._graphs.untold,
        }
        row = RankStats(0.0, 0.0, 0.0, 0.0, division=code_of(step.batch, None), **own)
        step.own_seconds = RankTimes(seconds)
        with waiting():
            heard = self._telling.start(step.number, row, NOTHING, step)()
        check_divisions(heard.divisions, step, None, self._mesh.world)
        self._take_findings(step, heard)
        _take_rows(step, heard)
        _take_times(step, heard)
        return step

    def wished(self, number: int) -> float:
        """Returns the greatest request that a rank sent with step ``number``, one of the last two with known rows."""
        return self._wishes.get(number, 0.0)

    def check(self) -> None:
        """Waits for the results of all steps so far, so that nothing wrong is saved or reported.

        Raises:
            DivergenceError: If the loss or a gradient of a rank was not finite, in the first such step.
        """
        self.settle()
        for step in self._measured:
            step.check_finite()
        if self._late and self._before is not None:
            self._before.check_finite()

    def settle_before(self, step: int) -> None:
        """Waits for outstanding rows of a step before ``step``, but not for those of ``step`` itself.

        A step that was not completed is reported with the seconds until then.
        """
        if self._in_flight is not None and self._in_flight[0].number < step:
            self.settle()
        for known in self._measured:
            if known.number < step and not known.seconds:
                own = known.own_seconds.compute + known.own_seconds.wait
                known.seconds = max(
                    map(sum, zip(known.compute_seconds, known.wait_seconds, strict=True)), default=own
                )

    def lost_before(self, step: int) -> Step | None:
        """Returns the step before ``step`` whose rows were lost when a rank died, or None. Its loss stays unknown."""
        lost = self._unread
        if lost is None or lost.number >= step:
            return None
        lost.results = lambda: Results(math.nan)
        lost.seconds = lost.seconds or math.nan
        return lost

    def finish(self) -> None:
        """Exchanges the times of the last step too, because no step follows at once. A collective call."""
        self.check()
        if self._late and self._before is not None:
            times = self._times()
            self._before.own_seconds = RankTimes(*times)
            row = RankStats(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, *times)
            with waiting():
                heard = self._telling.start(self._before.number + 1, row, NOTHING, self._before)()
            self._times_known(self._before, heard)
            self._before = self._unmeasured = None

    def forget(self) -> None:
        """Drops steps that were not reported yet."""
        self._in_flight = self._unmeasured = self._before = None
        self._measured.clear()
        self._counts = {}

    def told(self) -> Iterator[Step]:
        """Yields steps that are complete and known, each once."""
        while self._measured and self._measured[0].seconds:
            step = self._measured.popleft()
            if self._late:  # on others it was checked when its row was read, or before its update
                step.check_finite()
            yield step


def _values(numbers: Iterable[Readout]) -> list[float]:
    return [number.value() for number in numbers]


def _take_rows(step: Step, heard: GatheredStep) -> None:
    """Stores each rank's own numbers in the step, if rows were exchanged."""
    if heard.rows is not None:
        step.input_seconds = heard.rows.input_seconds
        step.retries = tuple(map(int, heard.rows.retries))
        step.pieces, step.graphs = _of_ranks(heard.rows.piece), _of_ranks(heard.rows.graphs)
        step.memory_columns = heard.memory


def _take_times(step: Step, heard: GatheredStep) -> None:
    if heard.rows is not None:
        step.compute_seconds, step.wait_seconds = heard.rows.compute_seconds, heard.rows.wait_seconds
        step.forward_seconds = heard.rows.forward_seconds
    step.speeds, step.lines = heard.speeds, heard.lines


def _of_ranks(numbers: Iterable[float]) -> tuple[int, ...]:
    """Returns integers, or an empty tuple if all are 0."""
    return tuple(map(int, numbers)) if any(numbers) else ()
