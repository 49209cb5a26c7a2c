"""A trial: one forward and backward pass of a graph for comparison, without side effects.

A graph captured by ``torch.compile`` is a function of tensors: activations, weights and buffers. A trial calls it with
copies of these and with random gradients of the outputs, and returns everything that was computed. So the model's
buffers and gradients do not change, no hooks on weights run, and random number generators keep their state.

A *disturbed* trial runs the plain graph node by node. It multiplies every result and every gradient at random by 1 +
eps or 1 - eps of its type. It shows how much rounding may change each result of the graph.
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

from evener.components.compile_check.eager_graph import recomputed
from evener.components.model_trial import apart_from_saving_hooks
from evener.data.batch import map_leaves
from evener.hardware import accelerators
from evener.hardware.timers import waiting
from evener.nn.context import current
from evener.torch_internals.autograd import version
from evener.torch_internals.dispatch import wraps

_SEED = 0x5EED


@dataclass
class Computed:
    """All results of a trial."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    """The gradients of the inputs that require one, in order. None if no output depends on the input."""
    left: dict[int, Tensor]
    """Inputs after the call, by index: weights that were written to, and all other inputs, because some operators write
    to inputs without marking it."""
    drew: bool
    """True if the graph drew random numbers from a PyTorch generator."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a graph. Each trial gets copies.

    Args:
        given: The arguments of the graph: tensors, and numbers for variable sizes.
        spread: Floating-point inputs are multiplied by 1 + spread times normally distributed numbers.
        seed: Seed of these numbers.
        rounding: If given, each number is also changed by a unit in the last place, with this seed.
    """

    given: Sequence[Any]
    spread: float = 0.0
    seed: int = 0
    rounding: int | None = None

    @property
    def wanting(self) -> list[int]:
        """The indices of the inputs that require a gradient."""
        wants = torch.is_grad_enabled()
        return [at for at, each in enumerate(self.given) if wants and _is_tensor(each) and each.requires_grad]

    @property
    def device(self) -> torch.device:
        """The device on which the graph computes: that of the first input on an accelerator, or the CPU."""
        found = [
            each.device
            for each in self.given
            if _is_tensor(each) and accelerators.is_accelerator(each.device)
        ]
        return found[0] if found else torch.device("cpu")

    def copies(self) -> tuple[list[Any], list[Tensor]]:
        """Returns copies of the inputs for a call of the graph, and the tensors whose gradients are requested."""
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
            else:  # the graph may write to a non-leaf input in place, but never to a leaf
                asked.append(made[at].clone().requires_grad_())
                made[at].copy_(asked[-1])
        return made, asked


class Noise:
    """Random numbers that are the same on every rank and in every run. They do not affect other generators."""

    def __init__(self, seed: int) -> None:
        self._seed, self._made = seed, dict[torch.device, torch.Generator]()

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self._made:
            self._made[device] = torch.Generator(device).manual_seed(_SEED + self._seed)
        return self._made[device]

    def normal(self, like: Tensor) -> Tensor:
        """Returns normally distributed numbers in the shape and type of ``like``."""
        drawn = torch.randn(like.shape, generator=self._on(like.device), device=like.device)
        return drawn.to(like.dtype)

    def shaken(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` with each number changed by about a unit in its last place, up or down. Zeros stay."""
        drawn = torch.randint(2, tensor.shape, generator=self._on(tensor.device), device=tensor.device)
        kind = tensor.real.dtype
        signs = (drawn * 2 - 1).to(torch.promote_types(kind, torch.float32))  # there, 1 + eps differs from 1
        return tensor * (1 + signs * torch.finfo(kind).eps).to(kind)


class Disturbed(fx.Interpreter):
    """Runs a plain graph node by node, and disturbs each result. Its inputs must be disturbed already."""

    def __init__(self, graph: fx.GraphModule, noise: Noise) -> None:
        super().__init__(graph)
        self._noise = noise

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs a checkpointed part node by node too, with disturbance, and does not recompute it."""
        if target is recomputed:
            return Disturbed(args[0], self._noise).run(*args[1:])
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node and disturbs its result, unless the result shares memory with an input: then it is a view, or the
        input written in place."""
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
    """Runs a disturbed trial of a plain graph."""
    return trial(Disturbed(graph, Noise(seed)).run, replace(inputs, rounding=seed))


def trial(function: Callable[..., Any], inputs: Inputs, draw: int | None = None) -> Computed:
    """Runs forward and backward of ``function`` under the caller's autocast. Runs no backward if the caller has
    disabled gradients.

    Args:
        draw: Seeds the generators. None keeps their state.
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
    """Runs backward with random gradients of the outputs. Autocast is disabled, as usual in backward."""
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
    """Prevents side effects of the block: restores the generators, does not count calls of layers with masks per
    sample, ignores others' hooks on saved tensors, disables autocast's cache, and does not count the time as the rank's
    work."""
    states, caches = accelerators.generator_states(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        scope = current()
        uncounted = nullcontext() if scope is None else scope.tried()
        with waiting(), uncounted, apart_from_saving_hooks():
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        accelerators.draw_from(states, device)


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def _version(value: Any) -> int:
    """Returns a tensor's version counter, which grows with every write. Returns 0 in inference mode."""
    return version(value) if _is_tensor(value) and not value.is_inference() else 0


def _shakes(value: Any) -> TypeGuard[Tensor]:
    """Returns True if rounding affects the value: a dense floating-point or complex tensor."""
    is_floating = _is_tensor(value) and (value.is_floating_point() or value.is_complex())
    return is_floating and value.layout is torch.strided


def _memory(value: Any) -> tuple[int, ...]:
    """Returns the address of the tensor's storage. Returns nothing if it is no plain tensor."""
    return (value.untyped_storage().data_ptr(),) if _is_plain(value) else ()


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    if not _is_tensor(value) or wraps(type(value)) or value.layout is not torch.strided:
        return False
    return not (value.is_conj() or value.is_neg())


def _overlaps(tensor: Tensor) -> bool:
    """Returns True if several elements share one memory location."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return any(size > 1 and not stride for size, stride in sizes)


def _copied(given: Sequence[Any]) -> list[Any]:
    """Returns copies with the same strides. Tensors that share storage still do."""
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
