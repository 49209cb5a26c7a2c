"""Whether each card is well, and whether they are alike and near to each other."""

from __future__ import annotations

from collections.abc import Iterator

from evener.hardware.diagnosis import findings as kinds
from evener.hardware.diagnosis.findings import Finding
from evener.hardware.survey.facts import Card, Path, Survey

_ALIKE = 0.95
"""Memory of cards of one name differs a little, by what a driver or a display keeps."""
_TENANTS_NBYTES, _TENANTS_PART = 256 << 20, 0.1


def card_findings(survey: Survey) -> Iterator[Finding]:
    """Of each card that torch sees."""
    for card in survey.seen:
        yield from _mode(card)
        yield from _tenants(card)
        yield from _health(card)
        yield from _power(card)


def _mode(card: Card) -> Iterator[Finding]:
    if card.compute_mode == "prohibited":
        yield kinds.PROHIBITED.found(f"{named(card)} has the compute mode prohibited")
    if card.compute_mode == "exclusive":
        yield kinds.EXCLUSIVE.found(f"{named(card)} has the compute mode exclusive")
    if card.mig:
        yield kinds.PARTITIONED.found(f"{named(card)} is divided by MIG")


def _tenants(card: Card) -> Iterator[Finding]:
    nbytes = sum(tenant.nbytes for tenant in card.tenants)
    if nbytes > min(_TENANTS_NBYTES, _TENANTS_PART * (card.memory_nbytes or _TENANTS_NBYTES * 10)):
        pids = ", ".join(str(tenant.pid) for tenant in card.tenants)
        yield kinds.IN_USE.found(f"{named(card)}: {nbytes / 2**30:.1f} GiB belong to processes {pids}")


def _health(card: Card) -> Iterator[Finding]:
    if card.brakes:
        heat = f" at {card.temperature} °C" if card.temperature is not None else ""
        yield kinds.BRAKED.found(
            f"{named(card)} has lowered its clocks because of {' and '.join(card.brakes)}{heat}"
        )
    if card.memory_errors:
        yield kinds.MEMORY_ERRORS.found(
            f"{named(card)} tells of {card.memory_errors} uncorrected memory errors"
        )
    if card.pcie_width is not None and card.pcie_widest is not None and card.pcie_width < card.pcie_widest:
        yield kinds.NARROW.found(f"{named(card)} uses {card.pcie_width} of {card.pcie_widest} lanes")


def _power(card: Card) -> Iterator[Finding]:
    limit, usual = card.power_limit_watts, card.power_default_watts
    if limit is not None and usual is not None and limit < usual:
        yield kinds.POWER_LIMIT.found(f"{named(card)} may use {limit:.0f} W of {usual:.0f} W")


def together_findings(survey: Survey) -> Iterator[Finding]:
    """Of the cards that are to train, as a whole."""
    seen = survey.used
    if len(seen) > 1 and not survey.plan.balanced and not _alike(seen):
        kinds_seen = dict.fromkeys((card.name, card.memory_nbytes) for card in seen)
        listed = ", ".join(f"{name} ({_gib(nbytes)})" for name, nbytes in kinds_seen)
        yield kinds.MIXED.found(f"the {len(seen)} cards are not alike: {listed}")
    yield from _pairs(survey, kinds.NO_PEER, [p for p in survey.paths if p.peer is False], "no peer access")
    yield from _pairs(
        survey, kinds.FAR_APART, [p for p in survey.paths if _is_far(p)], "only between sockets"
    )


def _alike(cards: tuple[Card, ...]) -> bool:
    sizes = [card.memory_nbytes for card in cards if card.memory_nbytes]
    return len({card.name for card in cards}) == 1 and (not sizes or min(sizes) >= _ALIKE * max(sizes))


def _is_far(path: Path) -> bool:
    return path.through == "system" and not path.nvlinks


def _pairs(survey: Survey, kind: kinds.Kind, paths: list[Path], words: str) -> Iterator[Finding]:
    """One finding of all pairs, of cards that are to train."""
    used = {card.device for card in survey.used}
    names = [card.device if card.device in used else None for card in survey.cards]
    pairs = [f"{names[p.a]}-{names[p.b]}" for p in paths if names[p.a] and names[p.b]]
    if pairs:
        more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
        yield kind.found(f"{words}: {', '.join(pairs[:4])}{more}")


def named(card: Card) -> str:
    """By what torch calls it, or the place that it has."""
    return f"{card.device or card.pci or 'a card'} ({card.name})"


def _gib(nbytes: int | None) -> str:
    return "memory not known" if nbytes is None else f"{nbytes / 2**30:.0f} GiB"
