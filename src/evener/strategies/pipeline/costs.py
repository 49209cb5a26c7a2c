"""Measures the time of each layer and the bytes that cross between layers, on this rank, before the model is divided.

The calls of the model are made for an example, layer by layer. Each layer gets memory of its own, which is freed before
the next. So no rank ever holds the whole model. Values do not affect the time; they are drawn small.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from evener.components.model_init import in_type, settle_on
from evener.components.tree_spec import taken_apart
from evener.data.batch import cloned, detached, map_leaves
from evener.hardware import accelerators
from evener.nn.context import outside
from evener.strategies.pipeline.stages import crossings
from evener.strategies.pipeline.traced_run import Rehearsal, TracedCalls
from evener.strategies.pipeline.tracing import gradients_as, inputs_of
from evener.torch_internals.autograd import without_checkpoints

_PASSES, _TURNS = 3, 3
"""Passes through the model, and repetitions of each layer in a pass. The fastest counts, to avoid disturbances."""
_PATIENCE = 5.0
"""Seconds after which no further pass begins."""


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the layers of a model, in the order of their first calls."""

    seconds: dict[str, float]
    """Seconds of forward and backward, by layer."""
    crossing: tuple[int, ...]
    """Bytes that a cut before the second and each further layer would have to send."""


class Measuring(fx.Interpreter):
    """Makes the calls of ``graph`` for an example, with forward and backward of each layer by itself.

    Args:
        model: Whole model, perhaps on the meta device; it stays unchanged.
        device: Device on which the layers are measured.
        dtype: Dtype of floating numbers; None leaves them.
    """

    def __init__(
        self, model: nn.Module, graph: fx.Graph, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        super().__init__(model, graph=graph)
        self._device, self._dtype = device, dtype
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds of forward and backward by layer, in the order of first calls."""
        self.nbytes: dict[fx.Node, int] = {}
        """Bytes of the result of each call."""

    def run_node(self, n: fx.Node) -> Any:
        with gradients_as(n):
            found = super().run_node(n)
        self.nbytes[n] = sum(tensor.nbytes for tensor in taken_apart(found)[1])
        return found

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self._made(self.fetch_attr(target))
        took, found = _timed(layer, args, kwargs, self._device)
        self.seconds[str(target)] += took
        return found

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        return map_leaves(lambda leaf: self._filled(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def _made(self, module: nn.Module) -> nn.Module:
        made = settle_on(copy.deepcopy(module), self._device, self._dtype)
        for (_, tensor), (_, given) in zip(_tensors(made), _tensors(module), strict=True):
            if given.is_meta:
                _fill(tensor)
        return made

    def _filled(self, tensor: Tensor) -> Tensor:
        dtype = in_type(tensor, self._dtype) if self._dtype else tensor.dtype
        made = torch.empty_like(tensor, device=self._device, dtype=dtype)
        return _fill(made) if tensor.is_meta else made.copy_(tensor.detach())


class Rehearsed:
    """Measures a model whose code cannot be read; the model's own code makes the calls."""

    def __init__(self, graph: TracedCalls, rehearsal: Rehearsal) -> None:
        self._nodes = [node for node in graph.nodes if node.op == "call_module"]
        self._rehearsal = rehearsal
        self.seconds: dict[str, float] = defaultdict(float)
        self.nbytes: dict[fx.Node, int] = {}

    def run(self) -> None:
        """Makes the calls once."""
        # A checkpoint spans calls that are timed one by one.
        with self._rehearsal.stage() as run, without_checkpoints():
            run(self._called, self._rehearsal.inputs())

    def _called(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Not repeated, because the call may write into its arguments, such as a cache of keys.
        took, found = _timed_once(forward, args, kwargs, self._rehearsal.device)
        self.seconds[name] += took
        self.nbytes[self._nodes[len(self.nbytes)]] = sum(tensor.nbytes for tensor in taken_apart(found)[1])
        return found


def _timed(layer: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> tuple[float, Any]:
    """Returns the least seconds of several forward and backward passes, and the layer's result."""
    took, found = zip(*(_timed_once(layer, args, kwargs, device) for _ in range(_TURNS)), strict=True)
    return min(took), found[-1]


def _timed_once(layer: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> tuple[float, Any]:
    args, kwargs = map_leaves(_as_input, (args, kwargs))
    with _clock(device) as elapsed:
        found = layer(*args, **kwargs)
        outputs = [tensor for tensor in taken_apart(found)[1] if tensor.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return elapsed(), map_leaves(detached, found)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _fill(tensor: Tensor) -> Tensor:
    return tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.zero_()


def _as_input(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # A copy of a leaf, and no leaf: layers such as ``nn.ReLU(inplace=True)`` write to it.
    return leaf.detach().requires_grad_(leaf.is_floating_point()).clone()


@contextmanager
def _clock(device: torch.device) -> Iterator[Callable[[], float]]:
    """Measures the seconds of the block, including the device's work in it."""
    took = 0.0
    _wait_for(device)
    began = time.perf_counter()
    yield lambda: took
    _wait_for(device)
    took = time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(
    model: nn.Module,
    graph: fx.Graph,
    arguments: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype | None,
) -> LayerCosts:
    """Returns the seconds of each layer and the bytes between layers, for the example ``arguments`` of the model."""
    if isinstance(graph, TracedCalls):
        rehearsal = Rehearsal(model, graph.leaves, arguments, device, dtype)
        return _costs(graph, device, partial(_rehearsed, graph, rehearsal), _PASSES * _TURNS)
    names = inputs_of(graph, inspect.signature(model.forward))
    inputs = [arguments[name] for name in names.values()]

    def interpreted() -> Measuring:
        made = Measuring(model, graph, device, dtype)
        made.run(*map_leaves(cloned, inputs))
        return made

    return _costs(graph, device, interpreted, _PASSES)


def _rehearsed(graph: TracedCalls, rehearsal: Rehearsal) -> Rehearsed:
    made = Rehearsed(graph, rehearsal)
    made.run()
    return made


def _costs(
    graph: fx.Graph, device: torch.device, measured: Callable[[], Measuring | Rehearsed], most: int
) -> LayerCosts:
    """Returns the costs of the fastest of at most ``most`` passes."""
    passes: list[Measuring | Rehearsed] = []
    began = time.perf_counter()
    with outside(), accelerators.generators_kept(device):
        while len(passes) < most and (not passes or time.perf_counter() - began < _PATIENCE):
            passes.append(measured())
    seconds = {layer: min(one.seconds[layer] for one in passes) for layer in passes[0].seconds}
    nbytes = passes[0].nbytes
    return LayerCosts(seconds, tuple(sum(nbytes[node] for node in crossing) for crossing in crossings(graph)))
