"""The pages that are read by looking something up: what they quote is what the code says."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

import evener.balance
import evener.checkpoint
import evener.core.records
import evener.errors
import evener.hardware.memory
import evener.nn
import evener.strategies
import evener.testing
from evener.core.config.run_config import RunConfig
from evener.core.records import RunSummary, StepRecord

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


def imported_by_users() -> set[str]:
    """What README, pages and examples import from Evener's packages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    programs = [
        text for page in pages for text in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    programs += [path.read_text() for path in (ROOT / "examples").rglob("*.py")]
    nodes = [
        node for text in programs for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)
    ]
    own = [node for node in nodes if (node.module or "").startswith("evener.")]
    found = {f"{node.module}.{alias.name}" for node in own for alias in node.names}
    modules = {name for name in found if (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").is_file()}
    return found - modules


def test_the_reference_has_what_users_import() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("api*.md"))
    entries = set(re.findall(r"^::: (\S+)$", pages, re.M))
    assert {"evener.testing", "evener.errors"} <= entries, "whose names are listed with them"
    covered = [
        pkgutil.resolve_name(name)
        for name in (
            *entries,
            *(f"evener.testing.{name}" for name in evener.testing.__all__),
            "evener.errors.EvenerError",
        )
    ]
    packages = (evener.strategies, evener.balance, evener.nn, evener.checkpoint, evener.hardware.memory)
    public = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    public |= {f"evener.{name}" for name in {*evener.__all__, "print"} - {"nn"}}
    wanted = {name: pkgutil.resolve_name(name) for name in public | imported_by_users()}
    missing = [name for name, value in wanted.items() if not any(value is each for each in covered)]
    assert not [name for name in missing if not isinstance(wanted[name], str | int)]


@pytest.mark.parametrize(
    "picture", sorted((ROOT / "docs/pictures").glob("*.svg")), ids=lambda path: path.stem
)
def test_a_picture_is_shown_and_says_what_it_shows(picture: Path) -> None:
    drawn = ElementTree.parse(picture).getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = [
        found
        for page in pages
        for found in re.findall(rf"!\[([^]]*)\]\(\S*{picture.name}\)", page.read_text())
    ]
    assert shown
    assert all(len(words) > 20 for words in shown), "for those who hear the page"


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


GENERATED = runpy.run_path(str(ROOT / "docs/generated.py"))


def test_the_benchmarks_at_a_glance_are_those_of_the_results() -> None:
    """Each number of the page's tables, and each that its text gives, stands in the results."""
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    page = (ROOT / "docs/benchmarks.md").read_text()
    numbers = set(re.findall(r"(?<![\d.-])\d+\.\d+(?![\d.])", page))
    assert len(numbers) > 40
    assert not [number for number in numbers if not re.search(rf"(?<![\d.]){number}0?(?!\d)", results)]


def test_bars_are_as_long_as_their_numbers() -> None:
    charts = runpy.run_path(str(ROOT / "docs/charts.py"))
    table = "| | a | b |\n|---|---|---|\n| `x` < 1 | 1,000.0 | 4,000.0 |\n| y | 2,000.0 | - |\n"
    drawn = charts["bars"](table).removeprefix("<div>").removesuffix("</div>")
    picture = ElementTree.fromstring(drawn)
    bars = [float(bar.get("width", "")) for bar in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert bars[2:] == [95.0, 380.0, 190.0, 0.0], "after those that say which is which"
    assert [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")][2] == "x < 1"


def test_bars_are_drawn_of_the_records_when_the_site_is_built() -> None:
    with_bars = runpy.run_path(str(ROOT / "docs/charts.py"))["with_bars"]
    page = (ROOT / "docs/benchmarks.md").read_text()
    built = with_bars(page)
    assert built.count("<svg ") == page.count("<!-- bars: ")
    assert "<!-- bars: " not in built
    stale = re.sub(r"\| \d+\.\d\d \|", "| 9.99 |", page)
    assert with_bars(stale).count("9.99") == 0, "tables are of the records, too"
    assert with_bars("no bars\n") == "no bars\n"


def test_every_setting_is_on_the_page_of_settings() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `(.+?)` \| \S", GENERATED["settings_table"](), re.M)
    assert dict(listed) == {field.name: repr(field.default) for field in dataclasses.fields(RunConfig)}


def test_every_error_is_on_the_page_of_errors() -> None:
    page = GENERATED["errors_list"]()
    classes = [name for name, value in vars(evener.errors).items() if isinstance(value, type)]
    assert set(re.findall(r"^## (\w+)$", page, re.M)) == {*classes}
    assert page.count("<li>") > 800


def test_messages_are_read_from_every_way_to_write_them() -> None:
    words = GENERATED["_words"]
    for written, read in {
        "f'rank {rank} of ' f'{ranks}'": "rank ... of ...",
        "'a ' + name + ' b'": "a ... b",
        "text": "...",
        "'it is ' 'so'": "it is so",
    }.items():
        assert words(ast.parse(written, mode="eval").body) == read


def test_every_kind_of_record_is_on_the_page_of_files() -> None:
    page = GENERATED["records_table"]()
    known = [*vars(evener.core.records).values(), *vars(evener.balance).values()]
    kinds = {found.kind for found in known if isinstance(found, type) and hasattr(found, "kind")}
    assert "decision" in kinds
    assert set(re.findall(r'"kind": "(\w+)"', page)) == kinds
    fields = [field.name for field in dataclasses.fields(StepRecord)]
    assert all(f"| `{name}` |" in page for name in fields)
    summary = re.findall(r"^\| `(\w+)` \| `.+` \| .", GENERATED["summary_table"](), re.M)
    assert summary == [field.name for field in dataclasses.fields(RunSummary)]
