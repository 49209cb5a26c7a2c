"""What a strategy says of the pieces that it makes, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import evener
from evener.components import clipping
from evener.components.sharded_tensor.shard_spec import ShardBounds, ShardSpec, set_shard_spec
from evener.distributed.mesh import Layout
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.strategies import Sharded, TensorParallel
from evener.training.engine import Engine
from tests import tasks


@pytest.mark.parametrize(
    "pieces",
    [(range(1, 3),), (range(2), range(3, 5)), (range(2, 4), range(2)), (range(0, 4, 2),), ()],
    ids=str,
)
def test_pieces_follow_each_other_without_gaps(pieces: tuple[range, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"axis 'tensor'"):
        ShardSpec("tensor", 0, pieces, 0)


def test_a_rank_has_one_of_the_pieces() -> None:
    with pytest.raises(ConfigurationError, match="piece 2 of axis 'tensor': there are 2"):
        ShardSpec("tensor", 0, (range(2), range(2, 2)), 2)


@pytest.mark.parametrize("dim", [0, -1, 2])
def test_what_is_marked_is_as_long_as_its_piece(dim: int) -> None:
    piece = ShardSpec("tensor", dim, (range(4), range(4, 7)), 1)
    with pytest.raises(ConfigurationError, match=r"shape \(8, 3\) is not range\(4, 7\), 3 long"):
        set_shard_spec(nn.Parameter(torch.zeros(8, 3)), piece)


def test_the_norm_of_no_gradients_is_where_the_parameters_are() -> None:
    """Other ranks may have some, and a backend moves tensors of one kind of device."""
    parameter = nn.Parameter(torch.empty(4, device="meta"))
    assert clipping.norm([parameter]).is_meta
    assert clipping.norm([]) == 0


def of_an_axis_of_one_rank() -> tuple[float, torch.Tensor]:
    """Each rank's replica of what is divided over an axis along which it is alone."""
    with Session("cpu", 60) as session:
        mesh = session.lay(Layout({"data": 2}))
        parameter = set_shard_spec(
            nn.Parameter(torch.full((4,), float(session.rank))), ShardSpec("tensor", 0, (range(4),), 0)
        )
        parameter.grad = torch.ones(4)
        piece = ShardSpec("tensor", 0, (range(4),), 0)
        return float(clipping.norm_over([parameter], mesh)), piece.gather(parameter, mesh)


def test_an_axis_of_one_rank_is_not_the_world(ranks: Any) -> None:
    for rank, (norm, whole) in enumerate(ranks(2).run(of_an_axis_of_one_rank)):
        assert norm == 2.0
        assert whole.tolist() == [rank] * 4


def nested(index: int, inner: int) -> ShardSpec:
    """Rows 3 to 8 of ten for index 1; of these five rows the last two for inner 1."""
    outer = ShardSpec("tensor", 0, (range(3), range(3, 8), range(8, 10)), index)
    return ShardSpec("shard", 0, (range(3), range(3, 5)), inner, within=outer)


def test_a_piece_of_a_piece() -> None:
    whole = torch.arange(20.0).view(10, 2)
    piece = nested(1, 1)
    part = piece.part(whole)
    assert part.tolist() == whole[6:8].tolist()
    assert piece.whole_shape(part.shape) == (10, 2)
    assert piece.boxes(part.shape) == [ShardBounds((6, 0), (0, 0), (2, 2))]
    assert piece.axes == ("shard", "tensor")
    columns = ShardSpec("data", 1, (range(1), range(1, 2)), 1, within=piece)
    assert columns.part(whole).tolist() == whole[6:8, 1:].tolist()
    assert columns.boxes((2, 1)) == [ShardBounds((6, 1), (0, 0), (2, 1))]


@given(blocks=st.integers(1, 3), first=st.integers(0, 3), second=st.integers(0, 3), cut=st.integers(0, 9))
def test_a_piece_of_blocks_and_what_is_cut_of_it(blocks: int, first: int, second: int, cut: int) -> None:
    """Boxes say where everything is: they put the whole together from what all ranks hold."""
    whole = torch.arange(float(blocks * (first + second) * 2)).view(-1, 2) + 1
    put_together = torch.zeros_like(whole)
    for index in range(2):
        pieces = (range(first), range(first, first + second))
        outer = ShardSpec("tensor", 0, pieces, index, blocks=blocks)
        middle = min(cut, outer.length)
        for inner in range(2):
            piece = ShardSpec("shard", 0, (range(middle), range(middle, outer.length)), inner, within=outer)
            part = piece.part(whole)
            assert part.shape[0] == piece.length
            assert piece.whole_shape(part.shape) == whole.shape
            for box in piece.boxes(part.shape):
                there, here = (
                    tuple(slice(a, a + n) for a, n in zip(starts, box.shape, strict=True))
                    for starts in (box.whole, box.held)
                )
                put_together[there] += part[here]
    assert torch.equal(put_together, whole)


def test_an_axis_cuts_once() -> None:
    with pytest.raises(ConfigurationError, match="cut twice over axis 'tensor'"):
        ShardSpec("tensor", 1, (range(2),), 0, within=ShardSpec("tensor", 0, (range(2),), 0))


def of_two_axes() -> tuple[torch.Tensor, float]:
    with Session("cpu", 60) as session:
        mesh = session.lay(Layout({"shard": 2, "tensor": 2}))
        outer = ShardSpec("tensor", 0, (range(3), range(3, 8)), mesh.index("tensor"))
        rows = len(outer.local_bounds)
        piece = ShardSpec("shard", 0, (range(1), range(1, rows)), mesh.index("shard"), within=outer)
        whole = torch.arange(8.0)
        parameter = set_shard_spec(nn.Parameter(piece.part(whole)), piece)
        parameter.grad = parameter.detach().clone()
        return piece.gather(parameter, mesh), float(clipping.norm_over([parameter], mesh))


def test_what_is_cut_over_two_axes_is_put_together(ranks: Any) -> None:
    for whole, norm in ranks(4).run(of_two_axes):
        assert whole.tolist() == list(range(8))
        assert norm == pytest.approx(140**0.5)


def without_attribute(strategy: Any) -> list[str]:
    """The parameters without the attribute that the model has set on all: what the optimizer is given, and what the
    model then has."""
    found: list[str] = []

    def model() -> nn.Module:
        between = evener.nn.Experts(8, 4, 2) if strategy == "experts" else nn.Tanh()
        made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), between, nn.Linear(8, 3))
        for parameter in made.parameters():
            parameter.decays = False  # type: ignore[attr-defined]
        return made

    def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        given = list(named_parameters)
        found.extend(name for name, parameter in given if getattr(parameter, "decays", True))
        return torch.optim.SGD([parameter for _, parameter in given], lr=0.1)

    task = replace(tasks.plain(), model=model, optimizer=optimizer)
    with Engine(task, device="cpu", dtype="float64", strategy=strategy) as engine:
        return found + [n for n, p in engine.model.named_parameters() if getattr(p, "decays", True)]


@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline",
        TensorParallel("0=colwise,2=rowwise"),
        "dimension",
        Sharded(zero=2),
        Sharded(zero=3),
        "experts",
    ],
    ids=str,
)
def test_a_shard_has_the_user_s_attributes_of_the_whole(ranks: Any, strategy: Any) -> None:
    """An optimizer may make groups by them, such as one without weight decay."""
    assert ranks(2).run(without_attribute, strategy) == [[], []]
