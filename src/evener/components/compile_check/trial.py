"""One forward and backward pass of a graph for comparison, of which nothing stays behind.

A graph that ``torch.compile`` has captured is a function of tensors: what the model passes on, its weights, and its
buffers. A trial calls such a function with copies of these, draws what comes back to its outputs in backward, and
returns all that was computed. So neither the model's buffers nor gradients that are there change, no hook on a weight
runs, and generators are where they were.

A *disturbed* trial is the plain graph, node by node, with every result multiplied by 1 + eps or 1 - eps of its own
type at random, and every gradient likewise. It shows how far rounding may move each number that the graph computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, UntypedStorage, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from evener.components.compile_check.eager_graph import recomputed
from evener.data.batch import map_leaves
from evener.hardware import accelerators
from evener.hardware.timers import waiting
from evener.nn.context import current
from evener.torch_internals.dispatch_mode import wraps
from evener.torch_internals.version import version

_SEED = 0x5EED


@dataclass
class Computed:
    """All that a trial computed."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    """Of the inputs that want one, in their order; None where no output depends on it."""
    left: dict[int, Tensor]
    """Inputs as they are afterwards, by their place: buffers and what else is no weight, for some operators write to
    these and do not say so, and weights that were written to."""
    drew: bool
    """Whether a generator of PyTorch has moved."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a graph, of which each trial has copies.

    Args:
        given: As the graph is called with them: tensors, and numbers for sizes that may change.
        spread: Floating inputs are multiplied by 1 + spread times normally distributed numbers, drawn by ``seed``.
        rounding: Seeds a last unit by which each number is moved besides; None moves none.
    """

    given: Sequence[Any]
    spread: float = 0.0
    seed: int = 0
    rounding: int | None = None

    @property
    def wanting(self) -> list[int]:
        """Places of the inputs that want a gradient."""
        wants = torch.is_grad_enabled()
        return [at for at, each in enumerate(self.given) if wants and _is_tensor(each) and each.requires_grad]

    @property
    def device(self) -> torch.device:
        """On which the graph computes: that of the first input on an accelerator, or the CPU."""
        found = [
            each.device
            for each in self.given
            if _is_tensor(each) and accelerators.is_accelerator(each.device)
        ]
        return found[0] if found else torch.device("cpu")

    def copies(self) -> tuple[list[Any], list[Tensor]]:
        """What to call the graph with, and those of which gradients are asked."""
        made, asked = _copied(self.given), list[Tensor]()
        movable = [each for each in made if _shakes(each) and not _overlaps(each)]
        if self.spread:
            noise = Noise(self.seed)
            for each in movable:
                each.mul_((1 + self.spread * noise.normal(each)).to(each.dtype))
        if self.rounding is not None:
            noise = Noise(self.rounding)
            for each in movable:
                each.copy_(noise.shaken(each))
        for at, each in enumerate(self.given):
            if isinstance(each, nn.Parameter):
                made[at] = nn.Parameter(made[at], each.requires_grad)
        for at in self.wanting:
            if self.given[at].is_leaf or _overlaps(made[at]):
                asked.append(made[at].requires_grad_())
            else:  # what another graph has computed may be written in place, and no leaf may
                asked.append(made[at].clone().requires_grad_())
                made[at].copy_(asked[-1])
        return made, asked


class Noise:
    """Random numbers that are the same on every rank and in every run, and move no generator of others."""

    def __init__(self, seed: int) -> None:
        self._seed, self._made = seed, dict[torch.device, torch.Generator]()

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self._made:
            self._made[device] = torch.Generator(device).manual_seed(_SEED + self._seed)
        return self._made[device]

    def normal(self, like: Tensor) -> Tensor:
        """Normally distributed numbers in the shape and type of ``like``."""
        drawn = torch.randn(like.shape, generator=self._on(like.device), device=like.device)
        return drawn.to(like.dtype)

    def shaken(self, tensor: Tensor) -> Tensor:
        """``tensor`` with each number moved by about a unit in its last place, up or down; zeros stay."""
        drawn = torch.randint(2, tensor.shape, generator=self._on(tensor.device), device=tensor.device)
        kind = tensor.real.dtype
        signs = (drawn * 2 - 1).to(torch.promote_types(kind, torch.float32))  # in which 1 + eps is not 1
        return tensor * (1 + signs * torch.finfo(kind).eps).to(kind)


class Disturbed(fx.Interpreter):
    """A plain graph that runs node by node, each result disturbed by rounding; its inputs are disturbed already."""

    def __init__(self, graph: fx.GraphModule, noise: Noise) -> None:
        super().__init__(graph)
        self._noise = noise

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A part that is computed again in backward is disturbed node by node, too, and computed once."""
        if target is recomputed:
            return Disturbed(args[0], self._noise).run(*args[1:])
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """The result of a node. One that lies in the memory of an input is a view, or the input written in place."""
        found = super().run_node(n)
        if n.op not in ("call_function", "call_method", "call_module"):
            return found
        memories: set[int] = set()
        map_leaves(
            lambda leaf: memories.update(_memory(leaf)), [self.env[each] for each in n.all_input_nodes]
        )
        return map_leaves(lambda leaf: self._shaken(leaf, memories), found)

    def _shaken(self, leaf: Any, memories: Container[int]) -> Any:
        if not _shakes(leaf) or any(each in memories for each in _memory(leaf)):
            return leaf
        shaken = self._noise.shaken(leaf)
        if shaken.requires_grad:
            shaken.register_hook(self._noise.shaken)  # type: ignore[no-untyped-call]
        return shaken


def disturbed(graph: fx.GraphModule, inputs: Inputs, seed: int) -> Computed:
    """A disturbed trial of a plain graph."""
    return trial(Disturbed(graph, Noise(seed)).run, replace(inputs, rounding=seed))


def trial(function: Callable[..., Any], inputs: Inputs, draw: int | None = None) -> Computed:
    """Calls ``function`` and goes backward through it, in the caller's autocast, and with gradients if he has them.

    Args:
        draw: Seeds the generators; None leaves them as the graph will find them.
    """
    device = inputs.device
    with _leaving_nothing(device):
        if draw is not None:
            torch.manual_seed(draw)
        before = accelerators.generator_states(device)
        given, asked = inputs.copies()
        versions = list(map(_version, given))
        found: list[Any] = []
        map_leaves(found.append, function(*given))
        outputs = [each for each in found if _is_tensor(each)]
        left = {
            at: each.detach()
            for at, (each, then) in enumerate(zip(given, versions, strict=True))
            if _is_tensor(each) and (_version(each) != then or not isinstance(inputs.given[at], nn.Parameter))
        }
        gradients = _gradients(outputs, asked)
        after = accelerators.generator_states(device)
        drew = not all(map(torch.equal, before, after))
    return Computed([each.detach() for each in outputs], gradients, left, drew)


def _gradients(outputs: list[Tensor], asked: list[Tensor]) -> list[Tensor | None]:
    """What drawn gradients of the outputs come to, outside of autocast, where backward passes run."""
    lead = [each for each in outputs if each.requires_grad]
    if not lead or not asked:
        return [None] * len(asked)
    noise = Noise(0)
    with ExitStack() as undo:
        for kind in {each.device.type for each in lead}:
            if torch.amp.is_autocast_available(kind):
                undo.enter_context(torch.autocast(kind, enabled=False))
        return list(torch.autograd.grad(lead, asked, list(map(noise.normal, lead)), allow_unused=True))


@contextmanager
def _leaving_nothing(device: torch.device) -> Iterator[None]:
    """Generators are afterwards where they were, no call of a layer with masks by sample is counted, what others do
    with saved tensors is not done in the block, autocast keeps no copies of it, and its time is no part of the rank's
    own."""
    states, caches = accelerators.generator_states(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        scope = current()
        uncounted = nullcontext() if scope is None else scope.tried()
        with waiting(), uncounted, saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        accelerators.draw_from(states, device)


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def _version(value: Any) -> int:
    """Rises with every write to a tensor, but not in inference mode."""
    return version(value) if _is_tensor(value) and not value.is_inference() else 0


def _shakes(value: Any) -> TypeGuard[Tensor]:
    """Whether rounding moves it."""
    is_floating = _is_tensor(value) and (value.is_floating_point() or value.is_complex())
    return is_floating and value.layout is torch.strided


def _memory(value: Any) -> tuple[int, ...]:
    """Where it lies; nowhere if it is no plain tensor."""
    return (value.untyped_storage().data_ptr(),) if _is_plain(value) else ()


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    if not _is_tensor(value) or wraps(type(value)) or value.layout is not torch.strided:
        return False
    return not (value.is_conj() or value.is_neg())


def _overlaps(tensor: Tensor) -> bool:
    """Whether several of its numbers lie in one place."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return any(size > 1 and not stride for size, stride in sizes)


def _copied(given: Sequence[Any]) -> list[Any]:
    """Copies in the same strides; those that lie in one memory still do."""
    users = Counter(chain.from_iterable(map(_memory, given)))
    memories: dict[int, UntypedStorage] = {}
    return [_copy(each, users, memories) if _is_tensor(each) else each for each in given]


@torch.no_grad()
def _copy(given: Tensor, users: Mapping[int, int], memories: dict[int, UntypedStorage]) -> Tensor:
    own = given.detach()
    if not _is_plain(own):
        return own.clone()
    (memory,) = _memory(own)
    if users[memory] == 1 and not _overlaps(own):
        return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device).copy_(own)
    if memory not in memories:
        memories[memory] = own.untyped_storage().clone()  # type: ignore[no-untyped-call]
    room = torch.empty(0, dtype=own.dtype, device=own.device)
    return room.set_(memories[memory], own.storage_offset(), own.shape, own.stride())
