"""What is told of ranks whose memory ran out, and of the pieces in which they take their samples since."""

from __future__ import annotations

from evener.records import MemoryRecord
from evener.step import Step


class Pieces:
    """Follows the pieces of all ranks from step to step."""

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()

    def changes(self, step: Step) -> list[MemoryRecord]:
        """What is new with the step, in words."""
        ranks = range(len(step.retries))
        now, before = step.pieces or (0,) * len(ranks), self._before or (0,) * len(ranks)
        self._before = step.pieces
        return [
            MemoryRecord(step.number, _in_words(rank, step.retries[rank], now[rank], before[rank]))
            for rank in ranks
            if step.retries[rank] or now[rank] != before[rank]
        ]


def _in_words(rank: int, retries: int, piece: int, before: int) -> str:
    """Of ``retries`` in a step, after which pieces have ``piece`` samples at most; 0 for all that there are."""
    samples = f"{piece:,} sample{'s' * (piece != 1)} at most" if piece else "any size"
    if retries:
        times = f" {retries} times" if retries > 1 else ""
        return f"rank {rank} ran out of memory{times} and took the step again, in pieces of {samples}"
    if piece and (not before or piece < before):
        return f"rank {rank} takes pieces of {samples}, for which its memory has room"
    return f"rank {rank} tries pieces of {samples} from the next step on"
