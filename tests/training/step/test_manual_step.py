"""A loop of the user's own trains as the engine's step does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from evener.errors import ConfigurationError
from tests.engines import Weights, assert_same, copied, engine_of, stepped


def by_hand(name: str, **settings: Any) -> tuple[Weights, list[float]]:
    """The same as ``stepped``, written out."""
    losses = []
    with engine_of(name, **settings) as engine:
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            outputs = engine.model(micro.inputs)
            total = engine.loss.total(outputs, micro.targets)
            losses.append(engine.backward(total, engine.loss.count(micro.targets)))
            engine.update()
        return copied(engine), losses


def test_a_loop_by_hand_is_the_step(ranks: Any) -> None:
    for name, settings in (
        ("batch_norm", {"steps": 8, "clip_norm": 0.2}),
        ("branches", {"steps": 8}),  # ranks without a gradient for some parameters
        ("sparse", {"steps": 6}),
        ("dropout", {"steps": 6}),
    ):
        weights, losses = stepped(name, **settings)
        for balance in ("equal", "0,1"):
            for other, found in ranks(2).run(by_hand, name, balance=balance, **settings):
                assert_same(weights, other)
                assert found == pytest.approx(losses, rel=1e-12, nan_ok=True)


def test_a_loop_by_hand_takes_whole_batches() -> None:
    with engine_of("plain", batch_size=8, micro_batch=4) as engine:
        micro = next(batches := engine.batches()).micro_batches[0]
        with pytest.raises(ConfigurationError, match="2 micro-batches"):
            engine.backward(engine.model(micro.inputs).sum(), 4)
        batches.close()  # type: ignore[attr-defined]


def refused(name: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        by_hand(name, steps=1)
    return str(caught.value)


def test_a_hook_that_would_get_a_part_of_the_gradient_is_refused(ranks: Any) -> None:
    assert_same(by_hand("hooked", steps=3)[0], stepped("hooked", steps=3)[0])
    for message in ranks(2).run(refused, "hooked"):
        assert message.startswith("weight has a hook on its gradient")


def adversarial(**settings: Any) -> Weights:
    """Two optimizers in turn, and an exchange for each."""
    with engine_of("adversaries", steps=6, **settings) as engine:
        generator, critic = engine.model.generator, engine.model.critic
        makes: Any = torch.optim.Adam(generator.parameters(), lr=1e-2)
        judges = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
        for batch in engine.batches():
            (micro,) = batch.micro_batches
            noise = torch.stack([micro.samples.double().sin(), micro.samples.double().cos()], 1)
            made, n = generator(noise), len(micro.samples)
            real, fake = critic(micro.inputs), critic(made.detach())
            wrong = F.softplus(-real).sum() + F.softplus(fake).sum()
            engine.backward(wrong, n)
            engine.update(judges)
            engine.backward(F.softplus(-critic(made)).sum(), n)
            judges.zero_grad()
            engine.update(makes)
        assert engine.steps_done == 6
        return copied(engine)


def test_two_optimizers_in_turn(ranks: Any) -> None:
    reference = adversarial()
    for settings in ({}, {"balance": "5,1"}, {"balance": "0,1"}):
        for weights in ranks(2).run(adversarial, **settings):
            assert_same(reference, weights)
