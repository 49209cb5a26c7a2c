"""torchrun's agent, adapted: it stops ranks sooner, finds the cause of a failure, and replaces single ranks.

The agent of `torch.distributed.elastic` starts the ranks of this machine, finds those of the others and watches all.
The differences here: Ranks are killed seconds after they were asked to stop, not half a minute later, because after so
long a silence people close the terminal and leave orphans. The agent remembers which ranks had failed *before* it ended
the others. Its log lines and banner are hidden, because the launcher reports the failure.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from evener.core.stacks import crash_in, stacks_of
from evener.core.stdio import to_stderr
from evener.core.text import printable
from evener.distributed import loopback
from evener.distributed.failure import Failure, first, is_hopeless, may_be_replaced, recorded_failure
from evener.distributed.launch.agent_scope import quiet, signals_restored
from evener.distributed.launch.fault_note import note_fault
from evener.distributed.launch.group_changes import GroupChanges
from evener.distributed.launch.launcher_watchdog import LauncherWatchdog
from evener.distributed.launch.process_count import Headcount, dead
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.launch.rendezvous_wait import RendezvousWait
from evener.distributed.processes import is_alive
from evener.distributed.recovery.regroup import GroupChange
from evener.distributed.recovery.replacement import Start, announce, take_at_their_word
from evener.distributed.restart_count import START
from evener.distributed.signals import GRACE_SECONDS, interruption, stop_signals
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peer_state import PeerState, report_on
from evener.errors import EvenerError, InterruptedRunError, RankError, RankTimeoutError
from evener.torch_internals.elastic import ElasticAgent, failed, running

_KILL_SECONDS = round(GRACE_SECONDS) + 1
_STACKS = 3


class _Variables(DefaultLogsSpecs):
    """Adds environment variables to those that the agent gives its ranks at each start."""

    def __init__(self, log_dir: Path, variables: Callable[[], Mapping[str, str]]) -> None:
        super().__init__(log_dir=str(log_dir))
        self._variables = variables

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for variables in envs.values():
            variables.update(self._variables())
        return super().reify(envs)


class Agent(ElasticAgent):
    """Starts the ranks of this machine and waits for all of them.

    Args:
        arguments: Arguments of the Python interpreter on every rank.
        processes: Number of ranks, at first and after a death.
        rendezvous: How several machines find each other.
        run_dir: A private directory for error files and heartbeats.
        variables: Environment variables of the ranks in addition to torchrun's.
        timeout_seconds: How long machines wait for each other.
        grace_seconds: How long ranks may take to end after a stop signal before they are killed.
        terms: What must be equal on machines that join the run later. None if the ranks know of no steps.
    """

    def __init__(
        self,
        arguments: list[str],
        processes: Headcount,
        rendezvous: Rendezvous,
        run_dir: Path,
        variables: Mapping[str, str],
        timeout_seconds: float,
        grace_seconds: float = GRACE_SECONDS,
        terms: Mapping[str, Any] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._grace_seconds, self._was_asked = grace_seconds, False
        self._headcount, self._max_restarts = processes, rendezvous.max_restarts or 0
        self._lookout = LauncherWatchdog(self._beats, self._pids)
        waits = RendezvousWait(rendezvous, timeout_seconds, terms)
        self._handler = waits.handler()
        self._changes = GroupChanges(
            self._handler, rendezvous, processes, run_dir, waits.keeps_store, waits.launch, terms is not None
        )
        static = rendezvous.rdzv_backend == "static" and not rendezvous.is_standalone
        spec = WorkerSpec(
            role="evener",
            local_world_size=processes.start,
            entrypoint=sys.executable,
            args=tuple(arguments),
            rdzv_handler=self._handler,
            max_restarts=self._max_restarts,
            monitor_interval=0.1,
            master_addr=rendezvous.master_addr if static else None,
            master_port=rendezvous.master_port if static else None,
            local_addr=loopback.ADDRESS if rendezvous.is_standalone else None,
        )
        own = {**variables, **self._changes.variables()}
        logs = _Variables(run_dir / "attempts", lambda: {**own, START: str(self.start_number)})
        super().__init__(spec, logs)
        self._roots: set[int] = set()
        self._others = ""

    @property
    def ranks(self) -> int:
        """Number of ranks of this machine in the current or the next start."""
        return self.get_worker_group().spec.local_world_size

    def run_to_end(self) -> None:
        """Runs the ranks until all have succeeded.

        Raises:
            EvenerError: The failure that caused the end of the run, with the type that it had on its rank.
        """
        with quiet(), signals_restored(), self._lookout:
            ended = False
            try:
                result = self.run()
                ended = result is not None and not result.is_failed()
            except SignalException as stop:
                number = int(stop.sigval)
                ended = self._noted() is None
                raise InterruptedRunError(interruption(number, self._progress()), number) from None
            except (RendezvousTimeoutError, RendezvousConnectionError, dist.DistError) as error:
                raise RankTimeoutError(f"the machines of the run lost each other: {error}") from error
            finally:
                self._kill_groups()
                self._changes.part(ended)
        if result is None:
            raise RankError("the other machines ended the run before this one had joined it")
        if result.is_failed():
            raise self._cause(result)

    @property
    def start_number(self) -> int:
        return self._changes.start_number(self.restarts_done)

    def regroups(self) -> bool:
        """Returns True if the ranks have ended because their number changes, and sets their next number.

        Raises:
            InterruptedRunError: If the ranks of this machine have left, and the others go on without them.
        """
        change = self._noted()
        if change is None or change.in_memory:
            return False
        if self._changes.has_left:
            raise InterruptedRunError(interruption(change.signal, self._progress()), change.signal)
        self.get_worker_group().spec.local_world_size = change.ranks or self.ranks
        _say(f"{change.words}; the ranks start again, with what they have saved")
        return True

    def meets_again(self) -> bool:
        return self._changes.may_have_lost

    def follow_changes(self) -> None:
        """If ranks wait for another number of ranks, and those that leave have ended, announces the next start."""
        change = self._changes.kept(self.start_number, self.ranks)
        pids = self.context.pids() if self.context else {}
        if change is None or any(is_alive(pids[rank]) for rank in change.leave):
            return
        stay = sorted(pids.keys() - set(change.leave))
        if all(is_alive(pids[rank]) for rank in stay) and take_at_their_word(
            self._run_dir, stay, self.start_number
        ):
            self._changes.made()
            new, kept = tuple(range(len(stay), change.ranks)), tuple(pids[rank] for rank in stay)
            announce(self._run_dir, Start(self.start_number, new, kept, change.ranks))
            self.renumber(stay, change.ranks)
            _say(f"{change.words}; the ranks that stay go on with what they hold in memory")

    def _noted(self) -> GroupChange | None:
        return self._changes.noted(
            self.start_number, self.ranks, self.get_worker_group().workers[0].global_rank
        )

    def started(self, context: PContext) -> None:
        self._roots = set()
        self._hurry(context)

    def _hurry(self, context: PContext) -> None:
        """Replaces ``context.close``, with which the agent ends ranks: its half minute of patience cannot be set."""
        slow_close = context.close

        def close(death_sig: signal.Signals | None = None, timeout: int = _KILL_SECONDS) -> None:
            self._roots = self._roots or failed(context)
            if self._roots:
                self._note_others()
                self._kill_deaf(context)
            self._ask(context, death_sig or signal.SIGTERM, self._patience())
            slow_close(death_sig, 1)

        context.close = close  # type: ignore[method-assign]

    def _ask(self, context: PContext, number: signal.Signals, seconds: int) -> None:
        """Sends the signal to the ranks only, and waits for their end. The agent would signal their children too, and
        without its DataLoader workers a rank could not finish its step."""
        pids = list(context.pids().values())
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _kill_deaf(self, context: PContext) -> None:
        """Kills ranks that are stopped or silent (blocked with the GIL), because they could not react to a signal."""
        ranks = {worker.local_rank: worker.global_rank for worker in self.get_worker_group().workers}
        for local_rank, pid in context.pids().items():
            beat = self._beat(ranks[local_rank])
            if beat and beat.pid == pid and not beat.ended and PeerState(beat.rank, beat).is_lost:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _patience(self) -> int:
        """Returns the seconds that ranks get to end by themselves: more after the first signal, for a checkpoint."""
        if self._was_asked or not isinstance(sys.exception(), SignalException):
            return _KILL_SECONDS
        self._was_asked = True
        if self._grace_seconds > GRACE_SECONDS:
            _say(
                f"asked the ranks to save and end, within {self._grace_seconds:g} s; a second signal ends them at once"
            )
        return math.ceil(self._grace_seconds) + 1

    def failing(self, result: RunResult, restarts: int) -> bool:
        """Called after a failure with the ``restarts`` left. Returns False if a restart would fail for the same reason.

        Otherwise, if there are restarts left, announces the restart and sets its number of ranks.
        """
        failures = {each.local_rank: self._failure(rank, each) for rank, each in result.failures.items()}
        cause = first(failures.values())
        note_fault(self._run_dir, cause, self._lookout.found)
        hopeless = self._lookout.was_done or is_hopeless(failures.values())
        hopeless, is_free = self._changes.judged(self.start_number, cause, hopeless, self._progressed())
        if is_free and not hopeless:
            self.spare_restart()
            restarts += 1
        if restarts and not hopeless:
            number = self._max_restarts - restarts + 1
            spared = self._spare(0 if self._lookout.found else dead(failures, self._roots, cause))
            _say(f"{cause.to_error()}\nrestart {number} of {self._max_restarts}{spared}")
        return not hopeless

    def replaces(self, failures: Mapping[int, ProcessFailure]) -> bool:
        """Returns True if the failed ranks will be replaced while all others stay, and announces the next start.

        This requires that they died by themselves, and that all other ranks have promised to stay.
        """
        goes_on_with_fewer = self._headcount.after(self.ranks, len(failures)) != self.ranks
        others = running(self.context) if self.context else {}
        known = len(failures) + len(others) == self.ranks
        is_fixed = not (goes_on_with_fewer or self._changes.between_machines)
        if self._lookout.found or not is_fixed or not (self.is_alone and others and known):
            return False
        ranks = [worker.global_rank for worker in self.get_worker_group().workers]
        self._roots = set(failures)
        found = [self._failure(ranks[local_rank], failure) for local_rank, failure in failures.items()]
        stay = [ranks[local_rank] for local_rank in others]
        if not may_be_replaced(found) or not take_at_their_word(self._run_dir, stay, self.start_number):
            return False
        self._roots = set()
        note_fault(self._run_dir, first(found))
        self._say_replaced(found)
        for failure in failures.values():
            self._kill_group(failure.pid)
        new, number = tuple(failure.rank for failure in found), self.start_number + 1
        announce(self._run_dir, Start(number, new, tuple(others.values())))
        return True

    def _say_replaced(self, found: Sequence[Failure]) -> None:
        causes = "\n".join(str(failure.to_error()) for failure in found)
        who = ", ".join(str(failure.rank) for failure in found)
        count = f"restart {self.restarts_done + 1} of {self._max_restarts}"
        _say(f"{causes}\n{count}: of rank {who} alone; the others stay, with what they hold in memory")

    def _spare(self, number: int) -> str:
        """Reduces the number of ranks for the next start by ``number``, if allowed. Returns text for the message."""
        spec = self.get_worker_group().spec  # the agent reads the number of ranks from it at each start
        spec.local_world_size = self._headcount.after(self.ranks, number)
        return self._headcount.description(self.ranks)

    def _kill_groups(self) -> None:
        """Kills the process groups of all ranks, including children such as DataLoader workers."""
        for pid in self.context.pids().values() if self.context else ():
            self._kill_group(pid)

    def _kill_group(self, pid: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _cause(self, result: RunResult) -> EvenerError:
        ended = result.failures
        if self._lookout.found is not None:  # a failure that a rank itself has recorded takes precedence
            ended = {
                rank: process
                for rank, process in ended.items()
                if recorded_failure(process.error_file_data) is not None
            }
            if not ended:
                return self._lookout.found
        failures = [self._failure(rank, failure) for rank, failure in ended.items()]
        cause = first(failures)
        others = [failure for failure in failures if failure is not cause]
        if cause.kind == "killed" and self._crash(cause.rank):
            lines = [f"\n  rank {other.rank}, at {other.line}" for other in others if other.line]
            cause = replace(cause, message=cause.message + "".join(lines))
        return cause.to_error()

    def _failure(self, rank: int, process: ProcessFailure) -> Failure:
        recorded = recorded_failure(process.error_file_data)
        if recorded is not None:
            return recorded
        if process.local_rank not in self._roots:
            return Failure(rank, "ended", "was ended after another rank failed")
        if -process.exitcode in stop_signals():
            message = interruption(-process.exitcode, self._progress())
            return Failure(
                rank, "interrupted", message, time=process.timestamp, exit_status=128 - process.exitcode
            )
        if process.exitcode < 0:
            return Failure(rank, "killed", self._death(rank, process), time=process.timestamp)
        message = f"(pid {process.pid}) ended with status {process.exitcode}"
        return Failure(rank, "exit", message, time=process.timestamp, exit_status=process.exitcode)

    def _death(self, rank: int, process: ProcessFailure) -> str:
        hint = {
            signal.SIGKILL: " (out of memory? the kernel's log, dmesg, would say)",
            signal.SIGSEGV: " (a crash in native code)",
            signal.SIGABRT: " (native code gave up; its last words are above)",
        }.get(signal.Signals(-process.exitcode), "")
        beat, place = self._beat(rank), ""
        if beat and beat.pid == process.pid:  # not what a process before it has left
            place = f"; last seen {max(time.monotonic() - beat.time, 0):.1f} s before in {beat.place}"
        crash = self._crash(rank)
        others = self._others if crash else ""
        return f"(pid {process.pid}) was killed by {process.signal_name()}{hint}{place}{crash}{others}"

    def _crash(self, rank: int) -> str:
        return crash_in(self._run_dir / f"crash-{rank}")

    def _note_others(self) -> None:
        """Records where the other ranks are if native code crashed a rank: they may be in another collective."""
        beats = self._beats()
        if any(self._crash(worker.global_rank) for worker in self.get_worker_group().workers):
            known = [PeerState(beat.rank, beat) for beat in beats.values() if beat is not None]
            stacks = {other.rank: stacks_of(other.beat.pid) for other in known[:_STACKS] if other.beat}
            self._others = f"\n{report_on(known, stacks)}" if known else ""

    def _progress(self) -> str:
        """Returns the position of the run as given by the first local rank that has one; else empty."""
        beats = [self._beat(worker.global_rank) for worker in self.get_worker_group().workers]
        return next((beat.progress for beat in beats if beat and beat.progress), "")

    def _progressed(self) -> bool:
        """Returns True if a rank of this machine is known to have taken a step in this start."""
        pids = set(self.context.pids().values()) if self.context else set()
        beats = [self._beat(worker.global_rank) for worker in self.get_worker_group().workers]
        return any(beat.pid in pids and beat.progress for beat in beats if beat)

    def _beats(self) -> dict[int, Heartbeat | None]:
        """Returns the last heartbeats of running ranks, by rank; None for one that has sent none in this start."""
        started = self._pids()
        beats = {rank: self._beat(rank) for rank in started}
        return {rank: beat if beat and beat.pid == started[rank] else None for rank, beat in beats.items()}

    def _pids(self) -> dict[int, int]:
        """Returns the process ids of the running ranks, by rank."""
        pids = self.context.pids() if self.context else {}
        workers = [
            (worker.global_rank, pids.get(worker.local_rank)) for worker in self.get_worker_group().workers
        ]
        return {rank: pid for rank, pid in workers if pid is not None and is_alive(pid)}

    def _beat(self, rank: int) -> Heartbeat | None:
        try:
            return Heartbeat.from_json((self._run_dir / f"beat-{rank}").read_text())
        except OSError:
            return None


def _say(message: str) -> None:
    to_stderr(f"evener: {printable(message)}")
