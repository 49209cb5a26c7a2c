"""From a survey to what is wrong with the machine: a pure function, of another machine's survey as of this one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from evener.hardware.diagnosis.cards import card_findings, together_findings
from evener.hardware.diagnosis.drivers import code_findings, driver_findings, library_findings
from evener.hardware.diagnosis.findings import Finding, sorted_by_level
from evener.hardware.diagnosis.host import core_findings, memory_findings, variable_findings
from evener.hardware.diagnosis.measured import link_findings, speed_findings
from evener.hardware.survey.facts import Survey

CHECKS: tuple[Callable[[Survey], Iterator[Finding]], ...] = (
    driver_findings,
    code_findings,
    library_findings,
    card_findings,
    together_findings,
    core_findings,
    memory_findings,
    variable_findings,
    speed_findings,
    link_findings,
)


def diagnose(survey: Survey) -> tuple[Finding, ...]:
    """All that is wrong, slow or worth knowing, the worst first."""
    return sorted_by_level([finding for check in CHECKS for finding in check(survey)])


def worst(survey: Survey) -> Finding | None:
    """The worst that should be done something about; None if there is nothing but notes."""
    return next((finding for finding in diagnose(survey) if finding.level != "note"), None)
