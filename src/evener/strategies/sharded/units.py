"""Selects the units of a model: modules whose weights are gathered for forward and backward, and freed afterwards.

A rank holds one unit whole at a time, and gathers it in one message. Deep models are repeated blocks, and a block is a
good unit. So by default units are the children of the same class, two or more, of a ``ModuleList`` or ``Sequential``,
if they have submodules. All other modules are gathered with the model itself::

    model ── embed                     with the model
          ├─ blocks ─┬─ 0 ─ attention, linear, ...    a unit
          │          ├─ 1 ─ attention, linear, ...    a unit
          │          └─ 2 ─ attention, linear, ...    a unit
          └─ heads ──┬─ 0 (Linear)     with the model: single layers are small, and samples may choose between them
                     └─ 1 (Linear)

A weight cannot belong to several units. Modules that share one stay with the model too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

from evener.components.sharded_tensor.local import is_divided
from evener.errors import ConfigurationError, TaskError
from evener.torch_internals.modules import own_parameters

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


Place = tuple[dict[str, Any], str, str]
"""Place of a parameter: the module's parameter dictionary, the key in it, and the parameter's name in the model."""


def is_unit(module: nn.Module) -> TypeGuard[Any]:
    """Returns True if FSDP2 shards the module as a unit.

    This does not import FSDP2, which takes a second: before somebody has, there are no units.
    """
    unit = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return unit is not None and isinstance(module, unit)


def divided_places(unit: nn.Module, names: Mapping[nn.Parameter, str]) -> Iterator[Place]:
    """Yields the place of each sharded parameter of a unit, without those of units inside it.

    Args:
        names: The names of the parameters.
    """
    for child in unit.children():
        if not is_unit(child):
            yield from divided_places(child, names)
    held = own_parameters(unit)
    for key, parameter in held.items():
        if parameter is not None and is_divided(parameter):
            yield held, key, names[parameter]


def units_of(model: nn.Module, wrap: str | None) -> dict[str, nn.Module]:
    """Returns the units of ``model`` by name, outer units before those inside them, without the model itself.

    Args:
        wrap: Names of modules, separated by commas. ``*`` stands for any part between two dots (``encoder.layers.*``).
            An
            empty text gives no units; None selects the repeated blocks.

    Raises:
        ConfigurationError: If no module with parameters has such a name.
        TaskError: If a weight of a named module is also used outside of it.
    """
    if wrap is None:
        blocks = _repeated(model)
        return {name: block for name, block in blocks.items() if not _shared(model, block)}
    named = _named(model, wrap)
    for name, module in named.items():
        shared = _shared(model, module)
        if shared:
            raise TaskError(
                f"{name} cannot be a unit: its weight {shared[0]} is used outside of it too; leave it out of 'wrap', "
                "so that it goes with the model"
            )
    return named


def nbytes_of_units(units: Iterable[Any]) -> list[int]:
    """Returns for each unit the bytes of its whole weights, without those of units inside it, which must come later."""
    seen: set[nn.Parameter] = set()
    sizes: list[int] = []
    for unit in reversed(list(units)):
        own = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(own)
        sizes.append(sum(parameter.nbytes for parameter in own))
    return sizes[::-1]


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential) and not _inside(name, found):
            found |= {f"{name}.{key}".lstrip("."): block for key, block in _blocks(container)}
    return found


def _blocks(container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    candidates = [(key, child) for key, child in container.named_children() if _is_block(child)]
    kinds = Counter(type(child) for _, child in candidates)
    return ((key, child) for key, child in candidates if kinds[type(child)] > 1)


def _is_block(module: nn.Module) -> bool:
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not container and any(True for _ in module.children()) and _has_parameters(module)


def _inside(name: str, units: Mapping[str, nn.Module]) -> bool:
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _named(model: nn.Module, wrap: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for pattern in filter(None, (part.strip() for part in wrap.split(","))):
        fitting = {name: m for name, m in model.named_modules() if name and _fits(name, pattern)}
        units = {name: module for name, module in fitting.items() if _has_parameters(module)}
        if not units:
            raise ConfigurationError(
                f"wrap: no module with parameters is called {pattern!r}; {type(model).__name__} has {_some(model)}"
            )
        found |= units
    return {name: found[name] for name, _ in model.named_modules() if name in found}


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _some(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if name and _has_parameters(module)]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "none"


def _shared(model: nn.Module, module: nn.Module) -> list[str]:
    """Returns the outside names of those parameters of ``module`` that are also used outside of it."""
    own = set(module.modules())
    inside = set(module.parameters())
    return [
        f"{name}.{key}".lstrip(".")
        for name, other in model.named_modules()
        if other not in own
        for key, parameter in other.named_parameters(recurse=False)
        if parameter in inside
    ]


def fills_unused(unit: FSDPModule) -> bool:
    """Has FSDP2 take unused gradients as zero, and returns True, if this torch can do that. An older torch leaves
    unused gradients out of the sum, so that the messages of the ranks differ in length."""
    if not hasattr(unit, "set_reduce_scatter_unused_params"):
        return False
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    return True
