"""What a run computes twice to take less memory, as its settings say it.

``blocks``: all that the model repeats. A budget, ``60%`` or ``8GB`` or one size for each rank: as much as is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from evener.core.config.sizes import parse_limits, size_words
from evener.errors import ConfigurationError

BLOCKS = "blocks"
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Recompute:
    """A setting of ``recompute``."""

    text: str
    """As it was given."""
    part: float | None = None
    """The budget as a part of the peak that a step would have, between 0 and 1."""

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """From the setting.

        Raises:
            ConfigurationError: If it is none of these.
        """
        found = _PART.fullmatch(text.strip())
        if text != BLOCKS and not found:
            _sizes(text, text.count(",") + 1)
        part = float(found[1]) / 100 if found else None
        if part is not None and not 0 < part < 1:
            raise ConfigurationError(
                f"recompute is {text!r}; a budget is a part of the peak that a step would have, above 0% and below 100%"
            )
        return cls(text, part)

    @property
    def is_budget(self) -> bool:
        """Whether what is computed twice is chosen for a budget."""
        return self.text != BLOCKS

    def budgets(self, peaks: Sequence[int], least: Sequence[int], stages: Sequence[int]) -> list[int]:
        """Bytes for each rank.

        A part is that of the largest peak of the ranks that compute the same blocks. The end of a pipeline may not come
        down to that: it has what it needs at least, if that is no more than the part of the largest peak of all.

        Args:
            peaks: Bytes that a step of each rank would have at its peak if nothing were computed twice.
            least: The same if everything were.
            stages: Which blocks each rank computes, as a number.

        Raises:
            ConfigurationError: If there are sizes for another number of ranks.
        """
        if self.part is not None:
            own = [self.part * _largest(peaks, stages, stage) for stage in stages]
            need = [min(_largest(least, stages, stage), self.part * max(peaks)) for stage in stages]
            return [int(max(pair)) for pair in zip(own, need, strict=True)]
        return [
            peak if size is None else size for size, peak in zip(self.sizes(len(peaks)), peaks, strict=True)
        ]

    def sizes(self, ranks: int) -> list[int | None]:
        """The sizes of a budget, for each rank; None is none.

        Raises:
            ConfigurationError: If there are as many as there are no ranks.
        """
        return [None] * ranks if self.part is not None or not self.is_budget else _sizes(self.text, ranks)

    def words(self, ranks: int) -> str:
        """A budget for people."""
        if self.part is not None:
            return f"{self.part:.3g} of the peak"
        return ", ".join(
            "-" if size is None else size_words(size) for size in dict.fromkeys(self.sizes(ranks))
        )


def _sizes(text: str, ranks: int) -> list[int | None]:
    try:
        return parse_limits(text, ranks)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"recompute is {text!r}; it must be blocks, a part of the peak such as 60%, a size such as 8GB, or one for "
            f"each rank: {error}"
        ) from error


def _largest(values: Sequence[int], stages: Sequence[int], stage: int) -> int:
    return max(value for value, other in zip(values, stages, strict=True) if other == stage)
