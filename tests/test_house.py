"""The plan of the house, held by the syntax trees: who may import whom, and what is public."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import evener

ROOT = Path(next(iter(evener.__path__)))
COLUMNS = (
    ("errors", "types", "config", "records", "loss", "task"),
    ("runtime", "hardware"),
    ("collectives", "balance", "data", "nn"),
    ("strategies", "tasks"),
    ("checkpoint", "evaluation", "step", "assembly", "engine", "planner", "report"),
    ("fitting", "verification", "benching"),
    ("cli",),
)
"""Imports go to the left only; within a column a single file may import, and be imported, in the order written."""
PLACES = {name: (column, i) for column, names in enumerate(COLUMNS) for i, name in enumerate(names)}
FILES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "evener")
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "imports are absolute"
            if node.module.partition(".")[0] == "evener":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in MODULES else node.module for name in names)


def may_import(importer: str, found: str) -> bool:
    (column, place), (other_column, other_place) = PLACES[importer], PLACES[found]
    both_packages = (ROOT / importer).is_dir() and (ROOT / found).is_dir()
    return (
        importer == found
        or column > other_column
        or (column == other_column and place > other_place and not both_packages)
    )


def test_every_part_has_a_place() -> None:
    assert {name.split(".")[1] for name in MODULES if "." in name} <= PLACES.keys()


def test_imports_go_to_the_left() -> None:
    edges = {(name, found) for name, tree in MODULES.items() if name != "evener" for found in imported(tree)}
    wrong = sorted(
        (a, b) for a, b in edges if b != "evener" and not may_import(a.split(".")[1], b.split(".")[1])
    )
    assert not wrong
    assert not [a for a, b in edges if b == "evener"], "the public names are for users"


def test_no_module_imports_itself_through_others() -> None:
    graphlib.TopologicalSorter(
        {name: set(imported(tree)) - {name} for name, tree in MODULES.items() if name != "evener"}
    ).prepare()


def test_nothing_is_imported_inside_of_functions() -> None:
    lazy = [
        f"{name}:{inner.lineno}"
        for name, tree in MODULES.items()
        if name != "evener" and not name.startswith("evener.cli")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert not lazy


def test_every_module_says_why_it_exists() -> None:
    empty = [name for name, tree in MODULES.items() if tree.body and not ast.get_docstring(tree)]
    assert not empty


def test_public_names_exist_and_are_explained() -> None:
    assert evener.__all__ == sorted(evener.__all__)
    for name in evener.__all__:
        assert (getattr(evener, name).__doc__ or "").strip(), name
        assert name in dir(evener)
    assert set(evener._HOMES) == set(evener.__all__) - {"nn"}
