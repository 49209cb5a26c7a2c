"""The types of devices that hold a module's parameters, which autocast has to be told in every pass.

``Module.parameters`` walks through all modules, which takes the host longer than launching the kernels of a layer. So
the walk is made once, and again if the first or the last parameter has been moved to another type of device since.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from evener.torch_internals.modules import own_parameters

Held = dict[str, nn.Parameter | None]


class _Kinds(NamedTuple):
    """What a walk through a module has found."""

    first: Held
    last: Held
    """The dicts in which modules hold the first and the last parameter."""
    ends: tuple[str, str]
    """The types of their devices."""
    kinds: list[str]


_known: WeakKeyDictionary[nn.Module, _Kinds] = WeakKeyDictionary()


def autocast_kinds(module: nn.Module) -> list[str]:
    """Returns the types of devices that hold the module's parameters, as far as they support autocast. A module without
    parameters has ``cpu``."""
    if torch.compiler.is_compiling():  # which walks once, and cannot look into what is known
        return _able({p.device.type for p in module.parameters()})
    known = _known.get(module)
    if known is None or _ends(known.first, known.last) != known.ends:
        held = [own for each in module.modules() if _holds(own := own_parameters(each))]
        able = _able({p.device.type for own in held for p in own.values() if p is not None})
        if not held:
            return able
        _known[module] = known = _Kinds(held[0], held[-1], _ends(held[0], held[-1]), able)
    return known.kinds


def _able(kinds: set[str]) -> list[str]:
    return sorted(kind for kind in kinds or {"cpu"} if torch.amp.is_autocast_available(kind))


def _holds(own: Held) -> bool:
    return any(p is not None for p in own.values())


def _ends(first: Held, last: Held) -> tuple[str, str]:
    """Returns the types of devices of both parameters; an empty word for one that has been taken out."""
    types = [[p.device.type for p in own.values() if p is not None] or [""] for own in (first, last)]
    return types[0][0], types[1][-1]
