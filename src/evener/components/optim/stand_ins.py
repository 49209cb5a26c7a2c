"""Stand-ins: parameters of whole weights that an optimizer holds in the place of the model's pieces.

::

    model        rows 0-3 of w    rows 4-7 of w         what a rank computes with, clips, averages and saves
    optimizer    w, whole         w, without memory     what its owner updates, and what other ranks never do
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.sharded_tensor.local import local
from evener.components.sharded_tensor.shard_spec import shard_spec, take_attributes
from evener.torch_internals.modules import own_parameters

_MARK = "evener_model_parameter"
_AWAY = "evener_is_away"


def model_parameter(parameter: Tensor) -> nn.Parameter:
    """Returns the model's parameter for which an optimizer's parameter stands: mostly itself."""
    found: Any = getattr(parameter, _MARK, parameter)
    return found  # type: ignore[no-any-return]


def updated_by(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """Returns the parameters of the model that an optimizer updates, itself or by stand-ins."""
    return {model_parameter(held) for group in optimizer.param_groups for held in group["params"]}


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Yields parameters of the model, and the state of each that is on this rank."""
    return ((model_parameter(held), entries) for held, entries in optimizer.state.items())


def is_updated_whole(parameter: Tensor) -> bool:
    """Returns True if an optimizer's parameter is a weight that one rank updates for all, with state of any shape."""
    return hasattr(parameter, _MARK)


def is_away(parameter: Tensor) -> bool:
    """Returns True if another rank updates the weight, and has the state."""
    return hasattr(parameter, _AWAY)


def mark_held(parameter: nn.Parameter) -> None:
    """Marks a parameter of the model as a weight of which this rank has all: it stands for itself."""
    setattr(parameter, _MARK, parameter)


def make_stand_in(parameter: nn.Parameter, device: torch.device, away: bool = False) -> nn.Parameter:
    """Returns a parameter of the whole shape, without memory, that has what the user has said of ``parameter``."""
    piece = shard_spec(parameter)
    held = local(parameter)
    shape = piece.whole_shape(held.shape) if piece else tuple(held.shape)
    made = nn.Parameter(_without_memory(shape, parameter.dtype, device), parameter.requires_grad)
    setattr(take_attributes(made, vars(parameter)), _MARK, parameter)
    if away:
        setattr(made, _AWAY, True)
    return made


def drop_memory(stand_in: nn.Parameter) -> None:
    """Frees the memory of the stand-in. It keeps its shape."""
    stand_in.grad = None
    stand_in.data = _without_memory(stand_in.shape, stand_in.dtype, stand_in.device)


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def exchange_parameters(optimizer: torch.optim.Optimizer, by: Mapping[Any, nn.Parameter]) -> None:
    """Gives the optimizer, and those inside it, other parameters in the places of those in ``by``, with their state."""
    for each in (optimizer, *inner_optimizers(optimizer)):
        for group in each.param_groups:
            group["params"] = [by.get(held, held) for held in group["params"]]
        for old in [old for old in by if old in each.state]:
            each.state[by[old]] = each.state.pop(old)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of which this one is made, at any depth: its attributes, or entries of these."""
    found = list[torch.optim.Optimizer]()
    left = [optimizer]
    while left:
        for value in vars(left.pop()).values():
            entries = (
                value
                if isinstance(value, list | tuple)
                else value.values()
                if isinstance(value, dict)
                else [value]
            )
            new = [each for each in entries if isinstance(each, torch.optim.Optimizer)]
            new = [
                each for each in new if each is not optimizer and all(each is not other for other in found)
            ]
            found += new
            left += new
    return found


@contextmanager
def shown(model: nn.Module, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Puts stand-ins into the model for the block, in which its optimizer is built."""
    places = [
        (own_parameters(module), name, parameter)
        for module in model.modules()
        for name, parameter in own_parameters(module).items()
        if parameter is not None and parameter in stand_ins
    ]
    try:
        for held, name, parameter in places:
            held[name] = stand_ins[parameter]
        yield
    finally:
        for held, name, parameter in places:
            held[name] = parameter
