"""Copies buffers that a forward pass changed from one rank to all others, and warns if they depend on samples.

Ranks that divide a batch get equal buffers after each step: those of one rank. If a buffer follows from the weights
alone (as with ``spectral_norm``), this matches training on one device. If it follows from samples (as with a running
average in a user's module), it does not match, and no collective can know how to correct it.
"""

from __future__ import annotations

import warnings

from evener.components.sharded_tensor.local import local
from evener.data.batch import Batch
from evener.data.fingerprint import digest_of
from evener.hardware.async_read import is_late
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner
from evener.torch_internals.dispatch import active_fake_mode


def share_buffers(learner: Learner, batch: Batch) -> None:
    """Copies the loose buffers of the first rank with samples to all ranks. All ranks must call this together.

    Args:
        batch: The batch whose forward pass changed the buffers.
    """
    if not learner.has_shared_buffers:
        learner.has_shared_buffers = True
        _tell(learner, batch)
    learner.synchronizer.share_buffers(learner.loose_buffers.tensors(), batch.first_part)


def _tell(learner: Learner, batch: Batch) -> None:
    """Compares the buffers of the ranks that had samples. Only on CPU ranks of one kind that each compute samples of
    their own, and not in an estimate, which has no numbers.

    Warns:
        UserWarning: On rank 0, if the buffers differ.
    """
    divided = learner.data.degree > 1 and learner.data.is_whole
    uncompared = is_late(learner.session.device) or learner.session.mixed or active_fake_mode() is not None
    if not divided or learner.settings.batch_norm == "local" or uncompared:
        return  # a step must not wait for a GPU, and mixed devices round differently; all ranks decide alike
    loose = {id(buffer) for buffer in learner.loose_buffers.tensors()}
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
