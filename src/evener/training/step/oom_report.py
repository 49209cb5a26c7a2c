"""Reports ranks that ran out of memory or lose memory to fragmentation, and the sizes of their pieces afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from evener.core.config.sizes import size_words
from evener.core.records import MemoryRecord
from evener.core.text import counted
from evener.hardware.memory.allocator_cache import remedy
from evener.hardware.memory.step_usage import News
from evener.training.step.step import Step


class PieceSizes:
    """Follows the piece sizes of all ranks from step to step."""

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()

    def changes(self, step: Step) -> list[MemoryRecord]:
        """Returns records of what has changed with the step."""
        if not step.retries or (step.pieces == self._before and not any(step.retries)):
            return []  # with many ranks, not every step has these numbers
        ranks = range(len(step.retries))
        now, before = step.pieces or (0,) * len(ranks), self._before or (0,) * len(ranks)
        self._before = step.pieces
        return [
            MemoryRecord(step.number, _in_words(rank, step.retries[rank], now[rank], before[rank]))
            for rank in ranks
            if step.retries[rank] or now[rank] != before[rank]
        ]


def noticed(step: Step, kind: str) -> list[MemoryRecord]:
    """Returns records of what the ranks have noticed about their devices' memory; ``kind`` is the device type."""
    if not step.has_news:
        return []
    return [
        MemoryRecord(step.number, words)
        for rank, use in enumerate(step.memory)
        for words in _news_in_words(rank, use.news, kind)
    ]


def _news_in_words(rank: int, news: News, kind: str) -> Iterator[str]:
    if news.won:
        yield f"rank {rank} gave {size_words(news.won)} that were cached back to its device"
    if news.lost:
        yield (
            f"rank {rank}: {size_words(news.lost)} of its memory lie in pieces between what is in use, and cannot be "
            f"used as one: {remedy(kind)}"
        )
    if news.retries:
        yield (
            f"rank {rank}: the device was full, and the allocator gave back what it had cached and asked again, for "
            "which all of the device waits: use a smaller micro_batch, or micro_batch=auto"
        )
    if news.others:
        yield (
            f"another process (pid {news.pid}) uses the card of rank {rank}: {size_words(news.others)} are not of this "
            f"run, and {size_words(news.free)} are free"
        )


def _in_words(rank: int, retries: int, piece: int, before: int) -> str:
    """Describes ``retries`` in a step, after which pieces have at most ``piece`` samples; 0 means no limit."""
    samples = f"{counted(piece, 'sample')} at most" if piece else "any size"
    if retries:
        times = f" {retries} times" if retries > 1 else ""
        return f"rank {rank} ran out of memory{times} and took the step again, in pieces of {samples}"
    if piece and (not before or piece < before):
        return f"rank {rank} takes pieces of {samples}, for which its memory has room"
    return f"rank {rank} tries pieces of {samples} from the next step on"
