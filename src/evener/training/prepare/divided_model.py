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
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from evener.components.model_init import named_tensors
from evener.components.sharded_tensor.local import as_held, is_divided, local
from evener.components.sharded_tensor.shard_spec import ShardSpec, shard_spec
from evener.data.batch import map_leaves
from evener.distributed.mesh import Mesh
from evener.errors import ConfigurationError
from evener.nn.fqn import clean_name
from evener.strategies.sharded.units import is_unit
from evener.training.prepare.replaced_parameter import retire

Meeting = Callable[[str], AbstractContextManager[Any]]
"""Makes sure that all ranks call something together. Takes what it is."""

Gather = Callable[[Any], list[Any]]
Spec = Callable[[Tensor], ShardSpec | None]


_OVER = (
    "this model or optimizer is divided over the ranks, and a later call of evener.prepare with another model has "
    "ended that, since a strategy divides one model at a time: evaluate and save it before that call, give all models "
    "in one module, or use strategy 'ddp'"
)


class Part(NamedTuple):
    """What a rank holds of a tensor."""

    spec: ShardSpec
    shape: tuple[int, ...]
    like: Tensor
    """A tensor that is a DTensor if the part is to be one."""


def check_undivided(models: Sequence[nn.Module]) -> None:
    """Raises ConfigurationError if an earlier call of ``evener.prepare`` has divided one of the models."""
    for model in models:
        if is_unit(model) or any(map(shard_spec, model.parameters())):
            raise ConfigurationError(
                "evener.prepare was given a model that is divided already, by an earlier call: leave it out of this "
                "one, which takes other loaders, optimizers and losses for it, or give it a model as you make it"
            )


class DividedOptimizers:
    """Optimizers whose state is divided over the ranks.

    Args:
        spec: Returns this rank's shard of what belongs to a parameter, or None.
        meet: Called around a collective call.
        gather: Gathers an object from every rank.
    """

    def __init__(self, spec: Spec, mesh: Mesh, meet: Meeting, gather: Gather) -> None:
        self._spec, self._mesh, self._meet, self._gather = spec, mesh, meet, gather
        self._whole: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        """Parameters that one rank updates as wholes, with state of any shape, and whether it is this one."""
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def renew(self, spec: Spec, mesh: Mesh) -> None:
        """Goes on with another division, after layers were put in or other models came. What a rank has stays."""
        self._spec, self._mesh = spec, mesh

    def take_whole(self, parameters: Mapping[Tensor, bool]) -> None:
        """Takes parameters that one rank updates as wholes, and whether it is this one."""
        self._whole.update(parameters)

    def is_divided(self, parameter: Tensor) -> bool:
        """Returns True if ranks have parts of the parameter, or update parts of it."""
        return self._spec(parameter) is not None

    def is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns True if the optimizer is not watched yet."""
        return optimizer not in self._watched

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's state whole where it is saved, and cuts it where it is loaded. Cuts what it has."""
        self._watched.add(optimizer)
        for owner in [each for each in optimizer.state if self.is_divided(each)]:
            optimizer.state[owner] = self._cut_all(optimizer.state[owner], owner)
        self._handles += [
            optimizer.register_state_dict_post_hook(_StateHook(self.gather_state)),
            optimizer.register_load_state_dict_pre_hook(_StateHook(self.cut_state)),
        ]

    def close(self) -> None:
        """Removes the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def gather_state(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's state with whole tensors in the places of parts. A collective call."""
        owners = _owners(optimizer)
        whole = {number: self._whole[each] for number, each in owners.items() if each in self._whole}
        with self._meet("state_dict()"):
            state = {
                number: {
                    key: self._gathered(value, self._part_of(owners[number]))
                    for key, value in entries.items()
                }
                if number in owners
                else entries
                for number, entries in found["state"].items()
                if number not in whole
            }
            if whole:
                here = [number for number in found["state"] if whole.get(number)]
                own = {number: map_leaves(_on_host, found["state"][number]) for number in here}
                for of_rank in self._gather(own):
                    state |= of_rank
        order = dict.fromkeys([*owners, *state])
        return {**found, "state": {key: state[key] for key in order if key in state}}

    def cut_state(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's state with this rank's parts in the places of whole tensors."""
        owners = _owners(optimizer)
        state = {
            number: self._cut_all(entries, owners[number]) if number in owners else entries
            for number, entries in found["state"].items()
            if number not in owners or self._whole.get(owners[number], True)
        }
        return {**found, "state": state}

    def _gathered(self, value: Any, part: Part | None) -> Any:
        """Returns ``value``, if it is like ``part``, as a whole tensor. A collective call."""
        alike = part is not None and isinstance(value, Tensor) and _shape(value) == part.shape
        if part is None or not alike:
            return value
        whole = part.spec.gather(value, self._mesh)
        return whole.cpu()  # a device need not have room for the whole model

    def _part_of(self, owner: Tensor) -> Part | None:
        """Returns what this rank holds of something as large as the whole of ``owner``; None if all of it."""
        spec = self._spec(owner)
        if spec is None:
            return None
        shape = _shape(owner)
        return Part(spec, (*shape[: spec.dim], spec.length, *shape[spec.dim + 1 :]), owner)

    def _cut_all(self, entries: Mapping[str, Any], owner: Tensor) -> dict[str, Any]:
        if owner in self._whole:
            return dict(entries)
        return {
            key: _cut(value, self._part_of(owner)) if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _cut(value: Tensor, part: Part | None) -> Tensor:
    """Returns this rank's part of ``value`` if that is a whole of such parts."""
    if part is None or is_divided(value) or tuple(value.shape) != part.spec.whole_shape(part.shape):
        return value
    return as_held(part.spec.part(value.detach()), part.like)


class DividedModel(DividedOptimizers):
    """A model whose parameters were replaced by this rank's parts, and its optimizers.

    Args:
        before: The parameters and buffers of the model before it was divided, by name.
        model: The divided model.
        is_in_pass: Returns True during a backward pass, which may recompute layers.
    """

    def __init__(
        self,
        before: Mapping[str, Tensor],
        model: nn.Module,
        mesh: Mesh,
        meet: Meeting,
        gather: Gather,
        is_in_pass: Callable[[], bool],
    ) -> None:
        super().__init__(shard_spec, mesh, meet, gather)
        self._parts: MutableMapping[Tensor, nn.Parameter] = WeakIdKeyDictionary()
        """The part of each parameter that was replaced, as long as anybody holds that."""
        for name, part in named_tensors(model).items():
            whole = before.get(name)
            if isinstance(part, nn.Parameter) and whole is not None and whole is not part:
                self._parts[whole] = part
        for whole in self._parts:
            retire(whole)
        found = named_tensors(model, clean=False)
        parts = {name: self._part_of(each) for name, each in found.items()}
        self._by_name = {name: part for name, part in parts.items() if part is not None}
        self._calls = _Calls(is_in_pass)
        self._guard(model)
        if any(is_divided(part) for part in model.parameters()):
            vars(model).update(__deepcopy__=_refuse_copy, __reduce_ex__=_refuse_copy)
        model.register_state_dict_post_hook(_StateHook(self.gather_model))  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(_StateHook(self.cut_model))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ends the use of the model and its optimizers, of which this rank keeps parts: their hooks stay, and refuse
        it."""
        self._calls.is_over = True

    def give_parts(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer the parts in the places of the parameters."""
        for group in optimizer.param_groups:
            group["params"] = [self._part(each) for each in group["params"]]

    def give_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Cuts the state that the optimizer has of the parameters from before."""
        for whole in [each for each in optimizer.state if each in self._parts]:
            part, entries = self._parts[whole], optimizer.state.pop(whole)
            if self._whole.get(part, True):
                optimizer.state[part] = self._cut_all(entries, part)

    def _part(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._parts.get(parameter, parameter)

    def check_current(self, parameters: Sequence[Tensor]) -> None:
        """Raises ConfigurationError if one of ``parameters`` was replaced by a part, or has a gradient that is none."""
        if any(parameter in self._parts for parameter in parameters):
            raise ConfigurationError(
                "an optimizer has parameters from before evener.prepare, which has divided the model and put others "
                "in their places: give the optimizer to evener.prepare, too, or make it afterwards"
            )
        if any(is_divided(each) and not is_divided(_gradient_of(each)) for each in parameters):
            raise ConfigurationError(
                "the loop has put a plain tensor in the place of the gradient of a weight that is divided over the "
                "ranks: change the gradient itself, as by p.grad.mul_(mask) or p.grad = p.grad * 0.5, or use strategy "
                "'ddp' or zero=1, whose gradients are whole"
            )

    def gather_model(self, _: nn.Module, found: dict[str, Any], prefix: str, *__: Any) -> None:
        """Replaces parts in ``found``, the state of the model or a copy, by whole tensors. A collective call."""
        with self._meet("state_dict()"):
            for key, value in found.items():
                found[key] = self._gathered(value, self._by_name.get(key.removeprefix(prefix)))

    def cut_model(self, _: nn.Module, found: dict[str, Any], prefix: str, *__: Any) -> None:
        """Replaces whole tensors in ``found`` by this rank's parts."""
        for key in [key for key in found if key.startswith(prefix)]:
            if isinstance(found[key], Tensor):
                found[key] = _cut(found[key], self._by_name.get(key.removeprefix(prefix)))

    def _guard(self, model: nn.Module) -> None:
        """Refuses calls of layers by the loop itself: what they give is this rank's part."""
        calls = self._calls
        model.register_forward_pre_hook(calls.enter, prepend=True)
        model.register_forward_hook(calls.leave, always_call=True)
        for name, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if name and any((name + "." + key) in self._by_name for key in own):
                module.register_forward_pre_hook(partial(calls.check, clean_name(name)), prepend=True)


def _gradient_of(parameter: Tensor) -> Tensor:
    return parameter if parameter.grad is None else parameter.grad


def _refuse_copy(*_: Any) -> NoReturn:
    """Stands for the methods of a model by which it is copied and pickled."""
    raise ConfigurationError(
        "a model whose weights PyTorch's FSDP2 has divided cannot be copied or pickled: take its state_dict(), which "
        "is whole, for another model or a file, or use evener.save. For an average of the weights (AveragedModel) say "
        "zero=1 beside strategy 'sharded'"
    )


def _owners(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Returns the parameters by their numbers in the optimizer's state."""
    return dict(enumerate(each for group in optimizer.param_groups for each in group["params"]))


def _shape(value: Tensor) -> tuple[int, ...]:
    return tuple(local(value.detach()).shape)


class _Unpickled:
    """Part of a divided model: copies of it share this, and it cannot be pickled."""

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a divided model or its optimizer cannot be pickled, since this rank has parts of it: save its "
            "state_dict(), which is whole, or use evener.save"
        )


class _Calls(_Unpickled):
    """Knows whether the model is being called."""

    def __init__(self, is_in_pass: Callable[[], bool]) -> None:
        self._depth, self._is_in_pass, self.is_over = 0, is_in_pass, False

    def enter(self, *_: Any) -> None:
        if self.is_over:
            raise ConfigurationError(_OVER)
        self._depth += 1

    def leave(self, *_: Any) -> None:
        self._depth -= 1

    def check(self, name: str, *_: Any) -> None:
        """Raises ConfigurationError if the layer ``name`` is called and the model is not."""
        if not self._depth and not self._is_in_pass():
            raise ConfigurationError(
                f"{name} was called by the loop itself, and is divided over the ranks: call the model, and have "
                "its forward do all that needs weights, or use strategy 'ddp'"
            )


class _StateHook(_Unpickled):
    """A hook on a state: calls a method of what has the parts. Serves copies of what it belongs to, too."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        found = self._method()
        if found is None:
            raise ConfigurationError(_OVER)
        return found(*args)
