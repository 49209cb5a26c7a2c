"""Compares blocks of grains that two ranks have computed, before the update: finds a device that computes wrongly.

In a run that is exact in bits, a block has the same gradients on whichever rank computes it. So another rank can check
them, bit by bit. A repetition on the same device would find no fault that is always there::

    rank 0    blocks 0 1 2 3 ───────────────── digest of 2 ─┐
    rank 1    block 2 ─ digest, forgets ─ blocks 4 5 6 7   ─┴─▶ equal, or rank 2 decides ─ update, or an error

Both take the digest of the block's gradients where they come to be summed with those of other blocks: every strategy
passes them to :class:`~evener.components.exact_sum.gradients.ExactGradients`, whole. The auditor computes the block
before its own, and restores what that has changed. Both also take a digest of the samples, because what was read
otherwise is not computed wrongly.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from evener.components.bit_digest import bit_digest, sum_of_digests
from evener.components.buffer_snapshot import BufferSnapshot
from evener.data.audits import AuditedBlock
from evener.data.batch import Batch, MicroBatch, tensors_in
from evener.distributed.control_channel import Rows
from evener.distributed.shm.scoreboard import WIDTH, quickest
from evener.errors import ConfigurationError, DataError, DivergenceError
from evener.hardware.accelerators import description_of
from evener.hardware.async_read import is_late
from evener.nn.grain_norm import GrainNorm
from evener.strategies.learner import Learner

Compute = Callable[[MicroBatch], object]
"""Runs forward and backward of a grain, without summing its gradients over the ranks."""
_HALF = 2**32
_NOTHING = [0.0] * 4
_LOSSES = 2**32
"""Where the numbers of losses begin; before are those of parameters."""


class BlockDigest:
    """The digests of one block: of its samples, and of its losses and gradients."""

    def __init__(self, device: torch.device) -> None:
        self.samples = torch.zeros((), dtype=torch.int64, device=device)
        self.results = torch.zeros((), dtype=torch.int64, device=device)
        self.grains = 0

    def add(self, micro: MicroBatch, term: Tensor) -> None:
        """Adds the samples of a grain, and the sum of its loss's terms."""
        leaves = tensors_in((micro.inputs, micro.targets))
        self.grains += 1
        for place, leaf in enumerate(leaves):
            self.samples += bit_digest(_dense(leaf), 1_000 * self.grains + place).to(self.samples.device)
        self.results += bit_digest(term, _LOSSES + self.grains)

    def row(self) -> list[float]:
        """Returns the digests as four numbers that a float64 holds. Waits for the device."""
        found = torch.stack([self.samples, self.results]).tolist()
        return [float(half) for digest in found for half in divmod(digest % 2**64, _HALF)]


class BlockAudit:
    """Takes and compares the digests of the audited blocks of this rank.

    Args:
        learner: Computes the blocks.

    Raises:
        ConfigurationError: If there is no other rank, or a rank cannot compute a block without the others.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        if learner.session.world_size < 2:
            raise ConfigurationError(
                "audit compares what two ranks compute, and there is one rank: leave audit out, or take more ranks"
            )
        if learner.synchronizer.gathers_in_passes:
            raise ConfigurationError(
                f"audit has a rank compute a block by itself, and with strategy {learner.name!r} ranks meet in each "
                "pass, to gather weights: use ddp, or sharded with zero=1 or zero=2, or leave audit out"
            )
        assert learner.exact is not None
        self._exact = learner.exact
        # Of its own, so that a rank may tell as soon as it knows, whatever else the ranks send each other.
        self._quick = quickest(learner.session)
        self._told: Rows | None = None
        self._audited: Sequence[AuditedBlock] = ()
        self._left: set[int] = set()
        """The blocks of this rank whose digests it has still to tell."""
        self._numbers = {name: at for at, name in enumerate(learner.names.values())}
        self._found: dict[int, BlockDigest] = {}
        self.blocks = 0
        """The number of blocks that were compared so far, on all ranks."""

    @property
    def words(self) -> str:
        """A text for the record."""
        found = f": {self.blocks:,} so far, with the same bits" if self.blocks else ""
        part = 100 * self._learner.settings.audit
        return f"{part:.3g} % of all blocks are computed by two ranks{found}"

    def begin_grain(self, micro: MicroBatch, term: Tensor) -> None:
        """Called before the backward of each grain. What is passed to the sum until the next one are the gradients of
        its block."""
        self._exact.watch = None
        if self._left and self._found.keys() >= self._left and micro.audit not in self._left:
            self._tell()  # other ranks have it when they ask
        if micro.audit is not None:
            digest = self._found.setdefault(micro.audit, BlockDigest(self._learner.session.device))
            digest.add(micro, term)
            self._exact.watch = partial(self._add_gradients, digest)

    def _add_gradients(self, digest: BlockDigest, gradients: Mapping[str, Tensor]) -> None:
        if gradients:  # zeros count as no gradient
            numbers = [self._numbers[name] for name in gradients]
            digest.results += sum_of_digests(list(map(_dense, gradients.values())), numbers)

    def begin(self, batch: Batch, compute: Compute) -> None:
        """Begins a step: computes the blocks of other ranks that this rank audits, and forgets earlier digests."""
        self._told, self._audited, self._left = None, batch.audited, set()
        self.compute(batch.audits, compute)
        rank, device = self._learner.session.rank, self._learner.session.device
        if not is_late(device):  # where to read a digest waits for no device
            self._left = {each.block for each in batch.audited if rank in (each.owner, each.auditor)}

    def _tell(self) -> None:
        """Sends the digests of this rank's blocks to all ranks."""
        rows = [
            self._found[each.block].row() if each.block in self._found else _NOTHING for each in self._audited
        ]
        numbers, self._left = [number for row in rows for number in row], set()
        way = self._quick if len(numbers) <= WIDTH else self._learner.session.control
        self._told = way.exchange(numbers)

    def compute(self, micro_batches: Sequence[MicroBatch], compute: Compute) -> None:
        """Computes whole blocks of other ranks, and forgets earlier digests. Leaves gradients, buffers and running
        statistics as they were."""
        self._found = {}
        model, synchronizer = self._learner.model, self._learner.synchronizer
        kept, buffers = {p: p.grad for p in self._learner.names}, BufferSnapshot(model)
        norms = [(norm, len(norm.terms)) for norm in model.modules() if isinstance(norm, GrainNorm)]
        self._exact.is_adding = False
        try:
            _set_gradients(dict.fromkeys(kept))
            for micro in micro_batches:
                compute(micro)
                if micro.ends_block:
                    synchronizer.end_block()
        finally:
            self._exact.is_adding, self._exact.watch = True, None
            _set_gradients(kept)
            buffers.restore()
            for norm, count in norms:
                del norm.terms[count:]

    def compare(self, batch: Batch, step: int, compute: Compute) -> None:
        """Compares the digests of the audited blocks of a step. All ranks must call this together.

        Args:
            compute: Computes a grain again, if a third rank has to decide.

        Raises:
            DivergenceError: On all ranks alike, if a block has other gradients on its auditor; names the rank.
            DataError: If the auditor has read other samples.
        """
        self._exact.watch = None
        if self._told is None:
            self._tell()
        assert self._told is not None
        gathered, self._found = self._told.wait(), {}
        for at, each in enumerate(batch.audited):
            of_owner, of_auditor = (
                gathered[rank][4 * at : 4 * at + 4] for rank in (each.owner, each.auditor)
            )
            if of_owner[:2] != of_auditor[:2]:
                raise DataError(_other_samples(each, step))
            if of_owner != of_auditor:
                third = self._third(each, batch, compute)
                raise self._error(each, step, [of_owner, of_auditor], third)
        self.blocks += len(batch.audited)

    def _third(self, audit: AuditedBlock, batch: Batch, compute: Compute) -> tuple[int, list[float]] | None:
        """Returns a third rank and what it finds for a block. Returns None if there is none. A collective call."""
        session, control = self._learner.session, self._learner.session.control
        others = [rank for rank in range(session.world_size) if rank not in (audit.owner, audit.auditor)]
        if not others:
            return None
        grains = [micro for micro in batch.micro_batches if micro.audit == audit.block]
        sent = control.broadcast_object(_packed(grains) if session.rank == audit.owner else None, audit.owner)
        row = _NOTHING
        if sent and session.rank == others[0]:
            self.compute([micro.to(session.device) for micro in pickle.loads(sent)], compute)
            row = self._found.pop(audit.block).row()
        return (others[0], control.broadcast_object(row, others[0])) if sent else None

    def _error(
        self, audit: AuditedBlock, step: int, rows: list[list[float]], third: tuple[int, list[float]] | None
    ) -> DivergenceError:
        """Returns the error for a block whose digests differ. A collective call."""
        session = self._learner.session
        where = (description_of(session.device), session.environment.host)
        places = [f"{device} of {host}" for device, host in session.control.gather_objects(where)]
        pair = audit.owner, audit.auditor
        wrong = None if third is None or third[1] not in rows else pair[1 - rows.index(third[1])]
        either = f"rank {pair[0]} ({places[pair[0]]}) or rank {pair[1]} ({places[pair[1]]})"
        if third is not None and wrong is not None:
            right = sum(pair) - wrong
            found = (
                f"rank {wrong} ({places[wrong]}) computes wrongly: rank {right} and rank {third[0]} agree on the "
                f"gradients of block {audit.block} of step {step}, and it has others"
            )
        else:
            more = "" if third is None else f", and rank {third[0]} ({places[third[0]]}) agrees with neither"
            found = (
                f"{either} computes wrongly: they have different gradients of block {audit.block} of step {step}"
                f"{more}"
            )
        error = DivergenceError(
            f"{found}. No update is made of this step, and checkpoints are from before it. What can do it: a device "
            "or its memory at fault, clocks that are too high, an operation that is not deterministic. Go on from the "
            "last checkpoint without that device (resume); the bits do not depend on the number of ranks"
        )
        error.rank = wrong
        return error


def _set_gradients(gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _packed(grains: Sequence[MicroBatch]) -> bytes | None:
    """Returns the grains as bytes for another rank, or None if they hold something that cannot be sent."""
    try:
        return pickle.dumps([micro.to("cpu") for micro in grains])
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


def _other_samples(audit: AuditedBlock, step: int) -> str:
    return (
        f"rank {audit.owner} and rank {audit.auditor} have read different samples for block {audit.block} of step "
        f"{step}, so that its audit means nothing. No update is made of this step. Does the dataset draw random "
        "numbers of its own, or has a file changed? Seed it by the sample; otherwise look at storage and memory of both"
    )
