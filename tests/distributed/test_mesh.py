from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from evener.distributed import mesh as meshes
from evener.distributed.mesh import AXES, DIVIDING_SAMPLES, DIVIDING_TERMS, Layout, Mesh
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.torch_internals.process_groups import groups_open

TWO = Layout({"data": 2, "tensor": 2}, speaks={"tensor": 1})
"""That of the drawing in the module."""


def test_ranks_are_numbered_with_the_last_axis_fastest() -> None:
    places = [(TWO.place(rank)["data"], TWO.place(rank)["tensor"]) for rank in range(4)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert set(TWO.place(3)) == set(AXES)
    assert TWO.place(3)["pipeline"] == 0


def test_the_order_of_axes_is_that_of_the_mesh_and_not_of_the_words() -> None:
    assert [Layout({"tensor": 2, "data": 3}).place(rank) for rank in range(6)] == [
        Layout({"data": 3, "tensor": 2}).place(rank) for rank in range(6)
    ]


@pytest.mark.parametrize(
    ("axes", "slices"),
    [
        ((), [(0,), (1,), (2,), (3,)]),
        (("tensor",), [(0, 1), (2, 3)]),
        (("data",), [(0, 2), (1, 3)]),
        (("data", "tensor"), [(0, 1, 2, 3)]),
        (("pipeline",), [(0,), (1,), (2,), (3,)]),
    ],
)
def test_slices(axes: tuple[str, ...], slices: list[tuple[int, ...]]) -> None:
    assert TWO.slices(axes) == slices


@pytest.mark.parametrize(
    ("layout", "teams", "speakers", "contributors"),
    [
        (Layout({"data": 3}), ((0,), (1,), (2,)), (0, 1, 2), (0, 1, 2)),
        (Layout({"shard": 2}), ((0,), (1,)), (0, 1), (0, 1)),
        (Layout({"tensor": 3}), ((0, 1, 2),), (0,), (0,)),
        (TWO, ((0, 1), (2, 3)), (1, 3), (1, 3)),
        (Layout({"data": 2, "tensor": 2}), ((0, 1), (2, 3)), (0, 2), (0, 2)),
        # The loss is in the last stage, of ranks 2 and 3.
        (Layout({"pipeline": 2, "data": 2}), ((0, 2), (1, 3)), (2, 3), (2, 3)),
        (Layout({"pipeline": 2}, speaks={"pipeline": 0}), ((0, 1),), (0,), (0,)),
        # The terms of a sample are divided: one speaks for its outputs, all add their terms.
        (Layout({"data": 2, "context": 2}), ((0, 1), (2, 3)), (0, 2), (0, 1, 2, 3)),
        (Layout({"context": 2, "tensor": 2}), ((0, 1, 2, 3),), (0,), (0, 2)),
        (Layout({"data": 2, "shard": 2}), ((0,), (1,), (2,), (3,)), (0, 1, 2, 3), (0, 1, 2, 3)),
    ],
    ids=lambda value: str(dict(value.degrees)) if isinstance(value, Layout) else None,
)
def test_who_computes_what_and_who_speaks(
    layout: Layout, teams: Any, speakers: tuple[int, ...], contributors: tuple[int, ...]
) -> None:
    for rank in range(layout.world_size):
        data = layout.data_axis(rank)
        assert (data.teams, data.speakers, data.contributors) == (teams, speakers, contributors)
        assert rank in data.team
        assert data.degree == len(teams)
        assert data.is_whole == all(len(team) == 1 for team in teams)


def test_what_is_said_by_ranks_and_by_parts() -> None:
    data = TWO.data_axis(0)
    assert data.of_parts(["a", "b", "c", "d"]) == ["b", "d"]
    assert Layout({"data": 2, "context": 2}).data_axis(0).of_contributors([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert data.slowest([1.0, 3.0, 4.0, 2.0]) == [3.0, 4.0]
    assert data.owners([0.75, 0.25]) == [0.75, 0.75, 0.25, 0.25]


@pytest.mark.parametrize(
    ("degrees", "speaks", "words"),
    [
        ({"expert": 2}, {}, "there is no axis 'expert'; there are pipeline, data, shard, context, tensor"),
        ({"data": 2}, {"model": 0}, "there is no axis 'model'"),
        ({"data": 0}, {}, "axis 'data' has the degree 0; it must be at least 1"),
        ({"tensor": 2}, {"tensor": 2}, "rank 2 of axis 'tensor' cannot speak: it has 2"),
        ({"tensor": 2}, {"tensor": -3}, "rank -3 of axis 'tensor' cannot speak: it has 2"),
        ({"data": 2}, {"tensor": 1}, "rank 1 of axis 'tensor' cannot speak: it has 1"),
    ],
)
def test_a_layout_that_cannot_be(degrees: Any, speaks: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Layout(degrees, speaks)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    axes = draw(st.lists(st.sampled_from(AXES), unique=True))
    degrees = {axis: draw(st.integers(1, 3)) for axis in axes}
    speaks = {axis: draw(st.integers(-degree, degree - 1)) for axis, degree in degrees.items()}
    return Layout(degrees, draw(st.sampled_from([{}, speaks])))


@given(layouts())
def test_every_rank_is_in_one_team_and_its_speaker_too(layout: Layout) -> None:
    axes = [layout.data_axis(rank) for rank in range(layout.world_size)]
    assert sorted(rank for team in axes[0].teams for rank in team) == list(range(layout.world_size))
    assert all(speaker in team for speaker, team in zip(axes[0].speakers, axes[0].teams, strict=True))
    assert all(rank in data.team for rank, data in enumerate(axes))
    seen = {(data.teams, data.speakers, data.contributors) for data in axes}
    assert len(seen) == 1, "all ranks know the same"
    assert axes[0].degree == layout.degree("data") * layout.degree("shard")


@given(layouts())
def test_contributors_add_every_term_once(layout: Layout) -> None:
    """For every index on the axes that divide terms there is one contributor, and every speaker is one."""
    data = layout.data_axis(0)
    places = [tuple(layout.place(rank)[axis] for axis in DIVIDING_TERMS) for rank in data.contributors]
    everywhere = {tuple(layout.place(r)[axis] for axis in DIVIDING_TERMS) for r in range(layout.world_size)}
    assert len(places) == len(set(places))
    assert set(places) == everywhere
    assert set(data.speakers) <= set(data.contributors)


@given(layouts(), st.lists(st.sampled_from(AXES), unique=True))
def test_slices_hold_every_rank_once_and_differ_on_their_axes_alone(layout: Layout, axes: list[str]) -> None:
    slices = layout.slices(axes)
    assert sorted(rank for ranks in slices for rank in ranks) == list(range(layout.world_size))
    for ranks in slices:
        assert list(ranks) == sorted(ranks)
        for axis in set(AXES) - set(axes):
            assert len({layout.place(rank)[axis] for rank in ranks}) == 1


@contextmanager
def meshed(layout: Layout) -> Iterator[Mesh]:
    with Session(device="cpu", timeout_seconds=60) as session:
        yield session.lay(layout)


def summed(group: dist.ProcessGroup | None, rank: int) -> int:
    value = torch.tensor(10**rank)
    if group is not None:
        dist.all_reduce(value, group=group)
    return int(value)


def test_groups_are_those_of_the_slices(ranks: Any) -> None:
    def groups() -> tuple[int, ...]:
        with meshed(TWO) as mesh:
            assert mesh.ranks("tensor") == TWO.slices(["tensor"])[mesh.index("data")]
            names = [("tensor",), ("data",), ("data", "tensor"), ("shard",), DIVIDING_SAMPLES]
            return tuple(summed(mesh.group(*axes), mesh.rank) for axes in names)

    assert ranks(4).run(groups) == [
        (11, 101, 1111, 1, 101),
        (11, 1010, 1111, 10, 1010),
        (1100, 101, 1111, 100, 101),
        (1100, 1010, 1111, 1000, 1010),
    ]


def test_a_group_is_made_once_and_that_of_all_ranks_is_the_world(ranks: Any) -> None:
    def same() -> tuple[bool, ...]:
        with meshed(TWO) as mesh:
            tensor = mesh.group("tensor")
            return (
                tensor is mesh.group("tensor", "context"),
                mesh.group("tensor", "data") is mesh.world,
                mesh.group("pipeline") is None and mesh.new_group("pipeline") is None,
                tensor is not mesh.new_group("tensor"),
                mesh.new_group("data", "tensor") is not mesh.world,
            )

    assert ranks(4).run(same) == [(True,) * 5] * 4


def test_nothing_is_outstanding_on_what_nccl_splits(ranks: Any) -> None:
    def called(backend: str) -> list[str]:
        order, made = list[str](), dist.new_group

        def noted(*args: Any, **kwargs: Any) -> Any:
            order.append("split")
            return made(*args, **kwargs)

        with meshed(TWO) as mesh, pytest.MonkeyPatch.context() as patched:
            patched.setattr(meshes, "backends_of", lambda group: {backend})
            patched.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
            patched.setattr(dist, "new_group", noted)
            mesh.new_group("tensor")
        return order

    assert ranks(4).run(called, "nccl") == [["wait", "split", "split"]] * 4
    assert ranks(4).run(called, "gloo") == [["split", "split"]] * 4


def test_groups_are_given_back_on_close(ranks: Any) -> None:
    """And what stands on a group goes before it."""

    def open_and_close() -> tuple[int, int, list[str]]:
        told = list[str]()
        with Session(device="cpu", timeout_seconds=60) as session:
            before = groups_open()
            mesh = session.lay(TWO)
            group = mesh.group("tensor")
            mesh.close_with_mesh(lambda: told.append("sum " + str(summed(group, mesh.rank))))
            summed(mesh.new_group("data"), mesh.rank)  # so that it has connected on all ranks
            mesh.close_with_mesh(lambda: told.append("first"))
            more = groups_open() - before
            mesh.close()
            return more, groups_open() - before, told

    for more, left, told in ranks(4).run(open_and_close):
        assert (more, left) == (2, 0)
        assert told[0] == "first"
        assert told[1] in ("sum 11", "sum 1100")


def test_pytorchs_own_mesh_has_the_same_groups(ranks: Any) -> None:
    def meshes() -> tuple[Any, ...]:
        with meshed(TWO) as mesh:
            device_mesh = mesh.device_mesh("cpu")
            names = device_mesh.mesh_dim_names
            assert names is not None
            mine = tuple(device_mesh.get_local_rank(name) for name in names)
            sums = tuple(summed(device_mesh.get_group(name), mesh.rank) for name in names)
        with meshed(Layout({"tensor": 4})) as mesh:
            return names, mine, sums, mesh.device_mesh("cpu").mesh_dim_names

    assert ranks(4).run(meshes) == [
        (("data", "tensor"), (0, 0), (101, 11), ("tensor",)),
        (("data", "tensor"), (0, 1), (1010, 11), ("tensor",)),
        (("data", "tensor"), (1, 0), (101, 1100), ("tensor",)),
        (("data", "tensor"), (1, 1), (1010, 1100), ("tensor",)),
    ]


def test_a_mesh_of_other_ranks_is_refused(ranks: Any) -> None:
    def refused() -> str:
        with (
            Session(device="cpu", timeout_seconds=60) as session,
            pytest.raises(ConfigurationError) as caught,
        ):
            session.lay(Layout({"data": 3, "tensor": 2}))
        return str(caught.value)

    expected = "a mesh of {'data': 3, 'tensor': 2} has 6 ranks, the run has 2"
    assert ranks(2).run(refused) == [expected] * 2


def test_a_rank_alone_has_no_groups() -> None:
    with Session(device="cpu", timeout_seconds=60) as session:
        mesh = session.lay(Layout({"data": 1}))
        assert mesh.group("data") is None
        assert mesh.group(*AXES) is None
        assert mesh.ranks("data") == (0,)


@pytest.mark.parametrize(
    ("degrees", "ranks_of_a_host", "across"),
    [
        ({"data": 2, "tensor": 4}, 4, []),
        ({"data": 4, "tensor": 3}, 4, ["tensor"]),
        ({"data": 4, "tensor": 3}, 12, []),
        ({"context": 4, "tensor": 2}, 4, ["context"]),
        ({"tensor": 8}, 4, []),
        ({"data": 8}, 4, []),
    ],
    ids=str,
)
def test_busy_axes_stay_on_a_host(degrees: dict[str, int], ranks_of_a_host: int, across: list[str]) -> None:
    """Eight ranks on one axis cannot, on hosts of four; three could."""
    assert Layout(degrees).across_hosts(ranks_of_a_host) == across
