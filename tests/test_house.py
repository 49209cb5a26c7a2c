"""The plan of the house, held by the syntax trees: which room may import which, what is public, how long a file is."""

from __future__ import annotations

import ast
import builtins
import graphlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import evener

ROOT = Path(next(iter(evener.__path__)))
TESTS = Path(__file__).parent
FLOORS = (
    ("errors", "version", "files", "torch_internals"),
    ("core", "hardware"),
    ("distributed", "nn", "data", "balance"),
    ("components", "collectives"),
    ("strategies", "checkpoint"),
    ("training",),
    ("tools", "integrations"),
    ("cli", "testing"),
    ("__main__",),
)
"""Rooms and loose files, from the lowest floor up. What is on a floor imports from lower ones and from itself alone."""
MOST_ROOMS, MOST_LOOSE_FILES, MOST_FLOORS, LONGEST_FILE = 15, 8, 9, 400
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
BARE = {"of", "put", "take", "look", "meet", "own", "come", "gave"}
WHOLE = {"conformance", "faults", "zoo"}
"""Directories of tests that are of no single room: all strategies by all models, injected faults, public models."""
FILES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
LOOKED_AT = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef),
    *(ast.Name, ast.Attribute, ast.Call),
)
ROOMS = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of each module. It takes seconds, which only the worker that runs these tests spends."""
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in FILES.items()}


@cache
def nodes(name: str) -> list[ast.AST]:
    """All nodes of a module that a test looks at. Walking through all trees takes a second."""
    return [node for node in ast.walk(modules()[name]) if isinstance(node, LOOKED_AT)]


def imported(name: str) -> Iterator[str]:
    for node in nodes(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "evener")
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "imports are absolute"
            if node.module.partition(".")[0] == "evener":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in modules() else node.module for name in names)


@cache
def edges() -> list[tuple[str, str]]:
    """Every module with each that it imports, but for the package itself, which knows the homes of public names."""
    return [
        (name, found)
        for name in modules()
        if name != "evener"
        for found in sorted(set(imported(name)) - {name})
    ]


def place_of(module: str, depth: int) -> str:
    """The room of a module, or with ``depth`` 2 the room in it, as ``strategies.pipeline``."""
    return ".".join(module.split(".")[1 : 1 + depth])


COSTLY = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")
# Rooms and floors


def test_every_room_and_loose_file_has_a_floor() -> None:
    assert {place_of(name, 1) for name in modules() if name != "evener"} == FLOOR_OF.keys()


def test_the_house_is_small() -> None:
    loose = [path.name for path in ROOT.glob("*.py")]
    assert len(ROOMS) <= MOST_ROOMS
    assert len(loose) <= MOST_LOOSE_FILES, "a file belongs in a room"
    assert len(FLOORS) <= MOST_FLOORS


def test_the_design_shows_every_room() -> None:
    design = (TESTS.parent / "docs/design.md").read_text()
    assert not [name for name in ROOMS if f"`{name}`" not in design]


def test_imports_go_down() -> None:
    found = [(a, b) for a, b in edges() if place_of(a, 1) != place_of(b, 1)]
    assert not [a for a, b in found if b == "evener"], "the public names are for users"
    wrong = [(a, b) for a, b in found if FLOOR_OF[place_of(a, 1)] <= FLOOR_OF[place_of(b, 1)]]
    assert not wrong


def test_no_room_in_a_room_imports_itself_through_others() -> None:
    rooms = {place_of(name, 2) for name in modules() if name.count(".") >= 2}
    graph: dict[str, set[str]] = defaultdict(set)
    for a, b in edges():
        inner, other = place_of(a, 2), place_of(b, 2)
        if place_of(a, 1) == place_of(b, 1) and inner != other and other in rooms:
            graph[inner].add(other)
    graphlib.TopologicalSorter(graph).prepare()


def test_tests_mirror_the_rooms() -> None:
    """A test of a room lies in the directory of tests that has the room's path."""
    directories = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path(".")}
    strange = [str(path) for path in directories if path.parts[0] not in WHOLE and not (ROOT / path).is_dir()]
    assert not strange


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for a, b in edges():
        graph[a].add(b)
    graphlib.TopologicalSorter(graph).prepare()


def test_nothing_is_imported_inside_of_functions() -> None:
    """But what takes PyTorch a second to import, and most processes do not need."""
    lazy = [
        f"{name}:{inner.lineno}"
        for name in modules()
        if name != "evener" and not name.startswith("evener.cli")
        for node in nodes(name)
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
        if not (isinstance(inner, ast.ImportFrom) and str(inner.module).startswith(COSTLY))
    ]
    assert not lazy


def test_every_module_says_why_it_exists() -> None:
    empty = [name for name, tree in modules().items() if tree.body and not ast.get_docstring(tree)]
    assert not empty


def test_public_names_exist_and_are_explained() -> None:
    assert evener.__all__ == sorted(evener.__all__)
    for name in evener.__all__:
        assert (getattr(evener, name).__doc__ or "").strip(), name
        assert name in dir(evener)
    assert set(evener._HOMES) == {*evener.__all__, "print"} - {"nn"}
    assert not set(evener.__all__) & set(vars(builtins)), (
        "`from evener import *` replaces nothing of Python's"
    )


# Private names of others

WORDS_OF_PYTHON = {"_replace", "_make", "_asdict", "_fields", "_exit", "_current_frames"}
"""Names that begin with an underscore and are documented: of named tuples, of ``os`` and ``sys``."""


def is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def own_names(module: str) -> Iterator[str]:
    """What a module defines: functions, classes, variables, and attributes of ``self``."""
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if is_name(node.value, "self", "cls") else []


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(module: str) -> Iterator[tuple[int, str]]:
    """Attributes and imports that begin with one underscore, and what is looked up by such a name."""
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            of_path = [part for part in (node.module or "").split(".") if private(part)]
            yield from ((node.lineno, name) for name in (*of_path, *(alias.name for alias in node.names)))
        elif isinstance(node, ast.Call) and is_name(node.func, "getattr", "hasattr", "setattr"):
            found = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, name) for name in found if isinstance(name, str))


def test_private_names_of_others_are_borrowed_in_one_place() -> None:
    own = {name for module in modules() for name in own_names(module)} | WORDS_OF_PYTHON
    strange = [
        f"{module}:{line} {name}"
        for module in modules()
        if not module.startswith("evener.torch_internals.")
        for line, name in private_names(module)
        if private(name) and name not in own
    ]
    assert not strange, (
        "use a public name, or give it a place in evener/torch_internals with its reason and a test"
    )


# Names


def test_no_class_name_is_there_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for name in modules():
        for node in nodes(name):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_names_of_functions_have_a_noun() -> None:
    """Whoever reads a call of ``of`` or ``take`` has to look up what it gives."""
    bare = [
        f"{name}:{node.lineno} {node.name}"
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.FunctionDef) and node.name in BARE
    ]
    assert not bare


# Lengths


def test_files_are_short() -> None:
    found = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    long = {name: length for name, length in found.items() if length > LONGEST_FILE}
    assert not long, "a file of so many lines is two ideas"
