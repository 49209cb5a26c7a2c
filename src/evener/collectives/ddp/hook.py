"""An all-reduce as DistributedDataParallel's communication hook.

DDP calls the hook for each bucket of gradients as soon as backward has filled it, and goes on with backward
while the returned future is not done. The hook *sums* and does not average: whoever uses it back-propagates
``total / global_count``, so that the gradients of the ranks add up to the gradient of the whole batch::

    all_reduce = SharedMemory(group)
    model = DistributedDataParallel(module, process_group=group)
    model.register_comm_hook(all_reduce, hook)

A bucket of sparse gradients goes through PyTorch's own collectives, whatever the all-reduce is.

DDP cuts its buckets anew after the first step, and may give any of them the index or the memory that another had. An
all-reduce with a memory is therefore told which parameters are in the bucket, and in which order.
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
    """Sums the gradients of ``bucket`` over the ranks of ``all_reduce``."""
    key = key_of(bucket.parameters()) if all_reduce.remembers else None
    return all_reduce(bucket.buffer(), key, lasting=True).future()


def power_sgd_state(group: dist.ProcessGroup | None = None, rank: int = 1, **options: Any) -> PowerSGDState:
    """The state of :func:`power_sgd_hook`: torch's with its ``options``; ``rank`` is that of the matrices."""
    return PowerSGDState(process_group=group, matrix_approximation_rank=rank, **options)


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Sums the gradients approximately: torch's PowerSGD with error feedback, times the number of ranks.

    Not exact: each matrix of gradients is replaced by one of low rank, and what that leaves out is added to
    the gradients of the next step (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727). All ranks get the
    same bits. The first ``start_powerSGD_iter`` steps are summed exactly.
    """
    world_size = dist.get_world_size(state.process_group)

    def to_sum(done: Future[Tensor]) -> Tensor:
        return only(done.value()).mul_(world_size)

    return powerSGD_hook(state, bucket).then(to_sum)
