"""A model of a prepared loop that a strategy has divided: its optimizers, and its state as one device would hold it.

Dividing a model replaces its parameters by this rank's parts of them. An optimizer that was made before gets the parts
in their places. ``state_dict()`` of the model and of its optimizers returns whole tensors, in PyTorch's own form, and
``load_state_dict()`` takes whole ones, so that a loop saves and loads as on one device::

    state_dict()         parts ─▶ gathered over the ranks ─▶ whole tensors, on every rank
    load_state_dict()    whole tensors, on every rank ─▶ cut ─▶ parts

All ranks must call either together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from evener.components.model_init import named_tensors
from evener.components.sharded_tensor.local import as_held, local
from evener.components.sharded_tensor.shard_spec import ShardSpec, shard_spec
from evener.distributed.mesh import Mesh
from evener.errors import ConfigurationError

Meeting = Callable[[str], AbstractContextManager[Any]]
"""Makes sure that all ranks call something together. Takes what it is."""


Spec = Callable[[Tensor], ShardSpec | None]


def check_undivided(models: Sequence[nn.Module], strategy: str) -> None:
    """Raises ConfigurationError if a strategy that divides the model cannot divide these."""
    if len(models) > 1:
        raise ConfigurationError(
            f"strategy {strategy!r} divides one model, and evener.prepare got {len(models)}: put them into one module "
            "whose forward calls them, or use strategy 'ddp'"
        )
    for model in models:
        if isinstance(model, FSDPModule) or any(map(shard_spec, model.parameters())):
            raise ConfigurationError(
                "evener.prepare was given a model that is divided already, by an earlier call: give it the model as "
                "you make it, each time that you call it"
            )


class DividedOptimizers:
    """Optimizers whose state is divided over the ranks.

    Args:
        spec: Returns this rank's shard of what belongs to a parameter, or None.
        meet: Called around a collective call.
    """

    def __init__(self, spec: Spec, mesh: Mesh, meet: Meeting) -> None:
        self._spec, self._mesh, self._meet = spec, mesh, meet
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's state whole where it is saved, and cuts it where it is loaded."""
        if optimizer not in self._watched:
            self._watched.add(optimizer)
            self._handles += [
                optimizer.register_state_dict_post_hook(_SavedOptimizer(self)),
                optimizer.register_load_state_dict_pre_hook(_LoadedOptimizer(self)),
            ]

    def close(self) -> None:
        """Removes the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def gather_state(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's state with whole tensors in the places of parts. A collective call."""
        owners = _owners(optimizer)
        with self._meet("state_dict()"):
            state = {
                number: {key: self._gathered(value, owners[number]) for key, value in entries.items()}
                if number in owners
                else entries
                for number, entries in found["state"].items()
            }
        return {**found, "state": state}

    def cut_state(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's state with this rank's parts in the places of whole tensors."""
        owners = _owners(optimizer)
        state = {
            number: self._cut_all(entries, owners[number]) if number in owners else entries
            for number, entries in found["state"].items()
        }
        return {**found, "state": state}

    def _gathered(self, value: Any, owner: Tensor) -> Any:
        """Returns ``value``, a part of something as large as the whole of ``owner``, as a whole tensor."""
        spec = self._spec(owner)
        alike = isinstance(value, Tensor) and spec and _shape(value) == _held_shape(owner, spec)
        return spec.gather(value, self._mesh) if spec and alike else value

    def _cut_all(self, entries: Mapping[str, Any], owner: Tensor) -> dict[str, Any]:
        return {
            key: self._cut(value, owner) if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }

    def _cut(self, value: Tensor, owner: Tensor) -> Tensor:
        """Returns this rank's part of ``value`` if that is as large as the whole of ``owner``."""
        spec = self._spec(owner)
        if spec is None or tuple(value.shape) != spec.whole_shape(_held_shape(owner, spec)):
            return value
        return as_held(spec.part(value.detach()), owner)


class DividedModel(DividedOptimizers):
    """A model whose parameters were replaced by this rank's parts, and its optimizers.

    Args:
        before: The parameters and buffers of the model before it was divided, by name.
        model: The divided model.
    """

    def __init__(self, before: Mapping[str, Tensor], model: nn.Module, mesh: Mesh, meet: Meeting) -> None:
        super().__init__(shard_spec, mesh, meet)
        self._parts: MutableMapping[Tensor, nn.Parameter] = WeakIdKeyDictionary()
        """The part of each parameter that was replaced, as long as anybody holds that."""
        for name, part in named_tensors(model).items():
            whole = before.get(name)
            if isinstance(part, nn.Parameter) and whole is not None and whole is not part:
                self._parts[whole] = part
        self._handles += [
            model.register_state_dict_post_hook(_SavedModel(self)),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(_LoadedModel(self)),  # type: ignore[no-untyped-call]
        ]

    def give_parts(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer the parts in the places of the parameters, with its state of them."""
        for group in optimizer.param_groups:
            group["params"] = [self._part(each) for each in group["params"]]
        for whole in [each for each in optimizer.state if each in self._parts]:
            part = self._parts[whole]
            optimizer.state[part] = self._cut_all(optimizer.state.pop(whole), part)

    def _part(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._parts.get(parameter, parameter)

    def check_current(self, parameters: Iterable[Tensor]) -> None:
        """Raises ConfigurationError if one of ``parameters`` was replaced by a part."""
        if any(parameter in self._parts for parameter in parameters):
            raise ConfigurationError(
                "an optimizer has parameters from before evener.prepare, which has divided the model and put others "
                "in their places: give the optimizer to evener.prepare, too, or make it afterwards"
            )

    def gather_model(self, model: nn.Module, found: dict[str, Any], prefix: str) -> None:
        """Replaces parts in ``found``, the model's state, by whole tensors. A collective call."""
        held = _named(model)
        with self._meet("state_dict()"):
            for key, value in found.items():
                owner = held.get(key.removeprefix(prefix))
                if owner is not None:
                    found[key] = self._gathered(value, owner)

    def cut_model(self, model: nn.Module, found: dict[str, Any], prefix: str) -> None:
        """Replaces whole tensors in ``found`` by this rank's parts."""
        held = _named(model)
        for key in [key for key in found if key.startswith(prefix)]:
            owner = held.get(key.removeprefix(prefix))
            if owner is not None and isinstance(found[key], Tensor):
                found[key] = self._cut(found[key], owner)


def _named(model: nn.Module) -> Mapping[str, Tensor]:
    """Returns the parameters and buffers by the names that they have in the model's state."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def _owners(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Returns the parameters by their numbers in the optimizer's state."""
    return dict(enumerate(each for group in optimizer.param_groups for each in group["params"]))


def _shape(value: Tensor) -> tuple[int, ...]:
    return tuple(local(value.detach()).shape)


def _held_shape(owner: Tensor, spec: ShardSpec) -> tuple[int, ...]:
    """Returns the shape of this rank's shard of something as large as the whole of ``owner``."""
    shape = _shape(owner)
    return (*shape[: spec.dim], spec.length, *shape[spec.dim + 1 :])


class _StateHook:
    """A hook on a state. Does nothing in a copy of what it belongs to, or in one loaded from a file."""

    def __init__(self, divided: DividedOptimizers | None = None) -> None:
        self._divided = None if divided is None else weakref.ref(divided)

    @property
    def divided(self) -> Any:
        return None if self._divided is None else self._divided()

    def __reduce__(self) -> Any:
        return type(self), ()


class _SavedModel(_StateHook):
    def __call__(self, model: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
        if self.divided is not None:
            self.divided.gather_model(model, found, prefix)


class _LoadedModel(_StateHook):
    def __call__(self, model: nn.Module, found: dict[str, Any], prefix: str, *_: Any) -> None:
        if self.divided is not None:
            self.divided.cut_model(model, found, prefix)


class _SavedOptimizer(_StateHook):
    def __call__(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> Any:
        return found if self.divided is None else self.divided.gather_state(optimizer, found)


class _LoadedOptimizer(_StateHook):
    def __call__(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> Any:
        return found if self.divided is None else self.divided.cut_state(optimizer, found)
