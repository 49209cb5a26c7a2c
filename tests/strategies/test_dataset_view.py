"""Data that hosts hold apart, against one device that is given the same samples in the same batches, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, TensorDataset

import evener
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import ConfigurationError, TaskError
from evener.nn.context import scope
from evener.tools.verify import relative_error, verify
from evener.training.engine import Engine
from evener.training.fit import fit
from tests.comparing import worst
from tests.observers import Remembering
from tests.tiers import ALWAYS, NIGHTLY, crossed

SIZES = (23, 4, 16)


def part(rank: int, size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(rank)
    return TensorDataset(
        torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)
    )


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), evener.nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def rank_of() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def task(sizes: tuple[int, ...] = SIZES) -> Task:
    own = part(rank_of(), sizes[rank_of()])
    return Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train=own,
        evaluate=own,
        metrics={"accuracy": evener.accuracy},
        partition="sample",
        batch_size=9,
        epochs=2,
    )


@dataclass
class Run:
    """What a rank saw and came to."""

    ids: list[list[list[int]]] = field(default_factory=list)
    """For each step, for each micro-batch, the samples that counted."""
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def train(sizes: tuple[int, ...], state: dict[str, Any] | None = None, **settings: Any) -> Run:
    run = Run()
    config = RunConfig(**({"dtype": "float64", "device": "cpu"} | settings))
    seen = Remembering()
    with Engine(task(sizes), config, observers=[seen]) as engine:
        if state is not None:
            engine.load_state_dict(state)
        for batch in engine.batches():
            run.ids.append([micro.samples[: micro.size].tolist() for micro in batch.micro_batches])
            engine.step(batch)
        run.weights = {name: value.detach().clone() for name, value in engine.learner.tensors().items()}
        run.state = engine.state_dict()
    run.losses = [record.loss for record in seen.steps]
    return run


def together(runs: list[Run]) -> list[list[list[int]]]:
    """The samples of all ranks."""
    steps = zip(*(run.ids for run in runs), strict=True)
    return [[list(chain(*parts)) for parts in zip(*step, strict=True)] for step in steps]


def on_one_device(sizes: tuple[int, ...], steps: list[list[list[int]]]) -> Run:
    """A plain loop of PyTorch over the same samples in the same batches; the scope is for the masks of Dropout."""
    run = Run()
    whole = ConcatDataset([part(rank, size) for rank, size in enumerate(sizes)])
    torch.manual_seed(0)
    net = evener.nn.name_dropouts(model()).double()
    optimizer = sgd(net.parameters())
    for number, micro_batches in enumerate(steps):
        count, total = sum(map(len, micro_batches)), 0.0
        for ids in micro_batches:
            inputs, targets = map(torch.stack, zip(*(whole[i] for i in ids), strict=True))
            with scope(torch.tensor(ids), number, 0):
                term = nn.functional.cross_entropy(net(inputs.double()), targets, reduction="sum")
            (term / count).backward()
            total += term.item()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(total / count)
    run.weights = {name: value.detach() for name, value in [*net.named_parameters(), *net.named_buffers()]}
    return run


def assert_same(found: Run, wanted: Run) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert found.weights.keys() == wanted.weights.keys()
    assert worst(wanted.weights, found.weights) <= 1e-12


@pytest.mark.parametrize(
    ("settings", "sizes"),
    crossed([{"micro_batch": 4, "batch_size": 10}, {}], [SIZES, (11, 0, 25)], lambda _: (ALWAYS, NIGHTLY)),
)
def test_gradients_are_those_of_all_parts_together(
    ranks: Any, sizes: tuple[int, ...], settings: dict[str, Any]
) -> None:
    runs = ranks(3).run(train, sizes, **settings)
    steps = together(runs)
    flat = [sorted(chain(*micro_batches)) for micro_batches in steps]
    per_epoch = len(steps) // 2
    for epoch in (flat[:per_epoch], flat[per_epoch:]):
        assert sorted(chain(*epoch)) == list(range(sum(sizes))), "each sample once an epoch"
    reference = on_one_device(sizes, steps)
    for run in runs:
        assert_same(run, reference)


def test_a_run_goes_on_in_mid_epoch(ranks: Any) -> None:
    whole = ranks(3).run(train, SIZES)
    begun = ranks(3).run(train, SIZES, steps=3)
    assert begun[0].state["progress"]["position"] == 27
    rest = ranks(3).run(train, SIZES, begun[0].state)
    assert together(begun) + together(rest) == together(whole)
    for name, value in whole[0].weights.items():
        assert relative_error(value, rest[0].weights[name]) <= 1e-12


def gone_on(state: dict[str, Any], sizes: tuple[int, ...]) -> int:
    return len(train(sizes, state).ids)


def refused(function: Any, *args: Any, **kwargs: Any) -> str:
    """What a rank is told that cannot take part; the ranks stay up."""
    with pytest.raises(ConfigurationError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_other_parts_are_refused_in_mid_epoch_and_welcome_at_its_end(ranks: Any) -> None:
    state = ranks(3).run(train, SIZES, steps=3)[0].state
    for message in ranks(2).run(refused, gone_on, state, (23, 18)):
        assert "parts of [23, 4, 16] samples, this run has [23, 18]" in message
    state = ranks(3).run(train, SIZES, epochs=1)[0].state
    assert ranks(2).run(gone_on, state, (23, 18)) == [5, 5]


def evaluated(sizes: tuple[int, ...]) -> tuple[dict[str, float], Tensor, dict[str, Any]]:
    with Engine(task(sizes), dtype="float64", device="cpu", epochs=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return (
            engine.evaluate(),
            engine.predict(engine.task.evaluate, everywhere=True),
            engine.model.state_dict(),
        )


@pytest.mark.parametrize("sizes", [pytest.param(SIZES, marks=NIGHTLY), (0, 3, 20)], ids=str)
def test_evaluation_counts_every_part_once_and_predictions_are_in_their_order(
    ranks: Any, sizes: tuple[int, ...]
) -> None:
    found = ranks(3).run(evaluated, sizes)
    net = model().double().eval()
    net.load_state_dict(found[0][2])
    whole = ConcatDataset([part(rank, size) for rank, size in enumerate(sizes)])
    inputs, targets = map(torch.stack, zip(*whole, strict=True))
    with torch.no_grad():
        outputs = net(inputs.double())
    for metrics, predictions, _ in found:
        assert relative_error(outputs, predictions) <= 1e-14
        assert metrics["loss"] == pytest.approx(
            nn.functional.cross_entropy(outputs, targets).item(), rel=1e-12
        )
        assert metrics["accuracy"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item())


def fitted(directory: str) -> tuple[int, list[float], float]:
    trained = fit(task, run_dir=Path(directory), epochs=1, show=False, device="cpu")
    return trained.summary.samples, trained.summary.shares, trained.summary.metrics["accuracy"]


def test_a_whole_run_tells_the_samples_of_all_parts(ranks: Any, tmp_path: Path) -> None:
    for samples, shares, _ in ranks(3).run(fitted, str(tmp_path)):
        assert samples == sum(SIZES)
        assert shares == pytest.approx([size / sum(SIZES) for size in SIZES])
    records = (tmp_path / "records.jsonl").read_text()
    assert f'"samples": {sum(SIZES)}' in records.splitlines()[-1]


def test_one_rank_owns_all_and_trains_as_without_parts(ranks: Any) -> None:
    (owning,) = ranks(1).run(train, (30,))
    own = part(0, 30)
    plain = Task(model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd, train=own, batch_size=9, epochs=2)
    with Engine(plain, dtype="float64", device="cpu") as engine:
        ids = []
        for batch in engine.batches():
            ids.append([batch.micro_batches[0].samples.tolist()])
            engine.step(batch)
    assert owning.ids == ids


def test_shares_of_the_users_own_are_refused(ranks: Any) -> None:
    for message in ranks(3).run(refused, train, SIZES, balance="3,2,1"):
        assert "balance '3,2,1' cannot divide data that are partitioned by sample" in message


def test_settings_about_shares_are_refused(ranks: Any) -> None:
    for message in ranks(3).run(refused, train, SIZES, balance="auto", max_shares="9,9,9"):
        assert "balance 'auto' and max_shares would do nothing: the data are partitioned" in message


def test_a_task_names_a_partition_that_there_is() -> None:
    with pytest.raises(
        TaskError, match=r"Task.partition is 'dimension', not 'batch' or 'sample'; .*strategy='dimension'"
    ):
        Task(model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd, train=part(0, 3), partition="dimension")  # type: ignore[arg-type]


def test_parts_have_no_reference_to_be_verified_against() -> None:
    with pytest.raises(ConfigurationError, match="one device cannot take the same steps"):
        verify(task, processes=2, device="cpu")
