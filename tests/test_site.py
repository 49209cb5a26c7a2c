"""The pages that are read by looking something up: what they quote is what the code says."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import evener

ROOT = Path(__file__).parents[1]
SOURCES = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")))
"""With strings that go over several lines put together."""
QUOTED = re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)


def test_there_is_something_to_look_up() -> None:
    assert len(QUOTED) > 10


@pytest.mark.parametrize("quoted", QUOTED)
def test_an_error_of_troubleshooting_is_one_of_the_code(quoted: str) -> None:
    for part in quoted.split("..."):
        assert part.strip(" ,") in SOURCES


def test_words_of_the_glossary_are_in_order() -> None:
    words = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), re.M)[2:]
    assert len(words) > 20
    assert words == sorted(words, key=str.lower)


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= listed


@pytest.mark.parametrize("name", sorted(set(evener.__all__) - {"nn"}))
def test_what_is_public_is_explained(name: str) -> None:
    value = getattr(evener, name)
    assert inspect.getdoc(value), name
    if dataclasses.is_dataclass(value):
        source = inspect.getsource(value)
        listed = inspect.getdoc(value) or ""
        for field in dataclasses.fields(value):
            explained = re.search(
                rf'^    {field.name}: [^\n]*(?:\n(?!    \w+:)[^\n]*)*?\n    """', source, re.M
            )
            metadata = field.metadata.get("help")
            assert explained or metadata or re.search(rf"^\s*{field.name}\b", listed, re.M), (
                f"{name}.{field.name}"
            )
