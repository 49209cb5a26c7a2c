"""Draws the blocks of a batch that a second rank computes as well, and the rank that does so.

The draw is counter-based: what becomes of a block depends on the seed and on the place of the block in the training,
and not on what was drawn before. So all ranks know it without a message, a resumed run draws the same blocks, and
another division of the batch changes only who computes them.
"""

from __future__ import annotations

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
    chances, choices = generator.random_raw(2 * len(owners)).reshape(-1, 2).T.tolist()
    return tuple(
        AuditedBlock(block, owner, (owner + 1 + choice % (world_size - 1)) % world_size)
        for block, (owner, chance, choice) in enumerate(zip(owners, chances, choices, strict=True))
        if chance < fraction * 2**64
    )
