"""Tables of the site that are made of the sources: settings, errors, records and the summary.

Messages and fields are read from the syntax tree, which also has the strings below the fields of a data class.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from evener.core.config.help_text import GROUPS
from evener.core.config.run_config import RunConfig

SOURCES = Path(__file__).parents[1] / "src/evener"


def settings_table() -> str:
    """All settings in the groups of ``--help``, each with its default and its full help text."""
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    parts = []
    for title, names in GROUPS.items():
        rows = [
            f"| `{name}` | {_code(repr(fields[name].default))} | {_cell(fields[name].metadata['help'])} |"
            for name in names
        ]
        parts.append(
            "\n".join(
                [
                    f"## {title[0].upper() + title[1:]}",
                    "",
                    "| setting | default | meaning |",
                    "|---|---|---|",
                    *rows,
                ]
            )
        )
    return "\n\n".join(parts)


def errors_list() -> str:
    """The messages of each class of errors, as they stand in the sources."""
    tree = _tree("errors.py")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = messages({node.name for node in classes})
    drawn = re.search(r"::\n\n((?:    .*\n)+)", _doc(tree))
    parts = ["```text", textwrap.dedent(drawn[1] if drawn else "").rstrip(), "```"]
    for node in classes:
        listed = "\n".join(f"<li>{html.escape(each)}</li>" for each in sorted(found[node.name], key=_place))
        parts += ["", f"## {node.name}", "", _plain(_doc(node)), ""]
        parts += [f"<ul>\n{listed}\n</ul>", ""] if listed else []
    return "\n".join(parts)


def messages(classes: set[str]) -> dict[str, set[str]]:
    """The messages with which the sources make errors of these classes; ``...`` stands for what differs."""
    found = defaultdict(set)
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                text = " ".join(_words(node.args[0]).split()) if node.args else ""
                if sum(map(str.isalpha, text)) > 3:
                    found[node.func.id].add(text)
    return found


def _place(message: str) -> str:
    """Where a message stands among others: by its first word, without signs and values before it."""
    return message.lstrip("-. ").lower()


def records_table() -> str:
    """The lines of ``records.jsonl``: the fields of each kind."""
    parts = []
    for path in ("core/records.py", "balance/base.py"):
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and (kind := _kind(node)):
                parts.append(
                    f'### `"kind": "{kind}"` ({node.name})\n\n{_plain(_doc(node))}\n\n{_fields(node)}'
                )
    return "\n\n".join(parts)


def summary_table() -> str:
    """The fields of ``summary.json``."""
    return _fields(_class("core/records.py", "RunSummary"))


def _tree(path: str) -> ast.Module:
    return ast.parse((SOURCES / path).read_text())


def _class(path: str, name: str) -> ast.ClassDef:
    return next(node for node in _tree(path).body if isinstance(node, ast.ClassDef) and node.name == name)


def _doc(node: ast.Module | ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def _words(node: ast.expr) -> str:
    """A string as it stands in the sources, with ``...`` for what is put into it."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(map(_words, parts))
        case ast.BinOp(left, ast.Add(), right):
            return _words(left) + _words(right)
    return "..."


def _kind(node: ast.ClassDef) -> str | None:
    fields = (line for line in node.body if isinstance(line, ast.AnnAssign) and line.target.id == "kind")
    return next(
        (ast.literal_eval(line.value) for line in fields if "ClassVar" in ast.unparse(line.annotation)), None
    )


def _fields(node: ast.ClassDef) -> str:
    """A table of a data class's fields, with the strings below them."""
    rows = [
        f"| `{field.target.id}` | {_code(ast.unparse(field.annotation))} | {_cell(_plain(text))} |"
        for field, text in _explained(node)
        if "ClassVar" not in ast.unparse(field.annotation)
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _explained(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    for line, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign):
            text = following.value if isinstance(following, ast.Expr) else None
            yield line, text.value if isinstance(text, ast.Constant) else ""


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
