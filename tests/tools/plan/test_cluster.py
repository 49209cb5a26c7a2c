"""Clusters that are not at hand: what their file may say, what comes of it, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evener.cli.main import main
from evener.core.config.sizes import parse_size
from evener.errors import ConfigurationError
from evener.hardware.survey.facts import MeasuredLink, Speed, Survey
from evener.hardware.survey.files import save
from evener.tools.plan.catalogue import find_entry, parse_bandwidth, parse_latency, read_catalogue
from evener.tools.plan.cluster import Cluster, Machine, PlannedLink, describe
from evener.tools.plan.cluster_file import read_cluster
from tests.hardware.survey import machines

GB, GIB = 1e9, 1 << 30

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
H100_TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    "\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\tSYS\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tNV18\tNV18\tNV18\tNV18\tSYS\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tNV18\tNV18\tNV18\tNV18\tSYS\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU4\tNV18\tNV18\tNV18\tNV18\t X \tNV18\tNV18\tNV18\tSYS\tPIX\t48-95,144-191\t1\t\tN/A\n"
    "GPU5\tNV18\tNV18\tNV18\tNV18\tNV18\t X \tNV18\tNV18\tSYS\tSYS\t48-95,144-191\t1\t\tN/A\n"
    "GPU6\tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\t X \tNV18\tSYS\tSYS\t48-95,144-191\t1\t\tN/A\n"
    "GPU7\tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\tNV18\t X \tSYS\tSYS\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \tSYS\n"
    "NIC1\tSYS\tSYS\tSYS\tSYS\tPIX\tSYS\tSYS\tSYS\tSYS\t X \n" + LEGEND
)
"""Eight H100 SXM that are joined by switches, and two network cards."""


def matrix(*rows: str) -> str:
    """The text of ``nvidia-smi topo -m`` for rows such as "X PIX SYS"."""
    header = "".join(f"\tGPU{n}" for n in range(len(rows))) + "\tCPU Affinity\tNUMA Affinity\n"
    body = "".join(f"GPU{n}\t" + "\t".join(row.split()) + "\t0-27,56-83\t0\n" for n, row in enumerate(rows))
    return header + body + LEGEND


TWO_SOCKETS = matrix("X PIX PHB SYS", "PIX X PHB SYS", "PHB PHB X SYS", "SYS SYS SYS X")
ONE_SOCKET = matrix("X PIX PHB PXB", "PIX X PHB PXB", "PHB PHB X NODE", "PXB PXB NODE X")
"""Every way that does not leave the socket."""
PAIRS = matrix("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
CHAIN = matrix("X NV4 NODE", "NV4 X NV4", "NODE NV4 X")
"""NVLinks that do not close a ring."""
SQUARE = matrix("X SYS NV4 NV4", "SYS X NV4 NV4", "NV4 NV4 X SYS", "NV4 NV4 SYS X")
"""NVLinks that close a ring, but not in the order of the cards."""


class Place:
    """A directory with a cluster's file and what it names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, text: str, **files: str | Survey) -> Cluster:
        for name, content in files.items():
            if isinstance(content, Survey):
                save(content, self.path / f"{name}.json")
            else:
                (self.path / f"{name}.txt").write_text(content)
        (self.path / "cluster.toml").write_text(text)
        return read_cluster(self.path / "cluster.toml")

    def machine(self, keys: str, **files: str | Survey) -> Machine:
        return self(f"[[machines]]\n{keys}", **files).machines[0]

    def inside(self, card: str, topology: str, number: int) -> PlannedLink:
        keys = f'card = "{card}"\ncards_per_machine = {number}\ntopology = "topo.txt"'
        return self.machine(keys, topo=topology).inside


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def measured(*links: MeasuredLink, **changes: Any) -> Survey:
    """A 3090 and a 4090 with the speeds that they had."""
    products = {"float32": 2e13, "bfloat16": 6e13}
    speeds = tuple(Speed(f"cuda:{n}", products, copy=8e11) for n in range(2))
    return replace(machines.mixed_cards(), **({"speeds": speeds, "links": links} | changes))


# The catalogue


@pytest.mark.parametrize("name", read_catalogue()["cards"])
def test_a_card_of_the_catalogue_is_whole_and_plausible(name: str, place: Place) -> None:
    card = place.machine(f'card = "{name}"').cards[0]
    floats = [card.flops[each] for each in ("float32", "tf32", "bfloat16", "float8") if each in card.flops]
    assert 5e12 < card.flops["float32"] < card.flops["float16"] < 3e15
    assert floats == sorted(floats), "fewer bits are not slower"
    assert card.flops.get("bfloat16", card.flops["float16"]) == card.flops["float16"]
    assert 10 * GIB <= card.memory_nbytes <= 192 * GIB
    assert 3e11 <= card.memory_bytes_per_second <= 8e12
    assert GIB / 2 <= card.workspace_nbytes <= 1.5 * GIB
    assert (card.name, card.kind, card.is_measured) == (name, "cuda", False)


def test_figures_of_data_sheets(place: Place) -> None:
    cards = place.machine('cards = ["H100 SXM", "A100 SXM 80GB", "RTX 4090", "V100 SXM2 16GB"]').cards
    h100, a100, rtx, v100 = (card.flops for card in cards)
    assert h100 == {
        "float32": 67e12,
        "tf32": 989e12 / 2,
        "bfloat16": 1979e12 / 2,
        "float16": 1979e12 / 2,
        "float8": 3958e12 / 2,
    }
    assert a100 == {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12}
    assert rtx["bfloat16"] == pytest.approx(2 * rtx["float32"], rel=0.01)
    assert "bfloat16" not in v100
    assert [card.memory_bytes_per_second for card in cards] == [3.35e12, 2.039e12, 1.008e12, 9e11]


def test_names_of_the_catalogue_are_of_one_thing_each() -> None:
    for table in ("cards", "links"):
        for name, entry in read_catalogue()[table].items():
            for each in (name, *entry.get("also", ())):
                assert find_entry(table, each)[0] == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100sxm", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_card_goes_by_what_people_and_torch_call_it(written: str, name: str) -> None:
    assert find_entry("cards", written)[0] == name


# Links


@pytest.mark.parametrize("name", read_catalogue()["links"])
def test_a_link_of_the_catalogue_is_plausible(name: str, place: Place) -> None:
    link = place.machine(f'card = "T4"\ncards_per_machine = 2\ninside = "{name}"').inside
    assert 1e-6 < link.latency_seconds <= 5e-5
    assert 0.1 * GB < link.bytes_per_second < 900 * GB
    assert not link.is_measured
    assert link.cost.seconds(link.bytes_per_second) == pytest.approx(1 + link.latency_seconds)


@pytest.mark.parametrize("speed", [1, 10, 25, 100, 200, 400])
def test_a_speed_alone_is_a_network(speed: int, place: Place) -> None:
    ways = (
        f'"{speed} Gbit/s"',
        f'"Ethernet {speed} Gbit/s"',
        f'"{speed / 8} GB/s"',
        f'"{speed} Gbit/s Ethernet"',
    )
    links = {place(f'between = {way}\n[[machines]]\ncount = 2\ncard = "T4"').between for way in ways}
    assert [link.bytes_per_second for link in links] == pytest.approx([0.94 * speed * GB / 8] * len(links))
    assert [link.latency_seconds for link in links] == pytest.approx([5e-5] * len(links))


@pytest.mark.parametrize(
    ("written", "link"),
    [
        ('{latency = "5 us", bandwidth = "12.5 GB/s"}', PlannedLink(5e-6, 12.5 * GB)),
        ('{latency = "0.1ms", bandwidth = "1 GiB/s", measured = true}', PlannedLink(1e-4, GIB, True)),
        ('"InfiniBand HDR"', PlannedLink(14e-6, 24 * GB)),
        ('"8 x infiniband ndr"', PlannedLink(14e-6, 384 * GB)),
        ('"2 x 100 Gbit/s"', PlannedLink(50e-6, 23.5 * GB)),
    ],
)
def test_ways_to_write_a_link(written: str, link: PlannedLink, place: Place) -> None:
    between = place(f'between = {written}\n[[machines]]\ncount = 2\ncard = "T4"').between
    assert (between.latency_seconds, between.bytes_per_second) == pytest.approx(
        (link.latency_seconds, link.bytes_per_second)
    )
    assert between.is_measured == link.is_measured


def test_units() -> None:
    assert [parse_latency(text) for text in ("3 ns", "3us", "3 µs", "1.5 ms", "2 s")] == pytest.approx(
        [3e-9, 3e-6, 3e-6, 1.5e-3, 2]
    )
    assert parse_bandwidth("1 MB/s") == 8 * parse_bandwidth("1 Mbit/s") == 1e6
    assert parse_bandwidth("1 Tbit/s") == 125 * GB
    for text in ("5", "5 min", "-5 us", "us", ""):
        with pytest.raises(ConfigurationError, match=r"no latency: .* such as 5 us"):
            parse_latency(text)
    for text in ("100", "100 Gb/s", "100 GB", "100 Gbit", "1e400 GB/s", "GB/s"):
        with pytest.raises(ConfigurationError, match=r"no bandwidth: .* such as 12.5 GB/s or 100 Gbit/s"):
            parse_bandwidth(text)


@pytest.mark.parametrize(
    ("card", "gigabytes"),
    [
        ("T4", 12),
        ("RTX 3090", 24),
        ("H100 PCIe", 48),
        ("A100 SXM 40GB", 240),
        ("H200", 370.8),
        ("B200", 721.8),
    ],
)
def test_cards_are_joined_as_is_usual(card: str, gigabytes: float, place: Place) -> None:
    inside = place.machine(f'card = "{card}"\ncards_per_machine = 16').inside
    assert inside.bytes_per_second == pytest.approx(gigabytes * GB)


def test_of_two_ends_the_slower_counts(place: Place) -> None:
    assert place.machine('cards = ["H100 SXM", "T4"]').inside == place.machine('cards = ["T4", "T4"]').inside


# Topologies


def test_switches_give_each_pair_all_links(place: Place) -> None:
    inside = place.inside("H100 SXM", H100_TOPOLOGY, 8)
    assert inside == place.machine('card = "H100 SXM"\ncards_per_machine = 2').inside
    assert inside.bytes_per_second == pytest.approx(18 * 20.6 * GB)


@pytest.mark.parametrize(
    ("topology", "number", "gigabytes"),
    [
        (TWO_SOCKETS, 4, 16),  # a ring has to cross the sockets
        (ONE_SOCKET, 4, 24),
        (PAIRS, 4, 16),
        (CHAIN, 3, 24),
        (SQUARE, 4, 48),
        (matrix("X NV4", "NV4 X"), 2, 48),
        (matrix("X NV2", "NV2 X"), 2, 24),
        (matrix("X"), 1, math.inf),
        (matrix(*(" ".join("X" if a == b else "PHB" for b in range(10)) for a in range(10))), 10, 24),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(
    topology: str, number: int, gigabytes: float, place: Place
) -> None:
    assert place.inside("RTX 3090", topology, number).bytes_per_second == pytest.approx(gigabytes * GB)


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ("nothing", "no row that begins with GPU0"),
        (matrix("X OK", "OK X"), "GPU0 and GPU1 are joined by OK"),
        (matrix("X PIX", "PHB X"), "joined by P"),
        ("GPU0 X PIX\nGPU1 PIX", "GPU1 and GPU1 are joined by nothing"),
        (PAIRS, "has 4 GPUs for 2 cards: leave out"),
        (matrix("X NV12", "NV12 X"), "no NV12 link of T4 and T4 is known"),
    ],
)
def test_a_topology_that_does_not_fit(topology: str, said: str, place: Place) -> None:
    with pytest.raises(ConfigurationError, match=f"cluster.toml: machines.*{said}"):
        place.inside("T4", topology, 2)


# Surveys


def test_a_survey_of_cards_is_measured(place: Place) -> None:
    survey = measured(MeasuredLink(0, 1, 9e-6, 11 * GB))
    cluster = place('[[machines]]\nsurvey = "lab.json"\nprice_per_hour = 3', lab=survey)
    (machine,) = cluster.machines
    assert machine.inside == PlannedLink(9e-6, 11 * GB, is_measured=True)
    assert (machine.name, machine.cores) == ("node", 64)
    first, second = machine.cards
    assert (first.name, second.name, first.kind) == ("RTX 3090", "RTX 4090", "cuda")
    assert first.flops == {"float32": 2e13, "bfloat16": 6e13}
    assert (first.memory_nbytes, first.memory_bytes_per_second) == (24 * GIB, 8e11)
    assert cluster.is_measured
    assert describe(cluster).splitlines() == [
        "machines: 1, ranks: 2, 3.00 per hour",
        "1 of node, 1 x RTX 3090 + 1 x RTX 4090, joined by 11 GB/s, 9 us (measured)",
    ]


def test_without_measurements_a_survey_takes_speeds_of_the_catalogue(place: Place) -> None:
    machine = place.machine(
        'survey = "lab.json"\ntopology = "topo.txt"', lab=machines.h100_node(), topo=H100_TOPOLOGY
    )
    named = place.machine('card = "H100 SXM"\ncards_per_machine = 8')
    assert machine.cards == named.cards
    assert machine.inside == named.inside
    assert not machine.is_measured


def test_a_ring_in_the_order_of_ranks_is_enough_for_many_cards(place: Place) -> None:
    many = replace(
        machines.survey(*(machines.card(n) for n in range(9))),
        links=tuple(MeasuredLink(n, (n + 1) % 9, 1e-6, (n + 5) * GB) for n in range(9)),
    )
    assert place.machine('survey = "lab.json"', lab=many).inside.bytes_per_second == 5 * GB


def test_a_measured_and_an_unmeasured_part(place: Place) -> None:
    unlinked = place('[[machines]]\nsurvey = "lab.json"', lab=measured())
    assert not unlinked.is_measured
    assert describe(unlinked).endswith("24 GB/s, 5.7 us (measured in part)")
    narrow = measured(cards=(machines.card(0, pcie_width=8), machines.card(1)))
    assert place.machine('survey = "lab.json"', lab=narrow).inside.bytes_per_second == 12 * GB


def test_ranks_on_a_cpu_share_it(place: Place) -> None:
    speeds = (Speed("cpu", {"float32": 4e11}, copy=4e10),)
    links = tuple(MeasuredLink(a, b, 8e-5, 4 * GB) for a in range(4) for b in range(a + 1, 4))
    machine = place.machine('survey = "lab.json"', lab=machines.on_cpu(speeds=speeds, links=links))
    assert len(machine.cards) == 4
    card = machine.cards[0]
    assert all(each == card for each in machine.cards)
    assert (card.name, card.kind, card.flops) == ("A processor", "cpu", {"float32": 1e11})
    assert (card.memory_nbytes, card.memory_bytes_per_second) == (128 * GIB, 1e10)
    assert card.workspace_nbytes == parse_size(read_catalogue()["workspace"]["cpu"])
    assert machine.is_measured


def test_a_survey_of_this_machine_needs_measurements(place: Place) -> None:
    survey = place.path / "here.json"
    assert (
        main(["devices", "--device", "cpu", "--processes", "2", "--no-measure", "--save", str(survey)]) == 0
    )
    with pytest.raises(
        ConfigurationError, match=r"survey = 'here.json' has no measured speed .* --no-measure"
    ):
        place.machine('survey = "here.json"')


@pytest.mark.parametrize(
    ("survey", "said"),
    [
        (measured(MeasuredLink(0, 1, 9e-6, 0.0)), "has no ranks, or a speed that is not above 0"),
        (machines.k80(), "has no measured speed of A processor"),
        (
            machines.survey(machines.card(0, "RTX A6000", pcie_generation=None)),
            "no measured speed of RTX A6000",
        ),
        (
            machines.on_cpu(speeds=(Speed("cpu", {"float32": 4e11}, copy=4e10),)),
            "inside is missing: no usual link",
        ),
    ],
)
def test_a_survey_that_tells_too_little(survey: Survey, said: str, place: Place) -> None:
    with pytest.raises(ConfigurationError, match=rf"cluster.toml: machines\[0\]\..*{said}"):
        place.machine('survey = "lab.json"', lab=survey)


def test_a_survey_of_another_format(place: Place) -> None:
    (place.path / "lab.json").write_text('{"format": "evener-survey-1"}')
    with pytest.raises(ConfigurationError, match=r"cluster.toml: .*survey = 'lab.json': .*evener-survey-1"):
        place.machine('survey = "lab.json"')


# The cluster


def test_ranks_are_numbered_through_the_machines(place: Place) -> None:
    cluster = place(
        'between = "InfiniBand EDR"\n[[machines]]\ncount = 2\ncard = "H100 SXM"\ncards_per_machine = 4\n'
        'price_per_hour = 10\ncores = 96\n[[machines]]\ncards = ["RTX 3090", "RTX 3060"]\nprice_per_hour = 1.5'
    )
    assert [n for n, _ in cluster.ranks] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [card.name for _, card in cluster.ranks[7:]] == ["H100 SXM", "RTX 3090", "RTX 3060"]
    assert cluster.link(0, 3) == cluster.link(7, 4) == cluster.machines[0].inside
    assert cluster.link(3, 4) == cluster.link(8, 0) == cluster.between
    assert cluster.link(8, 9) == cluster.machines[2].inside
    assert cluster.price_per_hour == pytest.approx(21.5)
    assert [cluster.price_of(ranks) for ranks in (1, 4, 5, 8, 9)] == [10, 10, 20, 20, pytest.approx(21.5)]
    assert [machine.cores for machine in cluster.machines] == [96, 96, 0]
    assert not cluster.is_measured
    assert describe(cluster).splitlines() == [
        "machines: 3, ranks: 10, 21.50 per hour",
        "2 of 4 x H100 SXM, joined by 371 GB/s, 3.4 us (catalogue)",
        "1 of 1 x RTX 3090 + 1 x RTX 3060, joined by 24 GB/s, 5.7 us (catalogue)",
        "between machines: 12 GB/s, 14 us (not measured)",
    ]


def test_one_price_that_is_not_known_hides_the_sum(place: Place) -> None:
    machine = '[[machines]]\ncard = "T4"\n'
    assert place(f'between = "10 Gbit/s"\n{machine}price_per_hour = 1\n{machine}').price_per_hour is None


def test_measured_machines_on_a_measured_network(place: Place) -> None:
    text = '[[machines]]\ncount = 2\nsurvey = "lab.json"'
    survey, given = measured(MeasuredLink(0, 1, 9e-6, 1e10)), 'latency = "60 us", bandwidth = "1.1 GB/s"'
    assert not place(f"between = {{{given}}}\n{text}", lab=survey).is_measured
    cluster = place(f"between = {{{given}, measured = true}}\n{text}", lab=survey)
    assert cluster.is_measured
    assert describe(cluster).endswith("between machines: 1.1 GB/s, 60 us (measured)")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("crad = 'T4'", r".crad is no key; did you mean card"),
        ("card = 'T4'\nzz = 1", r".zz is no key; keys are card, cards_per_machine"),
        ("count = 2", " has no cards: give one of card, cards and survey"),
        ("card = 'T4'\ncards = ['T4']", " has card and cards: give one"),
        ("cards = ['T4']\ncards_per_machine = 2", ".cards_per_machine goes with card, not with cards"),
        ("cards = []", r".cards = \[\] must be a list of names"),
        ("cards = ['T4', 4]", r".cards = \['T4', 4\] must be a list of names"),
        ("card = 'RTX 309'", ".card = 'RTX 309': no card is called so; did you mean RTX 3090"),
        ("card = 'A100'", ".card = 'A100': .* did you mean A100 PCIe 40GB or .* or A100 SXM 80GB"),
        ("card = 'quux'", ".card = 'quux': .* the catalogue has V100 PCIe 16GB, .*, MI300X"),
        ("card = 4", ".card = 4 must be a text"),
        ("card = 'T4'\ncount = 0", ".count = 0 must be at least 1"),
        ("card = 'T4'\ncount = 1000000000000", ".count = 1000000000000 must be at most 1048576"),
        ("card = 'T4'\ncards_per_machine = 9999999", ".cards_per_machine = 9999999 must be at most"),
        ("card = 'T4'\ncount = true", ".count = True must be a whole number"),
        ("card = 'T4'\ncards_per_machine = -8", ".cards_per_machine = -8 must be at least 1"),
        ("card = 'T4'\nprice_per_hour = -1.5", ".price_per_hour = -1.5 must be at least 0"),
        ("card = 'T4'\nprice_per_hour = inf", ".price_per_hour = inf must be"),
        ("survey = 'nowhere.json'", ".survey = 'nowhere.json': there is no file"),
        ("card = 'T4'\ntopology = 'nowhere.txt'", ".topology = 'nowhere.txt': .*nowhere.txt"),
        ("card = 'T4'\ninside = 'PCIe 4'\ntopology = 'a.txt'", ".inside and topology both tell the links"),
        ("card = 'T4'\ninside = 'PCI 4'", ".inside = 'PCI 4': no link is called so; did you mean PCIe 4"),
    ],
)
def test_a_machine_that_is_refused(keys: str, said: str, place: Place) -> None:
    with pytest.raises(ConfigurationError, match=rf"cluster.toml: machines\[0\]{said}"):
        place.machine(keys.replace("'", '"'))


def test_more_cards_than_a_cluster_has_are_refused(place: Place) -> None:
    with pytest.raises(ConfigurationError, match="machines have more than 1048576 cards together"):
        place.machine('card = "T4"\ncards_per_machine = 1025\ncount = 1024')


@pytest.mark.parametrize(
    ("between", "said"),
    [
        ("'NVLink 6'", "between = 'NVLink 6': no link is called so; did you mean NVLink 5"),
        ("'100'", "between = '100': '100' is no bandwidth: write a number with a unit"),
        ("100", "between = 100 must be a text"),
        ("{latency = '5 us'}", "between needs both latency and bandwidth"),
        ("{latency = 5}", "between.latency = 5 must be a text"),
        ("{latenc = '5 us'}", "between.latenc is no key; did you mean latency"),
        ("{latency = '5'}", "between.latency = '5': '5' is no latency"),
    ],
)
def test_a_link_that_is_refused(between: str, said: str, place: Place) -> None:
    with pytest.raises(ConfigurationError, match=f"cluster.toml: {said}"):
        place(f"between = {between}\n[[machines]]\ncard = 'T4'".replace("'", '"'))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": machines is missing"),
        ("machines = []", ": machines is missing"),
        ("machines = [3]", r": machines\[0\] = 3 must be a table"),
        ("machine = 3", ": machine is no key; did you mean machines"),
        ("[[machines]]\ncard = 'T4'\ncount = 3", ": between is missing: 3 machines need a link"),
        ("[[machines]", " is no TOML"),
    ],
)
def test_a_file_that_is_refused(text: str, said: str, place: Place) -> None:
    with pytest.raises(ConfigurationError, match=f"cluster.toml{said}"):
        place(text)


def test_a_survey_with_links_and_another_source_of_links(place: Place) -> None:
    with pytest.raises(
        ConfigurationError, match="inside and the survey both tell the links: leave inside out"
    ):
        place.machine('survey = "lab.json"\ninside = "PCIe 3"', lab=measured(MeasuredLink(0, 1, 9e-6, 1e10)))


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the cluster cannot be read: .*nowhere.toml"):
        read_cluster(tmp_path / "nowhere.toml")
