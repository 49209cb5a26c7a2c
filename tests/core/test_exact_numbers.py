from __future__ import annotations

import math
import random
from fractions import Fraction

import torch

from evener.core.exact_numbers import exact_total, total_and_rest


def test_losses_of_grains_add_up_to_the_same_bits_on_any_division() -> None:
    draw = random.Random(1)
    losses = [torch.tensor(draw.gauss(0, 1) * 10 ** draw.uniform(-12, 9)).item() for _ in range(97)]
    exact = float(sum(map(Fraction, losses)))
    for _ in range(200):
        draw.shuffle(losses)
        cuts = sorted(draw.randint(0, 97) for _ in range(3))
        parts = [losses[begin:end] for begin, end in zip([0, *cuts], [*cuts, 97], strict=True)]
        assert exact_total(number for part in parts for number in total_and_rest(part)) == exact
    assert sum(losses) != exact, "a trial that can fail"


def test_what_is_not_finite_stays_so() -> None:
    assert exact_total([1.0, math.inf]) == math.inf
    assert math.isnan(exact_total([math.inf, -math.inf]))
    assert total_and_rest([math.inf, 1.0]) == (math.inf, 0.0)
    assert exact_total([1e308, 1e308]) == math.inf
    assert exact_total([]) == 0
