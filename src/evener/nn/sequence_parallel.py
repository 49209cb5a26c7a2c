"""Positions divided over ranks that compute the same samples, where layers are not divided.

Norms, dropout and residual sums look at each position alone. Computed whole on all ranks, their activations are what is
left to be saved for backward when the layers between them are divided. So each rank computes some of the positions
there. A region of divided layers begins with an all_gather and ends with a reduce_scatter along them, which together
send as much as the all_reduce that they stand for (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022)::

              own positions             all positions, own features            own positions
    x ─ split ─┬─ norm ─ all_gather ─▶ columns ─▶ activation ─▶ rows ─ reduce_scatter ─ dropout ─ + ─ all_gather ─▶ y
               └──────────────────────────────────────────────────────────────────────────────────┘

Where pieces begin and end is a :class:`Stream`: its modules get a tensor that is whole, and give one. What columns read
is gathered once more in backward, so that no rank keeps all positions of it. A weight that is held whole and used in a
stream has a term of its gradient on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from evener.errors import TaskError
from evener.nn import collectives_no_grad as messages
from evener.nn.collectives import all_gather, all_reduce, enter, reduce_scatter, split
from evener.nn.sequence_layout import DividedSequence
from evener.nn.unowned import Shared
from evener.torch_internals.compiling import outside_of_graphs
from evener.torch_internals.module_tensors import own_parameters

Compute = Callable[..., Tensor]
"""What modules compute, from a tensor and more that all ranks have whole."""
Trial = Callable[["Stream", Compute, tuple[Any, ...], dict[str, Any]], None]
"""Raises if pieces do not come to what is computed whole; called with a stream before it first divides."""


class Stream:
    """Modules between whose regions of divided layers each rank computes some positions.

    Args:
        name: Of the modules, for messages.
        group: The ranks.
        dim: The dimension of the positions.
        trial: Of the modules, with the first tensor that they get; None for none.
    """

    def __init__(self, name: str, group: ProcessGroup, dim: int, trial: Trial | None = None) -> None:
        self.name, self.dim = name, dim
        self._ranks = Shared(group)
        self._trial = trial
        self._now = Shared[DividedSequence]()
        self._whole: int | None = None

    def __call__(self, compute: Compute, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What ``compute(x, ...)`` gives, computed in pieces."""
        self._check(x)
        if self._trial is not None:
            trial, self._trial = self._trial, None
            trial(self, compute, (x, *args), kwargs)
        return self.in_pieces(compute, x, *args, **kwargs)

    def in_pieces(self, compute: Compute, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Cuts ``x``, computes the positions of this rank, and gathers what comes of all."""
        now = DividedSequence(self.group, x.shape[self.dim], "contiguous", "tensor", self.dim)
        piece = split(x, self.group, self.dim, now.sizes)
        with self._dividing(now):
            output = compute(piece, *args, **kwargs)
            self._check_length(self.name, output)
        whole: Tensor = all_gather(output, self.group, self.dim, now.sizes, replicated=True)
        return whole

    @contextmanager
    def whole(self, length: int) -> Iterator[None]:
        """Inside, the modules compute all ``length`` positions, as if there were no stream."""
        self._whole = length
        try:
            yield
        finally:
            self._whole = None

    @property
    def group(self) -> ProcessGroup:
        """The ranks.

        Raises:
            ConfigurationError: In another process, which is none of these ranks.
        """
        return self._ranks.of(self.name)

    @property
    def now(self) -> DividedSequence | None:
        """How positions are divided at this moment; None if they are not."""
        return self._now.value

    # For the modules of the stream

    def check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises:
        TaskError: If a module that computes positions of its own is given something else.
        """
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) != 1:
            raise TaskError(
                f"{name} computes some of the positions, in {self.name}, and is given {len(given)} tensors, of which "
                f"nothing tells what they are; give it one, or put {name}=whole into the plan"
            )
        self._check_length(name, given[0])

    def columns(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear map of all positions to features of this rank: the beginning of a region."""
        self._check_length(name, x)
        now = self.now
        if now is None:
            return F.linear(enter(x, self.group), weight, bias)
        made: Tensor = gathered_linear(x, weight, bias, now)
        return made

    def sum(self, name: str, partial: Tensor, dim: int | None = None) -> Tensor:
        """The positions of this rank of the sum over the ranks: the end of a region."""
        dim, now = self.dim if dim is None else dim, self.now
        self._check_length(name, partial, dim, divided=False)
        if now is None:
            total: Tensor = all_reduce(partial, self.group, replicated=True)
            return total
        piece: Tensor = reduce_scatter(partial, self.group, dim, now.sizes)
        return piece

    def made_whole(
        self, name: str, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """What a module computes that has to see all positions: on all ranks the same."""
        self.check(name, args, kwargs)
        now = self.now
        if now is None:
            alike: Tensor = compute(*args, **kwargs)
            return alike
        gather = partial(all_gather, group=self.group, dim=self.dim, sizes=now.sizes, replicated=True)
        named = dict(zip(kwargs, _mapped(gather, kwargs.values()), strict=True))
        output = compute(*_mapped(gather, args), **named)
        self._check_length(name, output, divided=False)
        piece: Tensor = split(output, self.group, self.dim, now.sizes)
        return piece

    def _check(self, x: Any) -> None:
        if not isinstance(x, Tensor) or x.dim() <= max(1, self.dim + 1):
            kind = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TaskError(
                f"plan: {self.name} is sequence, and gets {kind} first: it must be (samples, positions, features), "
                f"with the positions on dimension {self.dim}. Say sequence:DIM, or leave it out of the plan"
            )

    def _check_length(self, name: str, x: Any, dim: int | None = None, divided: bool = True) -> None:
        dim = self.dim if dim is None else dim
        if self.now is None and self._whole is None:
            raise TaskError(
                f"{name} computes some of the positions, in {self.name}, and is called outside of it, where nobody "
                f"gathers them. If it is activation checkpointing that repeats {name} alone, checkpoint {self.name}; "
                "else leave it out of the plan"
            )
        length = self._whole if self.now is None else self.now.size if divided else self.now.length
        if not isinstance(x, Tensor) or x.dim() <= dim or x.shape[dim] != length:
            kind = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
            raise TaskError(
                f"{name}, in {self.name}, has a tensor of {kind} where dimension {dim} must be the {length} positions "
                f"{'of this rank' if divided else 'that there are'}: it does not look at each position alone, or is "
                f"used where all are at hand. Put {name}=whole into the plan, or leave out {self.name}=sequence"
            )

    @contextmanager
    def _dividing(self, now: DividedSequence) -> Iterator[None]:
        self._now.value = now
        try:
            yield
        finally:
            self._now.value = None


def _mapped(function: Callable[[Tensor], Tensor], values: Any) -> tuple[Any, ...]:
    return tuple(function(value) if isinstance(value, Tensor) else value for value in values)


# Instead of a module's forward


def _forward_of(module: nn.Module) -> Compute:
    """That of its class."""
    return partial(type(module).forward, module)


class InPieces:
    """A module that looks at each position alone, in a stream."""

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        self._module, self._name, self._stream = module, name, stream

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._stream.check(self._name, args, kwargs)
        return _forward_of(self._module)(*args, **kwargs)


class MadeWhole(InPieces):
    """A module that sees all positions, in a stream."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stream.made_whole(self._name, _forward_of(self._module), args, kwargs)


class Streamed:
    """A module that is a stream by itself."""

    def __init__(self, module: nn.Module, stream: Stream) -> None:
        self._module, self._stream = module, stream

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stream(_forward_of(self._module), *args, **kwargs)


class StreamsInARow:
    """``nn.Sequential``, of which some children that follow each other are a stream together."""

    def __init__(self, module: nn.Sequential, streams: dict[range, Stream]) -> None:
        self._module, self._streams = module, streams

    def __call__(self, x: Any) -> Any:
        children, place = list(self._module), 0
        while place < len(children):
            run = next((run for run in self._streams if run.start == place), None)
            if run is None:
                x, place = children[place](x), place + 1
            else:
                x, place = self._streams[run](_in_turn(children[run.start : run.stop]), x), run.stop
        return x


def _in_turn(modules: list[nn.Module]) -> Compute:
    def compute(x: Tensor) -> Tensor:
        for module in modules:
            x = module(x)
        return x

    return compute


def instead_of_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Has ``forward`` called in place of that of the module's class."""
    vars(module)["forward"] = forward


def in_terms(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of the module itself of whose gradients each rank has a term: what a stream uses whole."""
    forward = vars(module).get("forward")
    if type(forward) in (InPieces, Streamed):
        yield from (p for p in own_parameters(module).values() if p is not None)
        return
    found: Any = module
    if getattr(found, "stream", None) is not None and hasattr(found, "ends_stream"):
        yield from found.ends_stream()


# What begins a region


@outside_of_graphs  # a graph cannot wait for other ranks
def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: DividedSequence) -> Tensor:
    """``F.linear`` of all positions, from this rank's; they are gathered in forward and once more in backward."""
    output: Tensor = _GatheredLinear.apply(x, weight, bias, pieces)  # type: ignore[no-untyped-call]
    return output


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pieces: DividedSequence) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pieces = pieces
        return F.linear(messages.gathered(x, pieces.dim, pieces.sizes, pieces.group), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        pieces: DividedSequence = ctx.pieces
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        place, rows = (pieces.dim, pieces.sizes, pieces.group), dy.flatten(0, -2)
        dx = messages.scattered(dy @ weight, *place) if of_x else None
        dw = rows.t() @ messages.gathered(x, *place).flatten(0, -2) if of_weight else None
        return dx, dw, rows.sum(0) if of_bias else None, None
