"""Buffers that a forward pass writes from a rank's own samples, told once.

Ranks that divide a batch are given the same buffers after each step, those of one of them. Where what is written
follows from the weights alone (``spectral_norm``), that is what one device would have; where it follows from samples
(a running average in a module of the user's), it is not, and no collective of ours can know how to make it so.
"""

from __future__ import annotations

import warnings

from evener.components.sharded_tensor.local import local
from evener.data.batch import Batch
from evener.data.fingerprint import digest_of
from evener.hardware.async_read import is_late
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner


def share_buffers(learner: Learner, batch: Batch) -> None:
    """Gives all ranks one rank's loose buffers, written with ``batch``. A collective call."""
    if not learner.has_shared_buffers:
        learner.has_shared_buffers = True
        _tell(learner, batch)
    learner.synchronizer.share_buffers(learner.loose_buffers(), batch.first_part)


def _tell(learner: Learner, batch: Batch) -> None:
    """Compares the buffers of ranks that have had samples of a batch, where each computes a part of its own on a CPU.

    Warns:
        UserWarning: On rank 0, if they differ.
    """
    divided = learner.data.degree > 1 and learner.data.is_whole
    uncompared = is_late(learner.session.device) or learner.session.mixed
    if not divided or learner.settings.batch_norm == "local" or uncompared:
        return  # a step waits for no device; and unlike ones round differently, on all ranks or none
    loose = {id(buffer) for buffer in learner.loose_buffers()}
    own = {
        clean_name(name): digest_of(local(buffer))
        for name, buffer in learner.model.named_buffers()
        if id(buffer) in loose
    }
    has_samples = any(micro.weight for micro in batch.micro_batches)
    said = [row for row in learner.session.control.gather_objects(own if has_samples else None) if row]
    differing = [name for name in own if len({row.get(name) for row in said}) > 1]
    if differing and learner.session.rank == 0:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        warnings.warn(
            f"buffer {differing[0]}{more} is not the same on all ranks after a step: the model's forward writes it "
            "from the samples that a rank has. After each step all get those of the first rank with samples, which is "
            "not what one device would have; see docs/exactness.md",
            stacklevel=2,
        )
