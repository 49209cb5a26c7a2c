"""What one rank tells the others about where it is: a heartbeat, and how it is read off the running program.

A program that was not written for Evener says nothing of itself, so its place is taken from the stack of its
main thread: the innermost frames of the user's own code, and the call into ``torch.distributed`` or
``backward`` below them, if any. A main thread that stays in such a call and uses no processor time is
waiting; one that computes does.
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
_PAYLOADS = ("tensor", "tensors", "input_tensor", "input", "input_tensor_list", "input_list", "scatter_list")
"""What the collectives call what they send."""
_DEBUGGERS = (f"{os.sep}pdb.py", f"{os.sep}pydevd.py")
_USER_FRAMES = 3
_BUSY_SECONDS = 1e-3


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is. Times are in seconds."""

    rank: int
    host: str
    pid: int
    count: int
    """Number of this heartbeat; it stands still when the process does."""
    time: float
    """Of the clock that the processes of the sender's host share and that nobody sets."""
    phase: str | None = None
    step: int | None = None
    waits: bool = False
    """Whether it waits for other ranks."""
    seconds: float = 0.0
    """How long it has been there."""
    where: tuple[str, ...] = ()
    """Innermost frames of the user's code, ``train.py:33 in main``."""
    progress: str = ""
    together: str = ""
    """What it does together with all other ranks, for as long as that takes: ``checkpoint of step 41``."""
    token: str = ""
    """Of the host: that of two ranks is equal exactly where one can look at the other's process."""
    ended: bool = False
    """The rank has left on its own."""
    status: int | None = None
    """With which it left, where its process ends with it."""
    idle: float = 0.0
    """How long it has made no progress; 0 in what is done together, which has no limit."""
    payload: str = ""
    """What it gives to the collective in which it waits, where that is known: ``float32[3, 4]``."""
    limit: float = math.inf
    """How long it waits for others before the run ends."""
    still: float = 0.0
    """For how long its main thread has neither moved nor computed."""
    threads: tuple[str, ...] = ()
    """Names of the threads that its process, which has done its work, waits for before it ends."""
    works_on: bool = False
    """Whether these may be part of its work, as in a script."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Heartbeat:
        fields = json.loads(text)
        fields |= {name: tuple(fields[name]) for name in ("where", "threads")}
        return cls(**fields)

    @property
    def place(self) -> str:
        """In words: ``all-reduce of step 41, at train.py:33 in main``."""
        words = in_words(self.phase or "its program", self.step)
        if self.payload:
            words += f" of {self.payload}"
        if self.together not in ("", words):
            words += f" (during {self.together})"
        return f"{words}, at {' < '.join(self.where)}" if self.where else words

    @property
    def stuck_seconds(self) -> float:
        """How long it has waited or, if it does not, made no progress."""
        return self.seconds if self.waits else self.idle

    @property
    def status_words(self) -> str:
        return "" if self.status is None else f" with status {self.status}"

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def in_words(name: str, step: int | None) -> str:
    """``all-reduce of step 41``."""
    return name if step is None else f"{name} of step {step}"


def awaited_threads() -> tuple[str, ...]:
    """Names of the threads of this process without whose end it does not end."""
    main = threading.main_thread()
    return tuple(thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main)


@dataclass(frozen=True)
class Sample:
    """One look at the main thread."""

    where: tuple[str, ...]
    call: str | None
    """The call into ``torch.distributed`` or ``backward`` in which it is, or None."""
    still_seconds: float
    """For how long it has neither moved nor computed."""
    debugs: bool = False
    """Whether a debugger has it, and a person thinks."""
    payload: str = ""
    """What it gives to the call, where that is a collective."""


class MainThread:
    """Looks at the main thread from another one, and neither slows it down nor keeps its frames alive."""

    def __init__(self) -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        self._ident = ident
        self._clock = time.pthread_getcpuclockid(ident)
        self._signature: tuple[tuple[int, int], ...] = ()
        self._cpu_seconds = 0.0
        self._since = time.monotonic()

    def look(self) -> Sample:
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
        return Sample(_user_frames(frames), call, now - self._since, debugs, payload)


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
    """The outermost named function of `_WAITING_CODE` that the user's innermost frame has called."""
    found = None
    for frame in frames:
        if _is_user(frame):
            break
        code = frame.f_code
        if code.co_filename.startswith(_WAITING_CODE) and code.co_name != "wrapper":
            found = frame
    return found


def payload_of(frame: FrameType) -> str:
    """Type and shape of what is sent by a function of ``torch.distributed``; empty for others.

    Read off its variables, so that nothing of PyTorch has to be changed and a collective costs nothing more.
    """
    if not frame.f_code.co_filename.startswith(_WAITING_CODE[0]):
        return ""
    values = (frame.f_locals.get(name) for name in _PAYLOADS)
    return next((in_short(value) for value in values if in_short(value)), "")


def in_short(value: object) -> str:
    """Type and shape of a tensor, or of the first of a list: ``2 x float32[3, 4]``."""
    if isinstance(value, list | tuple) and value:
        first = in_short(value[0])
        return f"{len(value)} x {first}" if first else ""
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
