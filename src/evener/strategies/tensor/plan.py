"""Plans: which modules are divided over ranks that compute the same samples, and how; given by the user, or derived.

A plan gives modules, by name, a word::

    colwise        makes some of its features, or channels            blocks.0.up=colwise
    rowwise        reads some of its features, and ends the region    blocks.0.down=rowwise
    between        sees some of the features: BatchNorm, dropout      blocks.0.norm=between
    whole          sees all of them, though it stands beside          blocks.0.drop=whole
    heads          an nn.MultiheadAttention, by its heads             blocks.0.attention=heads
    vocabulary     an embedding, or the scores of an output layer     embed=vocabulary
    sequence       computes some of the positions, with all in it     blocks=sequence

The words are those of DTensor's plans. ``colwise:8`` keeps runs of 8 features together, such as the heads of a
projection. ``colwise:8:3`` cuts three blocks of rows alike, as in a fused projection to queries, keys and values.

A plan is derived only from proofs: the structure of the model, a recording of its forward, or a trial on the first
samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from evener.components.checks.embeddings import EMBEDDINGS
from evener.errors import ConfigurationError, TaskError
from evener.nn.fqn import clean_name
from evener.nn.tensor_parallel_conv1d import is_transposed
from evener.strategies.tensor.candidates import TriedRegion
from evener.strategies.tensor.regions import (
    CONVOLUTIONS,
    RECURRENT,
    Region,
    features,
    in_sequence,
    is_sequence,
    is_told,
    obstacle,
    obstacle_of_heads,
    of_transformer,
    width,
)
from evener.strategies.tensor.sequence_streams import check_streams, derived_streams, is_within
from evener.strategies.tensor.trace import traced
from evener.torch_internals.modules import AnyBatchNorm, AnyDropout, own_parameters

WORDS = ("colwise", "rowwise", "between", "whole", "heads", "vocabulary", "sequence")
_NUMBERS = {"colwise": 2, "rowwise": 1, "sequence": 1}
"""Most numbers that each word may have."""


@dataclass(frozen=True)
class LayerPlan:
    """Plan for one module."""

    word: str
    unit: int = 1
    """Number of features that stay together."""
    blocks: int = 1
    """Number of blocks of rows that are cut alike."""
    length: int = 0
    """For ``between``: number of features in all."""
    dim: int = -1
    """For ``between``: dimension of the features, from the end. For ``sequence``: dimension of the positions."""

    def __str__(self) -> str:
        if self.word == "sequence":
            return self.word if self.dim == 1 else f"{self.word}:{self.dim}"
        numbers = [self.unit, self.blocks] if self.blocks > 1 else [self.unit] if self.unit > 1 else []
        return ":".join([self.word, *map(str, numbers if self.word in ("colwise", "rowwise") else [])])


@dataclass(frozen=True)
class TensorPlan:
    """Plans of the divided modules of a model, by name."""

    uses: Mapping[str, LayerPlan]
    regions: tuple[TriedRegion, ...] = ()
    """Regions of the plan that a trial found."""

    @property
    def words(self) -> dict[str, str]:
        """Word of each module."""
        return {name: use.word for name, use in self.uses.items()}

    def __str__(self) -> str:
        """Returns the plan as the user would write it."""
        return ",".join(f"{name}={use}" for name, use in self.uses.items())

    def describe(self) -> str:
        """Returns the plan as text, a line for each module."""
        longest = max(map(len, self.uses), default=0)
        return "\n".join(f"  {name:{longest}}  {use}" for name, use in self.uses.items())


def plan_of(
    model: nn.Module,
    plan: str | None = None,
    sequence: bool = False,
    output: str | None = None,
    tried: Sequence[TriedRegion] = (),
) -> TensorPlan:
    """Returns how the strategy ``tensor`` divides a model, in the order of its modules.

    Args:
        model: May be on the meta device; it stays unchanged.
        plan: ``NAME=WORD,NAME=WORD``. Names are patterns as for files: ``*`` matches anything. The last match counts.
            The
            entry ``auto`` stands for the derived plan. None derives the plan.
        sequence: Whether to derive also which modules compute only some of the positions.
        output: Linear layer that makes the scores of a loss; its division by scores is derived.
        tried: Further regions, found by a trial.

    Raises:
        TaskError: If there is nothing to divide, or a module cannot be divided as planned; the message names it.
        ConfigurationError: If the plan cannot be read, or a pattern matches no module.
    """
    modules = {clean_name(name): module for name, module in model.named_modules()}
    derived = derived_of(model)
    for region in tried:
        derived |= _uses_of(region)
    if output is not None and output not in derived and _has_words(modules[output], _shared(model)):
        derived[output] = LayerPlan("vocabulary")
    if plan is None:
        _check_found(model, derived)
    if sequence:
        derived |= _streams(model, modules, derived, plan)
    uses = _given("auto" if plan is None else plan, modules, derived)
    for name, use in uses.items():
        _check_use(name, use, modules[name])
    kept = tuple(region for region in tried if _uses_of(region).items() <= uses.items())
    found = TensorPlan(_with_between(uses, derived, modules), kept)
    check_streams(modules, found.words, {name: use.dim for name, use in found.uses.items()})
    return found


# Plans that the user gives


def _given(
    plan: str, modules: Mapping[str, nn.Module], derived: Mapping[str, LayerPlan]
) -> dict[str, LayerPlan]:
    found: dict[str, LayerPlan] = {}
    for entry in filter(None, (part.strip() for part in plan.split(","))):
        if entry == "auto":
            found |= derived
            continue
        pattern, _, words = (part.strip() for part in entry.partition("="))
        use = _use(entry, words)
        matching = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not matching:
            there = ", ".join(name for name, module in modules.items() if own_parameters(module) and name)
            raise ConfigurationError(
                f"plan: {pattern!r} fits no module of the model; with parameters of their own there are {there}"
            )
        found |= dict.fromkeys(matching, use)
    if not any(use.word in ("rowwise", "heads", "vocabulary") for use in found.values()):
        raise ConfigurationError(
            f"plan {plan!r} divides nothing to its end: a region of colwise layers ends with a rowwise one"
        )
    return {name: found[name] for name in modules if name in found}


def _use(entry: str, words: str) -> LayerPlan:
    word, *numbers = words.split(":")
    fits = word in WORDS and len(numbers) <= _NUMBERS.get(word, 0)
    if not fits or not all(n.isdecimal() and (int(n) > 0 or word == "sequence") for n in numbers):
        raise ConfigurationError(
            f"plan: {entry!r} is not NAME=WORD with one of the words {', '.join(WORDS)}, or colwise:UNIT, "
            "colwise:UNIT:BLOCKS, rowwise:UNIT or sequence:DIM"
        )
    if word == "sequence":
        return LayerPlan(word, dim=int(numbers[0]) if numbers else 1)
    return LayerPlan(word, *map(int, numbers))


def _check_use(name: str, use: LayerPlan, module: nn.Module) -> None:
    wanted: dict[str, tuple[type, ...]] = {
        "colwise": (nn.Linear, *CONVOLUTIONS),
        "rowwise": (nn.Linear, *CONVOLUTIONS),
        "vocabulary": (nn.Linear, *EMBEDDINGS),
        "heads": (nn.MultiheadAttention,),
        "between": (AnyBatchNorm, AnyDropout),
        "whole": (nn.Module,),
        "sequence": (nn.Module,),
    }
    kind = type(module).__name__
    if isinstance(module, RECURRENT) and use.word not in ("whole", "sequence"):
        raise TaskError(f"plan: {name} cannot be divided: {obstacle(module)}; leave it out of the plan")
    transposed = use.word in ("colwise", "rowwise") and is_transposed(module)
    if not isinstance(module, wanted[use.word]) and not transposed:
        kinds = ", ".join(each.__name__.removeprefix("_") for each in wanted[use.word])
        raise TaskError(f"plan: {name} is a {kind}, and {use.word} is for {kinds}")
    if use.word in ("colwise", "rowwise", "vocabulary") and (why := obstacle(module)):
        raise TaskError(f"plan: {name} cannot be divided: {why}; leave it out of the plan")
    if use.word == "heads" and (why := obstacle_of_heads(module)):
        raise TaskError(f"plan: {name} cannot be divided: {why}; leave it out of the plan")
    if use.word == "between" and not is_told(module):
        raise TaskError(f"plan: {name} is a {kind}, which cannot be told that it sees a part of the features")
    if use.word in ("colwise", "rowwise"):
        length = width(module)[use.word == "colwise"]
        if length % (use.unit * use.blocks):
            raise TaskError(
                f"plan: {name} has {length} features, which are not {use.blocks} blocks of whole runs of {use.unit}"
            )


def _with_between(
    uses: Mapping[str, LayerPlan], derived: Mapping[str, LayerPlan], modules: Mapping[str, nn.Module]
) -> dict[str, LayerPlan]:
    """Adds plans of modules beside colwise layers, which see some or all features. Raises TaskError for a dropout if
    neither the user nor the derivation tells which."""
    found = dict(uses)
    for parent in {_parent(name) for name, use in uses.items() if use.word == "colwise"}:
        made = {name: use for name, use in uses.items() if use.word == "colwise" and _parent(name) == parent}
        seen = {_seen(modules[name], use) for name, use in made.items()}
        known = all(name in derived for name in made)
        for name in (name for name in modules if not parent or name.startswith(f"{parent}.")):
            proved = derived.get(name, LayerPlan("whole"))
            told = uses.get(name) or (proved if known else None)
            if told is not None and told.word == "between":
                found[name] = proved if proved.word == "between" else _only(name, seen)
            elif told is None and _drops(modules[name]):
                raise TaskError(
                    f"plan: {name} drops, and nothing tells whether it sees the part of the features that a rank has "
                    f"of {' or '.join(made)}, or all of them: say {name}=between, {name}=whole or {name}=sequence"
                )
    strange = [name for name, use in found.items() if use.word == "between" and not use.length]
    if strange:
        raise TaskError(f"plan: {strange[0]} is between, and no layer beside it is colwise")
    streams = [name for name, use in found.items() if use.word == "sequence"]
    silent = {name for name, use in found.items() if use.word == "whole" and not is_within(name, streams)}
    return {name: found[name] for name in modules if name in found.keys() - silent}


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _drops(module: nn.Module) -> bool:
    return isinstance(module, AnyDropout) and module.p > 0


def _seen(column: nn.Module, use: LayerPlan) -> LayerPlan:
    """Returns the plan of a module that sees the features of a colwise layer."""
    return LayerPlan("between", use.unit, length=width(column)[1] // use.blocks, dim=features(column))


def _only(name: str, seen: set[LayerPlan]) -> LayerPlan:
    if len(seen) > 1:
        raise TaskError(
            f"plan: {name} is between, and the colwise layers beside it make several numbers of features: "
            f"{', '.join(sorted(str(use.length) for use in seen))}"
        )
    return next(iter(seen))


# Derived plans


def derived_of(model: nn.Module) -> dict[str, LayerPlan]:
    """Returns the plan that follows from the model's structure and the recordings of its forward."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    names = {module: name for name, module in modules.items()}
    shared = _shared(model)
    found: dict[str, LayerPlan] = {}
    for name, module in modules.items():
        if not obstacle_of_heads(module) and not shared & set(module.parameters()):
            found[name] = LayerPlan("heads")
    for region in _regions(modules):
        weights = {p for layer in (*region.columns, region.row) for p in layer.parameters()}
        used = {names[module] for module in (*region.columns, *region.between, region.row)}
        if not weights & shared and not used & found.keys():
            found |= {names[module]: use for module, use in _uses(region)}
    return found | {name: LayerPlan("vocabulary") for name in _vocabulary(modules) if name not in found}


def _uses_of(region: TriedRegion) -> dict[str, LayerPlan]:
    guess = region.guess
    found = {column.name: LayerPlan("colwise", column.unit, column.blocks) for column in guess.columns}
    drops = {
        name: LayerPlan("between", length // guess.runs, length=length, dim=dim)
        for name, dim, length in region.drops
    }
    return {**found, **drops, guess.row: LayerPlan("rowwise", guess.unit)}


def _streams(
    model: nn.Module, modules: Mapping[str, nn.Module], derived: Mapping[str, LayerPlan], plan: str | None
) -> dict[str, LayerPlan]:
    if plan is not None and "auto" not in (entry.strip() for entry in plan.split(",")):
        raise ConfigurationError(
            f"sequence=True adds to what is derived, and plan {plan!r} has no auto: put that into it, or say "
            "NAME=sequence"
        )
    found = derived_streams(modules, {name: use.word for name, use in derived.items()})
    if not found:
        raise TaskError(
            f"sequence=True: {type(model).__name__} has none of PyTorch's transformer layers with divided attention, "
            "and no norm or dropout in an nn.Sequential beside divided layers: say plan='auto,NAME=sequence' for "
            "modules from (samples, positions, features) to the same, or leave sequence out"
        )
    return {name: LayerPlan("sequence", dim=dim) for name, dim in found.items()}


def _shared(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that have several names."""
    seen: set[nn.Parameter] = set()
    return {p for _, p in model.named_parameters(remove_duplicate=False) if p in seen or seen.add(p)}  # type: ignore[func-returns-value]


def _regions(modules: Mapping[str, nn.Module]) -> Iterator[Region]:
    inner = {child for module in modules.values() if is_sequence(module) for child in module.children()}
    for module in modules.values():
        if isinstance(module, nn.Sequential) and is_sequence(module):
            yield from in_sequence(module) if module not in inner else ()
        elif type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            yield from of_transformer(module)  # type: ignore[arg-type]
        elif not isinstance(module, nn.MultiheadAttention):
            yield from traced(module)


def _uses(region: Region) -> Iterator[tuple[nn.Module, LayerPlan]]:
    length, dim = width(region.row)[0], features(region.row)
    yield from ((column, LayerPlan("colwise")) for column in region.columns)
    yield from ((module, LayerPlan("between", length=length, dim=dim)) for module in region.between)
    yield region.row, LayerPlan("rowwise")


def _vocabulary(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields embeddings of more words than features, and the output layers that share their weight."""
    holders: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for parameter in own_parameters(module).values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(name)
    for names in holders.values():
        kinds = [modules[name] for name in names]
        large = any(
            isinstance(kind, EMBEDDINGS) and kind.num_embeddings > kind.embedding_dim for kind in kinds
        )
        whole = all(isinstance(kind, (nn.Linear, *EMBEDDINGS)) and not obstacle(kind) for kind in kinds)
        beside = {
            name
            for kind in kinds
            for p in own_parameters(kind).values()
            if p is not None
            for name in holders[p]
        }
        if large and whole and beside <= set(names):
            yield from names


def _has_words(layer: nn.Module, shared: set[nn.Parameter]) -> bool:
    """Returns True if an output layer has more scores than features, can be divided, and shares no parameter."""
    return not obstacle(layer) and width(layer)[1] > width(layer)[0] and not shared & set(layer.parameters())


def _check_found(model: nn.Module, found: Mapping[str, LayerPlan]) -> None:
    if not found:
        raise TaskError(
            f"strategy 'tensor' looked in {type(model).__name__} for pairs of linear layers or convolutions with only "
            "elementwise functions between, nn.MultiheadAttention, PyTorch's transformer layers, and embeddings of "
            "more words than features, tried others on the first samples, and found none: say what is divided by "
            "plan='NAME=colwise,NAME=rowwise', or use strategy 'ddp'"
        )
