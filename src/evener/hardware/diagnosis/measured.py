"""What measured speeds tell: a device that fails, or is slower than its like, and a link that is slower than others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from evener.hardware.diagnosis import findings as kinds
from evener.hardware.diagnosis.findings import Finding
from evener.hardware.survey.facts import Speed, Survey

_SLOWER = 0.8
"""Cards of one name differ by some percent among themselves."""
_TIMES = 3.0
"""On a busy machine one measurement may be twice as long as another."""
_LEAST_LINKS = 3


def speed_findings(survey: Survey) -> Iterator[Finding]:
    """Of devices that were measured."""
    for speed in survey.speeds:
        if speed.error:
            yield kinds.CARD_FAILS.found(f"{speed.device}: {speed.error}")
    names = {card.device: card.name for card in survey.seen}
    for name in dict.fromkeys(names.values()):
        yield from _uneven([speed for speed in survey.speeds if names.get(speed.device) == name], name)


def _uneven(alike: list[Speed], name: str) -> Iterator[Finding]:
    """The slowest of cards of one name, by the type of numbers in which it is the most behind."""
    found = []
    for dtype in dict.fromkeys(dtype for speed in alike for dtype in speed.products):
        measured = [(speed.products[dtype], speed.device) for speed in alike if dtype in speed.products]
        (slow, device), (fast, other) = min(measured), max(measured)
        found.append(
            (slow / fast, f"{device} has {slow / fast:.0%} of the speed of {other} in {dtype} ({name})")
        )
    if found and min(found)[0] < _SLOWER:
        yield kinds.UNEVEN.found(min(found)[1])


def link_findings(survey: Survey) -> Iterator[Finding]:
    """Of messages between ranks."""
    if survey.links_error:
        yield kinds.RANKS_FAIL.found(survey.links_error)
    if len(survey.links) < _LEAST_LINKS:
        return
    usual = statistics.median(link.bytes_per_second for link in survey.links)
    slow = min(survey.links, key=lambda link: link.bytes_per_second)
    if slow.bytes_per_second * _TIMES < usual:
        yield kinds.UNEVEN_LINKS.found(
            f"ranks {slow.a} and {slow.b} have {slow.bytes_per_second / 1e9:.2f} GB/s, {usual / 1e9:.2f} are usual"
        )
