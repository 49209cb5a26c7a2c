"""What the site shows besides the pages of this directory: examples, results, and files about the project.

Pages link to these files as they lie in the repository. Each becomes a page of the site, and links to it lead there.
Single words in capitals stand for tables that are made of the sources.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from charts import with_bars
from generated import errors_list, records_table, settings_table, summary_table
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples/clusters").iterdir()])
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}
TABLES = {
    "SETTINGS": settings_table,
    "ERRORS": errors_list,
    "RECORDS": records_table,
    "SUMMARY": summary_table,
}


def _page(name: str) -> str:
    """Of an example: the page that shows it."""
    return f"examples/{re.sub(r'[^a-z0-9]+', '_', name.lower())}.md"


SHOWN = {
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/HISTORY.md": "history.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}
"""Files that are pages as they are."""
PLACES = {
    **SHOWN,
    "README.md": "index.md",
    "examples": "examples.md",
    "examples/clusters": "examples.md",
    **{str(path.relative_to(ROOT)): _page(path.name) for path in EXAMPLES if path.is_file()},
}
"""Of a file or directory of the repository: its page."""
SHOWN_AS_TEXT = {"LICENSE", "benchmarks/results", "benchmarks/catalogue.toml"}
"""Files to which the site has no page: their names stay, without a link."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for place, text in _added():
        files.append(File.generated(config, place, content=text))
    return files


def _added() -> Iterator[tuple[str, str]]:
    for name, place in SHOWN.items():
        yield place, (ROOT / name).read_text()
    listed = []
    for path in filter(Path.is_file, EXAMPLES):
        place = _page(path.name)
        yield place, _shown(path)
        listed.append(f"| [`{path.relative_to(ROOT / 'examples')}`]({place}) | {_first_line(path)} |")
    yield "examples.md", "# Examples\n\n| program | |\n|---|---|\n" + "\n".join(listed) + "\n"


def _shown(path: Path) -> str:
    return f"# {path.name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"


def _first_line(path: Path) -> str:
    """What it is: the first sentence of its docstring, or of its first comment, without the command that follows."""
    text = path.read_text()
    if path.suffix == ".py":
        return " ".join(re.split(r"(?<=\.)\s", ast.get_docstring(ast.parse(text)) or "")[0].split())
    comment = re.search(r"^# ?(\w[^\n]*(?:\n# [^\n]*)*)", text, re.M)
    words = comment[1].replace("\n#", "") if comment else ""
    return re.split(r"[.:]\s", words)[0]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links out of this directory to their pages, and writes the tables that are made of the sources."""
    source = page.file.src_uri
    if source.startswith("examples/"):
        return markdown
    origin = {place: (ROOT / name).parent for name, place in SHOWN.items()}
    depth = "../" * source.count("/")

    def led(match: re.Match[str]) -> str:
        words, target, anchor = match["words"], match["target"], match["anchor"] or ""
        if re.match(r"\w+:|#", target) or (source == "examples.md"):
            return match[0]
        path = str((origin.get(source, ROOT / "docs") / target).resolve().relative_to(ROOT))
        if path in SHOWN_AS_TEXT:
            return words
        place = PLACES.get(path, path.removeprefix("docs/"))
        return f"[{words}]({depth}{place}{anchor})"

    markdown = re.sub(r"\[(?P<words>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)", led, markdown)
    markdown = with_bars(markdown)
    return re.sub(rf"^({'|'.join(TABLES)})$", lambda found: TABLES[found[1]](), markdown, flags=re.M)


def on_page_content(html: str, **_: Any) -> str:
    """Repairs what Markdown cannot say: links of names in docstrings, and tables without a head.

    Names that a docstring gives with a role, as ``:class:`Task```, lead to where the page explains them. An empty cell
    of a table's head is no head, and a head of such cells is none, for those who hear the page.
    """
    html = re.sub(r"<thead>\s*<tr>(?:\s*<th[^>]*></th>)+\s*</tr>\s*</thead>", "", html)
    html = re.sub(r"<th[^>]*></th>", '<td style="border-top: 0"></td>', html)
    places = set(re.findall(r'id="(evener\.[\w.]+)"', html))

    def led(match: re.Match[str]) -> str:
        name = match["name"].removeprefix("~")
        shown = name.rsplit(".", 1)[-1] if match["name"] != name else name
        place = next((each for each in (name, f"evener.{name}") if each in places), None)
        code = f"<code>{shown}</code>"
        return f'<a href="#{place}">{code}</a>' if place else code

    return re.sub(r":(?:class|func|meth|mod|attr|data|exc):<code>(?P<name>[^<]+)</code>", led, html)
