"""The estimate of one rank: the engine's own steps, on tensors that have a shape and no memory.

::

    outermost   Accounting     counts what comes and goes
                Answers        for whoever asks for a number
    innermost   fake tensors   every operator works out what it would return, and allocates nothing

Samples are read as in a run, outside of all this, and then lose their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evener.components.offload import host_storage as outside
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.data.batch import Batch
from evener.hardware import accelerators
from evener.hardware.memory import Accounting
from evener.tools.estimate.fake_models import PretendedModel
from evener.tools.estimate.fake_p2p import PostOffice
from evener.tools.estimate.fake_values import Answers
from evener.tools.estimate.fake_world import World
from evener.tools.estimate.result import RankMemory
from evener.tools.estimate.steps import STEPS, CountedEngine, count_steps
from evener.torch_internals.ddp_buckets import buckets_kept
from evener.torch_internals.fake_tensors import exchangeable, fake_mode, without_fakes


@dataclass(frozen=True)
class Place:
    """Where ranks are thought to be."""

    device: torch.device
    """Whose operators are taken."""
    rounding: str
    """The kind of device whose allocator makes the memory."""

    @classmethod
    def of(cls, kind: str) -> Place:
        """A PyTorch without CUDA cannot go backward on fake tensors of it, and takes those of a CPU."""
        has = kind == "cpu" or accelerators.count(kind) > 0
        return cls(torch.device(kind, 0) if has and kind != "cpu" else torch.device("cpu"), kind)


@dataclass(frozen=True)
class Found:
    """Of a rank."""

    memory: RankMemory
    shares: tuple[int, ...]
    asked: frozenset[str]
    """Lines of the user's own that asked for a number."""
    built_for_real: bool
    """Whether the model could be built with numbers alone."""


def estimate_rank(
    task: Task, config: RunConfig, rank: int, world_size: int, place: Place, mail: PostOffice
) -> Found:
    """What a rank of so many takes.

    Args:
        mail: What the other ranks of a pipeline have sent so far.

    Raises:
        ConfigurationError: If memory depends on numbers.
        NotYetSentError: If another rank must be estimated before.
    """
    device = place.device
    world, model = World(rank, world_size, device, mail), PretendedModel(task.model)
    pretended = replace(task, model=model)
    with ExitStack() as stack:
        mode, answers = fake_mode(), Answers()
        session = stack.enter_context(world.session())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(exchangeable())
        stack.enter_context(buckets_kept())
        stack.enter_context(_meshes_of_numbers())
        stack.enter_context(
            mock.patch.dict(outside.OUTSIDES, {device.type: outside.pretended(place.rounding)})
        )
        stack.enter_context(mode)
        stack.enter_context(answers)
        account = stack.enter_context(Accounting(device_type=device.type, rounding=place.rounding))
        engine = stack.enter_context(
            CountedEngine(
                account,
                pretended,
                config.replace(steps=STEPS + 1),
                session=session,
                reading=without_fakes,
                read=partial(_without_numbers, mode, device),
            )
        )
        memory, batch = count_steps(engine, account, world.shared_nbytes)
        return Found(memory, batch.shares, frozenset(answers.asked), model.built_for_real)


@contextmanager
def _meshes_of_numbers() -> Iterator[None]:
    """A mesh of devices keeps the numbers of its ranks in a tensor, and reads it."""
    original = DeviceMesh.from_group

    def from_group(*args: Any, **options: Any) -> DeviceMesh:
        with without_fakes():
            return original(*args, **options)

    with mock.patch.object(DeviceMesh, "from_group", from_group):
        yield


def _without_numbers(mode: Any, device: torch.device, batch: Batch) -> Batch:
    def faked(leaf: Any) -> Any:
        return mode.from_tensor(leaf).to(device) if isinstance(leaf, Tensor) else leaf

    return batch.map(faked)
