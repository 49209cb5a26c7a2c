"""The setting ``--processes MIN:MAX``: the smallest and the largest number of ranks that a run may have."""

from __future__ import annotations

from dataclasses import dataclass

from evener.errors import ConfigurationError


@dataclass(frozen=True)
class ProcessRange:
    """A number of ranks from ``least`` to ``most``, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> ProcessRange:
        """Parses ``MIN:MAX``.

        Raises:
            ConfigurationError: If ``text`` is no valid range.
        """
        least, _, most = text.partition(":")
        if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
            raise ConfigurationError(
                f"processes is {text!r}; it must be a whole number of at least 1, or MIN:MAX with 1 <= MIN <= MAX, "
                "such as 2:4"
            )
        return cls(int(least), int(most))


def processes_of(text: str) -> int | str:
    """Parses "4" or "2:8". Returns a number as an integer, a range as its text. A range with equal ends is a number.

    Raises:
        ConfigurationError: If ``text`` is neither a number nor a valid range.
    """
    if text.isdecimal():
        return int(text)
    found = ProcessRange.parse(text)
    return found.most if found.least == found.most else text


def one_number(processes: str | int | None) -> int | None:
    """Returns ``processes``, for commands that cannot continue with fewer ranks.

    Raises:
        ConfigurationError: If ``processes`` is a range.
    """
    if isinstance(processes, str):
        raise ConfigurationError(
            f"processes is {processes!r}: only a run of evener train, or evener.fit, goes on from a checkpoint with "
            "fewer ranks; give one number here"
        )
    return processes
