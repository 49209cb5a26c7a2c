"""The draw of audited blocks: alike on all ranks, by what a block is and not by who computes it."""

from __future__ import annotations

from collections import Counter

from evener.data.audits import drawn_blocks


def test_a_block_is_drawn_by_its_place_alone() -> None:
    for batch in range(50):
        place = (1, 64 * batch)
        one = drawn_blocks(0.3, 7, place, [0] * 16, 3)
        other = drawn_blocks(0.3, 7, place, [0, 1, 2, 0] * 4, 3)
        alone = drawn_blocks(0.3, 7, place, [2] * 9, 3)
        assert [each.block for each in one] == [each.block for each in other]
        assert [each.block for each in alone] == [each.block for each in one if each.block < 9]


def test_places_and_seeds_draw_apart() -> None:
    drawn = {
        (seed, epoch, position): tuple(
            each.block for each in drawn_blocks(0.5, seed, (epoch, position), [0] * 64, 2)
        )
        for seed in (0, 1)
        for epoch in (0, 1)
        for position in (0, 64)
    }
    assert len(set(drawn.values())) == len(drawn)


def test_the_part_of_all_blocks_is_audited_by_all_others_equally() -> None:
    pairs: Counter[tuple[int, int]] = Counter()
    for batch in range(1000):
        pairs.update(
            (each.owner, each.auditor) for each in drawn_blocks(0.1, 0, (0, 96 * batch), [0, 1, 2] * 8, 3)
        )
    assert set(pairs) == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert abs(sum(pairs.values()) - 2400) < 200  # 4 standard deviations
    assert max(pairs.values()) - min(pairs.values()) < 160


def test_nothing_and_everything() -> None:
    assert drawn_blocks(0.0, 0, (0, 0), [0, 1], 2) == ()
    assert drawn_blocks(1.0, 0, (0, 0), [0, 0], 1) == ()
    assert [each.auditor for each in drawn_blocks(1.0, 2**70, (0, 0), [0, 1], 2)] == [1, 0]
