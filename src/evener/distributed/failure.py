"""Reports the failure of a run to the user once: the failure of the rank where it began.

When one rank fails, the others fail a moment later with less helpful messages ("Connection closed by peer"). Each rank
writes its failure into the error file that torchrun's agent assigns to it, in the agent's format with additional
fields. The launcher then picks the failure that is the cause of the others.
"""

from __future__ import annotations

import base64
import dis
import json
import os
import pickle
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

from evener.core.os_errors import is_shortage, os_error_message
from evener.core.stdio import to_stderr
from evener.core.text import printable, said, shortened, trace_of
from evener.distributed.file_descriptors import release, shortage_message
from evener.errors import (
    ConfigurationError,
    DivergenceError,
    EvenerError,
    InterruptedRunError,
    RankError,
    RankTimeoutError,
)

_CONSEQUENCES = {"error": 0, "exit": 0, "killed": 0, "communication": 1, "interrupted": 1, "ended": 2}
"""Kinds of failure. One with a higher number is a consequence of another rank's failure with a lower number."""

_COMMUNICATION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|timeout|nccl|socket|remote process exited"
    r"|no route to host|failed to (recv|send)|store",
    re.IGNORECASE,
)
_BETWEEN_RANKS = (str(Path(__file__).parents[1]), os.path.join("torch", "distributed"))
"""Parts of the paths of files that connect ranks: Evener's own, and PyTorch's."""
_LONGEST_PICKLE = 100_000
"""Most characters of a pickled error. A larger error is passed on as text only."""
_SEMAPHORES = os.path.join("multiprocessing", "synchronize.py")
_SHM_CURE = "make it larger (docker run --shm-size=8g, or --ipc=host), or use no workers"
_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """Failure of one rank."""

    rank: int
    kind: str
    """``error``, ``exit`` (SystemExit), ``killed`` (by a signal), ``communication`` (with another rank),
    ``interrupted`` (asked to stop) or ``ended`` (by the agent, because another rank failed)."""
    message: str
    traceback: str = ""
    time: float = 0.0
    """Seconds since the epoch."""
    exit_status: int = 1
    pickled: str = ""
    """The `EvenerError`, pickled and base64-encoded, to be raised again where the run was started. Else empty."""

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the failure of a run with the smallest key is its cause."""
        return (_CONSEQUENCES[self.kind], self.time)

    @property
    def is_own(self) -> bool:
        """True if the failure is not a consequence of another rank's failure."""
        return _CONSEQUENCES[self.kind] == 0

    @property
    def line(self) -> str:
        """Innermost line of the traceback that is outside of site-packages; empty if there is none."""
        lines = [text.strip() for text in self.traceback.splitlines() if text.startswith("  File ")]
        return next((text for text in reversed(lines) if "site-packages" not in text), "")

    def to_error(self) -> EvenerError:
        """Returns the error to raise where the run was started. Its message names the rank."""
        again = self._unpickled()
        if again is None and self.kind == "interrupted":
            return InterruptedRunError(f"rank {self.rank} was {self.message}", self.exit_status - 128)
        if again is None:
            error = RankError(f"rank {self.rank} {self.message}\n\n{self.traceback}".rstrip())
            error.exit_status, error.rank = self.exit_status, self.rank
            return error
        if not isinstance(again, RankError | RankTimeoutError | InterruptedRunError):
            again.args = (f"rank {self.rank}: {said(again)}", *again.args[1:])
            again.rank = self.rank
        return again

    def _unpickled(self) -> EvenerError | None:
        try:
            error = pickle.loads(base64.b64decode(self.pickled)) if self.pickled else None
        except Exception:
            return None
        return error if isinstance(error, EvenerError) else None


def first(failures: Iterable[Failure]) -> Failure:
    """Returns the failure that is the cause of the others."""
    return min(failures, key=lambda failure: failure.order)


def is_hopeless(failures: Iterable[Failure]) -> bool:
    """Returns True if a restart would fail for the same reason: a configuration error, or a loss that diverged."""
    return isinstance(first(failures).to_error(), ConfigurationError | DivergenceError)


def may_be_replaced(failures: Sequence[Failure]) -> bool:
    """Returns True if these ranks failed by themselves, for a reason that need not occur in the next start."""
    return all(failure.is_own for failure in failures) and not is_hopeless(failures)


def is_communication_error(error: BaseException) -> bool:
    """Returns True if a collective, a store or a socket raised ``error`` because of another rank.

    A data set that reads over a network, or a DataLoader with a time limit, raises errors with the same words.
    """
    if isinstance(error, EvenerError):
        return isinstance(error, RankError | RankTimeoutError)
    is_theirs = isinstance(error, RuntimeError | ConnectionError | TimeoutError)
    if not is_theirs or _COMMUNICATION.search(said(error)) is None or shortage_message():
        return False
    before = error.__cause__ or error.__context__
    return _is_raised_between_ranks(error) or (before is not None and is_communication_error(before))


def _is_raised_between_ranks(error: BaseException) -> bool:
    """Returns True if code that connects ranks may have raised ``error``: PyTorch's, in C++ or Python, or Evener's.

    C++ raises a RuntimeError in the frame that called it, so there no ``raise`` statement stands at the end of the
    traceback. Python's sockets raise an OSError, and connect no ranks. Also True if there is no traceback.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    code = trace.tb_frame.f_code
    if any(part in code.co_filename for part in _BETWEEN_RANKS):
        return True
    return code.co_code[trace.tb_lasti] != dis.opmap["RAISE_VARARGS"] and not isinstance(error, OSError)


def is_timeout(error: BaseException) -> bool:
    """Returns True if a communication error says that a rank was late rather than gone."""
    return _TIMEOUT.search(said(error)) is not None


def failure_of(error: BaseException, rank: int) -> Failure:
    """Creates the failure to report for an exception that ended a rank."""
    error = _cause_of_interruption(error)
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
        code = f": {shortened(error.code)}" if isinstance(error.code, str) else f" with status {status}"
        return Failure(rank, "exit", f"ended{code}", time=time.time(), exit_status=status)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, "interrupted", "interrupted by SIGINT", time=time.time(), exit_status=130)
    return Failure(
        rank,
        _kind(error),
        f"raised {type(error).__name__}: {_message(error)}{_hint(error)}",
        "" if is_shortage(error) else _user_traceback(error),
        vars(error).get("time", time.time()),  # a signal's arrival, before its consequences elsewhere
        error.exit_status if isinstance(error, EvenerError) else 1,
        _pickled(error),
    )


def record_failure(error: BaseException, rank: int) -> Failure:
    """Creates the failure for ``error`` and, if there is an agent, writes it into the agent's error file."""
    release()
    failure = failure_of(error, rank)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {
            "py_callstack": failure.traceback,
            "timestamp": str(int(failure.time)),
            "evener": asdict(failure),
        }
        document = {"message": {"message": failure.message, "extraInfo": extra}}
        partial = Path(f"{path}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(document))
            partial.replace(path)
        except OSError as unwritten:  # the launcher can only tell its status then
            lacks = f"the launcher's directory cannot be written ({path}): {os_error_message(unwritten)}"
            to_stderr(printable(f"evener: {failure.to_error()}\n{lacks}; TMPDIR names another place"))
    return failure


def recorded_failure(document: dict[str, Any]) -> Failure | None:
    """Parses an error file that `record_failure` wrote. Returns None for any other document."""
    message = document.get("message")
    fields = message.get("extraInfo", {}).get("evener") if isinstance(message, dict) else None
    return None if fields is None else Failure(**fields)


def _hint(error: BaseException) -> str:
    """Returns advice to append to the message: for a killed DataLoader worker or used-up file descriptors; else empty.

    PyTorch raises the death of a DataLoader worker wherever the main thread is.
    """
    if (text := said(error)).startswith("DataLoader worker") and "killed by signal" in text:
        return "(out of memory or /dev/shm? the kernel's log, dmesg, would say; use fewer workers)"
    return "" if isinstance(error, EvenerError) or is_shortage(error) else shortage_message()


def _message(error: BaseException) -> str:
    """Returns the message of ``error``. A shortage is shown without traceback, so its place in the code is added."""
    if not (isinstance(error, OSError) and is_shortage(error)):
        return said(error)
    trace = _below_runtime(error.__traceback__) or error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    where = f" (at {code.co_filename}:{trace.tb_lineno} in {code.co_name})" if code and trace else ""
    if code and code.co_filename.endswith(_SEMAPHORES):  # the error names no file
        return (
            f"{error.strerror}: /dev/shm, where workers and queues have their semaphores; {_SHM_CURE}{where}"
        )
    return f"{os_error_message(error)}{where}"


def _kind(error: BaseException) -> str:
    if isinstance(error, InterruptedRunError):
        return "interrupted"
    return "communication" if is_communication_error(error) else "error"


def _cause_of_interruption(error: BaseException) -> BaseException:
    """Returns the error that was already ending the rank when a stop signal arrived, if any; otherwise ``error``."""
    before = vars(error).get("before")
    return before if isinstance(error, InterruptedRunError) and isinstance(before, Exception) else error


def _pickled(error: BaseException) -> str:
    if not isinstance(error, EvenerError):
        return ""
    try:
        bare = error.with_traceback(None)
        pickled = base64.b64encode(cloudpickle.dumps(bare)).decode()
        return pickled if len(pickled) <= _LONGEST_PICKLE else ""
    except Exception:
        return ""


def _user_traceback(error: BaseException) -> str:
    """Formats the traceback as Python does, without the outer frames of the runtime that called the user's code."""
    trace = error.__traceback__
    inner = _below_runtime(trace)
    return trace_of(error, inner or trace)


def _below_runtime(trace: TracebackType | None) -> TracebackType | None:
    here = os.path.dirname(os.path.abspath(__file__))
    ours = (here, "<frozen runpy>", sys.modules["runpy"].__file__ if "runpy" in sys.modules else here)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(tuple(map(str, ours))):
        trace = trace.tb_next
    return trace
