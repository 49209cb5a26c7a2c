from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from evener.errors import ConfigurationError
from evener.nn.context import Scope, current, data_group, outside, own_scope, scope, without_placeholder


def test_a_scope_is_seen_by_other_threads_and_ends() -> None:
    seen = []
    with scope(torch.arange(2), step=3, seed=4) as outer:
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        with contextlib.suppress(KeyError), scope(torch.arange(1), step=4, seed=4, weight=0) as inner:
            assert current() is inner
            raise KeyError
        assert current() is outer
    assert seen == [outer]
    assert current() is None


def test_scopes_end_in_any_order() -> None:
    first, second = scope(torch.arange(2), step=3, seed=4), scope(torch.arange(2), step=3, seed=4)
    first.__enter__()
    with second as now:
        first.__exit__()
        assert current() is now
        with outside():
            assert current() is None
    assert current() is None
    first.__exit__()
    assert current() is None


def test_calls_are_counted_by_module_and_repeated_by_backward() -> None:
    first, second, shared = nn.Identity(), nn.Identity(), nn.Identity()
    with scope(torch.arange(2), step=0, seed=0) as now:
        forward = [now.call(module) for module in (first, second, shared, shared)]
        assert forward == [0, 0, 0, 1]
        assert [now.order(module) for module in (second, first, second)] == [0, 1, 0]
        now.rewind()
        assert [now.call(module) for module in (second, first)] == [0, 0]
        assert now.order(first) == 1
        with pytest.raises(ConfigurationError, match="called 2 times in one forward"):
            now.call(shared)


def test_a_scope_of_ones_own_is_that_of_one_thread() -> None:
    seen: list[Scope | None] = []
    own = Scope(torch.arange(1), step=3, seed=4, weight=0)
    with scope(torch.arange(2), step=3, seed=4) as whole:
        with own_scope(own) as opened:
            assert opened is own
            thread = threading.Thread(target=lambda: seen.append(current()))
            thread.start()
            thread.join()
            assert current() is own
            assert len(without_placeholder(torch.ones(1, 2))) == 0
            assert data_group() is None
        assert current() is whole
    assert seen == [whole]
