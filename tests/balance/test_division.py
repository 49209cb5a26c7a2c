from __future__ import annotations

import json

from evener.balance.division import Division, Rule, tilted
from evener.balance.time_model import Line

EVEN, SKEW = Division((Line(0.0, 1.0),) * 2), Division((Line(0.0, 1.0), Line(0.0, 3.0)))


def divided(rule: Rule, step: int, batch_size: int = 16) -> list[int]:
    return rule.divide(step, batch_size, [None, None], 1)


def test_the_drawing_of_turns() -> None:
    rule = Rule(5, EVEN, SKEW)
    new, old = [12, 4], [8, 8]
    assert [divided(rule, step) for step in range(5, 13)] == [new, old, old, new, new, old, old, new]
    assert [divided(Rule(5, EVEN), step) for step in (5, 6)] == [old, old]


def test_both_of_a_pair_of_turns_come_first_as_often() -> None:
    rule = Rule(0, EVEN, SKEW)
    mean = {turn: sum(step for step in range(8) if rule.challenges(step) is turn) for turn in (False, True)}
    assert mean[False] == mean[True]


def test_no_change_takes_more_than_three_quarters_of_a_share() -> None:
    lines = (Line(0.001, 0.001), Line(1.0, 1.0))
    assert Division(lines)(64, [None, None], 1) == [64, 0]
    assert Division(lines).near([32, 32])(64, [None, None], 1) == [56, 8]
    assert Division(lines).near([56, 8])(64, [None, None], 1) == [62, 2]
    assert Division(lines).near([62, 2])(64, [None, None], 1) == [64, 0]
    assert Division(lines).near([32, 32])(64, [None, None], 16) == [64, 0], "8 samples are no whole multiple"


def test_a_rule_comes_back_from_json() -> None:
    for rule in (Rule(3, EVEN), Rule(4, Division(EVEN.lines).near([60, 4]), SKEW, probe=1)):
        back = Rule.from_values(json.loads(json.dumps(rule.values())))
        assert back == rule
        assert [divided(back, step) for step in range(8)] == [divided(rule, step) for step in range(8)]


def test_the_calibration_tilts_odd_and_even_ranks_in_turn() -> None:
    shares = [tilted(EVEN.lines, step, 0.25)(16, [None, None], 1) for step in range(3)]
    assert shares == [[6, 10], [10, 6], [6, 10]]
