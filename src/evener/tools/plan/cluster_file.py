"""Reads the machines of a plan from a TOML file.

The file names cards and links of the catalogue, or files from the machines themselves: a survey that
``evener devices --save`` wrote, and the text of ``nvidia-smi topo -m``.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from evener.core.config.sizes import parse_size
from evener.core.did_you_mean import did_you_mean
from evener.core.os_errors import os_error_message
from evener.errors import ConfigurationError
from evener.files import read_text
from evener.hardware.survey import files
from evener.hardware.survey.facts import Speed, Survey
from evener.tools.plan.catalogue import find_entry, names_like, parse_bandwidth, parse_latency, read_catalogue
from evener.tools.plan.cluster import Cluster, FailureRates, Machine, PlannedCard, PlannedLink, cards_text
from evener.tools.plan.topology import read_link_kinds, slowest_of_best_ring

T = TypeVar("T")
N = TypeVar("N", int, float)

_TOP_KEYS = ("between", "machines", "failures")
_MACHINE_KEYS = (
    *("card", "cards_per_machine", "cards", "survey", "count"),
    *("inside", "topology", "cores", "price_per_hour"),
)
_FAILURE_KEYS = ("mean_days_of_a_device", "checkpoint_stall", "recovery", "spread")
_LINK_KEYS = ("latency", "bandwidth", "measured")
_WORDS = {str: "a text", int: "a whole number", float: "a number", list: "a list", bool: "true or false"}
_SEVERAL = re.compile(r"([1-9]\d{0,3})\s*x\s+(\S.*)")
_COMPARED_NBYTES = 1 << 20
"""Size of the message by which links are compared, about that of a round of a sum."""


def read_cluster(path: Path) -> Cluster:
    """Reads the description of a cluster from a TOML file such as::

        between = "8 x InfiniBand NDR"  # or "100 Gbit/s", or {latency = "5 us", bandwidth = "12.5 GB/s"}

        [[machines]]
        count = 2                       # by default 1
        card = "H100 SXM"               # a name of the catalogue; or cards = ["RTX 3090", "RTX 3060"]
        cards_per_machine = 8           # by default 1
        inside = "NVLink 4"             # by default what is usual for the card
        cores = 96                      # by default 0, not known
        price_per_hour = 20.0           # of a machine

        [[machines]]
        survey = "lab1.json"            # what `evener devices --save` wrote there
        topology = "lab1.txt"           # what `nvidia-smi topo -m` printed there, if the survey has no links

        [failures]                      # for many ranks; each key has a default
        mean_days_of_a_device = 1900
        checkpoint_stall = "5 s"
        recovery = "600 s"
        spread = 0.09                   # of the times of alike cards, as a part of their mean

    Paths are relative to the file. ``between`` joins machines, with all of a machine's network cards together. A speed
    alone is the nominal one of a network. Latency and bandwidth count as measured with ``measured = true`` beside them.

    Raises:
        ConfigurationError: If the file, a key, a name or a value is not valid. The message names file and key.
    """
    try:
        values = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigurationError(f"the cluster cannot be read: {os_error_message(error)}") from error
    except ValueError as error:  # invalid TOML or UTF-8
        raise ConfigurationError(f"{path} is no TOML: {error}") from error
    table = _Table(path, "", values, _TOP_KEYS)
    entries = table.value("machines", list) or table.refuse("machines", "is missing: write [[machines]]")
    tables = [_Table(path, f"machines[{n}].", entry, _MACHINE_KEYS) for n, entry in enumerate(entries)]
    machines = tuple(machine for each in tables for machine in _machines(each))
    if sum(len(each.cards) for each in machines) > _MOST:
        table.refuse("machines", f"have more than {_MOST} cards together")
    between = _link(table, "between")
    if between is None and len(machines) > 1:
        table.refuse("between", f'is missing: {len(machines)} machines need a link, such as "100 Gbit/s"')
    return Cluster(machines, between or machines[0].inside, _failures(table))


def _failures(table: _Table) -> FailureRates:
    given = _Table(table.path, "failures.", table.values.get("failures", {}), _FAILURE_KEYS)
    days = given.number("mean_days_of_a_device", float, 0)
    if days == 0:
        given.refuse("mean_days_of_a_device", "= 0 must be above 0")
    found = {
        "mean_days_of_a_device": days,
        "checkpoint_stall_seconds": given.parsed("checkpoint_stall", parse_latency),
        "recovery_seconds": given.parsed("recovery", parse_latency),
        "spread": given.number("spread", float, 0),
    }
    return FailureRates(**{name: value for name, value in found.items() if value is not None})


_MOST = 2**20
"""Largest number of machines, of cards and of cores: more are no cluster, and would fill this machine's memory."""


class _Table:
    """A table of the file. Its errors name the file and the key."""

    def __init__(self, path: Path, place: str, values: Any, known: Sequence[str]) -> None:
        self.path, self.place, self.values = path, place, values
        if not isinstance(values, dict):
            self.refuse("", f"= {values!r} must be a table with {', '.join(known)}")
        for key in values:
            if key not in known:
                self.refuse(key, f"is no key; {did_you_mean(key, known) or 'keys are ' + ', '.join(known)}")

    def refuse(self, key: str, why: str) -> NoReturn:
        raise ConfigurationError(f"{self.path}: {(self.place + key).rstrip('.')} {why}")

    def value(self, key: str, kind: type[T]) -> T | None:
        """Returns a value of a type; None if the file does not have it."""
        found = self.values.get(key)
        found = float(found) if kind is float and type(found) is int else found
        if found is not None and type(found) is not kind:
            self.refuse(key, f"= {found!r} must be {_WORDS[kind]}")
        return found

    def number(self, key: str, kind: type[N], least: int) -> N | None:
        """Returns a number; None if the file does not have it. Whole numbers count machines, cards and cores."""
        found = self.value(key, kind)
        if kind is int and found is not None and found > _MOST:
            self.refuse(key, f"= {found} must be at most {_MOST}")
        if found is not None and not least <= found < math.inf:
            self.refuse(key, f"= {found} must be at least {least}")
        return found

    def parsed(self, key: str, parse: Callable[[str], T]) -> T | None:
        """Returns what a text stands for; None if the file does not have it."""
        text = self.value(key, str)
        try:
            return None if text is None else parse(text)
        except OSError as error:
            self.refuse(key, f"= {text!r}: {os_error_message(error)}")
        except ValueError as error:  # ConfigurationError too
            self.refuse(key, f"= {text!r}: {error}")


def _link(table: _Table, key: str) -> PlannedLink | None:
    if not isinstance(table.values.get(key), dict):
        return table.parsed(key, _link_named)
    given = _Table(table.path, f"{table.place}{key}.", table.values[key], _LINK_KEYS)
    latency, bandwidth = given.parsed("latency", parse_latency), given.parsed("bandwidth", parse_bandwidth)
    if latency is None or bandwidth is None:
        given.refuse("", "needs both latency and bandwidth")
    return PlannedLink(latency, bandwidth, bool(given.value("measured", bool)))


def _link_named(name: str) -> PlannedLink:
    """Returns a link of the catalogue, or a network of a nominal speed, or several of them side by side."""
    if several := _SEVERAL.fullmatch(name.strip()):
        one = _link_named(several[2])
        return replace(one, bytes_per_second=one.bytes_per_second * int(several[1]))
    entry, bare = find_entry("links", name)[1], read_catalogue()["bare"]
    if entry:
        return PlannedLink(parse_latency(entry["latency"]), parse_bandwidth(entry["bandwidth"]))
    if name.strip()[:1].isdecimal():
        return PlannedLink(parse_latency(bare["latency"]), parse_bandwidth(name) * bare["reached"])
    raise ConfigurationError(f"no link is called so; {names_like('links', name)}")


@dataclass(frozen=True)
class _Slot:
    """A card in its machine, with its links there."""

    card: PlannedCard
    entry: Mapping[str, Any]
    """What the catalogue has of the card; empty if it does not have it."""
    pcie: PlannedLink | None

    def link(self, kind: str) -> PlannedLink | None:
        """Returns the card's end of a link of a kind of ``nvidia-smi topo -m``; None if it is not known.

        NV# has a part of the card's NVLink. PIX, PXB, PHB and NODE are PCIe, and SYS leads to another socket, too. The
        kind "" is what is usual for the card.
        """
        fabric = self.entry.get("fabric", "")
        if kind.startswith("NV"):
            whole = _link_named(fabric) if (lanes := find_entry("links", fabric)[1].get("lanes", 0)) else None
            return whole and replace(whole, bytes_per_second=whole.bytes_per_second * int(kind[2:]) / lanes)
        if fabric and not kind and not self.entry.get("bridge"):
            return _link_named(fabric)
        return _slower(self.pcie, _link_named("between sockets")) if kind == "SYS" else self.pcie


def _slower(a: PlannedLink | None, b: PlannedLink | None) -> PlannedLink | None:
    return None if a is None or b is None else max(a, b, key=_seconds)


def _seconds(link: PlannedLink) -> float:
    return link.cost.seconds(_COMPARED_NBYTES)


def _machines(table: _Table) -> list[Machine]:
    ways = [key for key in ("card", "cards", "survey") if key in table.values]
    if len(ways) != 1:
        table.refuse("", f"has {' and '.join(ways) or 'no cards'}: give one of card, cards and survey")
    if ways != ["card"] and "cards_per_machine" in table.values:
        table.refuse("cards_per_machine", f"goes with card, not with {ways[0]}")
    survey = table.parsed("survey", lambda name: _load_survey(table.path.parent / name))
    slots = _surveyed(table, survey) if survey else _named(table)
    price = table.number("price_per_hour", float, 0)
    cards = tuple(replace(slot.card, price_per_hour=price and price / len(slots)) for slot in slots)
    cores = table.number("cores", int, 1) or (survey.host.usable_cores if survey else 0)
    name = survey.host.name if survey else cards_text(cards)
    return [Machine(name, cards, _inside(table, slots, survey), cores)] * (table.number("count", int, 1) or 1)


def _named(table: _Table) -> list[_Slot]:
    """Returns the cards that the file names."""
    key = "card" if "card" in table.values else "cards"
    number = table.number("cards_per_machine", int, 1) or 1
    names = [table.value(key, str)] * number if key == "card" else table.value(key, list)
    if not names or not all(isinstance(name, str) for name in names):
        table.refuse(key, f"= {names!r} must be a list of names")
    return [_slot(table, key, name, "cuda") for name in names if name is not None]


def _load_survey(path: Path) -> Survey:
    """Reads a survey, and refuses numbers that only an edited one can have."""
    survey = files.load(path)
    speeds = [each for speed in survey.speeds for each in (*speed.products.values(), speed.copy or 1.0)]
    speeds += [each for link in survey.links for each in (link.bytes_per_second, 1.0 + link.latency_seconds)]
    if survey.plan.ranks < 1 or not all(0 < each < math.inf for each in speeds):
        raise ConfigurationError(
            f"{path} has no ranks, or a speed that is not above 0: survey the machine again"
        )
    return survey


def _surveyed(table: _Table, survey: Survey) -> list[_Slot]:
    """Returns the cards that the ranks of a survey use. On the CPU, they share its cores and its memory."""
    speeds = {speed.device: speed for speed in survey.speeds}
    if not survey.trains_on_cards:
        ranks, host = survey.plan.ranks, survey.host
        name, nbytes = host.processor or "CPU", host.usable_nbytes
        return [_slot(table, "survey", name, "cpu", speeds.get("cpu"), nbytes, parts=ranks)] * ranks
    slots = []
    for card in survey.used:
        device = card.device or ""
        kind, speed = device.partition(":")[0], speeds.get(device)
        slot = _slot(table, "survey", card.name, kind, speed, card.memory_nbytes, card.pcie_generation)
        width = (card.pcie_width or 16) / 16
        pcie = slot.pcie and replace(slot.pcie, bytes_per_second=slot.pcie.bytes_per_second * width)
        slots.append(replace(slot, pcie=pcie))
    return slots or table.refuse("survey", "has no card that torch sees: look at its findings")


def _slot(
    table: _Table,
    key: str,
    name: str,
    kind: str,
    speed: Speed | None = None,
    nbytes: int | None = None,
    generation: int | None = None,
    parts: int = 1,
) -> _Slot:
    """Returns a card as it was measured, or else as the catalogue has it; of a CPU one of equal parts."""
    found, entry = find_entry("cards", name)
    if not entry and key != "survey":
        table.refuse(key, f"= {name!r}: no card is called so; {names_like('cards', name)}")
    measured = dict(speed.products) if speed else {}
    flops, copy = measured or entry.get("flops"), (speed and speed.copy) or None
    bandwidth = copy or (parse_bandwidth(entry["memory_bandwidth"]) if entry else None)
    nbytes = nbytes or (parse_size(entry["memory"]) if entry else None)
    if not flops or not bandwidth or not nbytes:
        table.refuse(
            key,
            f"= {table.values[key]!r} has no measured speed of {name}, which the catalogue does not have: "
            "survey the machine again, without --no-measure",
        )
    spaces = read_catalogue()["workspace"]
    card = PlannedCard(
        name=found,
        kind=kind,
        flops={dtype: each / parts for dtype, each in flops.items()},
        memory_nbytes=nbytes // parts,
        memory_bytes_per_second=bandwidth / parts,
        workspace_nbytes=parse_size(spaces["cpu" if kind == "cpu" else "cuda"]),
        price_per_hour=None,
        is_measured=bool(measured and copy),
    )
    way = find_entry("links", entry.get("pcie") or f"PCIe {generation}")
    return _Slot(card, entry, _link_named(way[0]) if way[1] else None)


def _inside(table: _Table, slots: Sequence[_Slot], survey: Survey | None) -> PlannedLink:
    """Returns the link that the file gives, or the slowest one of a ring over the cards."""
    size, links = len(slots), survey.links if survey else ()
    sources = [key for key in ("inside", "topology") if key in table.values] + ["the survey"] * bool(links)
    if len(sources) > 1:
        table.refuse(sources[0], f"and {sources[1]} both tell the links: leave {sources[0]} out")
    kinds = table.parsed("topology", lambda name: read_link_kinds(read_text(table.path.parent / name)))
    if kinds is not None and len(kinds) != size:
        table.refuse("topology", f"has {len(kinds)} GPUs for {size} cards: leave out the rows of the others")
    given = _link(table, "inside")
    if given is not None or size == 1:
        return given or PlannedLink(0.0, math.inf)
    measured = {frozenset((each.a, each.b)): each for each in links}

    @cache
    def link(a: int, b: int) -> PlannedLink:
        kind, seen = kinds[a][b] if kinds else "", measured.get(frozenset((a, b)))
        if seen is not None:
            return PlannedLink(seen.latency_seconds, seen.bytes_per_second, is_measured=True)
        found = None if links else _slower(slots[a].link(kind), slots[b].link(kind))
        cards = f"{slots[a].card.name} and {slots[b].card.name}"
        return found or table.refuse("inside", f"is missing: no {kind or 'usual'} link of {cards} is known")

    return slowest_of_best_ring(size, link, _seconds)
