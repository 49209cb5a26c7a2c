"""Lets a trial run a model without a trace, also with the code that only training runs.

A trial compares two ways to compute the same, so nothing may be drawn at random: dropout does nothing in it. Afterwards
the model is as before: a forward pass in training may count its calls, keep its inputs, or write to weights that no
optimizer changes.

A weight that begins as zeros, such as an embedding of positions, hides an error in its inputs. So parameters whose
elements are all equal get random values during a trial (:func:`undisturbed`).
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from evener.components.buffer_snapshot import BufferSnapshot
from evener.components.modes import modes_kept
from evener.components.sharded_tensor.local import changeable, local
from evener.hardware import accelerators
from evener.torch_internals.dispatch import DispatchMode, written
from evener.torch_internals.modules import AnyDropout, parametrized_anew

_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
    *(torch.feature_dropout, torch.feature_dropout_),
    *(torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
}
_SEED = 0x5EED
_MODELS = ("evener.tools.conformance.", "evener.training.builtin_tasks.")
"""Models that come with Evener are as those of a user."""
_LIBRARIES = ("torch.", "evener.", "builtins.", "typing.", "abc.")
_MOVING = (Iterator, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_OF_MODULES = vars(nn.Module()).keys()
_HOOKS = [name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict)]
_CONTAINERS = (list, dict, set, deque, OrderedDict)


@contextmanager
def training_without_dropout(model: nn.Module, training: Iterable[nn.Module]) -> Iterator[None]:
    """Puts modules in training mode and the others in evaluation mode, and leaves out dropout, for the block.

    Args:
        training: Modules of the model that train.
    """
    trains, before = set(training), {module: module.training for module in model.modules()}
    inside: list[Any] = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention | nn.RNNBase)]
    rates = [(module, module.dropout) for module in inside]
    try:
        for module in before:
            module.training = module in trains and not isinstance(module, AnyDropout)
        for module, _ in rates:
            module.dropout = 0.0
        with _WithoutDropout():
            yield
    finally:
        for module, was in before.items():
            module.training = was
        for module, rate in rates:
            module.dropout = rate


class _WithoutDropout(TorchFunctionMode):
    """Returns the input of each call of a dropout function."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                given = given | {"dropout_p": 0.0}
        return func(*args, **given)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restores the buffers after the block."""
    before = BufferSnapshot(model)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restores buffers, parameters, hooks, and the attributes of modules whose code is the user's, after the block.
    Other code, such as a strategy's, may count messages, which must not be forgotten."""
    saving = _Saving(model.parameters())
    try:
        with forward_state_kept(model), saving:
            yield
    finally:
        saving.restore()


@contextmanager
def forward_state_kept(model: nn.Module) -> Iterator[None]:
    """Does the same as :func:`state_kept` for forward passes in evaluation, which write to no parameters."""
    attributes = attributes_kept(module for module in model.modules() if _is_users(module))
    kept = attributes, buffers_kept(model), _hooks_kept(model), _types_kept(model)
    with ExitStack() as stack:
        for each in (*kept, _caches_kept(), apart_from_saving_hooks()):
            stack.enter_context(each)
        yield


def apart_from_saving_hooks() -> AbstractContextManager[None]:
    """Context in which autograd calls none of the hooks for saved tensors that are in force outside, which take those
    of a trial for those of the pass that it precedes: ``torch.utils.checkpoint`` counts them. An output that is saved
    as it is would keep itself, and so the whole pass, until the collector comes."""
    return saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


@contextmanager
def _caches_kept() -> Iterator[None]:
    """Computes without the weights that ``torch.autocast`` and ``parametrize.cached`` keep until they are left. Those
    of a trial may have other values, and a graph that is gone."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with parametrized_anew():
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _hooks_kept(model: nn.Module) -> Iterator[None]:
    """Restores the hooks of all modules whose code is the user's after the block. A model of ``transformers`` registers
    some in its first forward pass, and notes that in an attribute; so does a strategy, whose hooks stay."""
    held = [vars(module)[name] for module in model.modules() for name in _HOOKS if name in vars(module)]
    before = [(hooks, dict(hooks)) for hooks in held]
    try:
        yield
    finally:
        both = [(hooks, were, {**were, **hooks}) for hooks, were in before]
        own = {number for *_, known in both for number, hook in known.items() if _is_users_hook(hook)}
        for hooks, were, known in both:
            if (hooks.keys() ^ were.keys()) & own:
                kept = {n: hook for n, hook in known.items() if n in (were if n in own else hooks)}
                hooks.clear()
                hooks.update(kept)


def has_users_hooks(model: nn.Module) -> bool:
    """Returns True if a hook of the user's is called in the forward pass: what it keeps, a trial could not restore."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    held = (vars(module)[name] for module in model.modules() for name in names)
    return any(_is_users_hook(hook) for hooks in held for hook in hooks.values())


def has_moving_attributes(model: nn.Module) -> bool:
    """Returns True if a module whose code is the user's holds an iterator or a generator of random numbers, which a
    trial would move on, and not put back."""
    own = (
        value
        for module in model.modules()
        if _is_users(module)
        for key, value in vars(module).items()
        if key not in _OF_MODULES
    )
    return any(map(_moves, own))


def _moves(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_moves, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return any(map(_moves, value))
    return isinstance(value, _MOVING)


def _is_users_hook(hook: Any) -> bool:
    """Returns False for a hook of a library, and for the notes that PyTorch keeps of hooks by their numbers."""
    function = hook.func if isinstance(hook, partial) else hook
    home = f"{getattr(function, '__module__', None) or 'builtins'}."
    return callable(function) and (home.startswith(_MODELS) or not home.startswith(_LIBRARIES))


@contextmanager
def _types_kept(model: nn.Module) -> Iterator[None]:
    """Restores the types of parameters after the block: a forward pass may call ``to`` of a layer."""
    before = [
        (parameter, parameter.data) for parameter in model.parameters() if type(parameter) is nn.Parameter
    ]
    try:
        yield
    finally:
        for parameter, data in before:
            if parameter.dtype != data.dtype:
                parameter.data = data


@contextmanager
def attributes_kept(holders: Iterable[object]) -> Iterator[None]:
    """Restores the attributes of objects, and what the containers among these hold, after the block."""
    attributes = [_Attributes(vars(holder)) for holder in holders]
    try:
        yield
    finally:
        for each in attributes:
            each.restore()


@contextmanager
def variables_kept(function: FunctionType) -> Iterator[None]:
    """Restores the variables of a function's closure, those of its module that it names, and what the containers among
    these hold, after the block."""
    cells, held = closure_of(function), function.__globals__
    named = {name: held[name] for name in function.__code__.co_names if name in held}
    contents = _Attributes({**named, **{str(place): value for place, (_, value) in enumerate(cells)}})
    try:
        yield
    finally:
        contents.restore()
        held.update({name: value for name, value in named.items() if held.get(name) is not value})
        for cell, value in cells:
            cell.cell_contents = value


def closure_of(function: FunctionType) -> list[tuple[CellType, Any]]:
    """Returns the variables of a function's closure that are set, each with its cell."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append((cell, cell.cell_contents))
    return found


def _is_users(module: nn.Module) -> bool:
    homes = (f"{cls.__module__}." for cls in type(module).__mro__ if cls is not object)
    return any(home.startswith(_MODELS) or not home.startswith(_LIBRARIES) for home in homes)


class _Attributes:
    """The attributes of an object, and what its containers hold."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held = held
        self._before = dict(self._held)
        own = (value for key, value in self._before.items() if key not in _OF_MODULES)
        self._contents = [(value, copy.copy(value)) for value in own if type(value) in _CONTAINERS]

    def restore(self) -> None:
        self._held.clear()
        self._held.update(self._before)
        for container, was in self._contents:
            container.clear()
            (container.update if hasattr(container, "update") else container.extend)(was)


class _Saving(DispatchMode):
    """Copies a parameter before the first operation that writes to it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._parameters = {_address(p): p for p in parameters if type(p) is nn.Parameter and p.numel()}
        self._saved: dict[int, Tensor] = {}

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the parameters their values of before. Call it outside of the mode."""
        for address, value in self._saved.items():
            self._parameters[address].detach().copy_(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        for value in written(func, args, given):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                self._save(tensor)
        return func(*args, **given)

    def _save(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta:
            address = _address(tensor)
            if address in self._parameters and address not in self._saved:
                self._saved[address] = self._parameters[address].detach().clone()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts the model in evaluation mode, and adds noise to parameters of equal elements, for the block. Restores all of
    it, buffers and random states included."""
    with ExitStack() as stack:
        stack.enter_context(_caches_kept())
        stack.enter_context(accelerators.generators_kept(*accelerators.all_of_process()))
        stack.enter_context(buffers_kept(model))
        for name, parameter in model.named_parameters():
            if _hides(local(parameter.detach())):
                _fill(name, changeable(parameter, stack))
        stack.enter_context(modes_kept(model))  # before parameters, which a change of mode may read
        model.eval()
        yield


def _hides(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.is_floating_point() and tensor.numel() > 0
    return plain and bool(tensor.min() == tensor.max())


def _fill(name: str, tensor: Tensor) -> None:
    """Adds random values. They depend on the name alone, so that they are the same on all ranks. A single number, such
    as a gate or a temperature, keeps its sign."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + _SEED)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
    if tensor.numel() == 1:
        noise = torch.copysign(noise.abs() + 0.5, tensor)
    tensor.add_(noise, alpha=0.3)
