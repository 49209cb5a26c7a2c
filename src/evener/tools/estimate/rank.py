"""Estimates one rank: takes the engine's own steps on tensors that have a shape and no memory.

::

    outermost   MemoryTracker  counts what comes and goes
                FakeValues     for whoever asks for a number
    innermost   fake tensors   every operator works out what it would return, and allocates nothing

Samples are read as in a run, outside of these modes, and then replaced by fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evener.components.exact_sum import gradients, workspace
from evener.components.exact_sum.grid import MOST_BELOW
from evener.components.offload import host_storage as outside
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.data.batch import Batch
from evener.data.costs import Costs
from evener.hardware import accelerators
from evener.hardware.memory import MemoryTracker
from evener.tools.estimate.fake_models import PretendedModel
from evener.tools.estimate.fake_p2p import PostOffice
from evener.tools.estimate.fake_values import FakeValues
from evener.tools.estimate.fake_world import World
from evener.tools.estimate.result import RankMemory
from evener.tools.estimate.steps import STEPS, CountedEngine, count_steps
from evener.tools.estimate.traffic import Message, OperatorCalls, Traffic
from evener.torch_internals.ddp import buckets_kept
from evener.torch_internals.dispatch import exchangeable, fake_mode, without_fakes
from evener.training.batches import feed


@dataclass(frozen=True)
class FakeRank:
    """The kind of device that ranks are estimated for."""

    device: torch.device
    """Device whose operators the fake tensors use."""
    rounding: str
    """Kind of device whose allocator decides how sizes are rounded."""

    @classmethod
    def from_kind(cls, kind: str) -> FakeRank:
        """Returns the device to estimate for. Uses CPU operators if this machine has no such device.

        PyTorch without CUDA has no backward on fake CUDA tensors.
        """
        has = kind == "cpu" or accelerators.count(kind) > 0
        return cls(torch.device(kind, 0) if has and kind != "cpu" else torch.device("cpu"), kind)


@dataclass(frozen=True)
class RankPeak:
    """Result of the estimate of one rank."""

    memory: RankMemory
    shares: tuple[int, ...]
    asked: frozenset[str]
    """Lines of the user's code that asked for a value."""
    built_for_real: bool
    """True if the model could be built with real tensors alone."""
    flops: Mapping[str, int]
    """Floating-point operations of a step, forward and backward, in products of matrices and convolutions, by the type
    in which they are computed."""
    messages: tuple[Message, ...]
    """The messages of a step."""
    operators: int
    """The number of operators of the passes, views left out."""
    moved: int
    """Bytes that these operators read and write."""


def estimate_rank(
    task: Task, config: RunConfig, rank: int, world_size: int, place: FakeRank, mail: PostOffice
) -> RankPeak:
    """Estimates the memory of rank ``rank`` of ``world_size``.

    Args:
        mail: Messages that the other pipeline stages have sent so far.

    Raises:
        UnknownMemoryError: If memory depends on values of tensors.
        NotYetSentError: If another rank must be estimated first.
    """
    device, traffic = place.device, Traffic()
    world = World(rank, world_size, device, mail, traffic, on_host=place.rounding == "cpu")
    model = PretendedModel(task.model)
    pretended = replace(task, model=model, cost=_cost_without_fakes(task))
    with ExitStack() as stack:
        mode, answers = fake_mode(), FakeValues()
        session = stack.enter_context(world.session())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(exchangeable())
        stack.enter_context(buckets_kept())
        stack.enter_context(_meshes_of_numbers())
        stack.enter_context(_exact_without_numbers(place))
        if place.rounding != device.type:
            stack.enter_context(_norms_in_one_operator())
        stack.enter_context(
            mock.patch.dict(outside.OUTSIDES, {device.type: outside.pretended(place.rounding)})
        )
        stack.enter_context(mode)
        stack.enter_context(answers)
        account = stack.enter_context(MemoryTracker(device_type=device.type, rounding=place.rounding))
        engine = stack.enter_context(
            CountedEngine(
                account,
                pretended,
                config.replace(steps=STEPS + 1),
                session=session,
                reading=without_fakes,
                read=partial(_without_numbers, mode, device),
                ahead=int(place.rounding in accelerators.WITH_STREAMS),
            )
        )
        stack.enter_context(OperatorCalls(traffic))
        hook = engine.learner.optimizer.register_step_pre_hook(traffic.updating)
        stack.callback(hook.remove)
        memory, batch = count_steps(engine, account, world.shared_nbytes, traffic.clear)
        return RankPeak(
            memory,
            batch.shares,
            frozenset(answers.asked),
            model.built_for_real,
            traffic.flops,
            tuple(traffic.messages),
            traffic.operators,
            traffic.moved,
        )


def _cost_without_fakes(task: Task) -> Callable[[int], float] | None:
    """Returns the task's costs as a function that may use tensors, which are real for it alone."""
    if task.cost is None:
        return None
    costs = Costs(task.cost, task.train)

    def cost(index: int) -> float:
        with without_fakes():
            return float(costs(np.array([index]))[0])

    return cost


@contextmanager
def _meshes_of_numbers() -> Iterator[None]:
    """Makes ``DeviceMesh`` use real tensors, for it keeps its ranks in a tensor and reads them."""
    original = DeviceMesh.from_group

    def from_group(*args: Any, **options: Any) -> DeviceMesh:
        with without_fakes():
            return original(*args, **options)

    with mock.patch.object(DeviceMesh, "from_group", from_group):
        yield


@contextmanager
def _exact_without_numbers(place: FakeRank) -> Iterator[None]:
    """Makes sums that are exact in bits go the way of ordinary steps, which depends on numbers: each gradient is as
    large as in the step before. Samples are not compared."""
    ordinary: dict[str, Any] = {
        "check_rounding": lambda device: None,
        "counted": lambda largest, scales: [MOST_BELOW + 1] * len(scales),
        "is_wide": lambda count: False,
        "is_unusual": lambda count: False,
        "is_late": lambda device: place.rounding != "cpu",
    }
    with ExitStack() as stack:
        for name, function in ordinary.items():
            stack.enter_context(mock.patch.object(gradients, name, function))
        stack.enter_context(mock.patch.object(workspace, "is_late", ordinary["is_late"]))
        stack.enter_context(mock.patch.object(feed, "check_data"))
        yield


@contextmanager
def _norms_in_one_operator() -> Iterator[None]:
    """Makes RMSNorm one operator, as it is on an accelerator (PyTorch's fused kernel). The CPU has a dozen, which move
    many times the bytes and save more for backward. Without numbers, LayerNorm without a bias is the same: it reads,
    writes and saves as much."""
    original = F.rms_norm

    def fused(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:  # no kernel has two types
            return original(x, shape, weight, eps)
        return F.layer_norm(x, shape, weight, None, eps or 1e-5)

    with mock.patch.object(F, "rms_norm", fused), mock.patch.object(torch, "rms_norm", fused):
        yield


def _without_numbers(mode: Any, device: torch.device, batch: Batch) -> Batch:
    def faked(leaf: Any) -> Any:
        return mode.from_tensor(leaf).to(device) if isinstance(leaf, Tensor) else leaf

    return batch.map(faked)
