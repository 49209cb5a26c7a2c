"""Schedules are drawn as their module draws them, end, and wait as little as they say."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import ConfigurationError
from evener.strategies.pipeline import drawing as drawing_of
from evener.strategies.pipeline import schedule
from evener.strategies.pipeline.drawing import Drawing, as_svg, in_characters
from evener.strategies.pipeline.schedule import Action, Order, bubble, length, order_of, sent, simulate


def steps_of(order: Order) -> list[str]:
    """The schedules' grid, if each action took one unit of time: a row for each rank."""
    timeline = simulate(order, lambda action: 1.0)
    width = int(length(timeline))
    several = any(len({timed.action.stage for timed in actions}) > 1 for actions in timeline)
    rows = [["." for _ in range(width)] for _ in order]
    for row, actions in zip(rows, timeline, strict=True):
        for timed in actions:
            row[int(timed.began)] = f"{timed.action.stage}{timed.action}" if several else str(timed.action)
    wide = max((len(cell) for row in rows for cell in row), default=1)
    return [
        f"{rank:2d}  " + " ".join(cell.ljust(wide) for cell in row).rstrip() for rank, row in enumerate(rows)
    ]


def drawn(name: str) -> list[str]:
    """The rows of the schedule in the docstring."""
    text = schedule.__doc__ or ""
    block = re.search(rf"^ +{name} .*\n.*\n.*", text, re.MULTILINE)
    assert block
    rows = [re.search(r"(\d)  ((?:(?:[FB]\d|\.) ?\s?)+)", line) for line in block[0].splitlines()]
    return [
        f" {row[1]}  {' '.join(cell.ljust(2) for cell in row[2].split())}".rstrip() for row in rows if row
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_drawing_is_the_schedule(name: str) -> None:
    assert drawn(name) == [row.rstrip() for row in steps_of(order_of(name, 3, 3, 4))]


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_every_action_happens_once_and_nobody_waits_for_ever(
    name: str, ranks: int, per_rank: int, micros: int
) -> None:
    stages = ranks * (per_rank if name in ("interleaved", "zero-bubble") else 1)
    order = order_of(name, ranks, stages, micros)
    done = [action for actions in order for action in actions]
    assert len(done) == len(set(done))
    kinds = "FIW" if name == "zero-bubble" else "FB"
    assert set(done) == {Action(k, s, m) for k in kinds for s in range(stages) for m in range(micros)}
    assert all(action.stage % ranks == rank for rank, actions in enumerate(order) for action in actions)
    timeline = simulate(order, lambda action: 1.0, message=0.1)
    assert 0 <= bubble(timeline) < 1
    crossing = [sent(order, source, target) for source in range(ranks) for target in range(ranks)]
    assert sum(map(len, crossing)) == 2 * (stages - 1) * micros


def test_less_is_waited_for_where_more_is_under_way() -> None:
    """Of n ranks and m micro-batches, (n - 1) / (m + n - 1) of the time is a bubble (Huang et al., 2019)."""
    for micros in (2, 4, 8):
        for name in ("gpipe", "1f1b"):
            assert bubble(simulate(order_of(name, 4, 4, micros), lambda _: 1.0)) == pytest.approx(
                3 / (micros + 3)
            )
    less = {
        "interleaved": bubble(simulate(order_of("interleaved", 4, 8, 8), lambda _: 1.0)),
        "zero-bubble": bubble(simulate(order_of("zero-bubble", 4, 4, 8), lambda _: 1.0)),
    }
    assert max(less.values()) < 3 / 11


def test_a_slow_stage_and_a_message_hold_up_what_follows() -> None:
    order = order_of("gpipe", 2, 2, 2)
    timeline = simulate(order, lambda action: 3.0 if action.stage else 1.0, message=0.5)
    assert [(timed.began, timed.ended) for timed in timeline[1]] == [
        (1.5, 4.5),
        (4.5, 7.5),
        (7.5, 10.5),
        (10.5, 13.5),
    ]
    assert length(timeline) == 15.0


def test_an_order_in_which_ranks_wait_for_each_other_is_found() -> None:
    first, second = Action("F", 0, 0), Action("F", 1, 0)
    with pytest.raises(ConfigurationError, match="for ever"):
        simulate(((Action("B", 0, 0), first), (second, Action("B", 1, 0))), lambda _: 1.0)


def test_a_step_is_drawn_predicted_beside_measured() -> None:
    order = order_of("1f1b", 2, 2, 2)
    measured = simulate(order, lambda action: 0.003 if action.kind == "F" else 0.004)
    drawing = Drawing(order, measured)
    rows = in_characters(measured, 21)
    assert rows == [" 0  000111....aaaa...bbbb", " 1  ...000aaaa111bbbb...."]
    assert all(f"     {row.strip()}" in str(drawing_of.__doc__) for row in rows), "the module draws it"
    lines = str(drawing).splitlines()
    assert lines[0] == "predicted, 2 micro-batches: 21 ms, bubble 33%"
    assert lines[3] == "measured, 2 micro-batches: 21 ms, bubble 33%"
    assert str(Drawing(order, measured, 0.001)).startswith("predicted, 2 micro-batches: 23 ms")
    picture = ElementTree.fromstring(drawing.svg())
    bars = [element for element in picture if element.tag.endswith("rect")]
    assert len(bars) == 2 * 8
    assert ElementTree.fromstring(as_svg([("<&>", measured)]))[0].text == "<&>"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("fast", 2, 2, 2), "no schedule 'fast'"), (("1f1b", 2, 4, 2), "one stage a rank")],
)
def test_what_is_no_schedule(arguments: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        order_of(*arguments)
