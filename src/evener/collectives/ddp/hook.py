"""DDP communication hooks that sum gradients by an all-reduce of Evener.

DDP calls the hook for each gradient bucket as soon as backward has filled it, and continues backward while the
returned future is not done. The hook *sums* and does not average: each rank must back-propagate
``total / global_count``, so that the gradients of the ranks add up to the gradient of the whole batch::

    all_reduce = SharedMemory(group)
    model = DistributedDataParallel(module, process_group=group)
    model.register_comm_hook(all_reduce, hook)

PyTorch's own collectives sum sparse gradients, whatever the all-reduce is.

DDP rebuilds its buckets after the first step, and a bucket may get the index or memory that another one had. So an
all-reduce with error feedback identifies a bucket by its parameters and their order.
"""

# No "from __future__ import annotations" here: DDP compares the annotations of a hook with classes, not strings.

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from evener.collectives.base import AllReduce, key_of, only


def hook(all_reduce: AllReduce, bucket: GradBucket) -> Future[Tensor]:
    """Sums the gradients of ``bucket`` over the ranks of ``all_reduce``; to be registered with DDP."""
    key = key_of(bucket.parameters()) if all_reduce.remembers else None
    return all_reduce(bucket.buffer(), key, lasting=True).future()


def power_sgd_state(group: dist.ProcessGroup | None = None, rank: int = 1, **options: Any) -> PowerSGDState:
    """Builds the state of :func:`power_sgd_hook`: torch's ``PowerSGDState`` with ``options``. ``rank`` is the rank of
    the approximating matrices."""
    return PowerSGDState(process_group=group, matrix_approximation_rank=rank, **options)


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Sums the gradients approximately: torch's PowerSGD with error feedback, times the number of ranks.

    Each matrix of gradients is replaced by one of low rank, and the difference is added to the gradients of the
    next step (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727). The result is bitwise the same on all ranks.
    The first ``start_powerSGD_iter`` steps are summed exactly.
    """
    world_size = dist.get_world_size(state.process_group)

    def to_sum(done: Future[Tensor]) -> Tensor:
        return only(done.value()).mul_(world_size)

    return powerSGD_hook(state, bucket).then(to_sum)
