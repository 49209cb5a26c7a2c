from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evener.data.batch import Batch, MicroBatch
from evener.tools.verify.perturbation import disturb, reordered


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_changes_in_its_last_place_and_a_zero_not_at_all(dtype: torch.dtype) -> None:
    model = nn.Linear(30, 20).to(dtype)
    nn.init.zeros_(model.bias)
    nn.init.uniform_(model.weight, 0.1, 1.0)  # nothing below the normal numbers of float16
    before = model.weight.detach().clone()
    disturb(model, generator())
    change = (model.weight - before).abs() / before.abs()
    eps = torch.finfo(dtype).eps
    assert eps / 2 <= change.min()
    assert change.max() <= 2 * eps
    assert 200 < int((model.weight > before).sum()) < 400
    assert not model.bias.any()


def test_a_stronger_disturbance() -> None:
    model = nn.Linear(30, 20)
    before = model.weight.detach().clone()
    disturb(model, generator(), 8)
    change = (model.weight - before).abs() / before.abs()
    assert change.min() >= 7 * 2**-23
    assert change.max() <= 9 * 2**-23


def micro(inputs: Any, targets: Any) -> MicroBatch:
    return MicroBatch(inputs, targets, samples=torch.arange(10, 15))


def shuffled(*micro_batches: MicroBatch) -> list[MicroBatch]:
    batch = Batch(0, 0, 0, 5 * len(micro_batches), (5,), list(micro_batches), False)
    return reordered(batch, generator()).micro_batches


def test_samples_come_in_another_order_each_with_its_number_and_target() -> None:
    inputs = {"x": torch.arange(10, 15)[:, None] * 1.0, "mask": None}
    (found,) = shuffled(micro(inputs, (torch.arange(10, 15),)))
    assert found.samples.tolist() != list(range(10, 15))
    assert sorted(found.samples.tolist()) == list(range(10, 15))
    assert found.inputs["x"][:, 0].tolist() == found.samples.tolist() == found.targets[0].tolist()
    assert found.inputs["mask"] is None


def test_samples_stay_in_their_micro_batch() -> None:
    first, second = shuffled(micro(torch.zeros(5), torch.zeros(5)), micro(torch.ones(5), torch.ones(5)))
    assert first.inputs.tolist() == [0.0] * 5
    assert second.inputs.tolist() == [1.0] * 5


@pytest.mark.parametrize("inputs", [torch.zeros(6, 5), torch.tensor(1.0), "words", [torch.zeros(5), 3]])
def test_what_has_no_samples_along_its_first_dimension_stays_as_it_is(inputs: Any) -> None:
    given = micro(inputs, torch.arange(5))
    assert shuffled(given) == [given]
