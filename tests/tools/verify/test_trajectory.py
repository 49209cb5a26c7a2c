from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.tools.verify import record, relative_error
from evener.tools.verify.trajectory import WIDTH, RandomSketch
from tests import tasks


def draws(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_small_tensor_is_its_own_sketch() -> None:
    assert RandomSketch()("w", torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist() == [1, 2, 3, 4]


def test_the_sketch_of_a_difference_is_the_difference_of_sketches_about_as_long() -> None:
    sketch, a, b = RandomSketch(), draws(5003, 1), draws(5003, 2)
    of_difference = sketch("w", a - b)
    torch.testing.assert_close(of_difference, sketch("w", a) - sketch("w", b))
    lengths = [float(sketch(f"w{n}", a).norm() / a.norm()) for n in range(50)]
    assert min(lengths) > 0.4
    assert max(lengths) < 1.6
    assert sum(lengths) / 50 == pytest.approx(1, abs=0.1)


def test_one_wrong_element_shows_whole() -> None:
    sketch, a = RandomSketch(), draws(5003, 1)
    b = a.clone()
    b[4999] += 0.25
    assert float((sketch("w", a) - sketch("w", b)).norm()) == pytest.approx(0.25)


def test_sketches_of_two_processes_agree_and_hold_few_numbers() -> None:
    a = draws(100, 1)
    assert torch.equal(RandomSketch()("w", a), RandomSketch()("w", a))
    assert len(RandomSketch()("w", a)) == WIDTH


def test_a_sparse_gradient_is_taken_whole() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    assert RandomSketch()("w", sparse).tolist() == [1, 0, 5, 0]


class Graph(torch.nn.Linear):
    """Its edges are a sparse buffer, of each layout."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("edges", torch.eye(6).to_sparse())
        # Compressed ones are said to be beta.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            self.register_buffer("compressed", torch.eye(6).to_sparse_csr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.edges.to(x.dtype))


@pytest.mark.filterwarnings("ignore:.*Sparse CSR")
def test_sparse_buffers_are_compared_whole() -> None:
    config = RunConfig(steps=2, strategy="single")
    found = record(lambda: replace(tasks.plain(), model=Graph), None, config, Environment())
    assert found.weights["edges"].tolist() == found.weights["compressed"].tolist() == torch.eye(6).tolist()
    assert relative_error(found.weights["edges"], found.weights["compressed"]) == 0
    assert found.buffers["edges"].norm() > 0


def test_what_is_remembered_of_a_run() -> None:
    config = RunConfig(dtype="float64", steps=3, strategy="single")
    found = record(tasks.penalty, None, config, Environment())
    assert len(found.losses) == len(found.gradients) == 3
    assert list(found.shapes) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert set(found.gradients[0]) == set(found.penalty) == set(found.moved) == set(found.shapes)
    assert torch.equal(found.penalty["2.bias"].abs(), torch.full((3,), 0.03, dtype=torch.float64))
    assert min(found.moved.values()) > 0


def of_whole_weights() -> tasks.Task:
    target = torch.ones(8, 6, dtype=torch.float64)
    return tasks._task(penalty=lambda model: (model[0].weight - target).square().sum())


def test_a_penalty_of_whole_weights_is_one_where_each_rank_holds_a_slice(ranks: Any) -> None:
    config = RunConfig(device="cpu", dtype="float64", steps=2, strategy="dimension")
    divided = ranks(2).run(record, of_whole_weights, None, config)[0]
    alone = record(of_whole_weights, None, config.replace(strategy="single"), Environment())
    assert all(relative_error(value, divided.weights[name]) < 1e-12 for name, value in alone.weights.items())
    assert divided.penalty == {}


def test_gradients_are_those_that_the_optimizer_is_given() -> None:
    """Summed, with the penalty, and clipped."""
    config = RunConfig(dtype="float64", steps=1, strategy="single", clip_norm=1e-3)
    found = record(tasks.penalty, None, config, Environment())
    small = {name: found.gradients[0][name] for name in ("0.bias", "2.bias")}
    assert sum(float(value.square().sum()) for value in small.values()) <= 1e-6


def test_statistics_are_those_of_the_first_forward_pass() -> None:
    found = record(
        tasks.batch_norm, None, RunConfig(dtype="float64", steps=3, strategy="single"), Environment()
    )
    assert found.buffers["1.num_batches_tracked"].tolist() == [1]
    assert found.weights["1.num_batches_tracked"].item() == 3


@pytest.mark.parametrize(
    "how", [{"strategy": "tensor"}, {"strategy": "pipeline", "strategy_option": ("cut=2",)}], ids=str
)
def test_buffers_that_are_divided_are_compared_whole(ranks: Any, how: dict[str, Any]) -> None:
    usual = {"steps": 2, "dtype": "float64", "device": "cpu"}
    alone = record("tests.tasks:batch_norm", None, RunConfig(strategy="single", **usual), Environment())
    divided = ranks(2).run(record, "tests.tasks:batch_norm", None, RunConfig(**usual, **how))[0]
    assert alone.buffers
    for name, sketch in alone.buffers.items():
        torch.testing.assert_close(divided.buffers[name], sketch, rtol=1e-11, atol=1e-11)
