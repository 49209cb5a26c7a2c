"""Estimates beside what a run takes, and what cannot be known before a run."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.memory import Compared, estimated, words
from benchmarks.memory_models import MODELS, OPTIMIZERS, STRATEGIES, task_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.core.config.sizes import size_words
from evener.core.task.task import Task
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.strategies.ddp import Ddp
from evener.strategies.learner import Learner
from evener.strategies.synchronizer import Synchronizer
from evener.tools.estimate.measure import measure_memory
from evener.tools.estimate.result import RankMemory
from tests.tiers import NIGHTLY, SLOW, spread

ABOVE, BELOW, MEDIAN = 0.10, -0.03, 0.03
"""How far an estimate may be from what is counted."""
HELD = 16 * 1024
"""Bytes of a message that a thread of gloo may hold a little longer, which are something to the models here."""


def counted(tasks: list[Task], configs: list[RunConfig], times: int = 1) -> list[RankMemory]:
    """What each run takes, or the least of ``times`` such runs.

    A thread of gloo that is not scheduled after its message is through holds the message longer, up to the
    whole step; this only adds.
    """
    with Session(device="cpu") as session:
        return [
            min((measure_memory(task, config, session) for _ in range(times)), key=lambda found: found.peak)
            for task, config in zip(tasks, configs, strict=True)
        ]


def counted_alone(task: Task, config: RunConfig) -> RankMemory:
    with Session(device="cpu", environment=Environment()) as session:
        return measure_memory(task, config, session)


def assert_near(estimate: RankMemory, found: RankMemory) -> None:
    assert BELOW * found.peak - HELD <= estimate.peak - found.peak <= ABOVE * found.peak
    assert abs(estimate.between - found.between) <= MEDIAN * found.between + HELD
    assert sum(estimate.at_peak.values()) == estimate.peak
    for category, nbytes in estimate.at_peak.items():
        assert abs(nbytes - found.at_peak[category]) <= MEDIAN * found.peak + HELD, category


# Near to what is counted


@pytest.mark.parametrize(("model", "optimizer"), [("LSTM", "Adafactor"), ("ResNet", "SGD")])
def test_estimates_of_one_device(model: str, optimizer: str) -> None:
    config = RunConfig(strategy="single", processes=1, device="cpu")
    task = replace(task_of(model, optimizer), batch_size=4)
    assert_near(evener.estimate_memory(task, config).ranks[0], counted_alone(task, config))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def small(**parts: Any) -> Task:
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(
            nn.Linear(100, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 10)
        ),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "train": TensorDataset(torch.rand(96, 100), torch.arange(96) % 10),
        "batch_size": 24,
        "epochs": 3,
        "name": "small",
    }
    return Task(**(usual | parts))


def test_an_estimate_divides_by_cost_whatever_reads_it() -> None:
    """Here a tensor, whose numbers are real among fake ones."""
    lengths = (97 - torch.arange(96)) ** 2
    config = RunConfig(device="cpu", processes=2, balance="equal")
    costs = [lengths.tolist(), lengths, lambda index: lengths[index]]
    (shares,) = {tuple(evener.estimate_memory(small(cost=cost), config).shares) for cost in costs}
    assert sum(shares) == 24
    assert shares != (12, 12)


class Bucketless(Ddp):
    """A strategy of one's own, which keeps a copy of the parameters."""

    def synchronizer(self, learner: Learner) -> Synchronizer:
        self.__dict__["kept"] = [p.detach().clone() for p in learner.model.parameters()]
        return super().synchronizer(learner)


QUICK: list[dict[str, Any]] = [
    {"strategy": "ddp", "balance": "3,1", "micro_batch": 12, "clip_norm": 1.0},
]
DIVIDED: list[dict[str, Any]] = [
    {"strategy": "sharded", "strategy_option": ("zero=2",)},
    {"strategy": "ddp", "compress": "fp16", "dtype": "float64"},
    {"strategy": "sharded", "strategy_option": ("zero=1",)},
    {"strategy": "sharded", "batch_size": 96},  # fewer samples have two moments of nearly the same peak
    {"strategy": "tensor"},
    {"strategy": "dimension"},
    {"strategy": "pipeline", "strategy_option": ("balance=equal",)},
    {"strategy": f"{__name__}:Bucketless"},
]


@pytest.mark.parametrize(
    "settings", [QUICK, pytest.param(DIVIDED, marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_estimates_of_strategies(ranks: Callable[[int], Any], settings: list[dict[str, Any]]) -> None:
    configs = [RunConfig(device="cpu", processes=2, **each) for each in settings]
    found = ranks(2).run(counted, [small()] * len(configs), configs, times=3)
    for number, config in enumerate(configs):
        estimate = evener.estimate_memory(small(), config)
        for rank in range(2):
            assert_near(estimate.ranks[rank], found[rank][number])


def test_a_rank_with_more_samples_takes_more() -> None:
    uneven = evener.estimate_memory(small(), RunConfig(device="cpu", processes=2, **QUICK[0]))
    assert uneven.shares == (18, 6)
    assert uneven.ranks[0].peak > uneven.ranks[1].peak


def test_a_mesh_is_estimated() -> None:
    """Two stages, each on two ranks with half of the samples."""
    options = {"strategy": "pipeline", "strategy_option": ("balance=equal",), "device": "cpu"}
    along = evener.estimate_memory(small(), mesh="pipeline=2,data=2", processes=4, **options)
    parameters = [rank.at_peak["parameters"] for rank in along.ranks]
    assert parameters[0] == parameters[1] == 4 * (100 * 300 + 300 + 2 * 300)
    assert parameters[2] == parameters[3] == 4 * (300 * 10 + 10)
    assert along.shares == (12, 12)


@pytest.mark.parametrize("part", spread([0, 1], SLOW, NIGHTLY))
def test_estimates_of_models_optimizers_and_strategies(ranks: Callable[[int], Any], part: int) -> None:
    """Both parts together have each model with each optimizer once and with each strategy once or twice.

    Each part has all models, optimizers and strategies; all of it is benchmarks/memory.py.
    """
    names = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
    strategies = [name for name in STRATEGIES if name != "tensor"]  # not for every model
    cases = [(*name, strategies[number % len(strategies)]) for number, name in enumerate(names)][part::2]
    assert [set(column) for column in zip(*cases, strict=True)] == [
        set(MODELS),
        set(OPTIMIZERS),
        set(strategies),
    ]
    peaks, refused = estimated(cases)
    assert all("pipeline" in case or "sharded" in case[2] for case in refused), refused
    rows = []
    for processes in (1, 2):
        own = [case for case in peaks if STRATEGIES[case[2]]["processes"] == processes]
        tasks = [task_of(*case[:2]) for case in own]
        configs = [RunConfig(device="cpu", **STRATEGIES[case[2]]) for case in own]
        found = (
            ranks(2).run(counted, tasks, configs)
            if processes == 2
            else [[counted_alone(*each) for each in zip(tasks, configs, strict=True)]]
        )
        for number, case in enumerate(own):
            row = Compared(case, peaks[case], tuple(of_rank[number].peak for of_rank in found))
            if row.error < BELOW and processes == 2:  # a thread of gloo may have held a message: see counted
                again = ranks(2).run(counted, tasks[number : number + 1], configs[number : number + 1], 3)
                row = replace(row, counted=tuple(of_rank[0].peak for of_rank in again))
            rows.append(row)
    assert len(rows) > 10
    errors = sorted(abs(row.error) for row in rows)
    assert errors[len(errors) // 2] <= MEDIAN, words(rows)
    assert all(BELOW <= row.error <= ABOVE for row in rows), words(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["MLP", "ResNet", "GPT, tied", "GPT, tied, checkpointed"])
def test_estimates_of_a_gpu(model: str) -> None:
    """Of what the allocator gave, with workspaces of cuBLAS and cuDNN that no estimate knows."""
    config, task = RunConfig(strategy="single", processes=1, device="cuda"), task_of(model, "AdamW")
    estimate = evener.estimate_memory(task, config).ranks[0]
    with Session(device="cuda", environment=Environment()) as session:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert_near(estimate, measure_memory(task, config, session))
        assert torch.cuda.max_memory_allocated() - before <= 1.1 * estimate.peak + 64 * 2**20


# Without taking it


def test_a_model_is_estimated_that_is_larger_than_what_there_is() -> None:
    wide = 2**17
    task = small(
        model=lambda: nn.Sequential(nn.Linear(100, wide), nn.Linear(wide, wide), nn.Linear(wide, 10))
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    estimate = evener.estimate_memory(task, strategy="sharded", processes=2, device="cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB
    # Weights, gradients and two moments, halves, and gathered ones.
    assert estimate.peak > 2.5 * wide * wide * 4


def test_nothing_is_left_of_an_estimate() -> None:
    task, state, threads = small(), torch.get_rng_state(), torch.get_num_threads()
    evener.estimate_memory(task, processes=3, device="cpu")
    assert torch.equal(state, torch.get_rng_state())
    assert threads == torch.get_num_threads()
    assert not dist.is_initialized()
    assert type(torch.empty(1)) is Tensor


# What it is made of


def test_the_parts_of_the_peak_are_what_they_are() -> None:
    weights = 4 * (100 * 300 + 300 + 2 * 300 + 300 * 10 + 10)
    estimate = evener.estimate_memory(small(), processes=2, device="cpu", strategy="ddp")
    parts = estimate.ranks[0].at_peak
    assert parts["parameters"] == parts["gradients"] == weights
    assert parts["optimizer"] == 2 * weights + 4 * 6  # and of each parameter the number of steps
    assert parts["buffers"] == 4 * 2 * 300 + 8
    assert parts["inputs"] == 2 * (4 * 12 * 100 + 8 * 12)  # of this step and of the next one
    assert estimate.ranks[0].shared == 4 * 512 * 1024
    assert estimate.ranks[0].needed == estimate.ranks[0].peak + estimate.ranks[0].shared


def test_checkpointing_and_smaller_micro_batches_take_less() -> None:
    def activations(model: str, **settings: Any) -> int:
        config = RunConfig(processes=1, device="cpu", **settings)
        return evener.estimate_memory(task_of(model, "SGD"), config).ranks[0].at_peak["activations"]

    whole = activations("ResNet")
    assert activations("ResNet, checkpointed") < 0.6 * whole
    assert activations("ResNet", micro_batch=4) < 0.3 * whole


def plain(width: int) -> Task:
    layers = lambda: (nn.Linear(100, width), nn.ReLU(), nn.Linear(width, 100), nn.ReLU(), nn.Linear(100, 10))  # noqa: E731
    return small(model=lambda: nn.Sequential(*layers()))


BITS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "ddp", "grain": 12, "audit": 0.5},
    {"strategy": "sharded", "strategy_option": ("zero=1",)},
    {"strategy": "sharded", "strategy_option": ("zero=2",)},
    {"strategy": "sharded", "batch_size": 96},
]


@pytest.mark.slow
def test_estimates_of_runs_that_are_exact_in_bits(ranks: Callable[[int], Any]) -> None:
    settings = [{"exact": "bits", "grain": 4} | each for each in BITS]
    configs = [RunConfig(device="cpu", processes=2, **each) for each in settings]
    unaudited = [config.replace(audit=0.0) for config in configs]  # no step of which is audited by chance
    found = ranks(2).run(counted, [plain(300)] * len(configs), unaudited, times=3)
    for number, config in enumerate(configs):
        estimate = evener.estimate_memory(plain(300), config)
        for rank in range(2):
            assert_near(estimate.ranks[rank], found[rank][number])
        assert "several digits" in estimate.notes[0]


def test_an_estimate_of_one_device_that_is_exact_in_bits() -> None:
    config = RunConfig(device="cpu", processes=1, exact="bits", grain=4, batch_norm="grain")
    assert_near(evener.estimate_memory(small(), config).ranks[0], counted_alone(small(), config))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sums_that_are_exact_in_bits_are_part_of_the_estimate(device: str) -> None:
    """In float64: the sums, the message, and what is rounded at a time, which on a GPU is all of a block."""
    options: dict[str, Any] = {"processes": 2, "strategy": "ddp", "device": device}
    bits = evener.estimate_memory(plain(600), exact="bits", grain=4, **options)
    sums = evener.estimate_memory(plain(600), micro_batch=8, **options)
    parameters = 100 * 600 + 600 + 600 * 100 + 100 + 100 * 10 + 10
    rounded = 2**16 if device == "cpu" else parameters
    more = bits.ranks[0].between - sums.ranks[0].between
    assert abs(more - 8 * (2 * parameters + rounded)) < 16_000


def test_a_gpu_that_is_not_there_is_estimated_by_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_gpu = evener.estimate_memory(small(), processes=1, device="cuda")
    on_cpu = evener.estimate_memory(small(), processes=1, device="cpu")
    assert on_gpu.ranks[0].peak % 512 == 0
    assert on_gpu.ranks[0].peak > on_cpu.ranks[0].peak
    assert on_gpu.ranks[0].at_peak["inputs"] == 3 * (9728 + 512)  # two are there, or on their way
    assert any("no CUDA" in note for note in on_gpu.notes)
    assert not on_cpu.notes


def test_what_cuda_graphs_take_is_told_where_there_may_be_some() -> None:
    one: dict[str, Any] = {"processes": 1, "cuda_graphs": "auto"}
    notes = evener.estimate_memory(small(), device="cuda", **one).notes
    (told,) = (note for note in notes if "cuda_graphs" in note)
    without = evener.estimate_memory(small(), device="cuda", processes=1)
    held = without.ranks[0].at_peak
    assert size_words(held["activations"] + 3 * held["parameters"]) in told
    assert not any("cuda_graphs" in note for note in without.notes)
    assert not evener.estimate_memory(small(), device="cpu", **one).notes


# What cannot be known


class Chooses(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.sum(1) > 50])


class Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if x.sum() > 0 else x)


class Embeds(nn.Linear):
    """Has a sparse gradient, and a buffer that ranks share after each step."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.embed = nn.Embedding(50, sizes[0], sparse=True)
        self.register_buffer("seen", torch.zeros(sizes[0]))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.mean(0), 0.1)
        return super().forward(x + self.embed(x[:, 0].long().abs() % 50))


class Counts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[: int(x.long().sum())])


class CallsNumpy(nn.Linear):
    """As an operator of one's own may, which does not tell the shape of its result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.from_numpy(np.tanh(x.numpy())))


@pytest.mark.parametrize(
    ("task", "settings", "told"),
    [
        (small(model=lambda: Chooses(100, 10)), {}, "test_estimate.py"),
        (small(model=lambda: CallsNumpy(100, 10)), {}, "test_estimate.py:.*RuntimeError"),
        (small(model=lambda: Counts(100, 10)), {}, "test_estimate.py"),
        (small(model=lambda: Embeds(100, 10), optimizer=sgd), {"processes": 2}, "sparse=True"),
        (small(), {"strategy": "pipeline", "processes": 2}, "cut="),
        (small(), {"mesh": "pipeline=2,data=2", "processes": 4}, "cut="),
        (small(), {"compress": "powersgd", "processes": 2}, "powersgd"),
        (small(), {"strategy": "data_parallel", "devices": "cpu:0,cpu:1"}, "several devices in one process"),
        (small(), {"strategy": "diloco", "processes": 2}, "do not meet in every step"),
        (small(), {"strategy": "asynchronous", "processes": 2}, "do not meet in every step"),
        (small(), {"processes": 2, "allreduce": "ring"}, "allreduce=native"),
        (small(), {"processes": "1:2"}, "1:2"),
    ],
)
def test_what_cannot_be_known_is_refused_with_a_reason(task: Task, settings: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        evener.estimate_memory(task, device="cpu", **settings)


def test_code_that_asks_for_numbers_is_named() -> None:
    estimate = evener.estimate_memory(small(model=lambda: Looks(100, 10)), processes=1, device="cpu")
    assert any("test_estimate.py:" in note for note in estimate.notes)


class Stubborn(nn.Linear):
    """Its constructor needs numbers."""

    def __init__(self) -> None:
        super().__init__(100, 10)
        assert (self.weight.detach().abs().numpy() > 0).any()


def test_a_model_that_is_built_for_real_is_told_of() -> None:
    estimate = evener.estimate_memory(small(model=Stubborn), processes=1, device="cpu")
    assert estimate.ranks[0].at_peak["parameters"] == 4 * 1010
    assert any("built with numbers" in note for note in estimate.notes)


def test_a_rank_of_a_run_does_not_estimate(ranks: Callable[[int], Any]) -> None:
    assert all("before the ranks" in told for told in ranks(2).run(_estimated_by_a_rank))


def _estimated_by_a_rank() -> str:
    try:
        evener.estimate_memory(small(), processes=1, device="cpu")
    except ConfigurationError as error:
        return str(error)
    return ""


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def test_models_with_sparse_gradients_and_buffers_of_their_own_are_estimated() -> None:
    sparse = small(model=lambda: Embeds(100, 10), optimizer=sgd)
    assert evener.estimate_memory(sparse, processes=1, device="cpu").peak > 0

    def dense() -> nn.Module:
        model = Embeds(100, 10)
        model.embed.sparse = False
        return model

    assert evener.estimate_memory(small(model=dense), processes=2, device="cpu").peak > 0


def test_a_loss_of_the_users_is_not_tried_without_numbers() -> None:
    task = Task(
        model=lambda: nn.Linear(4, 3),
        loss=evener.loss(total=summed),
        optimizer=sgd,
        train=TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long)),
        batch_size=8,
    )
    assert evener.estimate_memory(task, processes=1, device="cpu").peak > 0
