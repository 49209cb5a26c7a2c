"""Which modules of a model are units: gathered for their forward and backward pass, and given back after it.

A unit is what a rank holds whole at a time, and one message. Deep models are repeated blocks, and a block is a good
unit: so are by default the children of one class that a ``ModuleList`` or ``Sequential`` has two or more of, if they
have modules of their own. All else goes with the model itself::

    model ── embed                     with the model
          ├─ blocks ─┬─ 0 ─ attention, linear, ...    a unit
          │          ├─ 1 ─ attention, linear, ...    a unit
          │          └─ 2 ─ attention, linear, ...    a unit
          └─ heads ──┬─ 0 (Linear)     with the model: single layers are small, and samples may choose between them
                     └─ 1 (Linear)

A weight that stands in several units can be in none: these modules go with the model too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from evener.errors import ConfigurationError, TaskError


def units_of(model: nn.Module, wrap: str | None) -> dict[str, nn.Module]:
    """The units of ``model`` by name, outer ones before those inside of them, without the model itself.

    Args:
        wrap: Names of modules, separated by commas, in which ``*`` stands for any part between two dots
            (``encoder.layers.*``); none in an empty text. None finds the repeated blocks.

    Raises:
        ConfigurationError: If there is no module of such a name with parameters.
        TaskError: If a weight of one that is named is used outside of it too.
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
    """Bytes of the whole weights of each that are not those of one inside of it, which comes later."""
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
    """The parameters of ``module`` that are known by a name outside of it too, by one of these names."""
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
    """Has FSDP2 take what a rank did not use for zero, where it can: an older torch leaves that out of the sum, and
    the ranks' messages are of other lengths."""
    if not hasattr(unit, "set_reduce_scatter_unused_params"):
        return False
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    return True
