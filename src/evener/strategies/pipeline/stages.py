"""Divides a model's calls into stages: which calls each runs, which values cross a cut, and who uses which weight.

::

    calls      embed  arange  place  add │ blocks.0  blocks.1 │ norm  head
    stage      0                         │ 1                  │ 2               cut "blocks.0,norm"
    crosses                     add's x ─▶ ─▶   blocks.1's x ─▶

A stage is a run of consecutive calls, so that running all stages in order is the model. A value that a later stage
needs of an earlier one crosses every cut between them: stages in between pass it on. Inputs of the model cross no cut,
because all ranks of a pipeline get the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx, nn

from evener.errors import ConfigurationError, TaskError
from evener.strategies.pipeline.traced_run import TracedCalls
from evener.strategies.pipeline.tracing import Arguments, read_both
from evener.torch_internals.modules import AnyBatchNorm

NOTHING = "-"
"""Entry of a cut: a stage without layers, which hands on what it receives."""
_FREE = ("placeholder", "get_attr")
"""Kinds of graph nodes that every stage can make for itself."""
_ONCE = AnyBatchNorm
"""Modules that keep state from their calls, and must not be called on two ranks."""


def layers_of(graph: fx.Graph) -> list[str]:
    """Returns the modules that the model calls, by first call. A stage can begin at each but the first."""
    return list(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "call_module"))


def words_of(layers: Sequence[str], pieces: Sequence[range]) -> str:
    """Returns the text of the cut that gives each stage its range of ``layers``."""
    return ",".join(layers[piece.start] if piece else NOTHING for piece in pieces[1:])


@dataclass(frozen=True)
class Stage:
    """The calls of one stage."""

    calls: tuple[fx.Node, ...]
    received: tuple[fx.Node, ...]
    """Nodes whose results come from the stage before."""
    handed_on: tuple[fx.Node, ...]
    """Nodes whose results go to the next stage."""


def crossings(graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
    """Returns for each layer but the first the nodes whose results would cross a cut in front of it."""
    layers = layers_of(graph)
    found = []
    for place in range(1, len(layers)):
        begun, stage_of = set[str](), dict[fx.Node, int]()
        for node in graph.nodes:
            if node.op == "call_module":
                begun.add(str(node.target))
            if node.op not in _FREE:
                stage_of[node] = int(layers[place] in begun)
        found.append(_crossing(stage_of, 0))
    return found


def parts_batch_norm(graph: fx.Graph, model: nn.Module) -> list[bool]:
    """Returns for each layer but the first whether a cut in front of it parts the calls of a module with BatchNorm,
    which must know all of them."""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    span: dict[nn.Module, tuple[int, int]] = {}
    for place, name in enumerate(calls):
        module = model.get_submodule(name)
        span[module] = span.get(module, (place, place))[0], place
    spans = [each for module, each in span.items() if each[0] < each[1] and _keeps_state(module)]
    begins = [calls.index(layer) for layer in layers_of(graph)[1:]]
    return [any(first < begin <= last for first, last in spans) for begin in begins]


def parts_checkpoint(graph: fx.Graph) -> list[bool]:
    """Returns for each layer but the first whether a cut in front of it parts an activation checkpoint
    (``torch.utils.checkpoint``): the stage would run it again in backward, with modules of earlier stages."""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    parting = graph.parting if isinstance(graph, TracedCalls) else frozenset()
    return [calls.index(layer) in parting for layer in layers_of(graph)[1:]]


def _keeps_state(module: nn.Module) -> bool:
    return any(isinstance(inner, _ONCE) for inner in module.modules())


class Stages:
    """A model divided into stages.

    Args:
        model: Stays whole, with all of its names.
        cut: Modules at which the second and each further stage begins, separated by commas; ``-`` for a stage without
            layers.
        stages: Number of stages.
        arguments: See :func:`evener.strategies.pipeline.tracing.read_both`.
        tried: Graphs of a model whose code cannot be read (:mod:`evener.strategies.pipeline.traced_run`).

    Raises:
        ConfigurationError: If the cut names other modules, or has another number of stages.
        TaskError: If the model's code cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: str,
        stages: int,
        arguments: Arguments | None,
        tried: Mapping[bool, fx.Graph] | None = None,
    ) -> None:
        self.model, self.cut = model, cut
        names = cut.split(",") if cut else []
        if len(names) != stages - 1:
            raise ConfigurationError(
                f"cut {cut!r} begins {len(names)} stages besides the first, and there are {stages} in all: name "
                f"{stages - 1} modules, with commas between them"
            )
        graphs = tried or read_both(model, arguments, [name for name in names if name != NOTHING])
        self._modes = {training: _divided(graph, names, model) for training, graph in graphs.items()}
        self._graphs, self.is_tried = graphs, tried is not None
        self.example: Arguments = arguments or {}
        """Arguments of ``forward`` with which its code was read."""

    def __len__(self) -> int:
        return len(self._modes[True])

    def stage(self, number: int, training: bool) -> Stage:
        """Returns the calls of stage ``number``."""
        return self._modes[training][number]

    def graph(self, training: bool) -> fx.Graph:
        """Returns the graph of all calls of the model."""
        return self._graphs[training]

    def users(self) -> dict[str, set[int]]:
        """Returns the stages that use each parameter and buffer, keyed by its first name."""
        found: dict[str, set[int]] = {}
        for stages in self._modes.values():
            for number, stage in enumerate(stages):
                for name in self._used(stage):
                    found.setdefault(name, set()).add(number)
        return found

    def _used(self, stage: Stage) -> Iterator[str]:
        for node in stage.calls:
            target = str(node.target)
            if node.op == "call_module":
                yield from self._below[target]
            elif node.op == "get_attr" and target in self._tensors:
                yield self._tensors[target]

    @cached_property
    def _tensors(self) -> dict[str, str]:
        """Maps every name of a parameter or buffer to its first name."""
        first: dict[Tensor, str] = {}
        return {name: first.setdefault(tensor, name) for name, tensor in _named(self.model)}

    @cached_property
    def _below(self) -> Mapping[str, list[str]]:
        """Maps every module name to the first names of the tensors in it."""
        found: dict[str, list[str]] = {
            name: [] for name, _ in self.model.named_modules(remove_duplicate=False)
        }
        for name, first in self._tensors.items():
            parts = name.split(".")
            for length in range(len(parts)):
                found[".".join(parts[:length])].append(first)
        return found

    def check_apart(self, rank_of: Sequence[int]) -> None:
        """Raises TaskError if a module that keeps state from its calls is called on two ranks, or if a stage begins
        within an activation checkpoint."""
        self._check_checkpoints()
        callers: dict[nn.Module, dict[int, str]] = {}
        for number, stage in enumerate(self._modes[True]):
            for node in stage.calls:
                if node.op == "call_module":
                    module = self.model.get_submodule(str(node.target))
                    callers.setdefault(module, {})[rank_of[number]] = str(node.target)
        for module, names in callers.items():
            if len(names) > 1 and _keeps_state(module):
                raise TaskError(
                    f"{next(iter(names.values()))} is called on {len(names)} ranks of the pipeline, and holds "
                    "BatchNorm, which must know all of its calls: cut so that one stage has them all, or use several "
                    "modules"
                )

    def _check_checkpoints(self) -> None:
        graph, begin = self._graphs[True], 0
        for number, stage in enumerate(self._modes[True]):
            if number and isinstance(graph, TracedCalls) and begin in graph.parting:
                layers = zip(layers_of(graph)[1:], parts_checkpoint(graph), strict=True)
                whole = ", ".join(layer for layer, parts in layers if not parts) or "no module"
                raise TaskError(
                    f"stage {number} of the cut {self.cut!r} begins within an activation checkpoint of the code around "
                    "the blocks (torch.utils.checkpoint), which backward would run again with modules of earlier "
                    f"stages: a stage can begin at {whole}. Call checkpoint with one block each, without code around "
                    "it, or leave it out and use --recompute"
                )
            begin += sum(node.op == "call_module" for node in stage.calls)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _divided(graph: fx.Graph, names: Sequence[str], model: nn.Module) -> list[Stage]:
    stage_of = _stage_of(graph, names, model)
    return [_stage(graph, stage_of, number, len(names)) for number in range(len(names) + 1)]


def _stage_of(graph: fx.Graph, names: Sequence[str], model: nn.Module) -> dict[fx.Node, int]:
    """Returns the stage of each call. Inputs and reads of weights have none."""
    found: dict[fx.Node, int] = {}
    stage, left = 0, list(names)
    for node in graph.nodes:
        if node.op == "output":
            stage += _left_over(left, graph, model)
        elif node.op == "call_module":
            skipped = next((i for i, name in enumerate(left) if name != NOTHING), None)
            if skipped is not None and _is_within(str(node.target), left[skipped]):
                stage += skipped + 1
                del left[: skipped + 1]
        if node.op not in _FREE:
            found[node] = stage
    return found


def _left_over(left: Sequence[str], graph: fx.Graph, model: nn.Module) -> int:
    """Returns the number of stages without layers at the end. Raises ConfigurationError for an unknown module."""
    lost = [name for name in left if name != NOTHING]
    if lost:
        layers = layers_of(graph)
        known = any(_is_within(layer, lost[0]) for layer in layers)
        why = "comes before another that the cut names first" if known else "is none that its code calls"
        raise ConfigurationError(
            f"the cut names {lost[0]!r}, which in {type(model).__name__} {why}; a stage can begin at "
            f"{', '.join(layers[1:]) or 'none'}"
        )
    return len(left)


def _is_within(target: str, name: str) -> bool:
    return target == name or target.startswith(f"{name}.")


def _stage(graph: fx.Graph, stage_of: Mapping[fx.Node, int], number: int, last: int) -> Stage:
    own = [node for node in graph.nodes if stage_of.get(node) == number]
    read = {node for call in own for node in call.all_input_nodes if node.op == "get_attr"}
    calls = tuple(node for node in graph.nodes if node in read or stage_of.get(node) == number)
    return Stage(calls, _crossing(stage_of, number - 1), _crossing(stage_of, number) if number < last else ())


def _crossing(stage_of: Mapping[fx.Node, int], boundary: int) -> tuple[fx.Node, ...]:
    """Returns the nodes that stages up to ``boundary`` compute and later ones use."""
    return tuple(
        node
        for node, stage in stage_of.items()
        if stage <= boundary and any(stage_of[user] > boundary for user in node.users)
    )
