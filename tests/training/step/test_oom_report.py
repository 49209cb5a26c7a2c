"""What is told of memory that ran out, or is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from evener.hardware.memory.step_usage import NOTHING, News
from evener.training.step.oom_report import noticed

MIB = 1 << 20


def words_of(*news: News, kind: str = "cuda") -> list[str]:
    step: Any = SimpleNamespace(
        number=7, has_news=True, memory=tuple(NOTHING._replace(news=each) for each in news)
    )
    records = noticed(step, kind)
    assert all(record.step == 7 for record in records)
    return [record.words for record in records]


def test_a_step_in_which_nothing_happened_is_not_told() -> None:
    assert words_of(News(), News()) == []


def test_each_rank_is_told_by_what_it_noticed() -> None:
    assert words_of(News(), News(won=900 * MIB)) == [
        "rank 1 gave 900 MiB that were cached back to its device"
    ]
    (lost,) = words_of(News(lost=300 * MIB), kind="xpu")
    assert lost.startswith("rank 0: 300 MiB of its memory lie in pieces")
    assert lost.endswith("set PYTORCH_ALLOC_CONF=expandable_segments:True before the run")
    (others,) = words_of(News(others=3 << 30, pid=4711, free=MIB))
    assert others.startswith("another process (pid 4711) uses the card of rank 0: 3 GiB are not of this run")
    assert "1 MiB are free" in others
    assert "use a smaller micro_batch" in words_of(News(retries=2))[0]
    assert len(words_of(News(lost=MIB, won=MIB, others=MIB, retries=1))) == 4
