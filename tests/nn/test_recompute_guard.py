"""What is done once, though a block is computed again."""

from __future__ import annotations

from itertools import count
from threading import Thread

import pytest

from evener.errors import ConfigurationError
from evener.nn.recompute_guard import RecomputedCall, once


def test_a_repetition_gets_what_there_was_in_order() -> None:
    numbers, segment = count(), RecomputedCall()
    assert once(lambda: next(numbers)) == 0
    with segment.first():
        assert [once(lambda: next(numbers)) for _ in range(2)] == [1, 2]
    for _ in range(2):
        with segment.again():
            assert [once(lambda: next(numbers)) for _ in range(2)] == [1, 2]
    assert once(lambda: next(numbers)) == 3


def test_a_repetition_may_end_early_and_ask_for_no_more() -> None:
    segment = RecomputedCall()
    with segment.first():
        once(lambda: 1)
    with pytest.raises(KeyError), segment.again():
        raise KeyError
    with segment.again():
        assert once(lambda: 2) == 1
        with pytest.raises(ConfigurationError, match="goes another way when it is computed again"):
            once(lambda: 2)


def test_another_thread_computes_its_own() -> None:
    segment, found = RecomputedCall(), list[int]()
    with segment.first():
        once(lambda: 1)
    with segment.again():
        thread = Thread(target=lambda: found.append(once(lambda: 2)))
        thread.start()
        thread.join()
    assert found == [2]
