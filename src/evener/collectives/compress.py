"""Gradient compression: wrappers that send fewer bytes through any all-reduce, for an approximate sum.

A wrapper only needs an all-reduce that sums, so it works over each of them. The result is bitwise the same on all
ranks.

With *error feedback* (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847) a rank keeps the part of a tensor
that it did not send and adds it the next time, so that nothing is lost for good. The caller identifies the tensor by a
key; without a key nothing is kept, and the error of a call is lost. Use it for gradients only, not for a model's state.
Checkpoints do not contain the kept parts: a resumed run starts without them, and so does a training whose buckets are
rebuilt.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce, ChainedWork, Done, Key, PieceKey, Promised, Work
from evener.collectives.executor.subgroup import subgroup
from evener.collectives.executor.worker import Worker
from evener.distributed.hosts import destroy
from evener.errors import ConfigurationError

_WIDE = (torch.float32, torch.float64)
_BLOCK = 256
_INT8_MOST = 127
_FP8 = torch.float8_e4m3fn
_FP8_MOST = 448.0
_FP8_BLOCK_NBYTES = _BLOCK + 4


class Compressed(AllReduce):
    """Sums float32 and float64 approximately through ``inner``, and other types exactly. Owns and closes ``inner``."""

    def __init__(self, inner: AllReduce) -> None:
        super().__init__(inner.group, inner.timeout_seconds)
        self.inner = inner
        self._own_nbytes = 0
        """Bytes that this rank has sent, beside those that ``inner`` counts."""

    @property
    def exact(self) -> bool:
        return False

    @property
    def sent_nbytes(self) -> int:
        return self.inner.sent_nbytes + self._own_nbytes

    @property
    def held_nbytes(self) -> int:  # type: ignore[override]
        return self.inner.held_nbytes

    @property
    def words(self) -> str:
        return f"{self.inner.words}, compressed: {self.name}"

    def start(self, tensor: Tensor) -> Work:
        return self.start_for(tensor, None)

    def start_for(self, tensor: Tensor, key: Key) -> Work:
        if tensor.dtype not in _WIDE or not tensor.numel():
            return self.inner(tensor)
        return self.compress(tensor.view(-1), key)

    @abstractmethod
    def compress(self, flat: Tensor, key: Key) -> Work:
        """Starts to replace floats of shape (n,), n > 0, by their approximate sum. Subclasses must implement this."""

    def close(self) -> None:
        self.inner.close()


class Half(Compressed):
    """Rounds each term to ``dtype`` (float16 or bfloat16) and sums in that type: 2 bytes per element.

    Exactness: a relative error of 2**-11 (float16) or 2**-8 (bfloat16) in each term. The sum has the same error once
    more if ``inner`` adds in float32 (shared memory), else each addition has it. float16 overflows to infinity beyond
    65504 and loses terms below 6e-8; bfloat16 has the range of float32. No error feedback.
    """

    def __init__(self, inner: AllReduce, dtype: torch.dtype) -> None:
        super().__init__(inner)
        self.name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        self._dtype = dtype

    def expected_seconds(self, nbytes: int) -> float | None:
        """Returns the expected time for a float32 tensor of ``nbytes``, without the time for rounding."""
        return self.inner.expected_seconds(nbytes // 2)

    def compress(self, flat: Tensor, key: Key) -> Work:
        half = flat.to(self._dtype)
        self._own_nbytes += half.nbytes  # `start_for` does not count, and a call would sum in float32
        return ChainedWork(self.inner.start_for(half, None), lambda: flat.copy_(half), (flat, half))


class Feedback:
    """Residuals: for each key, the part of the tensor that was not sent. Residuals of outdated keys are dropped."""

    def __init__(self) -> None:
        self._left: dict[Key, Tensor] = {}

    def __len__(self) -> int:
        return len(self._left)

    @property
    def nbytes(self) -> int:
        """Bytes of all residuals."""
        return sum(left.nbytes for left in tuple(self._left.values()))  # a thread may add one meanwhile

    def residual(self, flat: Tensor, key: Key) -> Tensor:
        """Returns the residual of the tensor, to be changed in place; zeros like ``flat`` if there is none."""
        if key is None:
            return torch.zeros_like(flat)
        left = self._left.get(key)
        if left is None or (left.shape, left.dtype, left.device) != (flat.shape, flat.dtype, flat.device):
            self._forget(key)
            left = self._left[key] = torch.zeros_like(flat)
        return left

    def _forget(self, new: Key) -> None:
        """Drops residuals whose keys share a part with ``new``, as after DDP rebuilt its buckets, or whose parameters
        were deleted. Residuals of other pieces of the same tensor stay."""
        whole, parts = _whole(new), _parts(new)
        self._left = {
            key: left
            for key, left in self._left.items()
            if (parts.isdisjoint(_parts(key)) or (_whole(key) == whole and key != new))
            and not any(map(_is_gone, _parts(key)))
        }


def _whole(key: Key) -> Key:
    return key.whole if isinstance(key, PieceKey) else key


def _parts(key: Key) -> set[Key]:
    whole = _whole(key)
    return set(whole) if isinstance(whole, tuple) else {whole}


def _is_gone(part: Key) -> bool:
    return isinstance(part, weakref.ref) and part() is None


class WithFeedback(Compressed):
    """Compression with error feedback: adds to a tensor the part that was not sent before."""

    def __init__(self, inner: AllReduce) -> None:
        super().__init__(inner)
        self.feedback = Feedback()

    @property
    def remembers(self) -> bool:
        return True

    @property
    def held_nbytes(self) -> int:  # type: ignore[override]
        return super().held_nbytes + self.feedback.nbytes


class Int8(WithFeedback):
    """Sends one byte per element, and one float per block of 256, with error feedback.

    First the ranks add up each block's largest magnitude: S. The terms are rounded to multiples of the unit
    S / (127 - world_size / 2). All ranks' terms then add up to at most 127 units, so that int8 holds the sum, which is
    exact as a sum of integers.

    Exactness: an error of at most half a unit in each term, which is sent in the next step.
    """

    name = "int8"

    def __init__(self, inner: AllReduce) -> None:
        super().__init__(inner)
        self._most = _INT8_MOST - math.ceil(self.world_size / 2)
        if self._most < 1:
            raise ConfigurationError(
                f"int8 cannot hold a sum over {self.world_size} ranks (252 at most): use bf16"
            )

    def compress(self, flat: Tensor, key: Key) -> Work:
        left = self.feedback.residual(flat, key)
        left += flat
        blocks = _blocks(left)
        largest = blocks.abs().amax(dim=1).float()
        self.inner(largest).wait()
        unit = (largest / self._most).to(flat.dtype)[:, None]
        levels = (blocks / unit).nan_to_num_(0, 0, 0).round_().clamp_(-self._most, self._most).to(torch.int8)
        left -= (levels * unit).view(-1)[: flat.numel()]
        left.nan_to_num_(0, 0, 0)  # not finite: the result is not finite either, keep nothing

        def scale() -> Tensor:
            return flat.copy_((levels * unit).view(-1)[: flat.numel()])

        return ChainedWork(self.inner(levels), scale, (flat, levels, unit))


def _blocks(flat: Tensor) -> Tensor:
    """Reshapes (n,) to (blocks, 256); the last block is padded with zeros."""
    missing = -flat.numel() % _BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, _BLOCK)


class Fp8(WithFeedback):
    """Sends one byte per element and a float32 per block of 256, both for terms and for sums, with error feedback on
    both.

    The sum of fp8 numbers is no fp8 number, so nothing is added in fp8. Each rank sends its terms of a slice to the
    slice's owner. The owner adds them in the tensor's own dtype, in the order of ranks, and sends the sum to all ranks.
    Works for any number of ranks::

        rank 0   encode 0, 1 ─┐ ┌─ decode, add: slice 0 ─ encode ─┐
                              ├─┤                                 ├─ decode 0, 1
        rank 1   encode 0, 1 ─┘ └─ decode, add: slice 1 ─ encode ─┘

    On CPUs a thread does all of it, so that a call returns at once.

    Exactness: in each term and in the sum, an error of at most 2**-4 relative, or of 2**-18 of the largest element in
    the block. In the next step a rank sends the errors of its terms, and an owner the error of its slice.
    """

    name = "fp8"

    def __init__(self, inner: AllReduce) -> None:
        super().__init__(inner)
        self._of_sums = Feedback()
        self._worker = Worker("evener compression fp8")
        made = subgroup(self.group, range(self.world_size), self.timeout_seconds)
        assert made is not None  # all ranks are members
        self._exchanging: dist.ProcessGroup | None = made

    @property
    def held_nbytes(self) -> int:  # type: ignore[override]
        return super().held_nbytes + self._of_sums.nbytes

    def compress(self, flat: Tensor, key: Key) -> Work:
        if not flat.is_cuda:
            return Promised(self._worker.submit(lambda: self._sum(flat, key)))
        self._sum(flat, key)  # queued on the stream of the caller
        return Done(flat)

    def close(self) -> None:
        self._worker.close()
        if self._exchanging is not None:
            group, self._exchanging = self._exchanging, None
            destroy(group)
        super().close()

    def _sum(self, flat: Tensor, key: Key) -> Tensor:
        slices = -(-flat.numel() // (_BLOCK * self.world_size))  # blocks of each rank's slice
        terms = _with_lost(self.feedback, flat, key)
        padded = torch.nn.functional.pad(terms, (0, slices * _BLOCK * self.world_size - flat.numel()))
        sent = encode(padded.view(-1, _BLOCK))
        _keep_lost(self.feedback, terms, decode(sent, flat.dtype).view(-1)[: flat.numel()], key)
        received = torch.empty_like(sent)
        self._send_slices(received, sent)
        of_ranks = decode(received, flat.dtype).view(self.world_size, -1)
        mine = _with_lost(self._of_sums, _added(of_ranks), key)
        sent_sums = encode(mine.view(-1, _BLOCK))
        _keep_lost(self._of_sums, mine, decode(sent_sums, flat.dtype).view(-1), key)
        sums = torch.empty_like(sent)
        self._send_slices(sums, sent_sums)
        return flat.copy_(decode(sums, flat.dtype).view(-1)[: flat.numel()])

    def _send_slices(self, received: Tensor, sent: Tensor) -> None:
        """Sends a slice to each rank (all-to-all) if ``sent`` is as large as ``received``, else one slice to all ranks
        (all-gather)."""
        self._own_nbytes += sent.nbytes
        try:
            if sent.shape == received.shape:
                dist.all_to_all_single(received.view(-1), sent.view(-1), group=self._exchanging)
            else:
                dist.all_gather(list(received.chunk(self.world_size)), sent, group=self._exchanging)
        except RuntimeError as error:
            raise self.roll_call.explain(error) from error


def _added(rows: Tensor) -> Tensor:
    """Returns the sum of the rows, added in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _with_lost(feedback: Feedback, flat: Tensor, key: Key) -> Tensor:
    return feedback.residual(flat, key) + flat


def _keep_lost(feedback: Feedback, wanted: Tensor, sent: Tensor, key: Key) -> None:
    """Keeps ``wanted - sent`` as residual. Values that are not finite become 0: the result is not finite either."""
    feedback.residual(wanted, key).copy_(wanted - sent).nan_to_num_(0, 0, 0)


def encode(blocks: Tensor) -> Tensor:
    """Encodes floats (blocks, 256) to bytes (blocks, 260): 256 fp8 numbers, and a float32 factor for them."""
    unit = blocks.abs().amax(dim=1, keepdim=True).float() / _FP8_MOST
    levels = (blocks.float() / unit).nan_to_num_(0, 0, 0).clamp_(-_FP8_MOST, _FP8_MOST).to(_FP8)
    return torch.cat([levels.view(torch.uint8), unit.view(torch.uint8)], dim=1)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Decodes the result of :func:`encode` to floats (blocks, 256)."""
    levels, unit = codes[:, :_BLOCK], codes[:, _BLOCK:_FP8_BLOCK_NBYTES]
    return levels.contiguous().view(_FP8).to(dtype) * unit.contiguous().view(torch.float32).to(dtype)


class TopK(WithFeedback):
    """Sends the fraction ``ratio`` of each rank's elements with the largest magnitude, with error feedback.

    The ranks choose different elements. So these are gathered, which sends ``8 * ratio * world_size`` bytes per element
    of the tensor, and each rank adds them up in the order of ranks. It pays for few ranks and small ratios.

    Exactness: the sent elements are summed exactly (in their own dtype). The others count as zero, and are added
    in the next step.
    """

    name = "top-k"

    def __init__(self, inner: AllReduce, ratio: float = 0.01) -> None:
        super().__init__(inner)
        if not 0 < ratio <= 1:
            raise ConfigurationError(f"top-k sends a ratio of the elements above 0 and up to 1, not {ratio}")
        self._ratio = ratio

    def compress(self, flat: Tensor, key: Key) -> Work:
        left = self.feedback.residual(flat, key)
        left += flat
        count = max(1, round(self._ratio * flat.numel()))
        chosen = left.abs().topk(count, sorted=False).indices
        values = flat.new_zeros(self.world_size, count)
        places = chosen.new_zeros(self.world_size, count)
        values[self.rank], places[self.rank] = left[chosen], chosen
        left[chosen] = 0
        left.nan_to_num_(0, 0, 0)  # not finite: the result is not finite either, keep nothing
        narrow = places.to(torch.int32) if flat.numel() < 2**31 else places
        first = self.inner(narrow)
        second = self.inner(values)

        def add_up() -> Tensor:
            first.wait()
            flat.zero_()
            for row, where in zip(values, narrow, strict=True):
                flat.index_add_(0, where.long(), row)
            return flat

        return ChainedWork(second, add_up, (flat, values, narrow))
