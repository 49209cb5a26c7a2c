"""The HTML page of a report: one file that opens offline and is complete with scripts off.

The page is made from the data of ``report.json`` alone, and reads no clock, so that the same run has the same bytes. It
has no script and loads nothing: its content security policy allows the page's own style sheet, by its hash, and nothing
else. Texts of a run are escaped, and characters that a browser would obey or that HTML forbids are shown as ``\\x00``.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from evener.core.text import printable, shortened
from evener.tools.report import schema
from evener.tools.report.numbers import value_text
from evener.tools.report.schema import Report, ReportFile
from evener.tools.report.sections import Section, run_names, sections_of

_LONGEST = 4000


def page_of(file: ReportFile, notice: str = "") -> str:
    """Returns the HTML page of one run, or of several runs side by side.

    Args:
        notice: A sentence shown above all else, such as that the run directory has gone.
    """
    names = run_names(file.runs)
    style = _ENVIRONMENT.get_template("style.css").render()
    return _ENVIRONMENT.get_template("page.html").render(
        title=" and ".join(names[:4]),
        notice=notice,
        states=(schema.FINISHED, schema.INTERRUPTED, schema.UNDER_WAY, schema.BROKEN_OFF),
        style=style,
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        runs=[(name, run, *_verdict(run), _tiles(run)) for name, run in zip(names, file.runs, strict=True)],
        sections=[*sections_of(file.runs)],
    )


def _shown(value: Any) -> Any:
    """Returns a value as the page shows it. Markup is made by the page itself, and stays."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(shortened(value, _LONGEST))
    return value


def _verdict(run: Report) -> tuple[str, str]:
    """Returns the headline, and the sentence below it: the first cause, and where the time of the run went."""
    words, causes = run.verdict.words, run.verdict.causes
    if not causes:
        return words, ""
    first = causes[0].words
    return f"{first[:1].upper()}{first[1:].removesuffix('.')}.", words.rpartition(". ")[2]


def _tiles(run: Report) -> list[tuple[str, str]]:
    """Returns the most important numbers of a run, each with its name."""
    identity, speed = run.identity, run.samples_per_second
    whole = f" of {identity.total_steps:,}" if identity.total_steps not in (None, identity.steps) else ""
    found = [
        ("goodput", value_text(run.goodput.fraction, "1") if run.goodput.total else ""),
        ("samples per second", value_text(float(f"{speed:.3g}")) if speed else ""),
        ("steps", f"{identity.steps:,}{whole}"),
        ("training time", value_text(identity.seconds, "s")),
    ]
    loss = next((each for each in run.series if each.name == schema.LOSS and each.rank is None), None)
    found.append(("loss at the end", value_text(_last(loss.mean)) if loss else ""))
    if run.evaluations:
        found += [
            (f"{name} (evaluation)", value_text(value))
            for name, value in list(run.evaluations[-1].metrics.items())[:2]
        ]
    return [(name, text) for name, text in found if text]


def _last(values: tuple[float | None, ...]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _is_wide(section: Section) -> bool:
    """True if a section has a single chart, which then has the whole width."""
    return sum(1 for part in section.parts if hasattr(part, "svg")) == 1


_ENVIRONMENT = Environment(
    loader=PackageLoader("evener.tools.report"),
    autoescape=lambda name: name != "style.css",
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.tests["wide"] = _is_wide
_ENVIRONMENT.filters["percent"] = "{:.0%}".format
