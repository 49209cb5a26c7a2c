"""Audited blocks: faults of one rank are found and named, and nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from evener.checkpoint import weights_digest
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, DataError, DivergenceError
from evener.tools.verify.bits import DRAWN
from evener.training.engine import Engine
from tests import bits_tasks
from tests.bits_tasks import CUT

Fault = Callable[[Engine], AbstractContextManager[Any]]


def trained(
    task: str, rank: int = 0, fault: Fault | None = None, **settings: Any
) -> tuple[str, str, int | None, int]:
    """Trains with a fault on one rank.

    Returns:
        The digest of the weights, the message of the error that ended the training and the rank that it names, and the
        number of audited blocks.
    """
    usual = {"exact": "bits", "device": "cpu", "steps": 6, "check_replicas": 0, **CUT}
    with Engine(getattr(bits_tasks, task)(), RunConfig(**(usual | settings))) as engine:
        message, named = "", None
        before = weights_digest(engine.model)
        is_faulty = fault is not None and engine.session.rank == rank
        try:
            with fault(engine) if is_faulty else nullcontext():  # type: ignore[misc]
                for batch in engine.batches():
                    before = weights_digest(engine.model)
                    engine.step(batch)
        except (DivergenceError, DataError) as error:
            message, named = str(error), error.rank
            assert weights_digest(engine.model) == before, "the update was made"
            assert not any(p.grad is not None for p in engine.model.parameters())
        audit = engine.learner.stepper.audit  # type: ignore[attr-defined]
        return weights_digest(engine.model), message, named, 0 if audit is None else audit.blocks


@contextmanager
def flipping(engine: Engine) -> Iterator[None]:
    """Changes one bit of one number of a gradient, in one backward pass of the third step."""

    def flipped(gradients: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if engine.steps_done != 2 or flipped.done:  # type: ignore[attr-defined]
            return None
        flipped.done = True  # type: ignore[attr-defined]
        changed = gradients[0].clone()
        changed.view(torch.int32).view(-1)[7] ^= 1 << 30
        return (changed,)

    flipped.done = False  # type: ignore[attr-defined]
    node = get_gradient_edge(engine.model.first.weight).node  # a hook on the weight waits for the sum
    node.register_prehook(flipped)
    yield
    del node  # which lives as long as somebody holds it


def wrong_products(engine: Engine) -> Any:
    """One number of every matrix product is off by a little, always in the same way."""
    right = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = right(x, weight, bias)
        off = torch.zeros_like(found)
        off.view(-1)[0] = 1e-4
        return found + off

    return patch.object(F, "linear", linear)


def other_samples(engine: Engine) -> Any:
    """The first number of what is read is another one."""
    engine.task.train.tensors[0][:, 0] += 1
    return nullcontext()


ZERO: list[dict[str, Any]] = [
    {"strategy": "sharded", "strategy_option": ("zero=1",)},
    {"strategy": "sharded", "strategy_option": ("zero=2",)},
]


@pytest.mark.parametrize(
    ("fault", "rank", "settings"),
    [
        *((fault, rank, {}) for fault in (flipping, wrong_products) for rank in range(3)),
        (wrong_products, 1, ZERO[0]),
        (wrong_products, 2, ZERO[1]),
    ],
)
def test_the_faulty_rank_is_named(ranks: Any, fault: Fault, rank: int, settings: dict[str, Any]) -> None:
    found = ranks(3).run(trained, "mlp", rank, fault, audit=1.0, **settings)
    for _, message, named, _ in found:
        assert named == rank
        assert message.startswith(f"rank {rank} (cpu")
        assert "computes wrongly" in message
        assert "No update is made" in message
        step = 2 if fault is flipping else 0
        assert re.search(rf"block \d of step {step}", message), message


def test_of_two_ranks_both_are_named(ranks: Any) -> None:
    found = ranks(2).run(trained, "mlp", 1, wrong_products, audit=1.0)
    assert {named for _, _, named, _ in found} == {None}
    assert all("rank 0 (cpu" in message and "rank 1 (cpu" in message for _, message, _, _ in found)


def test_a_constant_fault_is_found_within_a_hundred_audited_blocks(ranks: Any) -> None:
    found = ranks(3).run(trained, "mlp", 2, wrong_products, audit=0.05, steps=500)
    assert {named for _, _, named, _ in found} == {2}
    assert max(blocks for *_, blocks in found) < 100


def test_other_samples_are_told_from_wrong_results(ranks: Any) -> None:
    found = ranks(2).run(trained, "mlp", 1, other_samples, audit=1.0)
    assert all("have read different samples" in message for _, message, _, _ in found)


def test_without_an_audit_the_fault_passes(ranks: Any) -> None:
    """So that the tests above show what the audit finds."""
    found = ranks(2).run(trained, "mlp", 1, wrong_products)
    assert [message for _, message, _, _ in found] == ["", ""]


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("mlp", {}),
        ("mlp", {"balance": "1,0"}),
        ("mlp", ZERO[1] | {"clip_norm": 0.5}),
        pytest.param("transformer", ZERO[0] | {"precision": "bf16"}, marks=pytest.mark.slow),
        ("batch_norm", {"batch_norm": "grain"}),
        ("transformer", {"precision": "bf16", "clip_norm": 0.5}),
        ("lstm", {}),
    ],
    ids=str,
)
def test_an_audited_training_has_the_same_bits_and_no_alarm(
    ranks: Any, task: str, settings: dict[str, Any]
) -> None:
    shares = {"balance": DRAWN} | settings
    plain = ranks(2).run(trained, task, **shares)
    audited = ranks(2).run(trained, task, audit=0.6, **shares)
    assert {message for _, message, _, _ in audited} == {""}
    assert {digest for digest, *_ in audited} == {digest for digest, *_ in plain}
    # Of a rank's own rows.
    assert len({digest for digest, *_ in audited}) == (2 if "strategy" in settings else 1)
    assert all(blocks > 10 for *_, blocks in audited)


@pytest.mark.slow
def test_ten_thousand_blocks_give_no_false_alarm(ranks: Any) -> None:
    settings = {"audit": 1.0, "grain": 1, "block": 1, "steps": 420, "balance": DRAWN, "epochs": 200}
    found = ranks(2).run(trained, "mlp", timeout=400, **settings)
    assert {message for _, message, _, _ in found} == {""}
    assert {blocks for *_, blocks in found} >= {10_000} or min(blocks for *_, blocks in found) > 10_000


def test_what_cannot_be_audited_is_refused(ranks: Any) -> None:
    with pytest.raises(ConfigurationError, match="audit would do nothing"):
        RunConfig(audit=0.01)
    with pytest.raises(ConfigurationError, match="from 0 to 1"):
        RunConfig(exact="bits", audit=1.5)
    with pytest.raises(ConfigurationError, match="there is one rank"):
        trained("mlp", audit=0.5)
    sharded = {"audit": 0.5, "strategy": "sharded", "strategy_option": ("zero=3",)}
    assert set(ranks(2).run(refused, **sharded)) == {"audit has a rank compute a block by itself"}


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigurationError) as found:
        trained("mlp", **settings)
    return str(found.value).partition(",")[0]
