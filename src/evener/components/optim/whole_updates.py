"""Updates weights as wholes, each at one rank, with an optimizer that looks at more than single elements.

A weight may be whole at one rank already, its owner (``sharded`` with ``zero=1`` and ``2``, ``pipeline``). Otherwise
it is gathered at its owner for the update, and goes back in pieces (``zero=3``, ``tensor``, ``experts``). The owners
work at the same time, each on a weight of its own::

    rank 0, owner of a, c     pieces of a ─▶ update a ─▶ pieces of a      pieces of c ─▶ update c ─▶ ...
    rank 1, owner of b        pieces of b ─▶ update b ─▶ pieces of b
                              ╰─────────── a round ────────────────╯      which is gathered during the one before

The user's optimizer has stand-ins for the weights (:mod:`evener.components.optim.stand_ins`), and its state of a weight
is at the owner alone. An optimizer of which it is not known that it may be stepped several times is stepped once, with
all gradients: then a round has all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.optim.elementwise import updates_alone
from evener.components.optim.owners import choose_owners, update_cost
from evener.components.optim.stand_ins import drop_memory, is_away, make_stand_in, mark_held, shown
from evener.components.optim.whole_exchange import Form, start_exchange
from evener.components.sharded_tensor.local import is_divided, local, off_host
from evener.components.sharded_tensor.shard_spec import ShardBounds, ShardSpec, shard_spec
from evener.distributed.hosts import all_gather
from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError
from evener.torch_internals.optimizers import step_without_hooks

STATE_FACTOR = 4
"""Memory that an owner needs for a weight, in sizes of the weight: itself, its gradient and two of state."""
_NOWHERE = torch.device("meta")


@dataclass(frozen=True)
class OwnershipTerms:
    """Which weights are updated as wholes, and what the ranks of the world can do."""

    names: frozenset[str] = frozenset()
    """The weights, by their names in the model."""
    speeds: tuple[float, ...] = ()
    """The speed of each rank, relative to the others."""
    rooms: tuple[float, ...] = ()
    """Bytes of memory of each rank."""

    def along(self, layout: Layout, axes: Sequence[str], ranks: Sequence[int]) -> OwnershipTerms:
        """Returns the terms of ``ranks``, each with the least of all ranks at its place on ``axes``. So ranks that
        differ on other axes alone, as replicas do, choose the same owners."""
        places = [tuple(layout.place(rank)[axis] for axis in axes) for rank in range(len(self.speeds))]
        least: dict[tuple[int, ...], tuple[float, float]] = {}
        for place, speed, room in zip(places, self.speeds, self.rooms, strict=True):
            before = least.get(place, (speed, room))
            least[place] = min(speed, before[0]), min(room, before[1])
        found = [least[places[rank]] for rank in ranks]
        return replace(self, speeds=tuple(each[0] for each in found), rooms=tuple(each[1] for each in found))

    def owners(self, tensors: Sequence[tuple[Sequence[int], int]], held: float) -> list[int]:
        """Returns the index of the owner of each tensor.

        Args:
            tensors: Whole shape and bytes of each.
            held: Which part of all tensors, and of their gradients, each rank holds besides those that it owns.
        """
        beside = 2 * held * sum(nbytes for _, nbytes in tensors)
        return choose_owners(
            [update_cost(shape) for shape, _ in tensors],
            [STATE_FACTOR * nbytes for _, nbytes in tensors],
            self.speeds,
            [max(0.0, room - beside) for room in self.rooms],
        )


Piece = tuple[tuple[int, ...], list[ShardBounds]]
"""Shape of a rank's piece, and its place in the whole."""


@dataclass
class GatheredWeight:
    """A weight of which several ranks have pieces."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    pieces: list[Piece]
    """Of each rank of the group."""
    owner: int = 0
    """Index in the group."""
    stand_in: nn.Parameter = field(init=False)


@dataclass
class Team:
    """Ranks that have pieces of the same weights."""

    group: dist.ProcessGroup
    weights: list[GatheredWeight] = field(default_factory=list)


Round = list[tuple[Team, list[GatheredWeight]]]
"""Weights of each team that are gathered together."""


class WholeUpdates:
    """Builds an optimizer that holds whole weights, and steps it. All ranks must call its methods together.

    Args:
        model: Has the pieces.
        names: The names of its parameters.
        terms: Says which weights are updated as wholes.
        gather: Gathers an object from every rank of the world.
        device: This rank's device.
    """

    def __init__(
        self,
        model: nn.Module,
        names: dict[nn.Parameter, str],
        terms: OwnershipTerms,
        mesh: Mesh,
        gather: Callable[[Any], list[Any]],
        device: torch.device,
    ) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        divided = {p: spec for p, name in names.items() if name in terms.names and (spec := shard_spec(p))}
        self._held: list[nn.Parameter] = []  # of which this rank has all, and others nothing
        self._stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        self._teams: list[Team] = []
        axes = _dividing_axes({names[p]: p for p in divided}, gather)
        for over in sorted(set(axes.values())):
            of_axes = [p for p in divided if axes[names[p]] == over]
            group = mesh.group(*over, use="whole updates") if over else None
            here = []
            for parameter in of_axes:
                if _is_here(divided[parameter], over):
                    here.append(parameter)
                else:
                    self._stand_ins[parameter] = make_stand_in(parameter, _NOWHERE, away=True)
            if group is None:
                for parameter in here:
                    mark_held(parameter)
                self._held += here
            elif here:
                able = terms.along(mesh.layout, over, mesh.ranks(*over))
                self._teams.append(self._team(group, here, able))
        self.optimizer: torch.optim.Optimizer

    def _team(
        self, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter], terms: OwnershipTerms
    ) -> Team:
        team = Team(group)
        own = [_piece_of(parameter) for parameter in parameters]
        of_ranks: list[list[Piece]] = all_gather(own, group)
        for parameter, *pieces in zip(parameters, *of_ranks, strict=True):
            spec = shard_spec(parameter)
            assert spec is not None
            team.weights.append(GatheredWeight(parameter, spec.whole_shape(local(parameter).shape), pieces))
        sizes = [
            (each.shape, torch.Size(each.shape).numel() * each.parameter.element_size())
            for each in team.weights
        ]
        for weight, owner in zip(team.weights, terms.owners(sizes, held=1 / group.size()), strict=True):
            weight.owner = owner
            away = owner != group.rank()
            place = _NOWHERE if away else self._device
            weight.stand_in = self._stand_ins[weight.parameter] = make_stand_in(weight.parameter, place, away)
        return team

    @property
    def words(self) -> str:
        """A description for the record of the run."""
        number = len(self._stand_ins) + len(self._held)
        gathered = sum(len(team.weights) for team in self._teams)
        how = f", {gathered} of them gathered for it" if gathered else ""
        return f"optimizer {type(self.optimizer).__name__}, updates {number} weights whole, each at one rank{how}"

    @property
    def gathers(self) -> bool:
        """True if some weights are gathered for their updates."""
        return bool(self._teams)

    @property
    def stand_ins(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """What an optimizer has in the places of the model's parameters."""
        return self._stand_ins

    @property
    def parameters(self) -> dict[Tensor, bool]:
        """The model's parameters that are updated as wholes, and whether this rank updates them."""
        held: dict[Tensor, bool] = dict.fromkeys(self._held, True)
        return held | {parameter: not is_away(made) for parameter, made in self._stand_ins.items()}

    def fill(self) -> Round:
        """Makes all stand-ins whole whose weights have a gradient, with that. Returns them, for :meth:`give_back`."""
        now = []
        for team in self._teams:
            present = [weight for weight in team.weights if weight.parameter.grad is not None]
            for weight in present:
                _check_dense(weight.parameter)
            now.append((team, present))
        self._fill(now, self._start(now)())
        return now

    def give_back(self, now: Round) -> None:
        """Gives the ranks their pieces of updated weights. The stand-ins lose their memory."""
        self._give_back(now)()
        self._drop(now)

    def build(self, make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Returns the optimizer that ``make`` returns while the model has whole weights, with their values where they
        are owned."""
        everything = [(team, team.weights) for team in self._teams]
        self._fill(everything, self._start(everything, gradients=False)())
        try:
            with shown(self._model, self._stand_ins):
                self.optimizer = make()
        finally:
            self._drop(everything)
        return self.optimizer

    def step(self, stepped: Callable[[], Any]) -> None:
        """Steps the optimizer, and clears the gradients of the weights.

        Args:
            stepped: Steps the optimizer as usual.
        """
        for team in self._teams:
            for weight in team.weights:
                _check_dense(weight.parameter)
        rounds = list(self._rounds())
        coming = self._start(rounds[0]) if rounds else None
        going: Callable[[], object] = list
        for number in range(max(1, len(rounds))):
            now = rounds[number] if rounds else []
            if coming is not None:
                self._fill(now, coming())
            coming = self._start(rounds[number + 1]) if number + 1 < len(rounds) else None
            if number:
                step_without_hooks(self.optimizer)
            else:
                stepped()
                self.optimizer.zero_grad(set_to_none=True)  # what is not gathered is up to date
            going()
            going = self._give_back(now)
            self._drop(now)
        going()
        for parameter in (*self._stand_ins, *self._held):
            parameter.grad = None

    def _rounds(self) -> Iterator[Round]:
        """Yields the weights that are gathered together: one for each owner, the most costly first, or all."""
        alone = updates_alone(self.optimizer)
        queues = list[tuple[Team, list[list[GatheredWeight]]]]()
        for team in self._teams:
            present = [weight for weight in team.weights if weight.parameter.grad is not None]
            present.sort(key=lambda weight: -update_cost(weight.shape))
            of_owner: dict[int, list[GatheredWeight]] = {}
            for weight in present:
                of_owner.setdefault(weight.owner, []).append(weight)
            turns = max(map(len, of_owner.values()), default=0)
            each = [[of[turn] for of in of_owner.values() if turn < len(of)] for turn in range(turns)]
            queues.append((team, each if alone else [present]))
        for turn in range(max((len(each) for _, each in queues), default=0)):
            yield [(team, each[turn]) for team, each in queues if turn < len(each)]

    # The exchange of a round

    def _start(self, now: Round, gradients: bool = True) -> Callable[[], list[list[list[Tensor]]]]:
        """Starts to send this rank's pieces to the owners: weights and gradients."""
        waits = []
        for team, weights in now:
            outgoing: list[list[Tensor]] = [[] for _ in range(team.group.size())]
            incoming: list[list[Form]] = [[] for _ in range(team.group.size())]
            for weight in weights:
                parameter = weight.parameter
                sent = [parameter.detach()]
                if gradients and parameter.grad is not None:
                    sent.append(parameter.grad)
                outgoing[weight.owner] += [off_host(local(each), self._mesh) for each in sent]
                if weight.owner == team.group.rank():
                    for rank, (shape, _) in enumerate(weight.pieces):
                        incoming[rank] += [(shape, each.dtype) for each in sent]
            waits.append(start_exchange(team.group, outgoing, incoming, self._device))
        return lambda: [wait() for wait in waits]

    def _fill(self, now: Round, came: Sequence[list[list[Tensor]]]) -> None:
        """Makes whole the weights and gradients that this rank owns."""
        for (team, weights), of_ranks in zip(now, came, strict=True):
            parts = [iter(tensors) for tensors in of_ranks]
            own = [weight for weight in weights if weight.owner == team.group.rank()]
            for weight in own:
                weight.stand_in.data = _joined(weight, [next(part) for part in parts])
                if weight.parameter.grad is not None:
                    weight.stand_in.grad = _joined(weight, [next(part) for part in parts])

    @torch.no_grad()
    def _give_back(self, now: Round) -> Callable[[], object]:
        """Starts to send the updated weights back. The returned function waits, and writes this rank's pieces."""
        waits = []
        for team, weights in now:
            outgoing: list[list[Tensor]] = [[] for _ in range(team.group.size())]
            incoming: list[list[Form]] = [[] for _ in range(team.group.size())]
            for weight in weights:
                if weight.owner == team.group.rank():
                    for rank, piece in enumerate(weight.pieces):
                        outgoing[rank].append(_cut(weight.stand_in.detach(), piece))
                shape = weight.pieces[team.group.rank()][0]
                incoming[weight.owner].append((shape, weight.parameter.dtype))
            wait = start_exchange(team.group, outgoing, incoming, self._device)
            waits.append((wait, weights))

        def finish() -> None:
            for wait, weights in waits:
                parts = [iter(tensors) for tensors in wait()]
                with torch.no_grad():
                    for weight in weights:
                        local(weight.parameter.detach()).copy_(next(parts[weight.owner]))

        return finish

    def _drop(self, now: Round) -> None:
        for team, weights in now:
            for weight in weights:
                if weight.owner == team.group.rank():
                    drop_memory(weight.stand_in)


def _levels(spec: ShardSpec | None) -> Iterator[ShardSpec]:
    while spec is not None:
        yield spec
        spec = spec.within


def _dividing_axes(
    named: Mapping[str, nn.Parameter], gather: Callable[[Any], list[Any]]
) -> dict[str, tuple[str, ...]]:
    """Returns for each weight the axes over which several ranks have pieces of it. Ranks without a piece do not know
    by themselves how others divide the weight. A DTensor is a piece also where one rank has all of it: operators on it
    wait for the other ranks."""
    own = {
        name: {
            level.axis
            for level in _levels(shard_spec(parameter))
            if is_divided(parameter) or sum(map(bool, level.pieces)) > 1
        }
        for name, parameter in named.items()
    }
    rows: list[dict[str, set[str]]] = gather(own)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: tuple(sorted(set().union(*(row.get(name, set()) for row in rows)))) for name in names}


def _is_here(spec: ShardSpec, over: Sequence[str]) -> bool:
    """Returns True if the ranks that this rank meets along the axes ``over`` have all of the weight together."""
    return all(level.axis in over or level.local_bounds for level in _levels(spec))


def _piece_of(parameter: nn.Parameter) -> Piece:
    spec, held = shard_spec(parameter), local(parameter)
    assert spec is not None
    return tuple(held.shape), spec.boxes(held.shape) if held.numel() else []


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + length) for begin, length in zip(start, shape, strict=True))


def _joined(weight: GatheredWeight, parts: Sequence[Tensor]) -> Tensor:
    whole = parts[0].new_empty(weight.shape)
    for part, (_, boxes) in zip(parts, weight.pieces, strict=True):
        for box in boxes:
            whole[_slices(box.whole, box.shape)] = part[_slices(box.held, box.shape)]
    return whole


def _cut(whole: Tensor, piece: Piece) -> Tensor:
    shape, boxes = piece
    part = whole.new_empty(shape)
    for box in boxes:
        part[_slices(box.held, box.shape)] = whole[_slices(box.whole, box.shape)]
    return part


def _check_dense(parameter: nn.Parameter) -> None:
    if parameter.grad is not None and local(parameter.grad).layout is not torch.strided:
        raise ConfigurationError(
            f"a weight of shape {tuple(parameter.shape)} has a sparse gradient, which is not gathered for an update of "
            "the whole weight: build the embedding with sparse=False, or use strategy 'ddp'"
        )
