from __future__ import annotations

import pytest

from evener.training.run_report import RankPart, waiting_message


@pytest.mark.parametrize(
    ("waited", "workers", "words"),
    [
        ([1.0, 4.0], 2, "rank 1 waited for batches 40% of the time, with 2 workers"),
        ([4.0, 1.0], 1, "rank 0 waited for batches 40% of the time, with 1 worker"),
        (
            [3.0, 1.0],
            0,
            "rank 0 waited for batches 30% of the time, without workers: --workers N (workers=N) has N processes read "
            "meanwhile",
        ),
        ([0.5, 0.9], 1, ""),
    ],
)
def test_the_summary_names_who_waited(waited: list[float], workers: int, words: str) -> None:
    parts = [RankPart("cpu", {"input_seconds": seconds}, workers, {}, 0, 0) for seconds in waited]
    assert waiting_message(parts, 10.0) == words
    assert waiting_message(parts, 0.0) == ""
