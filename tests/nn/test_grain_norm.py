from __future__ import annotations

import copy
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.errors import TaskError
from evener.nn.context import scope
from evener.nn.grain_norm import GrainNorm, normalize_by_grains, update_running_statistics

KINDS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (6,),
    nn.BatchNorm2d: (6, 3, 2),
    nn.BatchNorm3d: (6, 2, 1, 3),
    nn.SyncBatchNorm: (6, 4),
}


def grains(shape: tuple[int, ...], number: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        (3 + number_of % 4) * torch.randn(4 if number_of < number - 1 else 3, *shape, generator=generator)
        for number_of in range(number)
    ]


def pretrained(kind: type[nn.Module], **options: Any) -> GrainNorm:
    torch.manual_seed(0)
    (norm,) = normalize_by_grains(nn.Sequential(kind(6, **options)))
    return norm


def forward(norm: GrainNorm, grain: Tensor, weight: int = 1) -> Tensor:
    with scope(torch.arange(len(grain)), 0, 0, weight):
        output: Tensor = norm(grain)
    return output


def statistics(norm: GrainNorm) -> tuple[Tensor, Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def after_a_step(norm: GrainNorm, of_ranks: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """The running statistics after a step in which each rank has these grains. Ranks take turns in this process."""
    replicas = [copy.deepcopy(norm) for _ in of_ranks]
    for replica, own in zip(replicas, of_ranks, strict=True):
        replica.terms = []
        for grain in own:
            forward(replica, grain)
    known: list[Tensor] = []
    sums: list[Tensor] = []

    def stopped(own: Tensor) -> Tensor:
        raise StopIteration

    def noted(own: Tensor) -> Tensor:
        known.append(own)
        raise StopIteration

    def summed(own: Tensor) -> Tensor:
        sums.append(own.clone())
        raise StopIteration

    device = torch.device("cpu")
    for replica in replicas:
        with pytest.raises(StopIteration):
            update_running_statistics([replica], noted, stopped, device)
    for replica in replicas:
        with pytest.raises(StopIteration):
            update_running_statistics([replica], lambda own: torch.stack(known), summed, device)
    for replica in replicas:
        update_running_statistics(
            [replica], lambda own: torch.stack(known), lambda own: sum(sums[1:], sums[0]), device
        )
    first = statistics(replicas[0])
    assert all(
        torch.equal(a, b) for replica in replicas for a, b in zip(first, statistics(replica), strict=True)
    )
    return first


@pytest.mark.parametrize("kind", KINDS)
def test_a_grain_is_normalized_by_itself(kind: type[nn.Module]) -> None:
    norm, plain = pretrained(kind), nn.BatchNorm1d(6)
    for grain in grains(KINDS[kind]):
        flat = grain.reshape(*grain.shape[:2], -1)
        expected = plain(flat).reshape(grain.shape)
        assert torch.allclose(forward(norm, grain), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_have_the_same_bits_on_any_division(
    kind: type[nn.Module], momentum: float | None
) -> None:
    norm, draws = pretrained(kind, momentum=momentum).double(), random.Random(0)  # which shows each rounding
    parts = [grain.double() / 3 for grain in grains(KINDS[kind])]
    expected = after_a_step(norm, [parts])
    for ranks in (2, 3, 5, 11, 13):
        shuffled = draws.sample(parts, len(parts))
        edges = [0, *sorted(draws.choices(range(len(parts) + 1), k=ranks - 1)), len(parts)]
        divided = [shuffled[a:b] for a, b in pairwise(edges)]
        found = after_a_step(norm, divided)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), ranks


def test_running_statistics_are_the_mean_over_grains() -> None:
    norm, parts = pretrained(nn.BatchNorm1d, momentum=0.3), grains((6,))
    mean, variance, number = after_a_step(norm, [parts[:4], parts[4:]])
    sizes = torch.tensor([float(len(part)) for part in parts])[:, None]
    means = (sizes * torch.stack([part.mean(0) for part in parts])).sum(0) / sizes.sum()
    variances = (sizes * torch.stack([part.var(0) for part in parts])).sum(0) / sizes.sum()
    assert torch.allclose(mean, 0.3 * means, atol=1e-6)
    assert torch.allclose(variance, 0.7 + 0.3 * variances, rtol=1e-5)
    assert number == 1


def test_a_placeholder_counts_for_nothing() -> None:
    norm = pretrained(nn.BatchNorm1d)
    output = forward(norm, torch.ones(1, 6), weight=0)
    assert output.isfinite().all()
    assert not norm.terms


def test_a_step_without_grains_changes_nothing() -> None:
    norm = pretrained(nn.BatchNorm1d)
    mean, variance, number = after_a_step(norm, [[], []])
    assert torch.equal(mean, torch.zeros(6))
    assert torch.equal(variance, torch.ones(6))
    assert number == 0


def test_a_grain_of_one_value_is_refused() -> None:
    with pytest.raises(
        TaskError, match=r"0 has a single value in a channel of a grain.* choose grain so that"
    ):
        forward(pretrained(nn.BatchNorm1d), torch.ones(1, 6))


def test_evaluation_and_modules_without_statistics() -> None:
    norm, plain = pretrained(nn.BatchNorm1d).eval(), nn.BatchNorm1d(6).eval()
    grain = grains((6,))[0]
    assert torch.equal(norm(grain), plain(grain))
    forgetful = pretrained(nn.BatchNorm1d, track_running_stats=False)
    forward(forgetful, grain)
    assert not forgetful.terms


def test_other_classes_stay() -> None:
    class Own(nn.BatchNorm1d):
        pass

    model = nn.Sequential(Own(3), nn.InstanceNorm1d(3), nn.LayerNorm(3))
    assert normalize_by_grains(model) == []
    assert type(model[0]) is Own
