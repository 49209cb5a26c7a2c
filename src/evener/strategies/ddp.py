"""Data parallelism with PyTorch's DistributedDataParallel: every rank holds a replica of the model.

DDP's reducer fills buckets during backward and passes each to a communication hook, which sums the bucket. Three things
differ from plain DDP.

*Missing gradients.* DDP waits for a gradient of every parameter, or, with ``find_unused_parameters``, walks the graph
and exchanges a map of used parameters in every step. Here, if backward leaves buckets unfilled, a second backward in
the same iteration of the reducer gives zeros to the parameters without gradient. So a rank whose samples skip a layer
does not hang the others, and ordinary steps cost nothing extra.

*Sums that are exact in bits.* A bucket is then sent as float64 numbers: the sums of all blocks of this rank, and their
counts (:mod:`evener.components.exact_sum`). Only the last block's backward passes buckets to the hook, so that the
message overlaps with that.

*Only gradients are exchanged in a step.* Buffers are not broadcast before every forward pass. The buffers of an exact
BatchNorm are equal anyway; other buffers are shared only after a forward pass has written to them.

On a GPU the host waits for the device only once: before the second forward pass DDP rebuilds its buckets in the order
in which rank 0's gradients came, and reads that order from the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from evener.collectives.base import AllReduce, ChainedWork
from evener.collectives.ddp.buckets import bucket_nbytes
from evener.collectives.ddp.hook import hook, power_sgd_hook, power_sgd_state
from evener.collectives.registry import make
from evener.components.exact_sum.gradients import ExactGradients
from evener.components.gradients import numbers_of
from evener.components.reached_parameters import ReachedParameters
from evener.distributed.mesh import AXES, DIVIDING_TERMS, Layout, Mesh
from evener.hardware.async_read import Readout, ReadyValue, is_late
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import waiting
from evener.strategies.after_backward import PostBackwardSum, summing_afterwards
from evener.strategies.base import Strategy
from evener.strategies.exact_sums import add_block, exact_gradients
from evener.strategies.interfaces import Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.reducer import check_types, is_apart, zeros_of
from evener.strategies.sample_trial import SampleTrial
from evener.strategies.single import NoSync
from evener.strategies.steppers.oom_retry import plain_or_piecewise, wants_pieces
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.synchronizer import Synchronizer
from evener.torch_internals.ddp import MARKED_TWICE, groups_freed_last, leave_out, no_buffer_broadcast


class Ddp(Strategy):
    """Data parallelism: every rank holds the whole model, and gradients are summed during backward."""

    combines: ClassVar[tuple[str, ...]] = AXES
    mixes: ClassVar[bool] = True
    replays: ClassVar[bool] = True
    sums_bits: ClassVar[bool] = True

    def for_own_loop(self) -> Strategy:
        return self

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        return Layout({"data": world_size})

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        return normalize_together(model, mesh)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return summing_afterwards(learner) if wants_pieces(learner) else summing(learner)

    def stepper(self, learner: Learner) -> Stepper:
        stepper = plain_or_piecewise(learner)
        stepper.trial = SampleTrial(learner)
        return stepper


def summing(learner: Learner) -> Synchronizer:
    """Returns a synchronizer that sums gradients during backward over the ranks that divide a batch. With only one such
    rank, returns one that sums nothing."""
    group = learner.mesh.group(*DIVIDING_TERMS)
    return NoSync(learner) if group is None else DdpSum(learner, group)


class DdpSum(PostBackwardSum):
    """Sums gradients over the ranks of ``group`` through PyTorch's DistributedDataParallel."""

    holds_all = True
    exchanges_in_passes = True

    def __init__(self, learner: Learner, group: dist.ProcessGroup) -> None:
        super().__init__(learner, group)
        learner.exact = exact_gradients(learner)
        self._hook = DdpCommHook(_send(learner, group, self._all_reduce), learner, self._all_reduce)
        self._reached, self._was_unusual = ReachedParameters(), False
        self._ddp: DistributedDataParallel | None = None
        self._of_thawed: Readout = ReadyValue(0.0)

    def _summed_by(self) -> AllReduce:
        settings, session = self._learner.settings, self._learner.session
        compression = None if settings.compression == "powersgd" else settings.compression
        return make(
            settings.all_reduce, self._group, session.timeout_seconds, compression, session.inner_backend
        )

    @property
    def words(self) -> str:  # type: ignore[override]
        power_sgd = self._learner.settings.compression == "powersgd"
        return "native, compressed: powersgd" if power_sgd else self._all_reduce.words

    def wrap(self, replica: nn.Module) -> nn.Module:
        with self._learner.trained.as_at_first():
            self._ddp = self._wrapped(replica)
        self._types = {p: p.dtype for p in self._trained}
        self._watch()  # the first step, of which nothing is known yet
        # The lambda has no annotations: DDP would compare them with classes, and here annotations are strings.
        self._ddp.register_comm_hook(self._hook, lambda hook, bucket: hook(bucket))
        return self._ddp

    def _wrapped(self, replica: nn.Module) -> DistributedDataParallel:
        thawed = set(self._thawed())
        apart = [name for name, p in replica.named_parameters() if is_apart(p) or p in thawed]
        leave_out(replica, apart)
        with groups_freed_last():
            return DistributedDataParallel(
                replica,
                process_group=self._group,
                bucket_cap_mb=self.bucket_bytes / 2**20,
                gradient_as_bucket_view=True,
                init_sync=False,  # the weights are rank 0's already
                **no_buffer_broadcast(),
            )

    @cached_property
    def bucket_bytes(self) -> int:
        """The bucket size in bytes: from the settings, or chosen by the expected time of the all-reduce."""
        chosen = self._learner.settings.bucket_bytes
        return chosen or bucket_nbytes(self._all_reduce.expected_seconds, self.gradient_nbytes)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of all gradients that are summed."""
        return sum(p.nbytes for p in self._trained)

    @property
    def bucket_nbytes(self) -> int:  # type: ignore[override]
        """Bytes that the all-reduce holds. DDP's buckets take no more: gradients are views of them. In a run that is
        exact in bits, float64 sums of this rank, and those that are sent, come to it."""
        exact = 0 if self._learner.exact is None else 2 * sum(8 * p.numel() for p in self._trained)
        return self._all_reduce.held_nbytes + exact

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        assert self._ddp is not None
        if not last:
            return self._ddp.no_sync()
        self._hook.begin()
        if any(p.grad is not None for p in self._trained):  # from earlier passes
            self._was_unusual = True
            self._watch()
        self._reached.begin()
        return nullcontext()

    def _watch(self) -> None:
        with self._learner.trained.as_at_first():
            self._reached.watch(self._trained)

    def end_block(self) -> None:
        add_block(self._learner, {self._learner.names[p]: p for p in self._trained})

    def complete(self) -> tuple[str, ...]:
        missing = self._complete()
        if (exact := self._learner.exact) is not None:
            with waiting():
                again = exact.finish(lambda limbs: self._all_reduce(limbs).wait())
            for name, total in again.items():
                gradient = self._learner.parameter(name).grad
                if gradient is not None:
                    gradient.copy_(total)
        return missing

    def _complete(self) -> tuple[str, ...]:
        """Completes the reduction. Returns the names of the parameters without a gradient from this rank: those that
        backward has not reached, and those for which it has found none. DDP takes the latter for zeros, with which an
        optimizer would decay a weight.
        """
        self._of_thawed = self._learner.look_at(self._thawed())
        missing = self._without_gradient(self._thawed())
        if not self._hook.saw_last_bucket:
            self._was_unusual = True
            missing += self._fill()
        elif not (self._was_unusual or self._hook.undefined):
            self._reached.stop()
            return missing
        self._was_unusual = True
        self._watch()
        return missing + tuple(self._learner.names[p] for p in self._hook.undefined if p.requires_grad)

    def _fill(self) -> tuple[str, ...]:
        """Fills the buckets that backward left unfilled, for which DDP still waits, and so do the other ranks. Returns
        the names of the parameters of which they wait, and that have no gradient.

        A second backward, of a scalar with zero gradient in just those parameters, fills them in the same iteration of
        the reducer. A gradient from an earlier micro-batch stays, because zero is added to it. Parameters frozen since
        the start get zeros too, and their gradients are then dropped.
        """
        check_types(self._learner.names, self._types)
        unfilled = [p for p in self._trained if not self._reached.has(p)]
        given = self._learner.exact.given if self._learner.exact is not None else ()
        missing = tuple(name for name in self._without_gradient(unfilled) if name not in given)
        with self._learner.trained.as_at_first():
            if self._reached.is_watching:
                self._fill_with_zeros(unfilled)
            else:
                self._fill_each(unfilled)
        self._forget_frozen()
        return missing

    def _fill_with_zeros(self, parameters: Sequence[nn.Parameter]) -> None:
        zeros = _ZeroGradients.apply([p in self._sparse for p in parameters], *parameters)  # type: ignore[no-untyped-call]
        zeros.backward()

    def _fill_each(self, parameters: Sequence[nn.Parameter]) -> None:
        """Fills those of the parameters that backward has not reached, where nobody has watched which these are. DDP
        refuses the others."""
        for parameter in parameters:
            try:
                self._fill_with_zeros([parameter])
            except RuntimeError as error:
                if MARKED_TWICE not in str(error):
                    raise
                parameter.grad = None  # as backward has left it

    def soundness(self) -> tuple[Readout, ...]:
        thawed = [self._of_thawed] if self._learner.trained.thawed else []
        apart = [self._learner.look_at(self._apart)] if self._apart else []
        return (*self._hook.soundness, *thawed, *apart)

    @cached_property
    def _apart(self) -> list[nn.Parameter]:
        """The parameters of which each rank has a shard, whose gradients are summed by themselves."""
        return [p for p in self._learner.names if is_apart(p)]

    def let_go(self) -> None:
        self._reached.stop()
        self._ddp = None

    def close(self) -> None:
        self._reached.stop()
        # The reducer must be gone before its process group is.
        self._ddp = None
        gc.collect()
        self._all_reduce.close()


Send = Callable[[GradBucket], Future[Tensor]]
"""Starts to sum a bucket over the ranks. Returns a future of the summed bucket."""


def _send(learner: Learner, group: dist.ProcessGroup, all_reduce: AllReduce) -> Send:
    """Returns the function that sums a bucket: PowerSGD or the all-reduce."""
    if learner.settings.compression == "powersgd":
        return partial(power_sgd_hook, power_sgd_state(group))
    return partial(hook, all_reduce)


class _BucketViews(NamedTuple):
    """The gradients of a bucket, as views of its memory."""

    memory: tuple[int, int, torch.dtype]
    """Where the bucket is, its elements, and their type."""
    gradients: list[Tensor]
    places: list[float]


class DdpCommHook:
    """DDP's communication hook: sums each bucket over the ranks. The time this takes is not counted as the rank's own
    work.

    Args:
        send: Sums a bucket.
        all_reduce: Sums in its place where the run is exact in bits.
    """

    def __init__(self, send: Send, learner: Learner, all_reduce: AllReduce) -> None:
        self._send, self._learner, self._all_reduce = send, learner, all_reduce
        self._views: dict[int, _BucketViews] = {}
        """For each bucket the views of its gradients, on a device that runs behind the host."""
        self.begin()

    def begin(self) -> None:
        """Resets the hook for a new micro-batch."""
        self.saw_last_bucket = False
        self.soundness: list[Readout] = []
        self.undefined: list[nn.Parameter] = []
        """Parameters that backward has reached without a gradient, as from a function that returns None for one."""

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        self.saw_last_bucket = bucket.is_last()
        exact = self._learner.exact
        self.undefined += self._without(bucket, exact)
        flat = bucket.buffer() if exact is None else self._all_blocks(bucket, exact)
        # Check this rank's own gradients before they are summed with those of others.
        self.soundness.append(self._look(bucket, flat, exact))
        if self.saw_last_bucket:
            self._learner.work_timer.work_done()
            self._learner.has_drawn()
        with waiting(), named_range("all_reduce bucket", bucket.index()):
            return self._send(bucket) if exact is None else self._send_exact(bucket, flat, exact)

    def _without(self, bucket: GradBucket, exact: ExactGradients | None) -> list[nn.Parameter]:
        """Returns the parameters of a bucket that have no gradient, which DDP takes for zeros."""
        found = [
            p for p in bucket.parameters() if p.grad is None and isinstance(p, nn.Parameter) and p.numel()
        ]
        return found if exact is None else [p for p in found if self._learner.names[p] not in exact.given]

    def _look(self, bucket: GradBucket, flat: Tensor, exact: ExactGradients | None) -> Readout:
        unsound = self._learner.unsound
        if exact is not None:
            counts = flat[flat.numel() - len(bucket.parameters()) :]
            return unsound.of_flat(counts, partial(self._named, bucket, exact))
        if flat.is_sparse or not is_late(flat.device):
            return unsound.of_flat(flat, partial(self._named, bucket, None))
        known, memory = self._views.get(bucket.index()), (flat.data_ptr(), flat.numel(), flat.dtype)
        if known is not None and known.memory == memory and known.places:
            return unsound.of_late(known.gradients, known.places)
        named = [(name, each) for name, each in self._named(bucket, None) if each.numel()]
        numbers, places = (
            [numbers_of(each) for _, each in named],
            unsound.places_of(name for name, _ in named),
        )
        # DDP makes its buckets anew after the first step: views of the first ones would keep their memory.
        stays = known is not None and known.memory == memory
        self._views[bucket.index()] = _BucketViews(memory, *((numbers, places) if stays else ([], [])))
        return unsound.of_late(numbers, places) if places else ReadyValue(0.0)

    def _all_blocks(self, bucket: GradBucket, exact: ExactGradients) -> Tensor:
        """Returns the sums of all blocks of this rank, then their counts, which are infinite if a number is not
        finite."""
        last = self._gradients(bucket)
        return exact.packed(list(last), last)

    def _send_exact(self, bucket: GradBucket, flat: Tensor, exact: ExactGradients) -> Future[Tensor]:
        buffer, gradients = bucket.buffer(), self._gradients(bucket)

        def finish() -> Tensor:
            exact.unpack(flat, gradients)
            return buffer

        return ChainedWork(self._all_reduce(flat, lasting=True), finish, (flat, buffer)).future()

    def _gradients(self, bucket: GradBucket) -> dict[str, Tensor]:
        """Returns the gradients of a bucket, by name. A dense parameter's gradient has its strides, which
        ``GradBucket.gradients`` does not know."""
        pairs = zip(bucket.parameters(), self._named(bucket, None), strict=True)
        return {name: _strided(gradient, parameter) for parameter, (name, gradient) in pairs}

    def _named(self, bucket: GradBucket, exact: ExactGradients | None) -> list[tuple[str, Tensor]]:
        """Returns the gradients of a bucket, or where given the sums of all blocks of this rank."""
        names = [self._learner.names[p] for p in bucket.parameters() if isinstance(p, nn.Parameter)]
        if exact is not None:
            return exact.named(names)
        sparse = bucket.buffer().is_sparse
        return list(zip(names, [bucket.buffer()] if sparse else bucket.gradients(), strict=True))


def _strided(flat: Tensor, parameter: Tensor) -> Tensor:
    """Returns a view of ``flat``, elements of a bucket, in which DDP keeps the gradient of ``parameter``."""
    is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    if parameter.is_contiguous() or not is_dense:
        return flat
    return flat.as_strided(parameter.shape, parameter.stride())


class _ZeroGradients(torch.autograd.Function):
    """Returns a scalar with zero gradient in every parameter. A rank without gradients uses it to contribute zeros to
    the sum."""

    @staticmethod
    def forward(ctx: Any, sparse: list[bool], *parameters: Tensor) -> Tensor:
        ctx.parameters = list(zip(parameters, sparse, strict=True))
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(zeros_of(parameter, sparse) for parameter, sparse in ctx.parameters))
