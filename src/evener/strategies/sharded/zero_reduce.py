"""Sums gradients to the owners of rows, and gathers the rows after their owners have updated them.

::

    stage 1   every bucket once a step       all ranks get the sum, and keep their own rows of it
    stage 2   every bucket a micro-batch     the owner gets the sum, and adds it to what it has

With stage 2 no rank ever holds more gradients than its own rows and a few buckets, also if a step has several
micro-batches. On a mesh that also has the axes ``data`` or ``context``, owners then sum their rows over these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from evener.collectives.registry import make
from evener.collectives.shared_memory.reduce_scatter import SharedOwners
from evener.collectives.shared_memory.shared_buffer import Common
from evener.components import gradients
from evener.components.coalesce import broadcast_together
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.distributed.mesh import DIVIDING_TERMS
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout, is_late
from evener.hardware.timers import waiting
from evener.strategies.exact_sums import add_block, check_kernels, exact_gradients
from evener.strategies.learner import Learner
from evener.strategies.reducer import Reducer
from evener.strategies.sharded.buckets import MOST_ON_THE_WAY, Bucket, BucketRound, buckets_of
from evener.strategies.sharded.full_weights import FullWeights
from evener.strategies.sharded.owned_weight import AXIS, Weight
from evener.strategies.sharded.reduce_modes import AllReduceMode, ReduceMode, ReduceScatterMode
from evener.strategies.sharded.write_check import refuse_writes


class ZeroSum(Reducer):
    """Sums gradients to the owners of rows, as ``stage`` 1 or 2 does, and gathers updated rows from them.

    Args:
        apart: True to sum over the owners only, and not over other axes of the mesh, and to compress nothing.
    """

    unknown_remedy = (
        "task's model between steps, in which each rank has its own rows: build the optimizer outside of the model's "
        "forward, from engine.model.parameters()"
    )

    def __init__(self, learner: Learner, stage: int, in_common: bool = False, apart: bool = False) -> None:
        axes = (AXIS,) if apart else DIVIDING_TERMS
        everyone = learner.mesh.group(*axes)
        assert everyone is not None
        super().__init__(learner, everyone)
        self._weights = {weight.piece: weight for weight in _weights(learner)}
        learner.exact = self._exact = exact_gradients(learner, {w.name: w.whole for w in self._all})
        if self._exact is not None:
            check_kernels(learner.optimizer)
        self._way: ReduceMode = (AllReduceMode if stage == 1 else ReduceScatterMode)(learner, axes)
        self._sparse_sum = make("native", everyone, learner.session.timeout_seconds)
        self._round = self._round_of(self._all)
        self._way.prepare(max((bucket.nbytes for bucket in self._round.buckets), default=0))
        self._wholes = FullWeights(learner.model, self._all, self._buckets(self._all), self._way.owners)
        refuse_writes(learner.model, self._whole, learner.name)
        self._sound: list[Readout] = []
        self._stepping = self._sending = self._last = False
        self._over = True
        for weight in self._all:
            weight.watch(self._arrived)
        self._wholes.refresh()
        self._common = ""
        if in_common:
            self.alone()

    def alone(self) -> None:
        """Keeps whole weights once per host, in memory that all owners share, if all owners are on one host."""
        cut = [weight for weight in self._all if weight.cut is not None]
        if self._common or not cut or not isinstance(self._way.owners, SharedOwners):
            return
        group, seconds = self._learner.mesh.group(AXIS), self._learner.session.timeout_seconds
        assert group is not None
        try:
            common = Common(group, [(w.whole.shape, w.whole.dtype) for w in cut], seconds, "weights")
        except ConfigurationError as error:  # raised on every rank alike
            self._common = f"weights on every rank: {error}"
            return
        self._common = "weights in common"
        self._wholes.move(common, cut, self._buckets(weight for weight in self._all if weight.cut is None))

    @property
    def words(self) -> str:  # type: ignore[override]
        return ", ".join(filter(None, (self._way.words, self._common)))

    @property
    def bucket_nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the largest buckets that can exist together: one is filled while others are being summed."""
        sizes = sorted((bucket.nbytes for bucket in self._round.buckets), reverse=True)
        return sum(sizes[: MOST_ON_THE_WAY + 1])

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        return ((weight.name, weight.whole) for weight in self._all)

    @property
    def _all(self) -> list[Weight]:
        return list(self._weights.values())

    def _dense(self, weights: Iterable[Weight]) -> list[Weight]:
        return [weight for weight in weights if not weight.sparse]

    def _round_of(self, weights: Iterable[Weight]) -> BucketRound:
        look = self._learner.unsound.of_flat
        buckets = self._buckets(self._dense(weights), counted=self._exact is not None)
        return BucketRound(buckets, self._way.start, self._work_done, look, self._way.room, self._exact)

    def _buckets(self, weights: Iterable[Weight], counted: bool = False) -> list[Bucket]:
        mesh = self._learner.mesh
        return buckets_of(weights, self.bucket_bytes, mesh.degree(AXIS), mesh.index(AXIS), counted)

    # A step

    def wrap(self, replica: nn.Module) -> nn.Module:
        replica.register_forward_hook(self._told)
        return replica

    def _told(self, replica: nn.Module, args: object, total: Tensor) -> None:
        self._round.total = total.detach()

    def forward(self) -> AbstractContextManager[None]:
        return self._wholes.shown()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        each = self._way.each_micro_batch and self._exact is None
        self._last, summed_now = last, last or each
        with self._computing(sending=summed_now):
            yield
        if summed_now and not last:
            self._round.finish()

    def end_block(self) -> None:
        add_block(self._learner, {weight.name: weight.whole for weight in self._all})

    def until_complete(self) -> AbstractContextManager[None]:
        self._last = False
        return self._computing(sending=False)

    @contextmanager
    def _computing(self, sending: bool) -> Iterator[None]:
        """Context around forward and backward. Full buckets are sent in it if ``sending``."""
        self._begin()
        with self._wholes.shown():
            self._stepping, self._sending = True, sending
            try:
                yield
            finally:
                self._stepping = self._sending = False

    def _begin(self) -> None:
        """Begins a step, unless one has begun."""
        if self._over:
            self._round.forget()
            self._over = False

    def _arrived(self, weight: Weight) -> None:
        """Called when backward has left the gradient of this rank's samples in the whole weight."""
        if self._sending and not weight.sparse:
            self._round.arrived(weight)
        elif not self._stepping:
            weight.show()

    def _work_done(self) -> None:
        if self._last:
            self._learner.work_timer.work_done()

    def complete(self) -> tuple[str, ...]:
        self._begin()
        self._last = True
        sparse = [weight for weight in self._all if weight.sparse]
        given = {weight for weight in sparse if weight.whole.grad is not None}
        self._sound = [self._look_at(sparse)] if sparse else []
        self._round.finish()
        if not self._round.buckets:
            self._work_done()
        told = [*self._hand_out(self._round), *self._sum_sparse(sparse)]
        earlier = self._exact.given if self._exact is not None else set()
        self._sum_again()
        self._wholes.barrier()  # other ranks may still read, in backward, the weights that this rank will update
        self._over = True
        if not self._all_sound(told):
            # This leads to an error that names the rank with a number that is not finite.
            return tuple(weight.name for weight in self._all)
        given |= self._round.given
        return tuple(w.name for w in self._all if w not in given and w.name not in earlier)

    def _look_at(self, weights: Iterable[Weight]) -> Readout:
        return self._learner.unsound.check_gradients(
            gradients.named((weight.name, weight.whole) for weight in weights)
        )

    def _all_sound(self, told: Iterable[Tensor]) -> bool:
        """Returns False if a summed flag is not finite. Returns True on a GPU, without waiting for the flags."""
        return is_late(self._learner.session.device) or all(bool(torch.isfinite(one)) for one in told)

    def soundness(self) -> tuple[Readout, ...]:
        return (*self._round.soundness, *self._sound)

    def updated(self, step: int) -> None:
        self._round.forget()
        self._wholes.refresh(always=True)

    def _hand_out(self, done: BucketRound) -> Iterator[Tensor]:
        """Gives the pieces their rows of the sums as gradients. Yields the summed flag of each bucket."""
        for number, own in done.sums.items():
            bucket = done.buckets[number]
            with waiting():
                self._way.end(bucket, own)
            *rows, tells = bucket.own_rows(own)
            for weight, gradient in zip(bucket.weights, rows, strict=True):
                weight.hide()
                weight.piece.grad = gradient.to(weight.piece.dtype)
            if self._exact is not None:
                self._exact.take_counts([weight.name for weight in bucket.weights], tells[1:])
            yield tells[:1]
        self._make_alike(weight for number in sorted(done.sums) for weight in done.buckets[number].weights)

    def _sum_again(self) -> None:
        """Ends sums that are exact in bits: those with too large numbers are made once more, over all ranks."""
        if self._exact is None:
            return
        with waiting():
            again = self._exact.finish(lambda limbs: self._sparse_sum(limbs).wait())
        for weight in self._all:
            if weight.name in again:
                weight.piece.grad = weight.rows(again[weight.name], self._learner.mesh.index(AXIS)).to(
                    weight.piece.dtype
                )

    def _make_alike(self, weights: Iterable[Weight]) -> None:
        """Broadcasts the gradients of undivided weights from the first rank. A bucket holds such a gradient once per
        rank, and the copies may be summed in different orders: without this, rounding would make the ranks differ."""
        kept = [weight.piece.grad for weight in weights if weight.cut is None]
        group = self._learner.mesh.group(AXIS)
        assert group is not None
        broadcast_together(
            (gradient for gradient in kept if gradient is not None), group, 0, self.bucket_bytes
        )

    def _sum_sparse(self, weights: Iterable[Weight]) -> Iterator[Tensor]:
        """Sums sparse gradients over all ranks; each keeps its own rows. Yields the sum of each, as a check number."""
        for weight in weights:
            gradient = weight.taken()
            with waiting():
                self._sparse_sum(gradient).wait()
            weight.piece.grad = weight.own_of_sparse(gradient)
            yield gradients.sum_of(gradient)

    # The user's own training loop

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        self.check_known(parameters)
        weights = [self._weights[p] for p in parameters if p in self._weights]
        for weight in weights:
            weight.check()
            weight.hide()
        found = self._present(weights)
        self._last = False
        done = self._round_of(found)
        done.finish()
        list(self._hand_out(done))
        list(self._sum_sparse(weight for weight in found if weight.sparse))
        self._wholes.barrier()
        self._wholes.expire()

    def _present(self, weights: Sequence[Weight]) -> list[Weight]:
        """Returns the weights to which at least one rank gave a gradient. All ranks must call this together."""
        self._look_at(weights)
        everywhere = self.absent_everywhere([weight.name for weight in weights if weight.whole.grad is None])
        return [weight for weight in weights if weight.name not in everywhere]

    def close(self) -> None:
        self._wholes.close()
        for weight in self._all:
            weight.close()
        self._way.close()
        self._sparse_sum.close()


def _weights(learner: Learner) -> Iterator[Weight]:
    """Yields a :class:`Weight` for everything that is trained here, on some rank of the axis."""
    sparse = gradients.sparse_weights(learner.model)
    for parameter, name in learner.names.items():
        piece = shard_spec(parameter)
        if piece is not None and piece.axis == AXIS:
            if piece.pieces[-1].stop:
                yield Weight(name, parameter, piece, parameter in sparse)
        elif parameter.requires_grad and parameter.numel():
            yield Weight(name, parameter, None, parameter in sparse)
