"""Draws the blocks of a batch that a second rank computes as well, and the rank that does so.

The draw is counter-based: it depends on the seed, on the place of the batch in the training and on its shares, and not
on what was drawn before. So all ranks know it without a message, and a resumed run draws the same blocks.

Ranks wait for each other at the end of a step. If blocks were drawn one by one, the few ranks that have something to
audit in a step would keep all others waiting, and the more ranks, the more often. So all ranks audit in the same steps,
each the blocks of one other rank::

    step      1    2    3    4    5    6         rank 0 audits rank 2, 1 audits 0, 2 audits 1 in step 3,
    rank 0    .    .    2    .    .    1         and the other way round in step 6
    rank 1    .    .    0    .    .    2
    rank 2    .    .    1    .    .    0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_KEY = 0x61756469745F6F66
"""Second word of the generator's key, so that nothing else that is drawn from the same seed is the same."""


@dataclass(frozen=True)
class AuditedBlock:
    """A block that two ranks compute."""

    block: int
    """Number of the block in its batch."""
    owner: int
    """The rank that computes it for the training."""
    auditor: int
    """Another rank, which computes it to compare."""


def drawn_blocks(
    fraction: float, seed: int, place: tuple[int, int], owners: Sequence[int], world_size: int
) -> tuple[AuditedBlock, ...]:
    """Returns the audited blocks of a batch, in order.

    Args:
        fraction: The part of all blocks that is audited, from 0 to 1.
        place: The epoch of the batch, and its position there.
        owners: For each block of the batch, the rank that computes it.
        world_size: The number of ranks; with one, nothing is audited.
    """
    if not fraction or world_size < 2:
        return ()
    generator = np.random.Philox(key=[seed % 2**64, _KEY], counter=[0, 0, *place])
    chance, turn, *order = generator.random_raw(2 + len(owners)).tolist()
    owned: dict[int, list[tuple[int, int]]] = {}
    for block, owner in enumerate(owners):
        owned.setdefault(owner, []).append((order[block], block))
    found = list[AuditedBlock]()
    for owner, own in owned.items():
        # Rounded at random, with the same number for all ranks: each block has the same chance.
        count = math.floor(fraction * len(own) + (chance >> 11) / 2**53)
        auditor = (owner + 1 + turn % (world_size - 1)) % world_size
        found += (AuditedBlock(block, owner, auditor) for _, block in sorted(own)[:count])
    return tuple(sorted(found, key=lambda each: each.block))
