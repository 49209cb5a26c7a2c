"""Asynchronous training against what it comes to: ddp, plain training, and its own repetition on one device."""

from __future__ import annotations

import copy
import math
import random
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.data.sections import SectionBatch
from evener.errors import DataError, DivergenceError
from evener.strategies import Asynchronous
from evener.strategies.asynchronous.ledger import Contribution, Merges, ages, check_whole
from evener.strategies.asynchronous.strategies import RecordedAsynchronous
from evener.tools.verify import verify
from evener.training.engine import Engine
from evener.training.fit import fit
from tests.comparing import worst
from tests.strategies.local_steps.test_local_steps import (
    IGNORED,
    SAMPLES,
    Words,
    adam,
    decaying,
    samples,
    task,
    total,
)
from tests.tiers import ALWAYS, NIGHTLY, spread

ROUNDING = 1e-9
Found = tuple[dict[str, Tensor], list[float], list[Merges], list[float]]


class Stalling(Words):
    """A network whose passes take longer now and then, and that draws random numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__(normalized=True)
        self._seed, self._random = seed, random.Random()
        self.drop = nn.Dropout(0.2)
        self.begun = False

    def forward(self, words: Tensor) -> Tensor:
        if self.training and not self.begun:
            self.begun = True
            self._random.seed(self._seed + 100 * torch.distributed.get_rank() if _is_divided() else 0)
        if self.training and _is_divided():
            time.sleep(self._random.choice([0.0, 0.0, 0.002, 0.02]))
        return super().forward(self.drop(words))


def _is_divided() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def penalty(model: nn.Module) -> Tensor:
    return 0.01 * sum((p.square().sum() for p in model.parameters()), torch.zeros((), dtype=torch.float64))


def everything() -> Task:
    return task(adam, scheduler=decaying, scheduler_interval="step", penalty=penalty)


def stalling(seed: int = 0, optimizer: Callable[[Any], torch.optim.Optimizer] = adam) -> Task:
    return task(
        optimizer,
        model=partial(Stalling, seed),
        scheduler=decaying,
        scheduler_interval="step",
        penalty=penalty,
    )


def trained(build: Callable[[], Task], settings: dict[str, Any], threads: int | None = None) -> Found:
    config = RunConfig(**{"device": "cpu", "dtype": "float64", "epochs": 2} | settings)
    merges: list[Merges] = []
    with Engine(build(), config) as engine:
        torch.set_num_threads(threads or torch.get_num_threads())
        steps = []
        for batch in engine.batches():
            steps.append(engine.step(batch))
        engine.settle()
        for step in steps:
            merges.append(tuple(tuple(Contribution(*each) for each in held) for held in step.merges))
        weights = {name: value.detach().clone() for name, value in engine.learner.tensors().items()}
        return weights, [step.loss for step in steps], merges, [step.lr for step in steps]


def on(ranks: Any, size: int, build: Callable[[], Task], **settings: Any) -> Found:
    """What training on ``size`` ranks has led to, which all have the same."""
    found = ranks(size).run(trained, build, settings)
    assert all(worst(found[0][0], other) == 0 for other, *_ in found)
    assert all(other[2:] == found[0][2:] for other in found)
    return found[0]


def repeated(found: Found, ranks: int, build: Callable[[], Task], **settings: Any) -> Found:
    strategy = RecordedAsynchronous(**vars(settings["strategy"]), recorded=tuple(found[2]), ranks=ranks)
    return trained(build, {**settings, "strategy": strategy}, threads=1)  # as many as the ranks have


@pytest.mark.parametrize(
    ("size", "micro_batch", "clip_norm"),
    spread([(2, None, None), (3, 4, 0.05), (2, None, 0.05), (3, 4, None)], ALWAYS, ALWAYS, NIGHTLY, NIGHTLY),
)
def test_without_staleness_it_is_data_parallelism(
    ranks: Any, size: int, micro_batch: int | None, clip_norm: float | None
) -> None:
    settings = {"micro_batch": micro_batch, "clip_norm": clip_norm}
    synchronous = on(ranks, size, everything, strategy="ddp", **settings)
    asynchronous = on(ranks, size, everything, strategy=Asynchronous(staleness=0, sync_every=4), **settings)
    assert worst(synchronous[0], asynchronous[0]) < ROUNDING
    assert asynchronous[3][-1] == pytest.approx(0.02 * 0.95**22)


def test_one_rank_is_plain_training() -> None:
    build = partial(task, adam, True, scheduler=decaying, scheduler_interval="step")
    plain = trained(build, {"strategy": "single"})
    alone = trained(build, {"strategy": Asynchronous(sync_every=3)})
    assert [held[0].size for section in alone[2] for held in section][:3] == [12, 12, 12]
    assert worst(plain[0], alone[0]) < ROUNDING


class Marked(Words):
    """Sets an attribute on its last layer's parameters, as for an optimizer or a penalty that asks for it."""

    def __init__(self) -> None:
        super().__init__(False)
        for parameter in self.last.parameters():
            parameter.rate = 0.1  # type: ignore[attr-defined]


class Asking(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad *= getattr(parameter, "rate", 1.0)
        return super().step(closure)


def of_marked(model: nn.Module) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return 0.01 * sum((p.square().sum() for p in model.parameters() if hasattr(p, "rate")), zero)


def test_updates_see_the_user_s_attributes_of_parameters() -> None:
    build = partial(task, partial(Asking, lr=0.2), model=Marked, penalty=of_marked)
    plain = trained(build, {"strategy": "single"})
    assert worst(plain[0], trained(build, {"strategy": Asynchronous(sync_every=3)})[0]) < ROUNDING


@pytest.mark.parametrize("size", [2, 3])
def test_a_repetition_of_the_merges_has_the_same_bits(ranks: Any, size: int) -> None:
    oldest, orders = 0, set()
    for seed in range(3):
        build = partial(stalling, seed)
        settings = {"strategy": Asynchronous(sync_every=4, staleness=3), "clip_norm": 0.5, "micro_batch": 9}
        found = on(ranks, size, build, **settings)
        again = repeated(found, size, build, **settings)
        assert worst(found[0], again[0]) == 0
        assert found[1] == pytest.approx(again[1])
        for merges, whole in zip(found[2], [48, 48, 34] * 2, strict=True):
            check_whole(merges, whole)
            assert max(ages(merges)) <= 3
        oldest = max(oldest, *(age for merges in found[2] for age in ages(merges)))
        orders.add(tuple(found[2]))
    assert oldest > 0
    assert len(orders) == 3


class Counting(Words):
    """A network with buffers of its own, which its passes write and compute with."""

    def __init__(self) -> None:
        super().__init__(normalized=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen += words.mean()
            self.passes += 1
        return super().forward(words) * (1 + self.seen + 0.01 * self.passes)


class Noisy(Dataset[Any]):
    """Samples that a reading changes, by torch's generator."""

    def __init__(self) -> None:
        self._samples = samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self._samples[index]
        return inputs + torch.rand(()), targets


@pytest.mark.parametrize(
    "changed", [{"model": Counting}, {"train": Noisy()}], ids=["buffers", "augmentation"]
)
def test_a_range_depends_on_no_range_that_its_rank_computed_before(
    ranks: Any, changed: dict[str, Any]
) -> None:
    build, settings = (
        partial(task, adam, **changed),
        {"strategy": Asynchronous(sync_every=4), "micro_batch": 4},
    )
    found = on(ranks, 2, build, **settings)
    assert worst(found[0], repeated(found, 2, build, **settings)[0]) == 0


def test_the_first_ranges_of_sections_draw_other_random_numbers() -> None:
    drawn: list[float] = []

    class Watched(Noisy):
        def __getitem__(self, index: int) -> Any:
            drawn.append(float(torch.rand(())))
            return super().__getitem__(index)

    trained(partial(task, adam, train=Watched()), {"strategy": Asynchronous(sync_every=2), "epochs": 1})
    drawn = drawn[-SAMPLES:]  # without those of the trial before the first step
    assert len(set(drawn)) == SAMPLES


def test_another_order_has_other_weights(ranks: Any) -> None:
    settings = {"strategy": Asynchronous(sync_every=12)}
    found = on(ranks, 2, stalling, **settings)
    first = list(found[2][0])
    first[1], first[-2] = (
        tuple(
            Contribution(each.worker, min(each.version, at), each.start, each.stop) for each in first[other]
        )
        for at, other in ((1, len(first) - 2), (len(first) - 2, 1))
    )
    edited = (found[0], found[1], [tuple(first), *found[2][1:]], found[3])
    assert worst(found[0], repeated(edited, 2, stalling, **settings)[0]) > 1e-6


def test_records_that_lack_a_range_or_run_ahead_are_refused(ranks: Any) -> None:
    settings = {"strategy": Asynchronous(sync_every=12)}
    found = on(ranks, 2, stalling, **settings)
    ahead = tuple(tuple(replace(each, version=99) for each in held) for held in found[2][0])
    for first in (found[2][0][1:], ahead):
        with pytest.raises(DataError, match=r"each sample once|came after it"):
            repeated((found[0], found[1], [first, *found[2][1:]], found[3]), 2, stalling, **settings)


def shares_and_samples() -> tuple[list[int], int, list[int]]:
    """The shares of a section, the samples that were computed in vain, and those that this rank has read."""
    seen: list[int] = []
    config = RunConfig(device="cpu", dtype="float64", epochs=1, strategy=Asynchronous())
    with Engine(task(adam), config) as engine:
        for batch in engine.batches():
            assert isinstance(batch, SectionBatch)
            assert batch.reader is not None
            read = batch.reader.read

            def noting(read: Any = read) -> Any:
                passes = read()
                seen.extend(number for each in passes for number in each.micro_batches[0].samples.tolist())
                return passes

            batch.reader.read = noting  # type: ignore[method-assign]
            step = engine.step(batch)
            engine.settle()
            return list(step.batch.shares), step.wasted, seen
    raise AssertionError


def test_each_sample_is_read_and_merged_once(ranks: Any) -> None:
    found = ranks(2).run(shares_and_samples)
    shares, wasted, _ = found[0]
    assert sum(shares) == SAMPLES
    assert found[1][:2] == (shares, wasted)
    read = [number for *_, numbers in found for number in numbers]
    assert set(read) == set(range(SAMPLES))
    assert len(read) == SAMPLES + wasted  # a machine with other work may be late with a range


def test_reading_ahead_in_workers_changes_nothing() -> None:
    settings = {"strategy": Asynchronous(sync_every=5)}
    assert worst(trained(everything, settings)[0], trained(everything, {**settings, "workers": 2})[0]) == 0


def held_in(*merges: tuple[tuple[int, int], ...]) -> Merges:
    """Merges of batches of 12 samples, each with its version."""
    return tuple(
        tuple(Contribution(0, version, 12 * at, 12 * at + 12) for at, version in held) for held in merges
    )


def test_damping_weighs_gradients_and_their_terms_by_age() -> None:
    """Two batches merge, of which one has an age of 1, against the same by hand."""
    config = RunConfig(device="cpu", dtype="float64", steps=3, strategy="single")
    with Engine(task(), config) as engine:
        batches = [batch.micro_batches[0] for batch in islice(engine.batches(), 3)]
        model = copy.deepcopy(engine.model)
    ours = list(model.parameters())

    def gradients(at: int) -> list[Tensor]:
        return list(torch.autograd.grad(total(model(batches[at].inputs), batches[at].targets), ours))

    counts = [int((batch.targets != IGNORED).sum()) for batch in batches]
    assert counts[1] != counts[2]
    first, old = gradients(0), gradients(1)
    with torch.no_grad():
        for parameter, each in zip(ours, first, strict=True):
            parameter -= 0.2 * each / counts[0]
    new = gradients(2)
    with torch.no_grad():
        for parameter, a, b in zip(ours, old, new, strict=True):
            parameter -= 0.2 * (a / 2 + b) / (counts[1] / 2 + counts[2])
    expected = {name: value.detach() for name, value in model.named_parameters()}
    merges = held_in(((0, 0),), ((1, 0), (2, 1)))
    for damping, alike in ((1.0, True), (0.0, False), (0.5, False)):
        strategy = RecordedAsynchronous(sync_every=3, recorded=(merges,), damping=damping)
        found = trained(task, {"strategy": strategy, "steps": 3, "epochs": None})[0]
        assert (worst(expected, found) < ROUNDING) == alike


def test_damping_changes_nothing_if_ages_are_equal() -> None:
    merges = held_in(((0, 0),), ((1, 0), (2, 0)))
    found = [
        trained(
            everything,
            {
                "strategy": RecordedAsynchronous(sync_every=3, recorded=(merges,), damping=damping),
                "steps": 3,
                "epochs": None,
            },
        )
        for damping in (0.0, 1.0, 0.3)
    ]
    assert worst(found[0][0], found[1][0]) == 0
    assert worst(found[0][0], found[2][0]) < ROUNDING
    assert found[0][1] == found[1][1]  # the loss is that of all terms


@pytest.mark.parametrize("buffer", [1, 30])
def test_the_buffer_says_how_many_samples_an_update_has(ranks: Any, buffer: int) -> None:
    found = on(ranks, 2, everything, strategy=Asynchronous(buffer=buffer, sync_every=100, staleness=-1))
    for section in found[2]:
        sizes = [sum(each.size for each in held) for held in section]
        if buffer == 1:
            assert all(len(held) == 1 for held in section)
        else:
            assert len(sizes) <= math.ceil(SAMPLES / buffer)
            assert min(sizes) >= SAMPLES / math.ceil(SAMPLES / buffer) / 2
    # It counts samples, not updates.
    assert found[3][-1] == pytest.approx(0.02 * 0.95 ** (2 * math.ceil(SAMPLES / 12)))


class BadOnRankOne(Words):
    def forward(self, words: Tensor) -> Tensor:
        bad = self.training and _is_divided() and torch.distributed.get_rank() == 1
        return super().forward(words) * (math.nan if bad else 1.0)


def failing(settings: dict[str, Any], **changed: Any) -> str:
    try:
        trained(partial(task, **changed), settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_gradient_that_is_not_a_number_is_named_on_all_ranks(ranks: Any) -> None:
    settings = {"strategy": Asynchronous(sync_every=4)}
    for said in ranks(2).run(failing, settings, model=partial(BadOnRankOne, False)):
        assert said.startswith(DivergenceError.__name__)
        assert "rank 1" in said


def test_verify_compares_it_with_one_device_if_nothing_is_stale(warm: Any) -> None:
    found = verify(
        everything,
        RunConfig(device="cpu", steps=8),
        processes=2,
        strategy=Asynchronous(staleness=0, sync_every=4),
    )
    assert found.passed
    assert found.strategy == "asynchronous(staleness=0, sync_every=4)"


def warned(strategy: Asynchronous) -> list[str]:
    config = RunConfig(device="cpu", dtype="float64", strategy=strategy)
    with warnings.catch_warnings(record=True) as found, Engine(task(), config):
        pass
    return [str(each.message) for each in found if "buffer" in str(each.message)]


def test_a_buffer_below_a_rank_s_samples_warns_once_of_the_age(ranks: Any) -> None:
    found = ranks(2).run(warned, Asynchronous(buffer=1, staleness=-1))
    assert [len(each) for each in found] == [1, 0]
    assert "buffer=1 is less than the 6 samples" in found[0][0]
    assert "about 6 samples old (1 in versions)" in found[0][0]
    for silent in (Asynchronous(buffer=6), Asynchronous(), Asynchronous(buffer=1, staleness=0)):
        assert ranks(2).run(warned, silent) == [[], []]
    assert warned(Asynchronous(buffer=1)) == []


def summary_of() -> tuple[str, str, int]:
    strategy = Asynchronous(sync_every=4, staleness=2)
    found = fit(
        partial(stalling), strategy=strategy, device="cpu", dtype="float64", epochs=1, show=False
    ).summary
    return found.updates_of_server, found.allreduce, found.merge_bytes


def test_the_summary_tells_of_updates_and_ages(ranks: Any) -> None:
    said, summed, nbytes = ranks(2).run(summary_of)[0]
    assert re.match(
        r"each sample in one of \d+ updates; gradients \d\.\d versions old on average, at most [0-2].*\n"
        r"gradients of each rank: \d+ \+ \d+; versions old: 0 \d+%.*; samples old: 0 \d+%",
        said,
    )
    assert "12 samples for an update, at most 2 versions old" in summed
    ranges = int(re.search(r"gradients of each rank: \d+ \+ (\d+);", said)[1])  # type: ignore[index]
    weights = 8 * sum(p.numel() for p in stalling().model().parameters())
    assert nbytes > 2 * ranges * weights  # the weights of each range, and its gradients
