"""Finds regions of layers by running a model on its first samples, for models whose code cannot be read.

Each module is tried with guesses of its regions (:mod:`evener.strategies.tensor.candidates`). Weights are random. The
forward runs as on one rank of two: the layers that begin the region return a part of their output. The layer that ends
the region must then read exactly that part of its whole input, and be the only thing that the part reaches::

    whole   x ─▶ qkv ─▶ 0 1 2 3 ─▶ code ─▶ 0 1 2 3 ─▶ o ─▶ y
    part    x ─▶ qkv ─▶ 0       ─▶ code ─▶ 0             y       the same as 0 of the whole: else it was no region

So a wrong guess costs a trial, and is never taken. If code uses sizes from attributes, these are tried with the sizes
of a part. If it takes sizes from its input, the input is tried with a stand-in of that width.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.model_trial import attributes_kept, state_kept, training_without_dropout
from evener.data.batch import tensors_in
from evener.distributed import signals as interrupt
from evener.hardware import accelerators
from evener.nn.context import outside
from evener.nn.dropout import Dropout
from evener.nn.fqn import clean_name
from evener.nn.tensor_parallel_conv1d import is_transposed
from evener.strategies.tensor.candidates import Place, TriedRegion
from evener.strategies.tensor.region_check import Judge, UndividedCall, copied, dropping
from evener.strategies.tensor.regions import obstacle, width
from evener.torch_internals.modules import own_buffers, own_parameters

_MOST = 12
"""Most layers of a module that is tried as a block."""
_PRIME = 65537
"""Number of random values, which weights repeat. It is prime, so that no layer's width divides it."""


class Trials:
    """Finds the regions of a model by trial.

    Args:
        model: May be on the meta device; it stays unchanged.
        taken: Names of modules that are divided already.
        ranks: Number of ranks over which heads are divided.
        device: Device of the trial.
        dtype: Dtype of floating numbers.
    """

    def __init__(
        self, model: nn.Module, taken: Sequence[str], ranks: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model, self._ranks, self._device, self._dtype = model, ranks, device, dtype
        self._modules = {clean_name(name): module for name, module in model.named_modules()}
        self._names = {module: name for name, module in self._modules.items()}
        self._taken, self._shared = set(taken), _shared_places(self._modules)
        self._acting: dict[nn.Module, Callable[..., Any]] = {}
        self._busy = self._flagging = False
        self._trained: dict[str, list[bool]] = {}
        self.made: dict[Place, nn.Parameter] = {}
        """Parameters with numbers in the last separate run of a module."""
        drawn = torch.randn(_PRIME, generator=torch.Generator().manual_seed(0))
        self._drawn = drawn.to(device, dtype)
        self._known: dict[Any, list[tuple[str, TriedRegion]]] = {}
        self._seen: set[str] = set()
        self.found: list[TriedRegion] = []
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> dict[str, str]:
        """For layers in no region, the reason why none ends with them, if there was a guess."""
        return {name: reason for name, reason in self._reasons.items() if name not in self._taken}

    def pairs(self) -> bool:
        """Returns True if there are layers of which one may read the output of another."""
        layers = [module for name, module in self._modules.items() if self._is_free(name)]
        made = {width(layer)[1] for layer in layers}
        fused = {made // part for made in made for part in (2, 3) if made % part == 0}
        return any(width(layer)[0] in made | fused for layer in layers) and len(layers) > 1

    def run(self, call: Callable[[], Any]) -> None:
        """Tries the modules of the model that ``call`` uses."""
        with self._prepared():
            self._flagging = True
            with suppress(Exception), torch.enable_grad():  # an error comes again in the second pass
                call()
            interrupt.check()
            self._flagging = False
            with torch.no_grad():
                call()

    # The model during the trial

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        modules = [*self._model.modules()]
        held = [each for module in modules for each in (own_parameters(module), own_buffers(module))]
        tensors = [dict(each) for each in held]
        with ExitStack() as stack:
            stack.enter_context(outside())
            stack.callback(_refill, list(zip(held, tensors, strict=True)))
            stack.enter_context(attributes_kept(modules))
            self._lighten(modules)
            self._model.eval()
            for module in modules:
                vars(module)["forward"] = partial(self._called, module, module.forward)
            yield

    def _lighten(self, modules: Sequence[nn.Module]) -> None:
        """Replaces parameters by ones without memory of their own. Buffers keep their numbers, or get ones or zeros."""
        made: dict[int, Tensor] = {}
        for module in modules:
            parameters, buffers = own_parameters(module), own_buffers(module)
            for name, parameter in parameters.items():
                if parameter is not None:
                    dtype = self._dtype if parameter.is_floating_point() else parameter.dtype
                    one = torch.full(
                        (), 0.02 if parameter.is_floating_point() else 0, dtype=dtype, device=self._device
                    )
                    light = nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
                    parameters[name] = made.setdefault(id(parameter), light)  # type: ignore[assignment]
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = made.setdefault(id(buffer), self._buffer(buffer))

    def _buffer(self, buffer: Tensor) -> Tensor:
        dtype = self._dtype if buffer.is_floating_point() else buffer.dtype
        if not buffer.is_meta:
            return buffer.detach().to(self._device, dtype, copy=True)
        made = torch.empty(buffer.shape, dtype=dtype, device=self._device)
        return made.fill_(1) if dtype.is_floating_point or dtype is torch.bool else made.zero_()

    @contextmanager
    def filled(self, module: nn.Module) -> Iterator[None]:
        """Fills the module's own parameters with numbers, always the same, inside the block."""
        held, before = own_parameters(module), dict(own_parameters(module))
        try:
            for key, parameter in before.items():
                if parameter is not None and parameter.is_floating_point():
                    place = (self._names[module], key)
                    held[key] = made = self._numbers(place, parameter, module)
                    if self._busy:
                        self.made[place] = made
            yield
        finally:
            held.update(before)

    @torch.no_grad()
    def _numbers(self, place: Place, parameter: Tensor, module: nn.Module) -> nn.Parameter:
        start, count = zlib.crc32(".".join(place).encode()) % _PRIME, parameter.numel()
        drawn = self._drawn.repeat((start + count) // _PRIME + 1)[start : start + count]
        made = drawn.view(parameter.shape).clone()
        if isinstance(module, nn.Embedding):
            pass
        elif made.ndim > 1:
            made *= 2.0 / made.shape[-1] ** 0.5 if not is_transposed(module) else 2.0 / made.shape[0] ** 0.5
        else:
            made = 0.3 * made + (place[1] == "weight")
        return nn.Parameter(made, parameter.requires_grad)

    # A call of a module

    def _called(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called in place of a module's forward."""
        acting = self._acting.get(module)
        if acting is not None:
            return acting(forward, args, kwargs)
        name = self._names[module]
        if self._flagging:
            if self._is_block(name):
                self._trained.setdefault(name, [leaf.requires_grad for leaf in tensors_in((args, kwargs))])
            return forward(*args, **kwargs)
        with self.filled(module):
            if self._busy or name in self._seen or not self._is_block(name):
                return forward(*args, **kwargs)
            self._seen.add(name)
            try:
                given = copied((args, kwargs))
            except Exception:
                interrupt.check()
                return forward(*args, **kwargs)
            output = forward(*args, **kwargs)
            if len(self._free(name)) > 1:
                self._look_at(name, forward, given)
            return output

    def _is_block(self, name: str) -> bool:
        return 1 < len(self._free(name)) <= _MOST or (len(self._free(name)) > 1 and self._flagging)

    def _is_free(self, name: str) -> bool:
        layer = self._modules[name]
        known = isinstance(layer, nn.Linear) or is_transposed(layer)
        apart = not any((name, key) in self._shared for key in own_parameters(layer))
        return known and apart and name not in self._taken and obstacle(layer) is None

    def _free(self, name: str) -> list[str]:
        return [each for each in self.modules_in(name) if each != name and self._is_free(each)]

    # A module

    def _look_at(self, name: str, forward: Callable[..., Any], given: Any) -> None:
        numbers, form = self._numbers_of(name), self._form(name)
        if form in self._known:
            for old, region in self._known[form]:
                self._take(region.renamed(old, name))
            return
        self._known[form] = []
        try:
            whole = self._whole(name, forward, given)
        except Exception:
            interrupt.check()
            return
        trained = self._whole_in_training(name, forward, given)
        judge = Judge(self, name, forward, whole, numbers, self._ranks, trained)
        for region in judge.regions():
            self._known[form].append((name, region))
            self._take(region)
        self._reasons = judge.reasons | self._reasons  # the innermost module's reasons are the most specific

    def _take(self, region: TriedRegion) -> None:
        self.found.append(region)
        self._taken |= {region.guess.row, *(column.name for column in region.guess.columns)}

    def _numbers_of(self, name: str) -> dict[Place, int]:
        """Returns the integers among the attributes of a module and of the modules in it, without linear layers."""
        return {
            (each, key): value
            for each, module in self.modules_in(name).items()
            if not (isinstance(module, nn.Linear) or is_transposed(module))
            for key, value in vars(module).items()
            if type(value) is int and not key.startswith("_")
        }

    def _form(self, name: str) -> Any:
        """Returns a key that is equal for two modules if one trial holds for both."""
        within = self.modules_in(name)
        shapes = tuple(
            (
                each[len(name) :],
                type(m),
                tuple((k, None if p is None else p.shape) for k, p in own_parameters(m).items()),
            )
            for each, m in within.items()
        )
        flags = tuple(
            (each[len(name) :], key, value)
            for each, m in within.items()
            for key, value in vars(m).items()
            if isinstance(value, int | float | str | None)
            and not any(w in key for w in ("idx", "index", "layer"))
        )
        return shapes, flags, tuple(each[len(name) :] for each in self._free(name))

    def run_alone(
        self,
        forward: Callable[..., Any],
        whole: UndividedCall,
        acting: Mapping[str, Callable[..., Any]],
        given: Any = None,
    ) -> Any:
        """Runs a module's forward on a copy of its arguments. Functions in ``acting`` answer calls of their layers."""
        args, kwargs = copied((whole.args, whole.kwargs)) if given is None else given
        self._acting, self._busy = {self._modules[name]: act for name, act in acting.items()}, True
        try:
            return forward(*args, **kwargs)
        finally:
            self._acting, self._busy = {}, False

    def _whole(self, name: str, forward: Callable[..., Any], given: Any) -> UndividedCall:
        whole = UndividedCall(given[0], given[1], self._trained.get(name, []))
        often: set[str] = set()

        def noted(layer: str) -> Callable[..., Any]:
            def act(own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
                with self.filled(self._modules[layer]):
                    output = own(*args, **kwargs)
                if layer in whole.calls or len(args) != 1 or kwargs:
                    often.add(layer)
                else:
                    whole.calls[layer] = args[0].detach().clone(), output.detach().clone()
                return output

            return act

        acting = {layer: noted(layer) for layer in self._free(name)}
        acting |= {each: dropping(each, whole.dropped) for each in self.dropouts(name)}
        whole.output = self.run_alone(forward, whole, acting)
        for layer in often:
            whole.calls.pop(layer, None)
        return whole

    def _whole_in_training(self, name: str, forward: Callable[..., Any], given: Any) -> UndividedCall | None:
        before = accelerators.generator_states(self._device)
        try:
            with accelerators.generators_kept(self._device), self.training(name):
                whole = self._whole(name, forward, given)
                drew = not all(map(torch.equal, before, accelerators.generator_states(self._device)))
        except Exception:
            interrupt.check()
            return None
        return None if drew else whole

    @contextmanager
    def training(self, name: str) -> Iterator[None]:
        """Puts a module in training mode, without dropout, for the block, and restores its state afterwards."""
        module = self._modules[name]
        with state_kept(module), training_without_dropout(module, module.modules()):
            yield

    def is_shared(self, place: Place) -> bool:
        """Returns True if a parameter has several names."""
        return place in self._shared

    def modules_in(self, name: str) -> dict[str, nn.Module]:
        """Returns a module and the modules in it, by name."""
        inside = f"{name}." if name else ""
        return {each: m for each, m in self._modules.items() if each == name or each.startswith(inside)}

    def dropouts(self, name: str) -> list[str]:
        """Returns the names of Evener's dropouts in a module."""
        return [each for each, module in self.modules_in(name).items() if isinstance(module, Dropout)]


def _refill(tensors: list[tuple[Any, Any]]) -> None:
    for held, given in tensors:
        held.clear()
        held.update(given)


def _shared_places(modules: Mapping[str, nn.Module]) -> set[Place]:
    holders: dict[int, list[Place]] = {}
    for name, module in modules.items():
        for key, parameter in own_parameters(module).items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((name, key))
    return {place for places in holders.values() if len(places) > 1 for place in places}
