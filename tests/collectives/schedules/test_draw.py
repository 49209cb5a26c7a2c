from __future__ import annotations

from xml.etree import ElementTree

from evener.collectives.schedules.direct import direct
from evener.collectives.schedules.draw import draw, draw_svg
from evener.collectives.schedules.halving import halving
from evener.collectives.schedules.ring import ring
from evener.collectives.schedules.schedule import Topology

SVG = "{http://www.w3.org/2000/svg}"


def test_table_has_a_row_a_round_and_a_column_a_rank() -> None:
    assert draw(ring(Topology.flat(2))).splitlines() == [
        "round   rank 0   rank 1",
        "    0   0>1+     1>0+",
        "    1   1>1      0>0",
    ]


def test_table_shows_ranges_of_chunks_and_idle_ranks() -> None:
    assert draw(halving(Topology.flat(3))).splitlines() == [
        "round   rank 0   rank 1   rank 2",
        "    0   0-1>1+",
        "    1            1>2+     0>1+",
        "    2            0>2      1>1",
        "    3            0-1>0",
    ]


def test_table_shows_transfers_of_a_rank_to_itself() -> None:
    assert draw(direct(Topology.flat(2))).splitlines()[1] == "    0   0>0 0>1   0>0+ 0>1+"


def test_table_of_one_rank_is_only_the_heading() -> None:
    assert draw(ring(Topology.flat(1))) == "round   rank 0"


def test_svg_has_an_arrow_for_each_transfer_and_a_line_for_each_rank() -> None:
    image = ElementTree.fromstring(draw_svg(ring(Topology.of_hosts([2, 1]))))
    arrows = [path for path in image.iter(f"{SVG}path") if "marker-end" in path.attrib]
    dashed = [arrow for arrow in arrows if "stroke-dasharray" in arrow.attrib]
    texts = [text.text for text in image.iter(f"{SVG}text")]
    assert (len(arrows), len(dashed)) == (12, 6)
    assert {"rank 0", "rank 2", "host 0", "host 1"} <= set(texts)


def test_svg_draws_a_transfer_to_itself_as_a_loop() -> None:
    image = ElementTree.fromstring(draw_svg(direct(Topology.flat(2))))
    arrows = [path.attrib["d"] for path in image.iter(f"{SVG}path") if "marker-end" in path.attrib]
    assert sum("C" in arrow for arrow in arrows) == 2
