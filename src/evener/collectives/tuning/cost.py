"""The alpha-beta cost model of a message: m bytes take ``alpha + m * beta`` seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The cost of a link between two ranks.

    Raises:
        ValueError: If a value is negative or not finite.
    """

    alpha_seconds: float
    """Latency: the time for a message of any size, in seconds."""
    beta_seconds_per_byte: float
    """Time per byte: the inverse of the bandwidth."""

    def __post_init__(self) -> None:
        for value in (self.alpha_seconds, self.beta_seconds_per_byte):
            if not 0 <= value < math.inf:
                raise ValueError(f"a link needs finite costs of at least 0, got {self}")

    def seconds(self, nbytes: float) -> float:
        """Returns the seconds for one message of ``nbytes``."""
        return self.alpha_seconds + nbytes * self.beta_seconds_per_byte
