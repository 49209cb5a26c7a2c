"""The plan of the house, held by the syntax trees: who may import whom, what is public, and how long things are."""

from __future__ import annotations

import ast
import builtins
import graphlib
import io
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

import evener

ROOT = Path(next(iter(evener.__path__)))
COLUMNS = (
    ("borrowed",),
    (
        *(
            "version",
            "errors",
            "texts",
            "files",
            "phase_marks",
            "spelling",
            "system",
            "streams",
            "calling",
            "types",
            "short_names",
            "plugins",
            "placement",
            "intervals",
        ),
        *(
            "halves",
            "sizes",
            "budgets",
            "offload",
            "ranges",
            "settings_checks",
            "settings_help",
            "config",
            "settings",
            "records",
            "observer",
            "losses",
            "given",
            "task",
        ),
    ),
    ("hardware", "memory"),
    ("runtime",),
    ("collectives", "balance", "data", "nn"),
    ("strategies", "tasks"),
    (
        *(
            "checkpoint",
            "weights",
            "step",
            "skipping",
            "same_data",
            "evaluation_options",
            "evaluation",
            "progress",
            "telling",
            "rounding",
        ),
        *(
            "ledger",
            "by_hand",
            "describing",
            "equality",
            "guard",
            "replicas",
            "assembly",
            "unlike",
            "shortage",
            "readers",
            "feed",
        ),
        *("overriding", "run_state", "recomputing", "engine"),
        *("report", "rundir", "origin", "outputs", "observers"),
    ),
    (
        "surveying",
        "saving",
        "stopping",
        "tally",
        "returning",
        "generators",
        "inheritance",
        "attendant",
        "running",
        "elastic",
        "fitting",
        "applying",
        "estimation",
        "verification",
        "benching",
        "testing",
        "prepared",
        "integrations",
    ),
    ("cli", "__main__"),
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
    assert {name.split(".")[1] for name in MODULES if "." in name} == PLACES.keys()


def test_the_design_shows_every_package() -> None:
    design = (Path(__file__).parents[1] / "docs/design.md").read_text()
    packages = [path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()]
    assert not [name for name in packages if f"`{name}`" not in design]


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
    assert set(evener._HOMES) == {*evener.__all__, "print"} - {"nn"}
    assert not set(evener.__all__) & set(vars(builtins)), (
        "`from evener import *` replaces nothing of Python's"
    )


# Private names of others

WORDS_OF_PYTHON = {"_replace", "_make", "_asdict", "_fields", "_exit", "_current_frames"}
"""Names that begin with an underscore and are documented: of named tuples, of ``os`` and ``sys``."""


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a module defines: functions, classes, variables, and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) in ("self", "cls") else []


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Attributes and imports that begin with one underscore, and what is looked up by such a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            of_path = [part for part in (node.module or "").split(".") if private(part)]
            yield from ((node.lineno, name) for name in (*of_path, *(alias.name for alias in node.names)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            found = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, name) for name in found if isinstance(name, str))


def test_private_names_of_others_are_borrowed_in_one_place() -> None:
    own = {name for tree in MODULES.values() for name in own_names(tree)} | WORDS_OF_PYTHON
    strange = [
        f"{module}:{line} {name}"
        for module, tree in MODULES.items()
        if not module.startswith("evener.borrowed.")
        for line, name in private_names(tree)
        if private(name) and name not in own
    ]
    assert not strange, "use a public name, or give it a file in evener/borrowed with its reason and a test"


# Lengths

LONGEST_FILE, MEDIAN_FUNCTION = 400, 5


def code_lines(source: str) -> set[int]:
    """The lines that hold more than a comment."""
    idle = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in idle]
    return {line for first, last in spans for line in range(first, last + 1)}


def lengths(source: str) -> Iterator[int]:
    """Of every function, from ``def`` to its end, without docstring, blank lines and comments."""
    code = code_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            without = range(docstring.lineno, docstring.end_lineno + 1) if docstring else ()
            yield len({*range(node.lineno, node.end_lineno + 1)} & code - {*without})


def test_length_of_a_function_is_that_of_its_code() -> None:
    source = '''
def three(a,
          b):
    """A docstring
    of two lines."""

    # a comment
    return a
'''
    assert list(lengths(source)) == [3]


def test_functions_are_short() -> None:
    found = [length for path in FILES.values() for length in lengths(path.read_text())]
    median = statistics.median(found)
    assert median <= MEDIAN_FUNCTION, f"the median of {len(found)} functions has {median} lines"


def test_files_are_short() -> None:
    found = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    long = {name: length for name, length in found.items() if length > LONGEST_FILE}
    assert not long, "a file of so many lines is two ideas"
