"""Reads the outermost code of a model as a list of calls, which can be cut anywhere.

``torch.fx`` runs ``forward`` once with proxies for its inputs and records the calls. Only the code *around* blocks is
read; a block is one call, whatever it does inside::

    def forward(self, words):                                 words                  an input
        x = self.embed(words) + self.place(positions)   ─▶    embed  arange  place  add
        for block in self.blocks:                             blocks.0 ─ blocks.1 ─ blocks.2
            x = block(x)
        return self.head(self.norm(x))                        norm ─ head

The opened modules are the model itself, ``nn.Sequential`` and ``nn.ModuleList``, and modules around such lists. A
module whose own code cannot be read stays one call. ``forward`` is read twice, in training and in evaluation, because
it may ask ``self.training``.

Proxies would miss what ``forward`` does besides (:mod:`evener.strategies.pipeline.side_effects`): it changes attributes
or weights, draws random numbers, switches autocast on or off, or has activations computed again. Such code is not read.
``torch.no_grad`` is noted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from evener.components.modes import modes_kept
from evener.errors import TaskError
from evener.strategies.pipeline.side_effects import OnlyProxies, nothing_changed, nothing_drawn, places_of
from evener.torch_internals.autograd import GradientMode, applied, saving_hooks
from evener.torch_internals.modules import has_backward_hooks

Arguments = Mapping[str, Any]
"""Arguments of ``forward``, by parameter name."""
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MAKERS = ("arange", "zeros", "ones", "full", "empty", "eye", "linspace")
"""Functions of torch that make a tensor from sizes, which may be proxies."""
WITHOUT_GRADIENTS = "without_gradients"
"""Key in the ``meta`` of a node: True if its call is made under ``torch.no_grad``."""
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, "backward")


def read_both(model: nn.Module, arguments: Arguments | None, named: Sequence[str]) -> dict[bool, fx.Graph]:
    """Returns the calls of the model in training (True) and in evaluation (False).

    Args:
        arguments: Example arguments of ``forward``. None, numbers and strings among them are taken as fixed.
        named: Modules that must be calls of their own.

    Raises:
        TaskError: If the code around the blocks cannot be read; the message has the reason.
    """
    found = {}
    for training in (True, False):
        with in_mode(model, training), torch.enable_grad():
            found[training] = _read(model, arguments, named)
    return found


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Puts the model in training or evaluation mode inside the block."""
    with modes_kept(model):
        model.train(training)
        yield


def _read(model: nn.Module, arguments: Arguments | None, named: Sequence[str]) -> fx.Graph:
    opened = opened_in(model, named)
    while True:
        reader = _Reader(opened)
        try:
            with (
                GradientMode() as gradients,
                _makers_recorded(),
                applied(partial(_recorded_function, gradients)),
                nothing_drawn(model),
                nothing_changed(model, opened, tensors=True),
                OnlyProxies(places_of((*model.named_parameters(), *model.named_buffers()))),
            ):
                return reader.trace(model, fixed_of(model, arguments))
        except TaskError:
            raise
        except Exception as error:
            if not reader.inside:
                raise TaskError(
                    f"the code of {type(model).__name__}.forward cannot be read to cut the model into stages: "
                    f"{str(error).strip().splitlines()[0] if str(error) else type(error).__name__}. Move the part that "
                    "depends on numbers into a module of its own, or write the model as an nn.Sequential of blocks"
                ) from error
            opened = opened - {reader.inside[-1]}


def gradients_as(node: fx.Node) -> torch.set_grad_enabled:
    """Returns a context in which gradients are off if they were around the call when it was read."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and not node.meta.get(WITHOUT_GRADIENTS, False))


def inputs_of(graph: fx.Graph, signature: inspect.Signature) -> dict[fx.Node, str]:
    """Maps each input node of the graph to its parameter of ``forward``, because the graph may use other names."""
    late = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = sorted(signature.parameters.values(), key=lambda parameter: parameter.kind in late)
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    return {node: parameter.name for node, parameter in zip(nodes, parameters, strict=True)}


class _Reader(fx.Tracer):
    """Tracer that opens the modules of these names, and takes all others as one call."""

    proxy_buffer_attributes = True

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened = opened
        self._autocast, self._saving = _autocast(), saving_hooks()
        self.inside: list[str] = []
        """Opened modules whose code is being read. They stay in the list if reading fails."""

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Proxy:
        if target in _GRADIENTS:
            raise TaskError(
                "the code around the blocks takes gradients itself, of which each stage has a part only"
            )
        if _autocast() != self._autocast:
            raise TaskError("the code around the blocks switches autocast on or off, which cannot be read")
        if saving_hooks() != self._saving:
            raise TaskError(
                "the code around the blocks saves tensors for backward in a way of its own (torch.utils.checkpoint, "
                "save_on_cpu), which cannot be read"
            )
        found = super().create_proxy(kind, target, *args, **kwargs)
        found.node.meta[WITHOUT_GRADIENTS] = not torch.is_grad_enabled()
        return found

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.inside.append(self.path_of_module(m))
        found = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        return found


def _autocast() -> tuple[object, ...]:
    """Returns whether autocast is on, and its types, which no call that is read shows."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kinds = ("cpu",) if device is None else ("cpu", device.type)
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def opened_in(model: nn.Module, named: Sequence[str]) -> frozenset[str]:
    """Returns the names to open: the model, its lists of blocks, and all modules around these and around ``named``."""
    return frozenset({"", *_lists_of(model, ""), *(place for name in named for place in above(name))})


def _lists_of(module: nn.Module, path: str) -> Iterator[str]:
    """Yields the lists of blocks in ``module`` and the modules around these, but not the blocks. A module whose
    gradients have hooks is a block: only the rank that makes all of its call has these gradients."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if has_backward_hooks(child):
            continue
        if isinstance(child, _LISTS) or _is_around(child, module):
            yield below
            yield from _lists_of(child, below)


def _is_around(child: nn.Module, parent: nn.Module) -> bool:
    """Returns True if ``child`` is code around a list of blocks, and not a block that has lists inside."""
    kinds = _LISTS if not isinstance(parent, _LISTS) else (nn.ModuleList,)
    return not isinstance(parent, nn.ModuleList) and any(isinstance(one, kinds) for one in child.modules())


def above(name: str) -> Iterator[str]:
    """Yields the names of the modules that contain a module, without the model itself."""
    parts = name.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts)))


def fixed_of(model: nn.Module, arguments: Arguments | None) -> dict[str, Any] | None:
    """Returns the arguments that ``forward`` sees as they are, not as proxies: None, words, truth values, and numbers
    that are the parameter's default. Other numbers, such as a length, may be different ones in each step."""
    parameters = inspect.signature(model.forward).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: value
        for name, value in (arguments or {}).items()
        if name in parameters
        and parameters[name].kind in kinds
        and (
            value is None
            or isinstance(value, bool | str)
            or (isinstance(value, int | float) and value == parameters[name].default)
        )
    }


@contextmanager
def _makers_recorded() -> Iterator[None]:
    """Records functions such as ``torch.arange(x.size(1))``, which see no tensor that could be a proxy."""
    with ExitStack() as undo:
        for name in _MAKERS:
            undo.enter_context(mock.patch.object(torch, name, _recorded(getattr(torch, name))))
        yield


def _recorded(maker: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(maker)
    def made(*args: Any, **kwargs: Any) -> Any:
        proxies = _stand_ins((args, kwargs))
        if not proxies:
            return maker(*args, **kwargs)
        return proxies[0].tracer.create_proxy("call_function", maker, args, kwargs)

    return made


def _recorded_function(
    gradients: GradientMode, function: type[torch.autograd.Function], args: tuple[Any, ...]
) -> Any:
    """Records a custom autograd function as one call, whatever its forward does; returns None without proxies."""
    proxies = _stand_ins(args)
    if not proxies:
        return None

    def call(*args: Any) -> Any:
        return function.apply(*args)  # type: ignore[no-untyped-call]

    call.__name__ = call.__qualname__ = function.__name__
    found = proxies[0].tracer.create_proxy("call_function", call, args, {})
    found.node.meta[WITHOUT_GRADIENTS] = not gradients.is_on()
    return found


def _stand_ins(arguments: Any) -> list[fx.Proxy]:
    found: list[fx.Proxy] = []
    fx.node.map_aggregate(arguments, lambda leaf: found.append(leaf) if isinstance(leaf, fx.Proxy) else leaf)
    return found
