"""Checks by running a module's forward on a part of the features whether layers of it are a region.

The layers that begin the region return a part of their output in the whole. The layer that ends it must receive that
part of its input in the whole, and returns its output in the whole. Then the module must return the same as before. In
backward no gradient may flow from the last layer's input to the arguments except through the first layers, whose
gradients are summed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evener.data.batch import map_leaves, tensors_in
from evener.distributed import signals as interrupt
from evener.hardware import accelerators
from evener.nn.tensor_region import stand_in
from evener.strategies.tensor.candidates import (
    Column,
    Guess,
    LinearCall,
    Place,
    TriedRegion,
    changes,
    guesses,
)
from evener.strategies.tensor.regions import width
from evener.torch_internals.modules import own_parameters

Acting = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Answers in place of a module's forward. Gets the forward and the arguments."""


class TrialModules(Protocol):
    """Runs modules on their own, for a trial."""

    made: dict[Place, nn.Parameter]

    def run_alone(
        self,
        forward: Callable[..., Any],
        whole: UndividedCall,
        acting: Mapping[str, Acting],
        given: Any = None,
    ) -> Any:
        """Runs a module's forward; modules in ``acting`` are answered by the given functions."""

    def training(self, name: str) -> AbstractContextManager[None]:
        """Returns a context in which a module is in training mode, without dropout, and keeps its state."""

    def filled(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which the module's own parameters have numbers."""

    def modules_in(self, name: str) -> dict[str, nn.Module]:
        """Returns a module and the modules in it, by name."""

    def dropouts(self, name: str) -> list[str]:
        """Returns the names of Evener's dropouts in a module."""

    def is_shared(self, place: Place) -> bool:
        """Returns True if a parameter has several names."""


@dataclass
class UndividedCall:
    """A recorded call of an undivided module."""

    args: Any
    kwargs: Any
    trained: list[bool]
    """For each tensor among the arguments, whether it requires a gradient."""
    output: Any = None
    calls: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Input and output of each layer that was called once, in order of calls."""
    dropped: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the inputs of Evener's dropouts."""


def dropping(name: str, into: dict[str, tuple[int, ...]]) -> Acting:
    """Returns what notes the shape of the input of a dropout."""

    def act(own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        into[name] = tuple(args[0].shape)
        return own(*args, **kwargs)

    return act


class _WrongError(Exception):
    """Raised with the reason when a guess is wrong."""


class Judge:
    """Finds the regions of one module.

    Args:
        stage: Runs the module.
        name: Name of the module.
        forward: The module's own forward.
        whole: Recorded call of the undivided module.
        numbers: Integer attributes of the module and the modules in it.
        ranks: Number of ranks over which heads are divided.
        trained: Recorded call in training mode, without dropout. None if it depends on random numbers or cannot be
            recorded.
    """

    def __init__(
        self,
        stage: TrialModules,
        name: str,
        forward: Callable[..., Any],
        whole: UndividedCall,
        numbers: Mapping[Place, int],
        ranks: int,
        trained: UndividedCall | None = None,
    ) -> None:
        self._stage, self._name, self._forward, self._whole = stage, name, forward, whole
        self._trained = trained
        self._numbers, self._ranks, self._modules = numbers, ranks, stage.modules_in(name)
        self.reasons: dict[str, str] = {}
        """For layers that end no region, the reason, if there was a guess."""

    def regions(self) -> Iterator[TriedRegion]:
        """Yields the regions in the module; each layer is in at most one."""
        called = [LinearCall(each, *width(self._modules[each])) for each in self._whole.calls]
        used: set[str] = set()
        for place, row in enumerate(called):
            before = [layer for layer in called[:place] if layer.name not in used]
            found = None if row.name in used else self._ending_with(row, before)
            if found is not None:
                used |= {row.name, *(column.name for column in found.guess.columns)}
                yield found

    def _ending_with(self, row: LinearCall, before: Sequence[LinearCall]) -> TriedRegion | None:
        for guess in guesses(row, before, self._numbers):
            if guess.runs < self._ranks:
                self.reasons.setdefault(
                    row.name,
                    f"its features are {guess.runs} runs of heads that share one, for {self._ranks} ranks",
                )
                continue
            for given, change in itertools.product(self._stand_ins(guess), changes(guess, self._numbers)):
                numbers = tuple((place, self._numbers[place]) for place in change)
                region = TriedRegion(self._name, guess, numbers, given)
                try:
                    return self._with_draws(self._judged(region))
                except Exception as error:
                    interrupt.check()
                    self.reasons[row.name] = f"{error}".partition("\n")[0]
        return None

    def _stand_ins(self, guess: Guess) -> list[tuple[int | str, int] | None]:
        """Returns the ways to pass the module's arguments: first None, as they are; then each argument that all layers
        read, to be replaced by a stand-in."""
        found: list[tuple[int | str, int] | None] = [None]
        inputs = [self._whole.calls[column.name][0] for column in guess.columns]
        for key, value in (*enumerate(self._whole.args), *self._whole.kwargs.items()):
            alike = isinstance(value, Tensor) and all(_same(value, each) for each in inputs)
            if alike and value.shape[-1] % guess.runs == 0:
                found.append((key, value.shape[-1]))
        return found

    def _judged(self, region: TriedRegion) -> TriedRegion:
        parts = range(1), range(1, region.guess.runs)
        for own in parts:
            region = _RegionPart(self._stage, self._modules, self._forward, self._whole, region, own).judged()
        if self._trained is not None:
            layers = {region.guess.row, *(column.name for column in region.guess.columns)}
            if missing := layers - self._trained.calls.keys():
                raise _WrongError(f"in training its code does not call {min(missing)} once")
            for own in parts:
                part = _RegionPart(self._stage, self._modules, self._forward, self._trained, region, own)
                with self._stage.training(self._name):
                    region = part.judged()
        return region

    def _with_draws(self, region: TriedRegion) -> TriedRegion:
        """Sets ``draws``: whether code between the layers uses the common random generator in training."""
        calls, row = self._whole.calls, region.guess.row
        first = next(each for each in calls if each in {column.name for column in region.guess.columns})
        device = calls[row][0].device
        states: dict[str, list[Tensor]] = {}

        def noting(name: str) -> Acting:
            def act(own: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
                states[name] = accelerators.generator_states(device)
                return calls[name][1].clone()

            return act

        with accelerators.generators_kept(device), _training(self._modules.values()):
            self._stage.run_alone(self._forward, self._whole, {first: noting(first), row: noting(row)})
        draws = not all(map(torch.equal, states[first], states[row]))
        if draws and not self._name:
            raise _WrongError("its input is dropped, and it stands in no block")
        return replace(region, draws=draws)


class _RegionPart:
    """Runs a module with one part of a region."""

    def __init__(
        self,
        stage: TrialModules,
        modules: Mapping[str, nn.Module],
        forward: Callable[..., Any],
        whole: UndividedCall,
        region: TriedRegion,
        own: range,
    ) -> None:
        self._stage, self._modules, self._forward, self._whole = stage, modules, forward, whole
        self._region, self._own, self._runs = region, own, region.guess.runs
        self._made: set[str] = set()
        self._read: Tensor | None = None
        self._dropped: dict[str, tuple[int, ...]] = {}

    def judged(self) -> TriedRegion:
        """Returns the region with the observed dropouts and parameters.

        Raises:
            _WrongError: If it is no region. Errors of the module's own code also pass through.
        """
        guess = self._region.guess
        acting: dict[str, Acting] = {column.name: self._column(column) for column in guess.columns}
        acting[guess.row] = self._row
        acting |= {name: dropping(name, self._dropped) for name in self._whole.dropped}
        given, leaves = _trained((self._whole.args, self._whole.kwargs), self._whole.trained)
        self._stage.made.clear()
        with torch.enable_grad(), self._numbers():
            output = self._stage.run_alone(self._forward, self._whole, acting, self._narrowed(given))
            if self._read is None:
                raise _WrongError("its code does not call the layers as it did")
            self._check(output)
            terms = self._terms(leaves)
        return replace(self._region, drops=self._drops(), terms=terms)

    @contextmanager
    def _numbers(self) -> Iterator[None]:
        with ExitStack() as stack:
            for (name, key), value in self._region.numbers:
                held = vars(self._modules[name])
                stack.callback(held.__setitem__, key, value)
                held[key] = value * len(self._own) // self._runs
            yield

    def _narrowed(self, given: Any) -> Any:
        if self._region.stand_in is None:
            return given
        key, features = self._region.stand_in
        args, kwargs = list(given[0]), dict(given[1])
        held: Any = args if isinstance(key, int) else kwargs
        held[key] = stand_in(held[key], features * len(self._own) // self._runs)
        return tuple(args), kwargs

    def _column(self, column: Column) -> Acting:
        def act(own: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
            before, after = self._whole.calls[column.name]
            if self._region.stand_in is not None:
                before = stand_in(before, self._region.stand_in[1] * len(self._own) // self._runs)
            if self._read is not None or not _same(args[0], before):
                raise _WrongError(f"{column.name} reads something else")
            self._made.add(column.name)
            made = _part(after, column.unit, column.blocks, self._own).detach().requires_grad_()
            return made.clone()

        return act

    def _row(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        guess, (before, after) = self._region.guess, self._whole.calls[self._region.guess.row]
        if len(self._made) < len(guess.columns) or self._read is not None:
            raise _WrongError(f"{guess.row} is called before what it reads is made")
        if not _same(args[0], _part(before, guess.unit, 1, self._own)):
            raise _WrongError(f"what {guess.row} reads of a part is not that part of what it reads")
        self._read = args[0]
        return after.clone()

    def _check(self, output: Any) -> None:
        found, wanted = tensors_in(output), tensors_in(self._whole.output)
        if len(found) != len(wanted) or not all(map(_same, found, wanted)):
            raise _WrongError("the module returns something else for a part")

    def _terms(self, leaves: Sequence[Tensor]) -> tuple[Place, ...]:
        """Returns the parameters between the layers, whose gradients come from this part alone."""
        places = dict(self._stage.made)
        for name, module in self._modules.items():
            for key, parameter in own_parameters(module).items():
                if parameter is not None:
                    places.setdefault((name, key), parameter)
        trained = {place: parameter for place, parameter in places.items() if parameter.requires_grad}
        assert self._read is not None
        wanted, ones = [*trained.values(), *leaves], torch.ones_like(self._read)
        found = torch.autograd.grad(self._read, wanted, ones, allow_unused=True) if wanted else ()
        reached = [gradient is not None for gradient in found]
        if any(reached[len(trained) :]):
            raise _WrongError("a gradient goes from a part to an argument of the module")
        terms = tuple(itertools.compress(trained, reached))
        if any(map(self._stage.is_shared, terms)):
            raise _WrongError("a parameter between is one of another module, too")
        return terms

    def _drops(self) -> tuple[tuple[str, int, int], ...]:
        """Returns Evener's dropouts that see a part, each with the divided dimension and its whole length."""
        found: list[tuple[str, int, int]] = []
        for name, shape in self._whole.dropped.items():
            now = self._dropped.get(name, ())
            other = [dim for dim in range(len(shape)) if len(now) == len(shape) and now[dim] != shape[dim]]
            if len(other) > 1 or len(now) != len(shape) or any(shape[dim] % self._runs for dim in other):
                raise _WrongError(f"{name} drops something of another form for a part")
            found.extend((name, dim - len(shape), shape[dim]) for dim in other)
        return tuple(found)


def _part(whole: Tensor, unit: int, blocks: int, own: range) -> Tensor:
    """Returns the runs ``own`` of a tensor's features, in each block."""
    in_blocks = whole.reshape(*whole.shape[:-1], blocks, whole.shape[-1] // blocks)
    return in_blocks[..., own.start * unit : own.stop * unit].flatten(-2)


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors are equal but for rounding. NaN is never equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool((a - b).norm() <= torch.finfo(a.dtype).eps ** 0.5 * b.norm())


@contextmanager
def _training(modules: Any) -> Iterator[None]:
    each = list(modules)
    for module in each:
        module.training = True
    try:
        yield
    finally:
        for module in each:
            module.training = False


# Arguments


def copied(tree: Any) -> Any:
    """Returns a copy without autograd history. Other objects are copied too: a module may keep state in them."""
    return map_leaves(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), tree
    )


def _trained(tree: Any, flags: Sequence[bool]) -> tuple[Any, list[Tensor]]:
    """Returns a copy in which the flagged tensors require a gradient, and the leaves that they come from."""
    leaves: list[Tensor] = []
    if len(flags) != len(tensors_in(tree)):
        raise _WrongError("the module is called otherwise with gradients than without")
    remaining = iter(flags)

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not next(remaining):
            return copied(leaf)
        leaves.append(leaf.detach().clone().requires_grad_())
        return leaves[-1].clone()

    return map_leaves(made, tree), leaves
