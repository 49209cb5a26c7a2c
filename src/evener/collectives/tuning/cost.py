"""What a message costs, in the alpha-beta model: m bytes take ``alpha + m * beta`` seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A way between two ranks.

    Raises:
        ValueError: If a value is negative or not finite.
    """

    alpha_seconds: float
    """What a message costs whatever its size."""
    beta_seconds_per_byte: float
    """What a byte costs: the inverse of the bandwidth."""

    def __post_init__(self) -> None:
        for value in (self.alpha_seconds, self.beta_seconds_per_byte):
            if not 0 <= value < math.inf:
                raise ValueError(f"a link needs finite costs of at least 0, got {self}")

    def seconds(self, nbytes: float) -> float:
        """One message of ``nbytes``."""
        return self.alpha_seconds + nbytes * self.beta_seconds_per_byte
