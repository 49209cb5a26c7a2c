"""Every error that a user can meet.

::

    EvenerError                 what the command shows without a traceback
    ├── ConfigurationError      a value that cannot work, found before anything ran       (exit status 2)
    │   ├── TaskError           no such task; a module without the function; a bad Task
    │   ├── ShareError          shares that are negative, do not add up, or are of the wrong number
    │   └── LossError           a loss whose count cannot be known from the targets
    ├── DataError               a wrong file or checksum; a dataset item of the wrong type
    ├── StorageError            a file that cannot be written or read: a full disk, no permission
    │   └── CheckpointError     a checkpoint that could not be written
    ├── DivergenceError         a loss that is not a number; replicas that differ
    ├── OutOfMemoryError        a rank whose memory does not hold its part of a step
    ├── RankError               a rank raised an exception, or its process died
    ├── RankTimeoutError        a wait ended without some rank; says which and where it stands
    └── InterruptedRunError     Ctrl-C or SIGTERM; says where the run stood               (exit status 130 or 143)

Each states the values that it saw, on which rank, and the way out.
"""

from __future__ import annotations


class EvenerError(Exception):
    """Base of all errors that Evener raises on purpose; ``exit_status`` is what the command ends with."""

    exit_status = 1


class ConfigurationError(EvenerError, ValueError):
    """A value that cannot work, found before anything ran."""

    exit_status = 2


class TaskError(ConfigurationError):
    """The task does not exist, or is not a task."""


class ShareError(ConfigurationError):
    """Shares that cannot divide a batch."""


class LossError(ConfigurationError):
    """A loss that is not a sum over terms whose number is known from the targets."""


class DataError(EvenerError):
    """A file, a checksum or a dataset item that is not what it must be."""


class StorageError(EvenerError):
    """A file that cannot be written or read: no space, no permission."""


class CheckpointError(StorageError):
    """A checkpoint could not be written; those before are as they were."""


class DivergenceError(EvenerError):
    """The training went where it cannot go on: a loss that is not finite, replicas that differ."""


class OutOfMemoryError(EvenerError):
    """A rank has no room for its part of a step, however small the pieces."""


class RankError(EvenerError):
    """A rank raised an exception, or its process died."""


class RankTimeoutError(EvenerError, TimeoutError):
    """A wait for other ranks ended without them."""


class InterruptedRunError(EvenerError):
    """The run was asked to stop by a signal."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message, signal_number)
        self.message = message
        self.exit_status = 128 + signal_number

    def __str__(self) -> str:
        return self.message
