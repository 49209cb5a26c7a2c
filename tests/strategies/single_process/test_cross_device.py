from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.errors import TaskError
from evener.strategies.single_process.cross_device import DeviceMover, Moves, draw_borders
from evener.strategies.single_process.model_parallel import move_modules, part_stateless
from evener.strategies.single_process.placement import parse_placement, said_places
from tests.ids import placeless
from tests.strategies.logical import LogicalDevices, MixedDevicesError
from tests.waiting_copies import CPU, DEVICE, CopiesToHost

FIRST = torch.device("cpu:0")


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mix, self.scale = block(), block(), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        total: Tensor = self.scale * (hidden + self.mix(hidden))
        return total


@dataclass
class Pair:
    wide: Tensor
    names: list[str]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair: Pair, *, mask: Tensor, extra: None = None) -> dict[str, Any]:
        assert extra is None
        assert pair.names == ["a"]
        wide = self.layer(pair.wide) * mask
        return {"wide": wide, "both": (wide.sum(), [wide + 1]), "none": None}


class Trees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(Pair(x, ["a"]), mask=x > 0, extra=None)
        assert found["none"] is None
        last: Tensor = self.last(found["wide"] + x) + found["both"][1][0] + found["both"][0]
        return last


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return x


class Written(Loop):
    """Its own code writes into what a block left."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x).mul_(2)
        return x


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = block()

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = checkpoint(self.encode, x, use_reentrant=False)
        return done + x


def chain() -> nn.Module:
    shared = nn.Tanh()
    return nn.Sequential(
        nn.Linear(4, 4),
        shared,
        nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4)),
        nn.Identity(),
        nn.Linear(4, 4),
    )


class Sliced(nn.Module):
    """Runs a part of a chain, which is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = chain()

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.chain[0](x) + x
        return self.chain[4](self.chain(first)) + first


class Doubling(nn.Module):
    """Changes its argument in place, and returns it or nothing."""

    def __init__(self, returns: bool = False) -> None:
        super().__init__()
        self.scale, self._returns = nn.Parameter(torch.full((1,), 2.0)), returns

    def forward(self, x: Tensor) -> Tensor | None:
        x.mul_(self.scale)
        return x if self._returns else None


class InPlace(nn.Module):
    """Relies on what its parts write into their arguments: into a tensor, a view of one, and what a chain is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.relu, self.twice = nn.Linear(4, 4), nn.ReLU(inplace=True), Doubling()
        self.again, self.chain = Doubling(returns=True), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x) + 0.1
        self.twice(hidden[:, 1:2])
        self.again(hidden).add_(1)
        added: Tensor = self.chain(hidden.sub_(2)) + hidden
        self.relu(added)
        return added


class Cached(nn.Module):
    """Adds to what it is given: a list, a list in a dict, and an entry of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, caches: list[Tensor], more: dict[str, Any]) -> Tensor:
        x = self.layer(x)
        caches.append(x)
        more["lists"].insert(0, x)
        more["sum"] = more.get("sum", 0) + x
        more.pop("first", None)
        return x.tanh()


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        caches: list[Tensor] = []
        lists: list[Tensor] = [x]
        more: dict[str, Any] = {"lists": lists, "first": x}
        for each in self.blocks:
            x = each(x, caches, more)
        assert len(caches) == len(lists) - 1 == 3
        assert "first" not in more
        found: Tensor = x + caches[0] * caches[2] + lists[1] * lists[0] + more["sum"]
        return found


def placed(model: nn.Module, placement: str) -> tuple[Moves, LogicalDevices]:
    places = said_places(model, parse_placement(placement), FIRST)
    part_stateless(model, places)
    move_modules(model, places)
    return draw_borders(model, places, FIRST), LogicalDevices(model, places)


CASES: list[tuple[Callable[[], nn.Module], str, int]] = [
    (Residual, "mix=cpu:1", 2),
    (Residual, "encode.0=cpu:1", 2),
    (Residual, "encode=cpu:1,mix=cpu:1", 3),
    (Residual, "mix=cpu:1,mix.1=cpu:2", 3),
    (Trees, "inner=cpu:1", 5),
    (Trees, "inner=cpu:2,inner.layer=cpu:1", 7),
    (Loop, "blocks.2=cpu:1,blocks.3=cpu:1", 3),
    (Loop, "blocks=cpu:1", 5),
    (Written, "blocks.[23]=cpu:1", 4),
    (chain, "2=cpu:1,3=cpu:1,4=cpu:1", 2),
    (chain, "2.0=cpu:1,2.2=cpu:1", 4),
    (Sliced, "chain.0=cpu:1,chain.2=cpu:1", 6),
    (Repeated, "encode=cpu:1", 2),
    (InPlace, "relu=cpu:1,twice=cpu:1,again=cpu:2,chain.0=cpu:1", 8),
    (Caching, "blocks.1=cpu:1,blocks.2=cpu:1", 14),
]


@pytest.mark.parametrize(("kind", "placement", "moves"), CASES, ids=placeless)
def test_what_crosses_a_border_is_moved_and_nothing_else(
    kind: Callable[[], nn.Module], placement: str, moves: int
) -> None:
    torch.manual_seed(1)
    model = kind().double()
    reference, x = copy.deepcopy(model), torch.randn(3, 4, dtype=torch.float64)
    counted, devices = placed(model, placement)
    with devices:
        outputs = model(x)
        assert devices.of(outputs) == FIRST
    assert not vars(outputs), "nothing is left on what the user gets"
    forward = sum(counted.count.values())
    outputs.square().sum().backward()
    reference(x).square().sum().backward()
    torch.testing.assert_close(outputs, reference(x), rtol=0, atol=0)
    for own, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=0, atol=0)
    assert forward == moves, dict(counted.count)


def test_a_call_that_fails_is_forgotten() -> None:
    class Failing(Doubling):
        fails = True

        def forward(self, x: Tensor) -> Tensor | None:
            if self.fails:
                raise ValueError("once")
            return super().forward(x)

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Failing()

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0
            self.inner(x)
            return x

    model, x = Trying(), torch.ones(2, 4)
    _, devices = placed(model, "inner=cpu:1")
    with devices:
        with pytest.raises(ValueError, match="once"):
            model(x)
        model.inner.fails = False
        assert torch.equal(model(x), torch.full((2, 4), 2.0))


def test_without_borders_the_devices_would_mix() -> None:
    model = Residual()
    places = said_places(model, parse_placement("mix=cpu:1"), FIRST)
    with pytest.raises(MixedDevicesError), LogicalDevices(model, places):
        model(torch.randn(3, 4))


def test_a_module_that_two_devices_call_is_refused() -> None:
    model = nn.ModuleDict({"left": Residual(), "right": Residual()})
    model["right"].mix = model["left"].mix
    with pytest.raises(TaskError, match=r"left.mix is called by modules on cpu:0 and cpu:1"):
        placed(model, "right=cpu:1,right.mix=cpu:0")


def test_the_host_waits_for_activations_that_come_to_it() -> None:
    mover = DeviceMover()
    with CopiesToHost() as copies:
        found, has_moved = mover.move({"x": torch.ones(3, device=DEVICE)}, DEVICE, CPU)
    assert has_moved
    assert found["x"].device == CPU
    assert copies.waits == [True]
