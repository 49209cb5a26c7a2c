from __future__ import annotations

import pytest

from evener.balance.time_model import CLIFF_AGE, Line, Point, Shape, fit_line, weighted_median


def test_weighted_median() -> None:
    assert weighted_median([(3.0, 1.0), (1.0, 1.0), (2.0, 1.0)]) == 2.0
    assert weighted_median([(3.0, 5.0), (1.0, 1.0), (2.0, 1.0)]) == 3.0


def test_a_scaled_line_scales_everywhere() -> None:
    line = Line(0.1, 0.01, ((8, 0.5),))
    for n in (0, 1, 8, 100):
        assert line.scaled(2.0)(n) == pytest.approx(2 * line(n))


def test_a_line_is_exact_where_the_sizes_tell_and_usual_where_they_do_not() -> None:
    apart = fit_line([Point(n, 0.01 + 0.001 * n, 50, 0) for n in (10, 50)], 0.01, Shape())
    assert apart.line.overhead_seconds == pytest.approx(0.01, rel=0.02)
    assert apart.line.seconds_per_sample == pytest.approx(0.001, rel=0.02)
    close = fit_line([Point(20, 0.030, 1, 0), Point(21, 0.020, 1, 0)], 0.2, Shape())
    part, _ = Shape().growing(close.center)
    assert close.line.seconds_per_sample * close.center == pytest.approx(part * 0.025, rel=0.15)


def test_one_wrong_size_of_many_does_not_turn_the_line() -> None:
    points = [Point(n, 0.01 + 0.001 * n, 5, 0) for n in range(10, 60, 5)]
    points[4] = points[4]._replace(seconds=10.0)
    fit = fit_line(points, 0.01, Shape())
    assert fit.line.seconds_per_sample == pytest.approx(0.001, rel=0.05)
    assert fit.line(12) == pytest.approx(0.022, rel=0.05)


def test_the_ratio_of_overhead_to_price_is_what_is_carried_over() -> None:
    before = fit_line([Point(n, 0.01 + 0.001 * n, 50, 0) for n in (10, 50)], 0.01, Shape())
    after = fit_line([Point(1, 2 * before.line(1), 3, 0)], 0.01, Shape.from_fit(before))
    assert after.line(50) == pytest.approx(2 * before.line(50), rel=0.05)
    assert after.error(50) > before.error(50)


def test_a_cliff_that_a_larger_size_contradicts_or_that_is_long_ago_is_none() -> None:
    def cliffs(age: int, larger_seconds: float) -> tuple[tuple[int, float], ...]:
        seconds = {10: 0.010, 20: 0.020, 30: 0.050, 40: larger_seconds}
        points = [Point(n, time, 6, age if n == 30 else 0) for n, time in seconds.items()]
        return fit_line(points, 0.02, Shape()).line.cliffs

    assert (30, 0.050) in cliffs(0, 0.052)
    assert (30, 0.050) not in cliffs(0, 0.040)
    assert (30, 0.050) not in cliffs(CLIFF_AGE, 0.052)


def test_noise_that_lasts_makes_the_level_less_certain() -> None:
    points = [Point(n, 0.01 + 0.001 * n, 50, 0) for n in (10, 50)]
    once, twice = (fit_line(points, 0.05, Shape(), memory) for memory in (1.0, 4.0))
    assert twice.level_error == pytest.approx(2 * once.level_error)
    assert twice.line == once.line
