"""Fused updates: where they are had, that they train the same, and what they would get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.components.optim.fused import clear_gradients, fuse, lay_out, lay_out_state, words_of
from evener.errors import ConfigurationError
from evener.training.engine import Engine
from tests.comparing import worst

ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def task(optimizer: Any = torch.optim.AdamW) -> evener.Task:
    generator = torch.Generator().manual_seed(3)
    return evener.Task(
        model=lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        train=TensorDataset(
            torch.randn(24, 5, generator=generator), torch.randint(3, (24,), generator=generator)
        ),
        batch_size=8,
    )


def parameter(*shape: int, **how: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, **how))


def engine(steps: int = 0, **settings: Any) -> Engine:
    made = Engine(task(), device="cpu", dtype="float64", epochs=9, **settings)
    take(made, steps)
    return made


def take(made: Engine, steps: int) -> None:
    batches = made.batches()
    for _ in range(steps):
        made.step(next(batches))
    batches.close()


def weights(made: Engine) -> dict[str, Tensor]:
    found: dict[str, Tensor] = made.state_dict()["model"]
    return found


def fused_of(made: Engine) -> list[Any]:
    return [group["fused"] for group in made.learner.optimizer.param_groups]


@pytest.mark.parametrize("kind", ADAMS)
def test_of_which_nothing_is_said_is_fused(kind: Any) -> None:
    optimizer = kind([parameter(3), parameter(2, dtype=torch.float64)])
    fuse(optimizer)
    assert optimizer.param_groups[0]["fused"] is True
    assert words_of(optimizer) == f"optimizer {kind.__name__}, fused"


@pytest.mark.parametrize(
    "said",
    [{"fused": False}, {"foreach": False}, {"foreach": True}, {"capturable": True}, {"differentiable": True}],
)
def test_what_is_said_stays(said: dict[str, bool]) -> None:
    optimizer = torch.optim.AdamW([parameter(3)], **said)
    before = dict(optimizer.param_groups[0])
    fuse(optimizer)
    assert optimizer.param_groups[0] == before
    assert words_of(optimizer) == ""


def test_a_rate_that_is_a_tensor_is_left() -> None:
    optimizer = torch.optim.AdamW([parameter(3)], lr=torch.tensor(0.1))
    fuse(optimizer)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    "odd",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.complex64},
        {"device": "meta"},
    ],
)
def test_a_parameter_without_kernel_keeps_its_group_as_it_is(odd: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW(
        [{"params": [parameter(3)]}, {"params": [parameter(3), parameter(2, **odd)]}]
    )
    fuse(optimizer)
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [True, False]
    assert words_of(optimizer) == "optimizer AdamW, fused in 1 of 2 groups"


def test_strides_that_the_kernel_does_not_look_at_are_left() -> None:
    strided = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([strided])
    fuse(optimizer)
    assert not optimizer.param_groups[0]["fused"]


def test_other_optimizers_are_left() -> None:
    class Own(torch.optim.AdamW):
        """One that may step in its own way."""

    for optimizer in (Own([parameter(3)]), torch.optim.SGD([parameter(3)], lr=0.1)):
        fuse(optimizer)
        assert not optimizer.param_groups[0]["fused"]


def test_an_empty_group_does_no_harm() -> None:
    optimizer = torch.optim.AdamW([{"params": [parameter(3)]}, {"params": []}])
    fuse(optimizer)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    assert words_of(optimizer) == "optimizer AdamW, fused"


def test_a_gradient_with_other_strides_than_its_parameter_is_laid_out() -> None:
    """By itself the kernel would add it to other weights, and say nothing."""
    found = []
    for fused in (False, True):
        one = nn.Parameter(torch.arange(12.0).view(3, 4))
        optimizer = torch.optim.AdamW([one], fused=fused)
        for _ in range(2):
            one.grad = torch.arange(12.0).view(4, 3).cos().t()
            lay_out(optimizer)
            optimizer.step()
        found.append(one.detach())
    assert torch.allclose(*found, rtol=1e-6)


def test_state_that_is_loaded_is_laid_out_as_its_parameter() -> None:
    """Files hold contiguous tensors. By itself the kernel would take them for those of other weights."""
    found = []
    for is_stored in (False, True):
        one = nn.Parameter(torch.arange(12.0).view(4, 3).t())
        optimizer = torch.optim.AdamW([one], fused=True, amsgrad=True)
        for _ in range(3):
            one.grad = torch.arange(12.0).view(4, 3).cos().t()
            optimizer.step()
            if is_stored:
                state = optimizer.state_dict()
                state["state"][0] = {key: value.contiguous() for key, value in state["state"][0].items()}
                optimizer.load_state_dict(state)
                lay_out_state(optimizer)
        found.append(one.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(0,), (4,), (3, 4, 1)])
def test_state_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """The kernel would read and write beyond it, in a checkpoint of anybody."""
    with engine(1) as begun, engine() as gone_on:
        state = begun.state_dict()
        state["optimizer"]["state"]["0.weight"]["exp_avg"] = torch.ones(shape, dtype=torch.float64)
        with pytest.raises(
            ConfigurationError, match=r"exp_avg has the shape .* there, and its parameter .* here"
        ):
            gone_on.load_state_dict(state)
        assert not gone_on.learner.optimizer.state


def test_a_run_that_fuses_weights_in_channels_last_goes_on_as_if_unbroken(tmp_path: Path) -> None:
    images = torch.randn(24, 3, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def made() -> Engine:
        convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)
        given = evener.Task(
            model=lambda: convolution,
            loss=nn.MSELoss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
            train=TensorDataset(images, torch.zeros(24, 16, dtype=torch.float64)),
            batch_size=8,
        )
        return Engine(given, device="cpu", dtype="float64", epochs=9)

    with made() as unbroken, made() as gone_on:
        batches = unbroken.batches()
        for step in range(6):
            unbroken.step(next(batches))
            if step == 2:
                unbroken.save(tmp_path)
        gone_on.load(tmp_path)
        take(gone_on, 3)
        assert worst(weights(unbroken), weights(gone_on)) == 0


def test_the_bits_do_not_depend_on_threads() -> None:
    """Ranks that hold the same may have different numbers of cores."""
    first, gradient = torch.randn(2, 100_003)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            one = nn.Parameter(first.clone())
            optimizer = torch.optim.AdamW([one], fused=True)
            for _ in range(2):
                one.grad = gradient
                optimizer.step()
            found.append(one.detach())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_it_trains_as_without_up_to_rounding() -> None:
    with engine(6) as fused, engine(6, fused_optimizer="no") as plain:
        assert fused_of(fused) == [True]
        assert fused_of(plain) == [None]
        assert worst(weights(fused), weights(plain)) < 1e-12


@pytest.mark.parametrize(("first", "second"), [("auto", "no"), ("no", "auto")])
def test_a_checkpoint_goes_on_with_the_setting_at_hand(first: str, second: str, tmp_path: Path) -> None:
    said: list[str] = []
    with engine(4, fused_optimizer=first) as begun, engine(fused_optimizer=second) as gone_on:
        begun.save(tmp_path)
        gone_on.load(tmp_path, said.append)
        assert fused_of(gone_on) == [True if second == "auto" else None]
        take(gone_on, 3)
        with engine(7) as straight:
            assert worst(weights(gone_on), weights(straight)) < 1e-12
    assert [words for words in said if "fused_optimizer" in words]


def test_a_run_says_it() -> None:
    result = evener.fit(task(), processes=1, device="cpu", steps=2, show=False)
    assert result.summary.optimizer == "optimizer AdamW, fused"


def test_hooks_cannot_lead_the_kernel_astray() -> None:
    """A hook that leaves a transposed copy in the place of the gradient."""

    def run(fused_optimizer: str) -> dict[str, Tensor]:
        with engine(fused_optimizer=fused_optimizer) as made:
            weight = next(made.model.parameters())

            def hook(held: Tensor) -> None:
                assert held.grad is not None
                held.grad = held.grad.t().contiguous().t()

            weight.register_post_accumulate_grad_hook(hook)
            take(made, 3)
            return weights(made)

    assert worst(run("auto"), run("no")) < 1e-12


# Clearing


class Clears(torch.optim.SGD):
    """An optimizer that clears in its own way."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1


def test_gradients_of_the_optimizers_parameters_are_cleared() -> None:
    own, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [own.weight]}, {"params": [own.bias]}], lr=0.1)
    for p in (*own.parameters(), *other.parameters()):
        p.grad = torch.ones_like(p)
    clear_gradients(optimizer)
    assert [p.grad for p in own.parameters()] == [None, None]
    assert all(p.grad is not None for p in other.parameters())


def test_an_optimizer_may_clear_in_its_own_way() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    optimizer = Clears(layer.parameters(), lr=0.1)
    clear_gradients(optimizer)
    assert optimizer.cleared == 1
    assert layer.weight.grad is not None
    replaced = torch.optim.SGD(layer.parameters(), lr=0.1)
    replaced.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    clear_gradients(replaced)
    assert layer.weight.grad is not None
