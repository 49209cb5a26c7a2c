"""The draw of audited blocks: alike on all ranks, and each block with the same chance."""

from __future__ import annotations

from collections import Counter

from evener.data.audits import drawn_blocks


def test_all_ranks_audit_in_the_same_batches() -> None:
    """So that no rank waits for the audits of another."""
    sizes = Counter[int]()
    for batch in range(400):
        drawn = drawn_blocks(0.02, 7, (1, 64 * batch), [0, 0, 1, 1, 2, 2, 3, 3], 4)
        sizes[len(drawn)] += 1
        assert sorted(each.auditor for each in drawn) in ([], [0, 1, 2, 3])
        assert all(each.auditor != each.owner for each in drawn)
    assert set(sizes) == {0, 4}
    assert abs(sizes[4] - 16) < 16, "4 standard deviations"


def test_each_block_has_the_same_chance() -> None:
    """With unequal shares, too, and for a rank without blocks."""
    blocks = Counter[int]()
    for batch in range(4000):
        drawn = drawn_blocks(0.25, 3, (0, 64 * batch), [0, 2, 2, 2, 2, 2, 2], 4)
        blocks.update(each.block for each in drawn)
    assert all(abs(blocks[block] - 1000) < 110 for block in range(7)), "4 standard deviations"


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
