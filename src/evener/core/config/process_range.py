"""``--processes MIN:MAX``: as many ranks as there is room for, and no fewer than the run is worth its while with."""

from __future__ import annotations

from dataclasses import dataclass

from evener.errors import ConfigurationError


@dataclass(frozen=True)
class ProcessRange:
    """From ``least`` to ``most``, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> ProcessRange:
        """What ``text`` says.

        Raises:
            ConfigurationError: If it is not of that form.
        """
        least, _, most = text.partition(":")
        if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
            raise ConfigurationError(
                f"processes is {text!r}; it must be a whole number of at least 1, or MIN:MAX with 1 <= MIN <= MAX, "
                "such as 2:4"
            )
        return cls(int(least), int(most))


def processes_of(text: str) -> int | str:
    """The number that ``text`` is, or the range in it, which is a number too where it has one.

    Raises:
        ConfigurationError: If it is neither.
    """
    if text.isdecimal():
        return int(text)
    found = ProcessRange.parse(text)
    return found.most if found.least == found.most else text


def one_number(processes: str | int | None) -> int | None:
    """The processes of what cannot go on with fewer.

    Raises:
        ConfigurationError: If they are a range.
    """
    if isinstance(processes, str):
        raise ConfigurationError(
            f"processes is {processes!r}: only a run of evener train, or evener.fit, goes on from a checkpoint with "
            "fewer ranks; give one number here"
        )
    return processes
