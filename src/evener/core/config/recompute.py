"""The setting ``recompute``: which blocks use activation checkpointing.

``blocks``: all blocks that the model repeats. A budget (``60%``, ``8GB``, or one size for each rank): as few blocks as
the budget needs.
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
    """The setting ``recompute``, parsed."""

    text: str
    """The setting as the user gave it."""
    part: float | None = None
    """A budget in per cent, as a fraction of a step's peak memory without checkpointing; None for other settings."""

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Parses the setting.

        Raises:
            ConfigurationError: If ``text`` is neither ``blocks`` nor a valid budget.
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
        """True if the setting is a budget, False if it is ``blocks``."""
        return self.text != BLOCKS

    def budgets(self, peaks: Sequence[int], least: Sequence[int], stages: Sequence[int]) -> list[int]:
        """Returns the budget of each rank in bytes.

        A fraction applies to the largest peak of the ranks of the same pipeline stage. The last stage of a pipeline may
        be unable to reach that. So a stage's budget is raised to its least possible peak, but to no more than the
        fraction of the largest peak of all ranks.

        Args:
            peaks: Peak memory of a step of each rank, in bytes, if no block is checkpointed.
            least: Peak memory of a step of each rank, in bytes, if all blocks are checkpointed.
            stages: The pipeline stage of each rank.

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
        """Returns the size in bytes of each rank's budget. None means that the rank has no size.

        Raises:
            ConfigurationError: If there are sizes for another number of ranks.
        """
        return [None] * ranks if self.part is not None or not self.is_budget else _sizes(self.text, ranks)

    def words(self, ranks: int) -> str:
        """Formats a budget for messages."""
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
