"""Finds modules that may compute only some of the positions, beside layers that are divided (sequence parallelism).

The word ``sequence`` makes a module a stream (:mod:`evener.nn.sequence_parallel`): its input is cut along the
positions, and its output is gathered. Consecutive children of an ``nn.Sequential`` form one stream, with the modules
between them::

    embed    norm=sequence    up=colwise    gelu    down=rowwise    drop=sequence    head
             └─────────────────────── one stream ─────────────────────────────┘

A stream may contain divided layers, modules of PyTorch that look at each position alone, and the user's own functions.
Other modules may look along the positions; they are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from evener.errors import TaskError
from evener.nn.dropout import Dropout
from evener.nn.fqn import clean_name
from evener.strategies.tensor.regions import CONVOLUTIONS, ELEMENTWISE, is_sequence
from evener.torch_internals.modules import AnyDropout, own_parameters

Words = Mapping[str, str]
"""Words of a plan, by module name."""
ALONE = (nn.LayerNorm, nn.RMSNorm, nn.Linear)
"""Modules with weights that look at each position alone: they work along the last dimension."""
_DROPOUTS = (nn.Dropout, Dropout)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)
_HOLDING = (nn.Sequential, nn.ModuleList, nn.ModuleDict, *_LAYERS, *_STACKS)
_TOLD = ("whole", "colwise", "rowwise", "heads", "between", "vocabulary")
"""Words that settle a module completely, with everything inside it."""


def members(name: str, module: nn.Module, words: Words) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields the modules of a stream with their names and words, down to those that the plan divides."""
    word = words.get(name, "")
    yield name, module, word
    for child, inner in module.named_children() if word not in _TOLD else ():
        yield from members(clean_name(f"{name}.{child}"), inner, words)


def outermost(words: Words) -> dict[str, list[str]]:
    """Returns the ``sequence`` modules that are in no other such module, by the module that holds them."""
    found: dict[str, list[str]] = {}
    outer: list[str] = []
    for name in (name for name, word in words.items() if word == "sequence"):
        if not is_within(name, outer):
            outer.append(name)
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def is_within(name: str, others: list[str]) -> bool:
    """Returns True if a module is inside one of the others."""
    return any(name.startswith(f"{other}.") for other in others)


def children(name: str, module: nn.Module) -> list[str]:
    """Returns the names of a module's children."""
    return [clean_name(f"{name}.{child}").lstrip(".") for child, _ in module.named_children()]


# Children of nn.Sequential


def runs(name: str, module: nn.Sequential, words: Words) -> list[range]:
    """Returns the ranges of children that form a stream: from one that is ``sequence`` to the last such child with only
    whole regions and elementwise modules between them."""
    found: list[range] = []
    sequence = [words.get(child) == "sequence" for child in children(name, module)]
    passing = _passing([words.get(child, "") for child in children(name, module)], list(module))
    for place in (place for place, is_one in enumerate(sequence) if is_one):
        if found and all(passing[found[-1].stop : place]):
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
    return found


def _passing(words: list[str], modules: list[nn.Module]) -> list[bool]:
    """Returns for each child whether it may lie inside a stream: a whole region, or an elementwise module."""
    passing = [type(module) in ELEMENTWISE for module in modules]
    for start, word in enumerate(words):
        stop = next((place + 1 for place in range(start, len(words)) if words[place] == "rowwise"), start)
        if word == "colwise" and "sequence" not in words[start:stop]:
            passing[start:stop] = [True] * (stop - start)
    return passing


# Derived streams


def derived_streams(modules: Mapping[str, nn.Module], words: Words) -> dict[str, int]:
    """Returns the modules that can be ``sequence`` beside those divided by ``words``, with the dimension of their
    positions:
    PyTorch's transformer layers, and norms and dropout in a row with divided layers.
    """
    found: dict[str, int] = {}
    for name, module in modules.items():
        if not is_within(name, [*found]) and (dim := _positions(name, module, words)) is not None:
            found[name] = dim
    for name, module in modules.items():
        within = name in found or is_within(name, [*found])
        if isinstance(module, nn.Sequential) and is_sequence(module) and not within:
            found |= _in_a_row(name, module, words, found)
    return {name: found[name] for name in modules if name in found}


def _positions(name: str, module: nn.Module, words: Words) -> int | None:
    """Returns the dimension of the positions of PyTorch's transformer layers; None if some are not divided."""
    if type(module) in _STACKS:
        layers = getattr(module, "layers", ())
        found = {_positions(f"{name}.layers.{i}", layer, words) for i, layer in enumerate(layers)}
        return found.pop() if len(found) == 1 and type(module.norm) in (*ALONE, type(None)) else None
    if type(module) not in _LAYERS:
        return None
    inner = dict(module.named_children())
    wanted = {
        child: "heads" if isinstance(inner[child], nn.MultiheadAttention) else "colwise"
        for child in inner
        if child == "linear1" or isinstance(inner[child], nn.MultiheadAttention)
    }
    divided = name and all(words.get(f"{name}.{child}") == word for child, word in wanted.items())
    attention = inner["self_attn"]
    assert isinstance(attention, nn.MultiheadAttention)
    return int(attention.batch_first) if divided else None


def _in_a_row(name: str, module: nn.Sequential, words: Words, streams: Mapping[str, int]) -> dict[str, int]:
    names = children(name, module)
    able = {
        child: "sequence"
        for child, inner in zip(names, module, strict=True)
        if child in streams or (child not in words and _may(child, inner, words))
    }
    found: dict[str, int] = {}
    for run in runs(name, module, {**words, **able}):
        within = names[run.start : run.stop]
        if any(child in words for child in within) or any(child in streams for child in within):
            dim = next((streams[child] for child in within if child in streams), 1)
            found |= {child: dim for child in within if child in able}
    return found


def _may(name: str, module: nn.Module, words: Words) -> bool:
    """Returns True if a child of ``nn.Sequential`` can be ``sequence``: a norm, dropout, or divided layers in a row."""
    if not is_sequence(module):
        return type(module) in (*ALONE, *_DROPOUTS)
    found = list(members(name, module, words))
    return any(word for *_, word in found) and not any(_obstacle(inner, word, 1) for _, inner, word in found)


# Checks


def check_streams(modules: Mapping[str, nn.Module], words: Words, dims: Mapping[str, int]) -> None:
    """Raises TaskError if a stream contains a module that cannot be in one; the message names it."""
    for name in (name for found in outermost(words).values() for name in found):
        for member, module, word in members(name, modules[name], words):
            why = _obstacle(module, word, dims[name])
            if why is not None:
                raise TaskError(
                    f"plan: {member} cannot compute some of the positions, in {name}=sequence: {why}. Put "
                    f"{member}=whole into the plan, which gathers the positions for it, or leave {name}=sequence out"
                )


def _obstacle(module: nn.Module, word: str, dim: int) -> str | None:
    kind = type(module)
    if word in ("between", "whole"):
        return None
    if word == "vocabulary" or (word in ("colwise", "rowwise") and isinstance(module, CONVOLUTIONS)):
        return f"it is a {kind.__name__} that is {word}, which has all positions"
    if isinstance(module, nn.MultiheadAttention) and word == "heads" and module.batch_first != bool(dim):
        return f"its positions are on dimension {int(module.batch_first)}, and those of the stream on {dim}"
    if word in _TOLD or kind in (*ELEMENTWISE, *ALONE):
        return None
    if isinstance(module, AnyDropout):
        return None if kind in _DROPOUTS or not module.p else f"a {kind.__name__} drops more than elements"
    if isinstance(module, nn.MultiheadAttention):
        return "it is not divided; say =heads"
    if kind not in _HOLDING and kind.__module__.partition(".")[0] in ("torch", "evener"):
        return f"a {kind.__name__} is not known to look at each position alone"
    own = list(own_parameters(module))
    if own and next(module.children(), None) is not None:
        return f"it has a parameter {own[0]} beside modules; give that a module of its own"
    if own and word != "sequence":
        return f"nothing tells what its forward does with {own[0]}; if it looks at each position alone, say =sequence"
    return None
