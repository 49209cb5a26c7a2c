"""Saves and loads the state of a model and its optimizer by parameter names.

PyTorch numbers an optimizer's state in the order of the parameters. A strategy that passes them in another order, or in
pieces, would silently load the wrong state. With names, it does not matter which rank holds what. Names are those of
the plain model, without the prefixes of DDP and ``torch.compile``. Tied weights are saved under each of their names.

The model's state goes through ``torch.distributed.checkpoint.state_dict``. For the optimizer, only the format is taken
from there. Its function steps a new optimizer with zero gradients to create the state: this counts in Adam's bias
correction, fails in SparseAdam, and changes weights if a learning rate is not a plain number.

::

    model        {name: tensor}
    optimizer    {"class": name, "state": {name: {key: value}}, "groups": [{"params": [name, ...], option: value}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.model_init import named_tensors
from evener.components.optim.eight_bit import kept_as, name_of, plain
from evener.components.optim.nested_state import leaves_of, without_tensors
from evener.components.optim.stand_ins import is_away, is_updated_whole, model_parameter
from evener.components.sharded_tensor.local import as_held, local
from evener.components.sharded_tensor.shard_spec import ShardSpec, shard_spec
from evener.core.text import few
from evener.data.batch import map_leaves
from evener.distributed.hosts import all_gather
from evener.distributed.mesh import Mesh
from evener.errors import ConfigurationError
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import UNCOUNTED
from evener.nn.context import outside
from evener.nn.fqn import clean_name

Cut = Callable[[Tensor, ShardSpec], Tensor]
"""Cuts this rank's piece out of the saved tensor, given the shard."""
_OF_DEVICE = ("foreach", "fused", "capturable")
"""Optimizer options that choose an implementation and do not change the result. Loading keeps the current ones, because
the saved ones may belong to another device or strategy."""
OF_REPLICAS = ("replica.", "outer.")
"""Beginnings of the keys under which a strategy of local steps keeps what other replicas, and its outer optimizer, have
of a parameter. Other strategies leave these out."""
Load = Callable[[dict[str, Any]], None]
"""Loads an optimizer's state, as ``load_state_dict`` does."""


@dataclass(frozen=True)
class HeldState:
    """The state that this rank holds: the live tensors, not copies."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    slices: dict[str, ShardSpec]
    """The shards of the divided parameters and buffers."""
    average: dict[str, Tensor] = field(default_factory=dict)
    """The averages of weights and buffers."""
    whole_updates: dict[str, bool] = field(default_factory=dict)
    """The parameters whose optimizer state one rank has whole, in any shape, and whether it is this rank."""

    def has_state_of(self, name: str) -> bool:
        """Returns False if another rank has the optimizer's state of the parameter."""
        return self.whole_updates.get(name, True)

    def shard_spec(self, name: str, value: Any, in_optimizer: bool = False) -> ShardSpec | None:
        """Returns the shard that ``value`` is: the parameter ``name``, or optimizer state of it. Returns None if it is
        whole."""
        if in_optimizer and name in self.whole_updates:
            return None
        piece = self.slices.get(name)
        parameter = self.model.get(name)
        alike = isinstance(value, Tensor) and isinstance(parameter, Tensor) and value.shape == parameter.shape
        return piece if alike else None

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields every dense tensor: its key, the name of its parameter or buffer, and the tensor. Quantized state is
        dequantized."""
        for name, value in self.model.items():
            if _is_dense(value):
                yield f"model/{name}", name, value
        for name, value in self.average.items():
            yield f"average/{name}", name, value
        for name, entries in self.optimizer["state"].items():
            for path, value in (leaf for entry in entries.items() for leaf in leaves_of(*entry)):
                if _is_dense(value):
                    yield f"optimizer/{name}/{path}", name, plain(value)

    def leftovers(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Returns what is not a dense tensor, of the model and the optimizer's state, and the optimizer's groups.

        Args:
            gather: Gathers an object from every rank. Called on all ranks, or on none.
        """
        model = {name: value for name, value in self.model.items() if not _is_dense(value)}
        state: dict[str, dict[str, Any]] = {}
        for name, entries in self.optimizer["state"].items():
            rest = {key: value for key, value in entries.items() if not _is_dense(value)}
            state[name] = {key: without_tensors(key, value, _is_dense) for key, value in rest.items()}
        if self.whole_updates:  # each rank has the state of other parameters
            for found in gather({name: state[name] for name in self.whole_updates if name in state}):
                state |= found
        return {"model": model, "optimizer": self.optimizer | {"state": state}}


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def held(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: Mapping[str, Tensor] | None = None
) -> HeldState:
    """Returns the state of both, and of the averages of weights, as this rank holds it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict  # takes over a second

    names = _names(model)
    with outside():  # also in the middle of a step, when divided layers hide their weights
        of_model: dict[str, Any] = {name: _held(value) for name, value in get_model_state_dict(model).items()}
    state = {
        names[model_parameter(p)]: {key: _held(value) for key, value in entries.items()}
        for p, entries in optimizer.state.items()
        if model_parameter(p) in names and not is_away(p)
    }
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": _listed(group, names)}
        for group in optimizer.param_groups
    ]
    slices = {name: piece for name, tensor in named_tensors(model).items() if (piece := shard_spec(tensor))}
    of_optimizer = {"class": name_of(optimizer), "state": state, "groups": groups}
    updated = (p for group in optimizer.param_groups for p in group["params"] if is_updated_whole(p))
    wholes = {names[model_parameter(p)]: not is_away(p) for p in updated}
    return HeldState(of_model, of_optimizer, slices, dict(average or {}), wholes)


def _held(value: Any) -> Any:
    return local(value) if isinstance(value, Tensor) else value


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: clean_name(name) for name, parameter in model.named_parameters()}


def _listed(group: Mapping[str, Any], names: Mapping[Tensor, str]) -> list[str]:
    return [names.get(model_parameter(parameter), "") for parameter in group["params"]]


def whole(found: HeldState, mesh: Mesh) -> dict[str, Any]:
    """Returns the whole state, copied to the CPU. If something is divided, all ranks must call this together."""

    def copied(name: str, value: Any, in_optimizer: bool = False) -> Any:
        piece = found.shard_spec(name, value, in_optimizer)
        return _copy(piece.gather(plain(value), mesh)) if piece else map_leaves(_copy, plain(value))

    def entries_of(name: str) -> dict[str, Any]:
        entries = found.optimizer["state"].get(name, {})
        own = {key: copied(name, value, True) for key, value in entries.items()}
        if name not in found.whole_updates or mesh.world is None:
            return own
        of_ranks = all_gather(own, mesh.world)  # empty where the state is elsewhere
        return next(filter(None, of_ranks), own)

    others = [name for name in found.optimizer["state"] if name not in found.whole_updates]
    names = [*others, *found.whole_updates]  # in the same order on all ranks
    return {
        "model": {name: copied(name, value) for name, value in found.model.items()},
        "average": {name: copied(name, value) for name, value in found.average.items()},
        "optimizer": {
            **found.optimizer,
            "groups": map_leaves(_copy, found.optimizer["groups"]),
            "state": {name: entries for name in names if (entries := entries_of(name)) or name in others},
        },
    }


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with made_as(UNCOUNTED):  # host memory that is not counted as memory of the training
        return value.detach().cpu().clone()


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    found: Mapping[str, Any],
    cut: Cut | None,
    load: Load | None = None,
) -> None:
    """Loads a state. The given tensors are copied.

    Args:
        cut: Cuts this rank's piece out of a whole saved tensor. None if ``found`` holds pieces.
        load: Loads the optimizer's state. None uses its own ``load_state_dict``.

    Raises:
        ConfigurationError: If the state belongs to another model or optimizer. Nothing has changed in this case.
    """
    from torch.distributed.checkpoint.state_dict import set_model_state_dict  # takes over a second

    own = held(model, optimizer)
    _check_model(own, found["model"], cut)
    check_kind(optimizer, found["optimizer"])
    _check_optimizer(own.optimizer, found["optimizer"])

    tensors, taken = named_tensors(model), _taker(own, model, cut)
    weights = {name: taken(name, value) for name, value in found["model"].items()}
    with outside():
        set_model_state_dict(model, weights)
    state = found["optimizer"]["state"]

    def entries_of(name: str) -> dict[str, Any]:
        return {
            key: kept_as(optimizer, tensors[name], key, map_leaves(_own, part_of(name, value)))
            for key, value in state[name].items()
            if not key.startswith(OF_REPLICAS)
        }

    def part_of(name: str, value: Any) -> Any:
        return value if name in own.whole_updates else taken(name, value)

    groups, here = found["optimizer"]["groups"], [name for name in state if own.has_state_of(name)]
    _load_optimizer(optimizer, load or optimizer.load_state_dict, _names(model), here, entries_of, groups)


def taker(model: nn.Module, optimizer: torch.optim.Optimizer, cut: Cut | None) -> Callable[[str, Any], Any]:
    """Returns a function of a name and a saved value: a parameter, or state of it. It returns this rank's part of the
    value, in the form of the parameter, as :func:`load_state` does."""
    return _taker(held(model, optimizer), model, cut)


def _taker(own: HeldState, model: nn.Module, cut: Cut | None) -> Callable[[str, Any], Any]:
    tensors = named_tensors(model)

    def taken(name: str, value: Any) -> Any:
        part, like = own.slices.get(name), own.model[name]
        are_tensors = isinstance(value, Tensor) and isinstance(like, Tensor)
        if part and cut and are_tensors and tuple(value.shape) == part.whole_shape(like.shape):
            value = cut(value, part)
        return as_held(value, tensors[name]) if own.shard_spec(name, value) else value

    return taken


class _Made(Mapping[int, Any]):
    """A mapping by number whose values are made on access, so that they need not all be in memory at once."""

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
    """Loads the state through ``load``, which expects numbers and keeps the tensors of ``state``."""
    numbers: dict[str, int] = {}
    listed = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        # Numbered in the order of this optimizer; the saved order may differ.
        held = [names[model_parameter(parameter)] for parameter in group["params"]]
        own = [numbers.setdefault(name, len(numbers)) for name in held]
        kept = {key: _alike(value, group.get(key)) for key, value in saved.items() if key not in _OF_DEVICE}
        listed.append({**group, **map_leaves(_own, kept), "params": own})
    state = _Made({numbers[name]: partial(entries_of, name) for name in saved_names})
    load({"state": state, "param_groups": listed})


def optimizer_state_from(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Mapping[str, Any]]
) -> dict[Any, Any]:
    """Returns an optimizer's state by parameter, as its ``load_state_dict`` makes it of a saved one by name.

    The optimizer itself is left as it is. The saved tensors are copied.
    """
    names, before = _names(model), optimizer.state_dict()
    groups = [{**group, "params": _listed(group, names)} for group in optimizer.param_groups]
    try:
        made: Callable[[str], dict[str, Any]] = partial(_owned, saved)
        _load_optimizer(optimizer, optimizer.load_state_dict, names, list(saved), made, groups)
        return optimizer.state
    finally:
        optimizer.load_state_dict(before)


def _owned(saved: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return {key: map_leaves(_own, value) for key, value in saved[name].items()}


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _alike(value: Any, like: Any) -> Any:
    """Converts an option of a group to a tensor or a number, as the optimizer has it."""
    if isinstance(like, Tensor) and isinstance(value, float | int):
        return torch.full_like(like, value)
    return value.item() if isinstance(value, Tensor) and isinstance(like, float | int) else value


def _check_model(own: HeldState, saved: Mapping[str, Any], cut: Cut | None) -> None:
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
    """Raises ConfigurationError if the saved state belongs to another class of optimizer."""
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
    """Returns a scheduler's saved state, with learning rates as numbers unless the optimizer has them as tensors."""
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return scheduler
    found: dict[str, Any] = map_leaves(_as_number, scheduler)
    return found


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and not value.dim() else value


def check_form(found: Mapping[str, Any]) -> None:
    """Raises ConfigurationError if ``found`` is no state from an engine's ``state_dict``."""
    lacking = [part for part in ("progress", "model", "optimizer") if part not in found]
    if lacking:
        raise ConfigurationError(
            f"this is no state of an engine, which has {', '.join(lacking)} too: plain weights are loaded into the "
            "model that Task.model returns"
        )
