"""What the documentation tells to run, runs.

A ``sh`` block is commands; those of the README are carried out in order, in one directory. A comment
``<!-- test: skip, REASON -->`` above a block leaves it to people. The Python blocks of a page in ``docs`` are run one
after the other as one program, but for those that name a file in their first line (``# mytask.py``): these are written,
and those among them that are called ``check_...`` are run. The commands there are carried out too, on ranks that are up
already, in a directory with the examples and the files of the page on models; before a block with a
comment ``<!-- test: after COMMAND -->`` that command, and ``<!-- test: file NAME -->`` says of a block of data where it
lies. Of commands that are skipped the command line is checked.

A block without a language right after one that is run is what it prints: its lines are among those that were printed,
in this order, but for the numbers, and for what three dots stand for.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markdown.extensions.toc import slugify

from evener.cli.main import parser
from evener.training.prepare import prepare as preparing
from tests.tiers import ALWAYS, SLOW
from tests.warm import Warm, alone_in

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MODELS = ROOT / "docs/your_model.md"
CHANGELOG = ROOT / "CHANGELOG.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- test: (?P<how>skip,|after|file) (?P<what>\S[^\n]*?) -->\n)?"
    r"^```(?P<language>sh|python|json|toml)\n(?P<text>.*?)^```$"
    r"(?:\n+^```(?:text)?\n(?P<shown>.*?)^```$)?",
    re.M | re.S,
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#([^)\s]+))?")


class Block(NamedTuple):
    language: str
    text: str
    skipped: bool
    after: str = ""
    """The command that makes what it needs."""
    file: str = ""
    """Where data lie."""
    shown: str = ""
    """What it prints."""


def blocks(page: Path) -> list[Block]:
    return [
        Block(
            match["language"],
            match["text"],
            match["how"] == "skip,",
            match["what"] if match["how"] == "after" else "",
            match["what"] if match["how"] == "file" else "",
            match["shown"] or "",
        )
        for match in BLOCK.finditer(page.read_text())
    ]


def commands(page: Path) -> list[list[str]]:
    """The command lines of a page, split into words."""
    texts = [block.text for block in blocks(page) if block.language == "sh"]
    joined = "\n".join(texts).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in joined.splitlines() if line.strip()]


def file_of(block: Block) -> str | None:
    """The file that a Python block is, by its first line."""
    name = re.match(r"# (\w+\.py)\n", block.text)
    return name[1] if name and block.language == "python" else None


def carry_out(block: Block, directory: Path) -> None:
    """Writes the file, or runs the commands."""
    if block.language == "python":
        name = file_of(block)
        assert name, f"a Python block names no file in its first line:\n{block.text}"
        (directory / name).write_text(block.text)
        return
    run(block.text, directory)


def form(line: str) -> str:
    """An expression of all lines that differ from it in numbers alone."""
    words = " ".join(line.split())
    parts = re.split(r"(\d[\d.,:]*(?:e[+-]\d+)?|\.\.\.)", words)
    return "".join(
        {"": "", "...": ".*"}.get(p, r"[\d.,:]+(?:e[+-]\d+)?" if p[:1].isdigit() else re.escape(p))
        for p in parts
    )


LONG = ("collectives", "exactness", "notebooks", "partitions")
"""Pages whose Python starts ranks of its own several times."""


def check_shown(shown: str, printed: str) -> None:
    """What a page shows is what was printed."""
    lines = iter([" ".join(line.split()) for line in re.split(r"[\r\n]+", printed)])
    for line in filter(str.strip, shown.splitlines()):
        assert any(re.fullmatch(form(line), each) for each in lines), f"not printed: {line}\n{printed}"


def run(text: str, directory: Path) -> str:
    """With this environment's own commands first on the path; returns what was printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", text]
    environment = {**os.environ, "PATH": path, "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, f"{text}{done.stdout}{done.stderr}"
    return done.stderr + done.stdout


def test_what_is_shown_and_was_not_printed_is_found_out() -> None:
    printed = "header\nstep 3 of 1,000:  1.5e-16\nkept in runs/digits-20261123\nthe end\n"
    check_shown("step 9 of 9: 2.0e+00\n...\nthe end\n", printed)
    check_shown("kept in runs/...\n", printed)
    for wrong in ("step nine\n", "the end\nheader\n", "kept in runs\n"):
        with pytest.raises(AssertionError, match="not printed"):
            check_shown(wrong, printed)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    return alone_in(tmp_path)


@pytest.mark.slow
def test_what_the_readme_says_runs(tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``evener run`` and the first ``evener train`` are whole commands, all others run on ranks that are up already."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    warm, known = Warm(tmp_path, ranks, monkeypatch), set[str]()
    whole = ("evener train", "evener run")
    for block in blocks(README):
        printed = ""
        for line in block.text.splitlines() if block.language == "sh" and not block.skipped else ():
            first = " ".join(line.split()[:2])
            if first == "evener run" or (first in whole and first not in known):
                known.add(first)
                printed += run(line, tmp_path)
            else:
                printed += warm.carry_out(line)
        if printed:
            check_shown(block.shown, printed)
    assert known == {*whole}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=SLOW if page.stem in LONG else ALWAYS) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_the_python_of_a_page_runs(
    page: Path,
    ranks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What it launches runs on ranks that are up already."""
    Warm(tmp_path, ranks, monkeypatch)
    monkeypatch.chdir(tmp_path)
    program = [b for b in blocks(page) if b.language == "python" and not b.skipped and not file_of(b)]
    text = "\n".join(b.text for b in program)
    (tmp_path / "page.py").write_text(text)
    try:
        runpy.run_path("page.py", run_name="__main__")
    finally:
        preparing.end()  # or the loops of other tests in this process would be those of the page's preparation
    check_shown("".join(b.shown for b in program), capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(file_of, blocks(page)))], ids=lambda page: page.stem
)
def test_what_a_page_writes_to_files_is_used(
    page: Path, tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extension that is shown is trained with, as the page says, and passes the checks that the page shows."""
    named = {file_of(block): block for block in blocks(page) if file_of(block)}
    for block in named.values():
        carry_out(block, tmp_path)
    free = by_themselves(page)
    uses = [b for b in blocks(page) if b.language == "sh" and not b.skipped and b not in free]
    shown = "".join(block.text for block in uses)
    checks = [f"python {name}" for name in named if name.startswith("check_") and name not in shown]
    assert uses
    warm = Warm(tmp_path, ranks, monkeypatch)
    for block in uses:
        check_shown(block.shown, warm.carry_out(block.text))
    for text in checks:
        warm.carry_out(text)


def by_themselves(page: Path) -> list[Block]:
    """Blocks of commands that use no file of the page's."""
    named = [Path(name).stem for name in map(file_of, blocks(page)) if name]
    free = [b for b in blocks(page) if b.language == "sh" and not b.skipped]
    return [b for b in free if not any(f"{name}:" in b.text or f"{name}.py" in b.text for name in named)]


@pytest.mark.slow
@pytest.mark.parametrize("page", list(filter(by_themselves, PAGES)), ids=lambda page: page.stem)
def test_what_a_page_tells_to_run_runs(
    page: Path, tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for block in blocks(MODELS):
        if file_of(block):
            carry_out(block, tmp_path)
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    warm = Warm(tmp_path, ranks, monkeypatch)
    for block in by_themselves(page):
        warm.carry_out(block.after)
        printed = ""
        for line in block.text.replace("\\\n", " ").splitlines():
            printed += run(line, tmp_path) if line.startswith("evener run") else warm.carry_out(line)
        check_shown(block.shown, printed)


PARTS = re.compile(r"^class (\w+)\((?:AllReduce|Balancer|Strategy)\):|^def (make_\w+)", re.M)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if PARTS.search(page.read_text())], ids=lambda p: p.stem
)
def test_every_part_of_a_page_is_tried(page: Path) -> None:
    """By its battery, in a file that checks, or by ``evener verify``; both are carried out by the tests above."""
    tried = [block.text for block in blocks(page) if (file_of(block) or "").startswith("check_")]
    tried += [" ".join(words) for words in commands(page) if "verify" in words]
    for found in PARTS.finditer(page.read_text()):
        name = found[1] or found[2]
        assert any(re.search(rf"\b{name}\b", text) for text in tried), (
            f"{name} is tried by nothing on this page"
        )


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_every_command_line_is_understood(page: Path) -> None:
    for words in commands(page):
        if "evener" in words:
            parser().parse_args(words[words.index("evener") + 1 :])


@pytest.mark.parametrize("page", [README, CHANGELOG, *PAGES], ids=lambda page: page.stem)
def test_commands_that_sentences_name_are_there(page: Path) -> None:
    named = set(re.findall(r"`evener ([a-z]+)(?=[\s`])", page.read_text())) - {"records"}  # how a file begins
    (choices,) = [action.choices for action in parser()._actions if action.choices]
    assert named <= set(choices)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = {link for link, _ in LINK.findall(page.read_text())}
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_every_anchor_of_the_readme_is_there() -> None:
    """Those of pages are looked at when the site is built."""
    wanted = [(link, anchor) for link, anchor in LINK.findall(README.read_text()) if anchor]
    assert wanted
    for link, anchor in wanted:
        headings = re.findall(r"^#+ (.*)$", (ROOT / link).read_text(), re.M)
        assert anchor in {slugify(heading, "-") for heading in headings}, f"{link}#{anchor}"


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_a_page_has_each_section_once(page: Path) -> None:
    headings = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    assert len(set(headings)) == len(headings)


def test_every_word_to_the_tests_is_understood() -> None:
    """A skipped block gives its reason."""
    text = "".join(page.read_text() for page in [README, *PAGES])
    assert len(re.findall(r"<!-- test:", text)) == sum(
        block.skipped or bool(block.after or block.file)
        for page in [README, *PAGES]
        for block in blocks(page)
    )
