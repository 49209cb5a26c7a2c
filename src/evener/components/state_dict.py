"""The state of a model and its optimizer, by the names of parameters.

PyTorch keeps an optimizer's state by number, in the order in which parameters were handed over: a strategy that hands
them over in another order, or in pieces, would take up the wrong ones in silence. By name it does not matter who holds
what. Names are those of the plain model, without what DDP and ``torch.compile`` put into them; weights that are tied
stand under each of theirs.

The model's part goes through ``torch.distributed.checkpoint.state_dict``. Of the optimizer's only the form is taken
from there: its function takes a step with zero gradients to make room in an optimizer that has taken none, which counts
in Adam's bias correction, fails in SparseAdam, and moves weights where a learning rate is no number of a group.

::

    model        {name: tensor}
    optimizer    {"class": name, "state": {name: {key: value}}, "groups": [{"params": [name, ...], option: value}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from evener.components.model_init import named_tensors
from evener.components.optim.eight_bit import kept_as, name_of, plain
from evener.components.sharded_tensor.local import as_held, local
from evener.components.sharded_tensor.shard_spec import Slice, slice_of
from evener.core.text import few
from evener.data.batch import map_leaves
from evener.distributed.mesh import Mesh
from evener.errors import ConfigurationError
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import UNCOUNTED
from evener.nn.context import outside
from evener.nn.fqn import clean_name

Cut = Callable[[Tensor, Slice], Tensor]
"""This rank's piece of what was saved of a divided tensor."""
_OF_DEVICE = ("foreach", "fused", "capturable")
"""Options that say how a device updates, not what: those of the optimizer at hand stay, for what was saved may be of
another device or strategy, to which a kernel is unknown."""
Load = Callable[[dict[str, Any]], None]
"""An optimizer's ``load_state_dict``."""


@dataclass(frozen=True)
class Held:
    """The state as this rank holds it: the live tensors, not copies."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    slices: dict[str, Slice]
    """Of the divided parameters and buffers."""

    def slice_of(self, name: str, value: Any) -> Slice | None:
        """The slice that ``value``, the parameter ``name`` or an optimizer's state of it, is; None if it is whole."""
        piece = self.slices.get(name)
        parameter = self.model.get(name)
        alike = isinstance(value, Tensor) and isinstance(parameter, Tensor) and value.shape == parameter.shape
        return piece if alike else None

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every dense tensor: its key, the parameter or buffer it belongs to, itself, or the numbers that its codes
        stand for."""
        for name, value in self.model.items():
            if _is_dense(value):
                yield f"model/{name}", name, value
        for name, entries in self.optimizer["state"].items():
            for key, value in entries.items():
                if _is_dense(value):
                    yield f"optimizer/{name}/{key}", name, plain(value)


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """The state of both, as this rank holds it."""
    names = _names(model)
    with outside():  # in the midst of a step too, in which divided layers keep their weights to themselves
        of_model: dict[str, Any] = {name: _held(value) for name, value in get_model_state_dict(model).items()}
    state = {
        names[p]: {key: _held(value) for key, value in entries.items()}
        for p, entries in optimizer.state.items()
        if p in names
    }
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": _listed(group, names)}
        for group in optimizer.param_groups
    ]
    slices = {name: piece for name, tensor in named_tensors(model).items() if (piece := slice_of(tensor))}
    return Held(of_model, {"class": name_of(optimizer), "state": state, "groups": groups}, slices)


def _held(value: Any) -> Any:
    return local(value) if isinstance(value, Tensor) else value


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: clean_name(name) for name, parameter in model.named_parameters()}


def _listed(group: Mapping[str, Any], names: Mapping[Tensor, str]) -> list[str]:
    return [names.get(parameter, "") for parameter in group["params"]]


def whole(found: Held, mesh: Mesh) -> dict[str, Any]:
    """The state as one device would hold it, copied to the CPU. A collective call where something is divided."""

    def copied(name: str, value: Any) -> Any:
        piece = found.slice_of(name, value)
        return _copy(piece.gather(plain(value), mesh)) if piece else map_leaves(_copy, plain(value))

    return {
        "model": {name: copied(name, value) for name, value in found.model.items()},
        "optimizer": {
            **found.optimizer,
            "groups": map_leaves(_copy, found.optimizer["groups"]),
            "state": {
                name: {key: copied(name, value) for key, value in entries.items()}
                for name, entries in found.optimizer["state"].items()
            },
        },
    }


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with made_as(UNCOUNTED):  # of the host's memory, and not of what training takes
        return value.detach().cpu().clone()


def take(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    found: Mapping[str, Any],
    cut: Cut | None,
    load: Load | None = None,
) -> None:
    """Takes up a state, of which the tensors given stay the giver's own.

    Args:
        cut: Makes this rank's piece of what was saved whole; None where pieces are given.
        load: Takes up the optimizer's; None is its own ``load_state_dict``.

    Raises:
        ConfigurationError: If it is of another model or optimizer; nothing has changed then.
    """
    own = held(model, optimizer)
    _check_model(own, found["model"], cut)
    check_kind(optimizer, found["optimizer"])
    _check_optimizer(own.optimizer, found["optimizer"])

    def piece(name: str, value: Any, like: Any) -> Any:
        part = own.slices.get(name)
        if part is None or cut is None or not isinstance(value, Tensor) or not isinstance(like, Tensor):
            return value
        return cut(value, part) if tuple(value.shape) == part.whole_shape(like.shape) else value

    tensors = named_tensors(model)

    def taken(name: str, value: Any) -> Any:
        part = piece(name, value, own.model[name])
        return as_held(part, tensors[name]) if own.slice_of(name, part) else part

    weights = {name: taken(name, value) for name, value in found["model"].items()}
    with outside():
        set_model_state_dict(model, weights)
    state = found["optimizer"]["state"]

    def entries_of(name: str) -> dict[str, Any]:
        return {
            key: kept_as(optimizer, tensors[name], key, map_leaves(_own, taken(name, value)))
            for key, value in state[name].items()
        }

    groups = found["optimizer"]["groups"]
    _load_optimizer(
        optimizer, load or optimizer.load_state_dict, _names(model), list(state), entries_of, groups
    )


class _Made(Mapping[int, Any]):
    """By number, and made when it is asked for, so that not all of it need be there at once."""

    def __init__(self, makers: Mapping[int, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, number: int) -> Any:
        return self._makers[number]()

    def __iter__(self) -> Iterator[int]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    load: Load,
    names: Mapping[Tensor, str],
    saved_names: Sequence[str],
    entries_of: Callable[[str], dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """Through the optimizer's own ``load_state_dict``, which wants numbers and keeps the tensors of ``state``."""
    numbers: dict[str, int] = {}
    listed = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        # In the order that they have here: what was saved may list them in another.
        own = [numbers.setdefault(names[parameter], len(numbers)) for parameter in group["params"]]
        kept = {key: _alike(value, group.get(key)) for key, value in saved.items() if key not in _OF_DEVICE}
        listed.append({**group, **map_leaves(_own, kept), "params": own})
    state = _Made({numbers[name]: partial(entries_of, name) for name in saved_names})
    load({"state": state, "param_groups": listed})


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _alike(value: Any, like: Any) -> Any:
    """An option of a group as a tensor where the optimizer has it so, and as a number where it has not."""
    if isinstance(like, Tensor) and isinstance(value, float | int):
        return torch.full_like(like, value)
    return value.item() if isinstance(value, Tensor) and isinstance(like, float | int) else value


def _check_model(own: Held, saved: Mapping[str, Any], cut: Cut | None) -> None:
    lacking, strange = sorted(own.model.keys() - saved.keys()), sorted(saved.keys() - own.model.keys())
    if lacking or strange:
        raise ConfigurationError(
            f"the checkpoint is of another model: it lacks {few(lacking)} and has {few(strange)} more"
        )
    for name, value in own.model.items():
        if isinstance(value, Tensor):
            piece = own.slices.get(name) if cut else None
            shape = piece.whole_shape(value.shape) if piece else tuple(value.shape)
            if tuple(saved[name].shape) != shape:
                raise ConfigurationError(
                    f"the checkpoint is of another model: {name} has the shape {tuple(saved[name].shape)} there and "
                    f"{shape} here"
                )


def check_kind(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises ConfigurationError if the saved state is that of another kind of optimizer."""
    if saved["class"] != name_of(optimizer):
        raise ConfigurationError(
            f"the checkpoint is of a {saved['class']}, the task's optimizer is a {name_of(optimizer)}: what one keeps "
            "the other cannot use; go on with the same, or begin a new run"
        )


def _check_optimizer(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    ours, theirs = ([group["params"] for group in state["groups"]] for state in (own, saved))
    if [sorted(names) for names in ours] != [sorted(names) for names in theirs]:
        raise ConfigurationError(
            f"the checkpoint's optimizer has groups of {[len(names) for names in theirs]} parameters, the task's of "
            f"{[len(names) for names in ours]}, or of others: go on with the same groups"
        )


def rates_as_in(optimizer: torch.optim.Optimizer, scheduler: dict[str, Any]) -> dict[str, Any]:
    """What a scheduler has saved, with rates as numbers unless the optimizer has them as tensors."""
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return scheduler
    found: dict[str, Any] = map_leaves(_as_number, scheduler)
    return found


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and not value.dim() else value


def check_form(found: Mapping[str, Any]) -> None:
    """Raises:
    ConfigurationError: If it is not what an engine's ``state_dict`` gives.
    """
    lacking = [part for part in ("progress", "model", "optimizer") if part not in found]
    if lacking:
        raise ConfigurationError(
            f"this is no state of an engine, which has {', '.join(lacking)} too: plain weights are loaded into the "
            "model that Task.model returns"
        )
