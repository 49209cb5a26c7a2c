"""Heartbeat: what one rank tells the others about where it is. Also samples the main thread to find that out.

A program that was not written for Evener marks no phases, so its place is read from the stack of its main thread: the
innermost frames of the user's own code, and the call into ``torch.distributed`` or ``backward`` below them, if any. A
main thread in such a call counts as waiting since it last moved or used processor time.
"""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch

from evener.core.collector import collector_paused
from evener.files import PACKAGE

_TORCH = str(Path(torch.__file__).parent) + os.sep
_EVENER = str(PACKAGE) + os.sep
_LIBRARIES = (_TORCH, _EVENER, sysconfig.get_path("stdlib") + os.sep, "<frozen", "<string>")
_WAITING_CODE = (
    _TORCH + os.path.join("distributed", ""),
    _TORCH + os.path.join("nn", "parallel", ""),
    _TORCH + os.path.join("autograd", ""),
    _TORCH + "_tensor.py",
)
_NO_WAITS = ("wrapper", "destroy_process_group")
"""Functions there that are no waits with a limit. NCCL destroys a group when all of its ranks do, and one of them may
have work to do before, such as to write what was trained."""
_PAYLOADS = ("tensor", "tensors", "input_tensor", "input", "input_tensor_list", "input_list", "scatter_list")
"""Names of the collectives' parameters for the data that a rank sends."""
_DEBUGGERS = (f"{os.sep}pdb.py", f"{os.sep}pydevd.py")
_USER_FRAMES = 3
_BUSY_SECONDS = 1e-3
INTERVAL_SECONDS = 1.0
"""Seconds between two heartbeats of a rank, unless its time limit is short."""
_BEATS = 5
"""A rank sends at least so many heartbeats within its time limit."""
_SILENT_BEATS = 3
"""Number of heartbeats that may be missing before a rank counts as silent."""


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank. Times are in seconds."""

    rank: int
    host: str
    pid: int
    count: int
    """Number of this heartbeat. It does not grow while the process is stopped."""
    time: float
    """Time of the sender's monotonic clock, which all processes of its host share."""
    phase: str | None = None
    step: int | None = None
    waits: bool = False
    """True if the rank waits for other ranks."""
    seconds: float = 0.0
    """How long the rank has been in this phase or wait."""
    where: tuple[str, ...] = ()
    """Innermost frames of the user's code, ``train.py:33 in main``."""
    progress: str = ""
    together: str = ""
    """Operation without time limit that all ranks do together (`Watchdog.together`): ``checkpoint of step 41``."""
    token: str = ""
    """Host token: equal for two ranks exactly if one can see the other's process."""
    ended: bool = False
    """True if the rank has left by itself."""
    status: int | None = None
    """Exit status with which the rank left; None if its process goes on."""
    idle: float = 0.0
    """How long the rank has made no progress; 0 in a joint operation, which has no limit."""
    payload: str = ""
    """Type and shape of what the rank gives to the collective in which it waits, if known: ``float32[3, 4]``."""
    limit: float = math.inf
    """How long the rank waits for others before the run ends."""
    still: float = 0.0
    """For how long the main thread has neither moved nor computed."""
    threads: tuple[str, ...] = ()
    """Names of the threads that the process waits for before it ends. Set in the last heartbeat."""
    works_on: bool = False
    """True if these threads may be part of the rank's work, as in a script."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Heartbeat:
        fields = json.loads(text)
        fields |= {name: tuple(fields[name]) for name in ("where", "threads")}
        return cls(**fields)

    @property
    def interval_seconds(self) -> float:
        """Seconds between two heartbeats of the rank."""
        return interval_of(self.limit)

    @property
    def patience_seconds(self) -> float:
        """Seconds without a new heartbeat after which the rank counts as silent."""
        return _SILENT_BEATS * self.interval_seconds

    @property
    def place(self) -> str:
        """Description of where the rank is: ``all-reduce of step 41, at train.py:33 in main``."""
        phase_text = format_phase(self.phase or "its program", self.step)
        if self.payload:
            phase_text += f" of {self.payload}"
        if self.together not in ("", phase_text):
            phase_text += f" (during {self.together})"
        return f"{phase_text}, at {' < '.join(self.where)}" if self.where else phase_text

    @property
    def stuck_seconds(self) -> float:
        """How long the rank has waited, or, if it does not wait, made no progress."""
        return self.seconds if self.waits else self.idle

    @property
    def exit_status_text(self) -> str:
        return "" if self.status is None else f" with status {self.status}"

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def interval_of(limit_seconds: float) -> float:
    """Returns the seconds between two heartbeats of a rank with this time limit."""
    return min(INTERVAL_SECONDS, limit_seconds / _BEATS)


def format_phase(name: str, step: int | None) -> str:
    """Returns ``all-reduce of step 41``, or only the name without a step."""
    return name if step is None else f"{name} of step {step}"


def awaited_threads() -> tuple[str, ...]:
    """Returns the names of the threads that this process must wait for before it ends (non-daemon threads)."""
    main = threading.main_thread()
    return tuple(thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main)


@dataclass(frozen=True)
class ThreadSample:
    """One sample of the main thread."""

    where: tuple[str, ...]
    call: str | None
    """Name of the call into ``torch.distributed`` or ``backward`` that the thread is in; None if there is none."""
    still_seconds: float
    """For how long the thread has neither moved nor computed."""
    debugs: bool = False
    """True if a debugger's frame is on the stack."""
    payload: str = ""
    """Type and shape of what the thread gives to the call, if that is a collective."""


class MainThread:
    """Samples the main thread from another thread, without slowing it down or keeping its frames alive."""

    def __init__(self) -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        self._ident = ident
        self._clock = time.pthread_getcpuclockid(ident)
        self._signature: tuple[tuple[int, int], ...] = ()
        self._cpu_seconds = 0.0
        self._since = time.monotonic()

    def take_sample(self) -> ThreadSample:
        """Returns where the main thread is.

        Nothing is collected meanwhile. A finalizer of the user's, called while Python reads the frames of the other
        thread, may let that go on. The frames are gone then, and what is written to them crashes the process, or the
        two threads wait for each other (python/cpython#106883).
        """
        with collector_paused():
            return self._take_sample()

    def _take_sample(self) -> ThreadSample:
        frames = list(_outward(sys._current_frames().get(self._ident)))
        signature = tuple((id(frame), frame.f_lasti) for frame in frames)
        cpu_seconds, now = time.clock_gettime(self._clock), time.monotonic()
        if signature != self._signature or cpu_seconds - self._cpu_seconds > _BUSY_SECONDS:
            self._since = now
        self._signature, self._cpu_seconds = signature, cpu_seconds
        debugs = any(frame.f_code.co_filename.endswith(_DEBUGGERS) for frame in frames)
        waits = _waiting_frame(frames)
        call = None if waits is None else waits.f_code.co_name
        payload = "" if waits is None else payload_of(waits)
        return ThreadSample(_user_frames(frames), call, now - self._since, debugs, payload)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_user(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(_LIBRARIES) and "site-packages" not in file


def _user_frames(frames: list[FrameType]) -> tuple[str, ...]:
    users = [frame for frame in frames if _is_user(frame)]
    return tuple(
        f"{os.path.basename(f.f_code.co_filename)}:{f.f_lineno} in {f.f_code.co_name}"
        for f in users[:_USER_FRAMES]
    )


def _waiting_frame(frames: list[FrameType]) -> FrameType | None:
    """Returns the outermost frame in `_WAITING_CODE` below the user's innermost frame. Returns None without any."""
    found = None
    for frame in frames:
        if _is_user(frame):
            break
        code = frame.f_code
        if code.co_filename.startswith(_WAITING_CODE) and code.co_name not in _NO_WAITS:
            found = frame
    return found


def payload_of(frame: FrameType) -> str:
    """Returns type and shape of what a function of ``torch.distributed`` sends; empty for other functions.

    Reads the frame's local variables, so PyTorch need not be patched and collectives have no overhead.
    """
    if not frame.f_code.co_filename.startswith(_WAITING_CODE[0]):
        return ""
    values = (frame.f_locals.get(name) for name in _PAYLOADS)
    return next((in_short(value) for value in values if in_short(value)), "")


def in_short(value: object) -> str:
    """Returns type and shape of a tensor, or of a list's first: ``2 x float32[3, 4]``. Empty for other values."""
    if isinstance(value, list | tuple) and value:
        first = in_short(value[0])
        return f"{len(value)} x {first}" if first else ""
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
