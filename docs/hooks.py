"""What the site shows besides the pages of this directory: the README, the examples and the results of benchmarks.

Pages link to these files as they lie in the repository. Each becomes a page of the site, and links to it lead there.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from evener.core.config.run_config import RunConfig

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples/clusters").iterdir()])
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}


def _page(name: str) -> str:
    """Of an example: the page that shows it."""
    return f"examples/{re.sub(r'[^a-z0-9]+', '_', name.lower())}.md"


PLACES = {
    "README.md": "index.md",
    "benchmarks/RESULTS.md": "results.md",
    "examples": "examples.md",
    "examples/clusters": "examples.md",
    **{str(path.relative_to(ROOT)): _page(path.name) for path in EXAMPLES if path.is_file()},
}
"""Of a file or directory of the repository: its page."""
SHOWN_AS_TEXT = {"LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
"""Files to which the site has no page: their names stay, without a link."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for place, text in _added():
        files.append(File.generated(config, place, content=text))
    return files


def _added() -> Iterator[tuple[str, str]]:
    yield "index.md", (ROOT / "README.md").read_text()
    yield "results.md", (ROOT / "benchmarks/RESULTS.md").read_text()
    listed = []
    for path in EXAMPLES:
        if path.is_file():
            place = _page(path.name)
            yield place, _shown(path)
            listed.append(f"- [`{path.relative_to(ROOT / 'examples')}`]({place}): {_first_line(path)}")
    yield "examples.md", "# Examples\n\n" + "\n".join(listed) + "\n"


def _shown(path: Path) -> str:
    return f"# {path.name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"


def _first_line(path: Path) -> str:
    """What it is: the first sentence of its docstring or of its first comment."""
    text = path.read_text()
    words = ast.get_docstring(ast.parse(text)) if path.suffix == ".py" else None
    lines = (words or "\n".join(re.findall(r"^# ?(.*)$", text, re.M))).split("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(lines.split()))[0]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links out of this directory to their pages, and writes the table of settings."""
    source = page.file.src_uri
    markdown = re.sub(r"^SETTINGS$", lambda _: _settings(), markdown, flags=re.M)
    if source.startswith("examples/"):
        return markdown
    origin = {"index.md": ROOT, "results.md": ROOT / "benchmarks"}.get(source, ROOT / "docs")
    depth = "../" * source.count("/")

    def led(match: re.Match[str]) -> str:
        words, target, anchor = match["words"], match["target"], match["anchor"] or ""
        if re.match(r"\w+:|#", target) or (source == "examples.md"):
            return match[0]
        path = str((origin / target).resolve().relative_to(ROOT))
        if path in SHOWN_AS_TEXT:
            return words
        place = PLACES.get(path, path.removeprefix("docs/"))
        return f"[{words}]({depth}{place}{anchor})"

    return re.sub(r"\[(?P<words>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)", led, markdown)


def _settings() -> str:
    """A table of all settings, from the record of them."""
    lines = ["| setting | default | |", "|---|---|---|"]
    for field in dataclasses.fields(RunConfig):
        words = field.metadata["help"].replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{field.default!r}` | {words} |")
    return "\n".join(lines)


def on_page_content(html: str, **_: Any) -> str:
    """Names that a docstring gives with a role, as ``:class:`Task```, lead to where the page explains them."""
    places = set(re.findall(r'id="(evener\.[\w.]+)"', html))

    def led(match: re.Match[str]) -> str:
        name = match["name"].removeprefix("~")
        shown = name.rsplit(".", 1)[-1] if match["name"] != name else name
        place = next((each for each in (name, f"evener.{name}") if each in places), None)
        code = f"<code>{shown}</code>"
        return f'<a href="#{place}">{code}</a>' if place else code

    return re.sub(r":(?:class|func|meth|mod|attr|data|exc):<code>(?P<name>[^<]+)</code>", led, html)
