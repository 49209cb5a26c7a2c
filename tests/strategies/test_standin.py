"""On a GPU nothing blocks the host in a step: every strategy takes steps on a stand-in, whose numbers are not there.

Not here: fp16, whose scale of the loss has to be known before the update, and waits; and compiled models, for
torch.compile gives up under what watches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import evener
from evener.core.task.task import Task
from evener.data.batch import Batch
from evener.distributed.mesh import Layout
from evener.hardware.async_read import read
from evener.strategies.ddp import Ddp
from evener.strategies.features import FeatureParallel
from evener.strategies.interfaces import StepOutcome, Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.single import NoSync, Single
from evener.strategies.steppers.plain import Plain
from evener.strategies.synchronizer import Synchronizer
from evener.strategies.timing import WorkTimer
from evener.training.engine import Engine
from evener.training.step.step import Step
from tests.observers import Remembering
from tests.standin import HostWaitsError, StandIn
from tests.tiers import ALWAYS, NIGHTLY, crossed

FEATURES, CLASSES, SAMPLES, STEPS = 6, 3, 48, 4


class Grid(FeatureParallel):
    """Samples over two ranks and features over two, of which the second speaks."""

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        return Layout({"data": 2, "tensor": 2}, speaks={"tensor": 1})


STRATEGIES = {
    "single": ("single", 1, 0),
    "ddp": ("ddp", 4, 1),
    "dimension": ("dimension", 4, 1),
    "grid": (f"{__name__}:Grid", 4, 2),
}


# What a task may hold that could make the host wait


def mlp(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    hidden = layers or (nn.Tanh,)
    return lambda: nn.Sequential(
        nn.Linear(FEATURES, 8), *(layer() for layer in hidden), nn.Linear(8, CLASSES)
    )


class Unused(nn.Module):
    """A layer that no sample ever reaches, a frozen parameter, and a buffer that each forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.scale = nn.Parameter(torch.ones(CLASSES), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.abs().mean()
        scores: Tensor = self.used(x) * self.scale
        return scores


class Checkpointed(nn.Module):
    """Draws its masks once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(FEATURES, 8), evener.nn.Dropout(0.3)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: self.drop(torch.relu(h)), self.first(x), use_reentrant=False)
        scores: Tensor = self.last(hidden)
        return scores


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 5, sparse=True), nn.Linear(5, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(self.embedding(words).mean(1))
        return scores


class Blocks(nn.Module):
    """Repeats a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(3))
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.last(x)
        return scores


MLP = mlp()


def task(model: Callable[[], nn.Module] = MLP, **parts: Any) -> Task:
    data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.arange(SAMPLES) % CLASSES)
    usual: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        "train": data,
        "batch_size": 10,
        "epochs": 9,
    }
    return Task(**(usual | parts))


def squares(model: nn.Module) -> Tensor:
    return 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True)


MATRICES = lambda: nn.Sequential(  # noqa: E731
    nn.Linear(FEATURES, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES, bias=False)
)
BATCH_NORM = mlp(lambda: nn.BatchNorm1d(8), nn.ReLU, lambda: nn.BatchNorm1d(8, affine=False))
CUMULATIVE = mlp(lambda: nn.BatchNorm1d(8, momentum=None), nn.ReLU)
TRAITS: dict[str, tuple[Task, dict[str, Any]]] = {
    "plain": (task(), {}),
    "clipping": (task(), {"clip_norm": 0.1}),
    "penalty, AdamW, clipping": (task(penalty=squares, optimizer=adamw), {"clip_norm": 0.1}),
    "accumulation": (task(optimizer=adamw), {"micro_batch": 2}),
    "float64": (task(), {"dtype": "float64"}),
    "BatchNorm": (task(BATCH_NORM), {}),
    "BatchNorm, accumulation": (task(BATCH_NORM), {"micro_batch": 2}),
    "BatchNorm, ranks without samples": (task(BATCH_NORM, batch_size=2), {}),
    "cumulative BatchNorm": (task(CUMULATIVE), {}),
    "Dropout": (task(mlp(lambda: evener.nn.Dropout(0.2), nn.ReLU)), {"micro_batch": 2}),
    "Dropout, checkpointed": (task(Checkpointed), {}),
    "class weights": (
        task(loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1)),
        {},
    ),
    "unused parameters, written buffers": (task(Unused), {"clip_norm": 1.0}),
    "schedule of each step": (
        task(scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9), scheduler_interval="step"),
        {},
    ),
    "small buckets": (task(), {"bucket_mb": 1e-5}),
    "bf16": (task(), {"precision": "bf16", "clip_norm": 0.1}),
    "bf16-true": (task(), {"precision": "bf16-true"}),
    "weights updated whole": (task(MATRICES, optimizer=lambda p: torch.optim.Muon(p)), {"clip_norm": 0.1}),
    "many parameters": (task(mlp(*[partial(nn.Linear, 8, 8)] * 20)), {}),
    "blocks computed again": (task(Blocks), {"recompute": "blocks"}),
}
WAITS = {("single", "cumulative BatchNorm"), ("dimension", "cumulative BatchNorm")}
"""Where PyTorch's own module waits, as no rank has other samples."""


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """Sessions collect garbage; of this module's alone."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def trained(
    trained_task: Task, strategy: str, world_size: int, rank: int, **settings: Any
) -> tuple[StandIn, list[Step], Remembering]:
    device, told = StandIn(), Remembering()
    usual = {"steps": STEPS, "strategy": strategy, "allreduce": "native"} | settings
    with (
        device.session(rank, world_size) as session,
        Engine(trained_task, session=session, observers=[told], **usual) as engine,
    ):
        return device, device.train(engine), told


@pytest.mark.parametrize(
    ("kind", "trait"), crossed(STRATEGIES, list(TRAITS), lambda kind: (ALWAYS, NIGHTLY, NIGHTLY))
)
def test_no_step_waits_for_the_device(kind: str, trait: str) -> None:
    if (kind, trait) in WAITS:
        pytest.skip("torch.nn's own BatchNorm reads the number of its batches")
    given, settings = TRAITS[trait]
    device, steps, told = trained(given, *STRATEGIES[kind], **settings)
    assert len(steps) == STEPS
    assert [record.step for record in told.steps] == list(range(STEPS))
    assert device.constants == [] or trait == "class weights"


class Positions(nn.Module):
    """Scores for each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores.transpose(1, 2)


def test_sequences_are_tried_on_the_device_and_in_the_types_of_the_run() -> None:
    """The copy of a batch that the host keeps for counting is cut first."""
    sequences = TensorDataset(torch.ones(SAMPLES, 9, FEATURES), torch.zeros(SAMPLES, 9, dtype=torch.long))
    with mock.patch("evener.strategies.context.context.check_likeness", return_value=None) as check:
        trained(task(Positions, train=sequences), "context", 4, 1, dtype="float64")
    _, whole, piece, _ = check.call_args.args
    assert [(each.inputs.device.type, each.inputs.dtype) for each in (whole, piece)] == [
        ("meta", torch.float64)
    ] * 2
    assert whole.inputs.shape[1] > piece.inputs.shape[1]


class Threads(torch.autograd.Function):
    """Remembers in backward whether autograd would give another device's part to a thread of that device."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        Threads.seen.append(torch._C._is_multithreading_enabled())
        return grad[0]


class OnThread(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Threads.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return found


def test_backward_runs_on_the_thread_that_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small step would take a tenth of its time to go to the device's thread and back."""
    monkeypatch.setattr(Threads, "seen", [])
    trained(task(lambda: OnThread(FEATURES, CLASSES)), *STRATEGIES["ddp"], micro_batch=2)
    assert len(Threads.seen) >= STEPS
    assert not any(Threads.seen)
    assert torch._C._is_multithreading_enabled()


class Narrow(nn.Module):
    """Has no room for more than two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        if len(x) > 2:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return scores


@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_a_step_that_is_taken_again_in_pieces_does_not_wait(kind: str) -> None:
    _, _, told = trained(task(Narrow), *STRATEGIES[kind], memory_limit="1GB")
    assert [set(record.pieces) for record in told.steps] == [{2 if kind == "single" else 1}] * STEPS


@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_pieces_of_a_size_that_fits_do_not_wait(kind: str) -> None:
    _, steps, _ = trained(task(), *STRATEGIES[kind], micro_batch="auto")
    assert len(steps) == STEPS


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 5, "balance": "auto", "steps": 9}])
def test_two_batches_are_on_the_device_or_on_their_way_when_a_step_is_taken(settings: dict[str, Any]) -> None:
    """Shares by speed are asked for that far ahead of what is known."""
    device, copied = StandIn(), list[int]()
    usual: dict[str, Any] = {"steps": STEPS, "strategy": "ddp", "allreduce": "native"} | settings
    with device.session(1, 4) as session, Engine(task(), session=session, **usual) as engine:
        step = engine.step

        def counted(batch: Batch) -> Step:
            copied.append(device.streams.copies // (2 * len(batch.micro_batches)))
            return step(batch)

        with mock.patch.object(engine, "step", counted):
            device.train(engine)
    assert copied == [min(number, usual["steps"] + 1) for number in range(3, usual["steps"] + 3)]


@pytest.mark.parametrize("compress", ["bf16", "int8", "top-k", "powersgd"])
def test_no_compression_waits_for_the_device(compress: str) -> None:
    trained(task(), *STRATEGIES["ddp"], compress=compress, bucket_mb=1e-4)


def test_sparse_gradients_do_not_wait_for_the_device() -> None:
    """On one rank: PyTorch has no sum of sparse tensors on the meta device."""
    words = TensorDataset(torch.arange(SAMPLES * 2).view(SAMPLES, 2) % 11, torch.arange(SAMPLES) % CLASSES)
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    trained(task(Words, train=words, optimizer=sgd), *STRATEGIES["single"], clip_norm=1.0)


def test_ddp_waits_once_when_it_orders_its_buckets() -> None:
    assert trained(task(), *STRATEGIES["ddp"])[0].rebuilt == {1}
    assert trained(task(), *STRATEGIES["dimension"])[0].rebuilt == set()


def test_a_constant_goes_to_the_device_once() -> None:
    device, *_ = trained(*TRAITS["class weights"][:1], *STRATEGIES["ddp"])
    (constant,) = device.constants
    assert "losses/torch_losses.py" in constant


def test_steps_are_told_two_steps_late() -> None:
    device, told, known = StandIn(), Remembering(), list[int]()
    with (
        device.session() as session,
        Engine(task(), session=session, steps=STEPS, observers=[told]) as engine,
        device.watched(),
    ):
        for batch in engine.batches():
            device.now += 1
            if device.now == STEPS - 1:
                break
            engine.step(batch)
            known.append(len(told.steps))
    assert known == [0, 0, 1]


# A part that makes the host wait is found out


class Mistakes:
    """What the parts below do with a tensor of the device in every step."""

    now: Callable[[Tensor], Any] = repr


class Nosy(Plain):
    """A stepper that looks at the device before the step is over."""

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        outcome = super().run(batch, divisor, step)
        Mistakes.now(batch.micro_batches[0].inputs.clone())
        return outcome


class NosyDdp(Ddp):
    def stepper(self, learner: Learner) -> Stepper:
        return Nosy(learner)


class Checks(NoSync):
    """A synchronizer that makes sure of the gradients at once."""

    def complete(self) -> tuple[str, ...]:
        for parameter in self._learner.model.parameters():
            if parameter.grad is not None:
                Mistakes.now(parameter.grad)
        return super().complete()


class CheckedSingle(Single):
    def synchronizer(self, learner: Learner) -> Synchronizer:
        return Checks(learner)


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Mistakes.now(gradient)
        return gradient


class ReadsInBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        read_later: Tensor = Reads.apply(x)  # type: ignore[no-untyped-call]
        return read_later


def assign_through_mask(x: Tensor) -> None:
    x[x > 0] = torch.ones_like(x)[0, :2]


def overwrite(x: Tensor) -> None:
    x.copy_(torch.zeros(x.shape))


MISTAKES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.isfinite().all()),
    "comparison": lambda x: 1 if x.sum() > 0 else 0,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "print": repr,
    "format": lambda x: f"{x.sum()}",
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "assignment through a mask": assign_through_mask,
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "readout": lambda x: read(x.sum()).value(),
    "copy to the device": lambda x: torch.zeros(2).to(x.device),
    "copy into the device": overwrite,
    "constant": lambda x: torch.tensor([1.0], device=x.device),
    "new constant": lambda x: x.new_tensor([1.0]),
    "indices of the host": lambda x: x[torch.tensor([0])],
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(("strategy", "world_size"), [("NosyDdp", 4), ("CheckedSingle", 1)])
def test_a_part_that_waits_is_found_out(
    monkeypatch: pytest.MonkeyPatch, strategy: str, world_size: int, mistake: str
) -> None:
    monkeypatch.setattr(Mistakes, "now", staticmethod(MISTAKES[mistake]))
    with pytest.raises(HostWaitsError, match=r"step [01]: .* at .*test_standin\.py"):
        trained(task(), f"{__name__}:{strategy}", world_size, 0)


@pytest.mark.parametrize("mistake", ["item", "print", "assignment through a mask", "constant"])
def test_a_model_whose_backward_waits_is_found_out(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(Mistakes, "now", staticmethod(MISTAKES[mistake]))
    with pytest.raises(HostWaitsError, match=r"step [01]: .* at .*test_standin\.py"):
        trained(task(mlp(ReadsInBackward)), *STRATEGIES["ddp"])


def test_the_time_of_the_same_step_is_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkTimer, "work_done", lambda work_timer: Mistakes.now(work_timer.taken().value()))
    with pytest.raises(HostWaitsError, match=r"a number of this same step is read at .*test_standin"):
        trained(task(), *STRATEGIES["ddp"])


def test_a_tensor_on_another_device_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mistakes, "now", staticmethod(lambda x: x + torch.ones(FEATURES)))
    with pytest.raises(RuntimeError, match="cpu is not on the expected device meta"):
        trained(task(), f"{__name__}:NosyDdp", 4, 0)


def test_what_stays_on_the_device_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def careful(x: Tensor) -> Any:
        x[x > 0] = 0.0
        return x.masked_fill(x < 0, 1.0) * torch.ones((), device=x.device) * torch.tensor(2.0) + 3

    monkeypatch.setattr(Mistakes, "now", staticmethod(careful))
    trained(task(), f"{__name__}:NosyDdp", 4, 0)
