"""All exceptions that Evener raises on purpose.

::

    EvenerError                 base class; the command prints it without a traceback   (exit status 1)
    ├── ConfigurationError      an invalid setting, found before the run started        (exit status 2)
    │   ├── TaskError           no such task; a module without the function; a bad Task
    │   ├── ShareError          shares that are negative, do not add up, or are too many or too few
    │   └── LossError           a loss whose number of terms cannot be known from the targets
    ├── DataError               a wrong file or checksum; a dataset item of the wrong type
    ├── StorageError            a file that cannot be written or read: a full disk, no permission
    │   └── CheckpointError     a checkpoint that could not be written
    ├── DivergenceError         a loss that is not finite; replicas that differ
    ├── OutOfMemoryError        a rank whose memory does not hold its part of a step
    ├── RankError               a rank raised an exception, or its process died
    ├── RankTimeoutError        a wait for other ranks timed out; says which ranks, and where they are
    └── InterruptedRunError     Ctrl-C, SIGTERM and the like; says how far the run was  (exit status 128 + signal)

Each message states the offending values, the rank, and a remedy.
"""

from __future__ import annotations


class EvenerError(Exception):
    """Base class of all errors that Evener raises on purpose. ``exit_status`` is the exit status of the command."""

    exit_status = 1
    rank: int | None = None
    """The rank that is the cause, if one is known."""


class ConfigurationError(EvenerError, ValueError):
    """A setting is invalid. Raised before the run starts."""

    exit_status = 2


class TaskError(ConfigurationError):
    """The task does not exist, or is not a valid task."""


class ShareError(ConfigurationError):
    """The shares cannot divide a batch: they are negative, do not add up, or are too many or too few."""


class LossError(ConfigurationError):
    """The loss is not a sum over terms whose number is known from the targets."""


class DataError(EvenerError):
    """A file, a checksum or a dataset item is wrong."""


class StorageError(EvenerError):
    """A file cannot be written or read: the disk is full, or there is no permission."""


class CheckpointError(StorageError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


class DivergenceError(EvenerError):
    """Training cannot continue: the loss is not finite, or replicas differ."""


class OutOfMemoryError(EvenerError):
    """A rank has too little memory for its part of a step, even with the smallest micro-batches."""


class RankError(EvenerError):
    """A rank raised an exception, or its process died."""


class RankTimeoutError(EvenerError, TimeoutError):
    """A wait for other ranks timed out."""


class InterruptedRunError(EvenerError):
    """A signal, such as SIGINT or SIGTERM, stopped the run."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message, signal_number)
        self.message = message
        self.exit_status = 128 + signal_number

    def __str__(self) -> str:
        return self.message
