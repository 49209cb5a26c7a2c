"""What people and tools read of the project, held to what is true of it."""

from __future__ import annotations

import pkgutil
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PAGES = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md"]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_version_is_one() -> None:
    assert read("CITATION.cff")["version"] == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_of_an_index_has_no_link_that_leads_nowhere() -> None:
    for_an_index = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["for_an_index"]
    readme = (ROOT / "README.md").read_text()
    shown = for_an_index(readme)
    assert re.findall(r"\]\((?!https?:|#)", readme)
    assert not re.findall(r"\]\((?!https?:|#)|<!--", shown)
    assert shown.count("```") == readme.count("```")
    given = (
        "A [page](docs/a.md), [one](https://a.b), [here](#c).\n\n![p](p.svg)\n\n<!-- test: skip -->\nEnd\n"
    )
    assert for_an_index(given) == "A page, [one](https://a.b), [here](#c).\n\nEnd\n"


def test_the_workflow_tries_the_versions_of_the_makefile() -> None:
    made = dict(re.findall(r"^(OLDEST|NEWEST) := (\S+)$", (ROOT / "Makefile").read_text(), re.M))
    matrix = read(".github/workflows/tests.yml")["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["torch"] == [made["OLDEST"], made["NEWEST"]]
    oldest = re.search(r">=([\d.]+)", PROJECT["requires-python"])
    assert oldest is not None
    assert matrix["python"][0] == oldest[1]


def test_a_release_is_built_and_checked_and_needs_no_secret() -> None:
    jobs = read(".github/workflows/package.yml")["jobs"]
    assert "make package" in [step.get("run") for step in jobs["build"]["steps"]]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    recipe = (ROOT / "Makefile").read_text().partition("\npackage:")[2].partition("\n\n")[0]
    assert "build\n" in recipe
    assert "twine check --strict" in recipe
    assert not [path for path in (ROOT / ".github/workflows").iterdir() if "secrets." in path.read_text()]


def test_the_metadata_say_what_is_supported() -> None:
    versions = read(".github/workflows/tests.yml")["jobs"]["versions"]["strategy"]["matrix"]["python"]
    named = {f"Programming Language :: Python :: {version}" for version in versions}
    assert named | {"Operating System :: POSIX :: Linux"} <= {*PROJECT["classifiers"]}
    assert PROJECT["license"].split(" AND ") == ["Apache-2.0", "CC-BY-4.0"], "the code, and the digits"
    assert "CC BY 4.0" in " ".join((ROOT / "README.md").read_text().split())


def test_nothing_tells_to_install_from_an_index_that_does_not_have_it() -> None:
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    found = [
        path.name for path in [*texts, ROOT / "README.md"] if re.search(r"install '?evener", path.read_text())
    ]
    assert not found


def test_hooks_call_what_make_calls() -> None:
    hooks = read(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert [hook["entry"].split()[0] for hook in hooks] == [
        ".venv/bin/ruff",
        ".venv/bin/ruff",
        ".venv/bin/mypy",
    ]


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form.stem != "config"], ids=lambda form: form.stem
)
def test_forms_are_those_of_github(form: Path) -> None:
    read_form = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} == set(read_form)
    fields = [field["id"] for field in read_form["body"]]
    assert len(set(fields)) == len(fields)
    assert all(
        field["type"] in ("textarea", "input") and field["attributes"]["label"] for field in read_form["body"]
    )


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"^make ([\w-]+)", text, re.M):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    for name in re.findall(r"`(evener\.[\w.]+)`", text):
        assert pkgutil.resolve_name(name)
