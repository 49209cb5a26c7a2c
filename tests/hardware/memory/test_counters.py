"""The tally against one that remembers everything."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evener.hardware.memory.counters import CATEGORIES, ByteCounter, HeldBytes

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9), st.sampled_from(CATEGORIES)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.none()),
        st.tuples(st.just("name"), st.integers(0, 30), st.sampled_from(CATEGORIES)),
        st.tuples(st.just("reset"), st.none(), st.none()),
    ),
    max_size=60,
)


@given(EVENTS)
def test_held_peak_and_its_parts_are_those_of_whoever_remembers_all(events: list[Any]) -> None:
    tally, there, at_peak = ByteCounter(), list[HeldBytes](), list[HeldBytes]()
    for kind, number, category in events:
        if kind == "add":
            there.append(tally.add(number, category))
            if total(there) > total(at_peak):
                at_peak = list(there)
        elif kind == "reset":
            tally.reset_peak()
            at_peak = list(there)
        elif there and kind == "remove":
            tally.remove(there.pop(number % len(there)))
        elif there:
            there[number % len(there)].category = category
        assert (tally.held, tally.peak) == (total(there), total(at_peak))
        assert tally.now() == sums(there)
        assert tally.at_peak() == sums(at_peak)


def total(things: list[HeldBytes]) -> int:
    return sum(held.nbytes for held in things)


def sums(things: list[HeldBytes]) -> dict[str, int]:
    found = Counter(dict.fromkeys(CATEGORIES, 0))
    for held in things:
        found[held.category] += held.nbytes
    return dict(found)


def test_what_a_thing_is_for_may_be_said_after_the_peak() -> None:
    tally = ByteCounter()
    gradient, other = tally.add(5, "other"), tally.add(7, "activations")
    tally.remove(other)
    gradient.category = "gradients"
    assert (tally.held, tally.peak) == (5, 12)
    assert tally.at_peak()["gradients"] == 5
    assert tally.at_peak()["activations"] == 7
