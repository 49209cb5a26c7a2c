"""Sequence parallelism: between tensor-parallel layers, each rank computes some of the positions.

Norms, dropout and residual sums treat each position by itself. If every rank computes them for all positions, their
activations are the largest part left in memory once the layers between them are divided. So each rank computes only
some positions there. A region of divided layers then begins with an all_gather along the positions and ends with a
reduce_scatter. Together these send as much as the all_reduce that they replace (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022)::

              own positions             all positions, own features            own positions
    x ─ split ─┬─ norm ─ all_gather ─▶ columns ─▶ activation ─▶ rows ─ reduce_scatter ─ dropout ─ + ─ all_gather ─▶ y
               └──────────────────────────────────────────────────────────────────────────────────┘

A :class:`SequenceStream` is a run of modules inside which positions are divided; its input and its output are whole.
The input of a column layer is gathered again in backward, so that no rank keeps all positions of it. For an undivided
weight used in a stream, each rank has only a term of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.errors import TaskError
from evener.nn import collectives_no_grad as messages
from evener.nn.collectives import all_gather, all_reduce, enter, reduce_scatter, split
from evener.nn.second_derivatives import differentiable_gradients
from evener.nn.sequence_layout import DividedSequence
from evener.nn.unowned import Shared
from evener.torch_internals.compiling import outside_of_graphs
from evener.torch_internals.modules import own_parameters

Compute = Callable[..., Tensor]
"""Computes the modules of a stream: maps a tensor, and further arguments that all ranks have whole, to a tensor."""
Trial = Callable[["SequenceStream", Compute, tuple[Any, ...], dict[str, Any]], None]
"""Compares the divided with the whole computation and raises if they differ. Called before a stream first divides."""


class SequenceStream:
    """A run of modules in which each rank computes some of the positions, except inside regions of divided layers.

    Args:
        name: Name of the modules, for error messages.
        group: The ranks over which positions are divided.
        dim: The dimension of the positions.
        trial: Called once, with the first input, before positions are divided; None to skip it.
    """

    def __init__(self, name: str, group: ProcessGroup, dim: int, trial: Trial | None = None) -> None:
        self.name, self.dim = name, dim
        self._ranks = Shared(group)
        self._trial = trial
        self._now = Shared[DividedSequence]()
        self._whole: int | None = None

    def __call__(self, compute: Compute, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns ``compute(x, ...)``, computed with divided positions. All ranks must call this together.

        Raises:
            TaskError: If ``x`` is no tensor with a dimension of positions before the last one.
        """
        self._check(x)
        if self._trial is not None:
            trial, self._trial = self._trial, None
            trial(self, compute, (x, *args), kwargs)
        return self.in_pieces(compute, x, *args, **kwargs)

    def in_pieces(self, compute: Compute, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Splits ``x``, computes this rank's positions, and gathers the outputs of all ranks."""
        now = DividedSequence(self.group, x.shape[self.dim], "contiguous", "tensor", self.dim)
        piece = split(x, self.group, self.dim, now.sizes)
        with self._dividing(now):
            output = compute(piece, *args, **kwargs)
            self._check_length(self.name, output)
        whole: Tensor = all_gather(output, self.group, self.dim, now.sizes, replicated=True)
        return whole

    @contextmanager
    def whole(self, length: int) -> Iterator[None]:
        """Context in which the modules compute all ``length`` positions, as without a stream."""
        self._whole = length
        try:
            yield
        finally:
            self._whole = None

    @property
    def group(self) -> ProcessGroup:
        """The ranks over which positions are divided.

        Raises:
            ConfigurationError: If the stream was pickled into another process, which has no such group.
        """
        return self._ranks.value_for(self.name)

    @property
    def now(self) -> DividedSequence | None:
        """The current division of the positions; None if they are not divided now."""
        return self._now.value

    # Called by the modules inside the stream

    def check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks the arguments of a module that computes this rank's positions only.

        Raises:
            TaskError: If they are not exactly one tensor with this rank's positions.
        """
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) != 1:
            raise TaskError(
                f"{name} computes some of the positions, in {self.name}, and is given {len(given)} tensors, of which "
                f"nothing tells what they are; give it one, or put {name}=whole into the plan"
            )
        self._check_length(name, given[0])

    def columns(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gathers ``x`` and maps all positions to this rank's features; begins a region of divided layers."""
        self._check_length(name, x)
        now = self.now
        if now is None:
            return F.linear(enter(x, self.group), weight, bias)
        made: Tensor = gathered_linear(x, weight, bias, now)
        return made

    def sum(self, name: str, partial: Tensor, dim: int | None = None) -> Tensor:
        """Sums over the ranks and keeps this rank's positions; ends a region of divided layers."""
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
        """Runs a module that needs all positions: gathers its input, and keeps this rank's positions of its output."""
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


# Replacements for a module's forward


def _forward_of(module: nn.Module) -> Compute:
    """Returns the forward of the module's class, bound to the module."""
    return partial(type(module).forward, module)


class InPieces:
    """Forward of a module in a stream that treats each position by itself: it gets this rank's positions."""

    def __init__(self, module: nn.Module, name: str, stream: SequenceStream) -> None:
        self._module, self._name, self._stream = module, name, stream

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._stream.check(self._name, args, kwargs)
        return _forward_of(self._module)(*args, **kwargs)


class MadeWhole(InPieces):
    """Forward of a module in a stream that needs all positions: its input is gathered."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stream.made_whole(self._name, _forward_of(self._module), args, kwargs)


class Streamed:
    """Forward of a module that is a whole stream."""

    def __init__(self, module: nn.Module, stream: SequenceStream) -> None:
        self._module, self._stream = module, stream

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stream(_forward_of(self._module), *args, **kwargs)


class StreamsInARow:
    """Forward of an ``nn.Sequential`` in which some runs of consecutive children are streams."""

    def __init__(self, module: nn.Sequential, streams: dict[range, SequenceStream]) -> None:
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
    """Sets ``forward`` on the module, in place of the forward of its class."""
    vars(module)["forward"] = forward


def in_terms(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the module's own undivided parameters that a stream uses. Each rank has only a term of their gradients,
    which must be summed over the ranks."""
    forward = vars(module).get("forward")
    if type(forward) in (InPieces, Streamed):
        yield from (p for p in own_parameters(module).values() if p is not None)
        return
    found: Any = module
    if getattr(found, "stream", None) is not None and hasattr(found, "ends_stream"):
        yield from found.ends_stream()


# The beginning of a region


@outside_of_graphs  # a graph cannot wait for other ranks
def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: DividedSequence) -> Tensor:
    """Gathers this rank's positions ``x`` with those of the others and returns ``F.linear`` of all positions. Backward
    gathers them again instead of keeping them."""
    output: Tensor = _GatheredLinear.apply(x, weight, bias, pieces)  # type: ignore[no-untyped-call]
    return output


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pieces: DividedSequence) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.pieces = pieces
        return F.linear(messages.gathered(x, pieces.dim, pieces.sizes, pieces.group), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        pieces: DividedSequence = ctx.pieces
        if torch.is_grad_enabled():

            def again(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return F.linear(all_gather(x, pieces.group, pieces.dim, pieces.sizes), weight, bias)

            return *differentiable_gradients(again, (x, weight, bias), ctx.needs_input_grad, dy), None
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        place, rows = (pieces.dim, pieces.sizes, pieces.group), dy.flatten(0, -2)
        # Autocast, which computes forward in dy's dtype, is over: like it, this sums over the ranks in that of x.
        dx = messages.scattered((dy @ weight.to(dy.dtype)).to(x.dtype), *place) if of_x else None
        dw = rows.t() @ messages.gathered(x.to(dy.dtype), *place).flatten(0, -2) if of_weight else None
        return dx, dw, rows.sum(0) if of_bias else None, None
