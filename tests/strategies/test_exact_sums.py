"""The same bits on any number of ranks, with any shares, all-reduce and bucket size."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.components.exact_sum import grid
from evener.core.losses import Sum
from evener.core.task.task import Task
from evener.errors import ConfigurationError, DivergenceError
from evener.strategies.ddp import Ddp
from evener.strategies.single import NoSync
from evener.strategies.synchronizer import Synchronizer
from evener.training.engine import Engine
from tests import tasks
from tests.ranks import RankPool
from tests.strategies import sharding, whole_tasks
from tests.tiers import ALWAYS, NIGHTLY, SLOW, spread

Ranks = Callable[[int], RankPool]
RANDOM = "tests.balancers:Random"
SMALL = 1e-4
"""A bucket size, in MiB, for a few gradients."""


def mean_square(outputs: Tensor, targets: Tensor) -> Sum:
    return Sum(outputs.double().square().sum().float(), outputs.numel())


class Uneven(nn.Module):
    """Gradients of very different sizes, which need limbs, and weighted classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.size = nn.Parameter(torch.tensor([1e6, 1e-6]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x * self.size[0] * self.size[1] * 3)))
        return found


def uneven() -> Task:
    weights = torch.tensor([0.3, 1.7, 1 / 3])
    return replace(
        tasks.plain(),
        model=Uneven,
        loss=nn.CrossEntropyLoss(weight=weights),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        metrics={"square": mean_square, "accuracy": evener.accuracy},
    )


def wide() -> Task:
    """As ``uneven``, with gradients that are larger by 2**40: each step needs limbs."""
    return replace(uneven(), loss=evener.loss(total=_large, count=lambda targets: float(len(targets))))


def _large(outputs: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy(outputs, targets) * (2.0**40 if targets[0] else 2.0**-20)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def tiny(power: int = -80) -> Task:
    """As ``uneven``, with gradients far below the first units: the first steps need the digits below them."""
    return replace(
        uneven(),
        loss=evener.loss(
            total=lambda outputs, targets: _cross_entropy(outputs, targets) * 2.0**power,
            count=lambda targets: float(len(targets)),
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1 * 2.0**-power),
    )


TASKS: dict[str, Callable[[], Task]] = {
    "branches": tasks.branches,
    "layouts": tasks.layouts,
    "penalty": tasks.penalty,
    "words": sharding.task,
    "uneven": uneven,
    "wide": wide,
    "tiny": tiny,
    "muon": whole_tasks.muon,
}


def digest(tensors: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(
            tensor.detach().cpu().contiguous().numpy().tobytes() if isinstance(tensor, Tensor) else b""
        )
    return found.hexdigest()


def digests(engine: Engine) -> tuple[str, ...]:
    """Of the weights, of the optimizer's state, and the names of what it has stepped."""
    state = engine.state_dict()
    kept = {f"{n}.{k}": v for n, entry in state["optimizer"]["state"].items() for k, v in entry.items()}
    return digest(state["model"]), digest(kept), ", ".join(sorted(state["optimizer"]["state"]))


def trained(name: str, steps: int = 5, **settings: Any) -> tuple[Any, ...]:
    config: dict[str, Any] = {
        "exact": "bits",
        "device": "cpu",
        "grain": 2,
        "block": 2,
        "steps": steps,
    } | settings
    with Engine(TASKS[name](), **config) as engine:
        losses = [engine.step(batch).loss.hex() for batch in engine.batches()]
        metrics = engine.evaluate()
        return *digests(engine), losses, {key: value.hex() for key, value in metrics.items()}


@pytest.fixture(scope="module")
def alone() -> Callable[..., tuple[Any, ...]]:
    """What a run on one rank gives, computed once."""
    known: dict[str, tuple[Any, ...]] = {}

    def found(name: str, **settings: Any) -> tuple[Any, ...]:
        key = f"{name} {sorted(settings.items())}"
        if key not in known:
            known[key] = trained(name, **settings)
        return known[key]

    return found


SUMS: list[dict[str, Any]] = [
    {"allreduce": "shared-memory"},
    {"allreduce": "native", "bucket_mb": SMALL},
    {"allreduce": "ring", "balance": RANDOM},
    {"allreduce": "tree", "bucket_mb": SMALL, "balance": RANDOM},
]
SHARDED: list[dict[str, Any]] = [
    {"strategy": "sharded", "strategy_option": ("zero=1",), "allreduce": "native"},
    {"strategy": "sharded", "strategy_option": ("zero=1", "shard_sizes=2,1"), "balance": RANDOM},
    {"strategy": "sharded", "strategy_option": ("zero=2",), "bucket_mb": SMALL, "balance": RANDOM},
    {"strategy": "sharded", "strategy_option": ("zero=2", "in_common=True"), "balance": "3,1"},
]


@pytest.mark.parametrize("name", spread(TASKS, ALWAYS, SLOW))
@pytest.mark.parametrize("how", [SUMS[2], *spread([SUMS[0], SUMS[1], SUMS[3]], NIGHTLY)], ids=str)
def test_two_ranks_have_the_bits_of_one(ranks: Ranks, alone: Any, name: str, how: dict[str, Any]) -> None:
    for found in ranks(2).run(trained, name, **how):
        assert found == alone(name)


@pytest.mark.parametrize("how", spread(SUMS, SLOW, ALWAYS), ids=str)
def test_three_ranks_have_the_bits_of_one(ranks: Ranks, alone: Any, how: dict[str, Any]) -> None:
    for found in ranks(3).run(trained, "words", clip_norm=0.5, **how):
        assert found == alone("words", clip_norm=0.5)


@pytest.mark.parametrize("how", spread(SHARDED, SLOW, ALWAYS), ids=str)
@pytest.mark.parametrize(
    "name", spread(["words", "wide", "branches", "tiny", "penalty", "muon"], ALWAYS, SLOW, SLOW)
)
def test_divided_updates_have_the_bits_of_one(
    ranks: Ranks, alone: Any, name: str, how: dict[str, Any]
) -> None:
    for found in ranks(2).run(trained, name, clip_norm=0.1, **how):
        assert found == alone(name, clip_norm=0.1)


@pytest.mark.parametrize("name", spread(["words", "wide", "penalty", "tiny"], ALWAYS, SLOW, SLOW))
def test_divided_weights_have_the_bits_of_one(ranks: Ranks, alone: Any, name: str) -> None:
    for size, balance in ((2, RANDOM), (3, "1,0,2")):
        found = ranks(size).run(trained, name, clip_norm=0.1, strategy="sharded", balance=balance)
        assert found == [alone(name, clip_norm=0.1)] * size


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"recompute": "blocks"}, {"dtype": "float64"}], ids=str
)
def test_other_computations_have_the_bits_of_one(ranks: Ranks, alone: Any, settings: dict[str, Any]) -> None:
    expected = alone("words", **settings)
    assert ranks(2).run(trained, "words", balance=RANDOM, **settings) == [expected] * 2
    zero: Any = {"strategy": "sharded", "strategy_option": ("zero=2",)}
    assert ranks(2).run(trained, "words", **zero, **settings) == [expected] * 2


@pytest.mark.slow
def test_divisions_over_two_axes_have_the_bits_of_one(ranks: Ranks, alone: Any) -> None:
    for zero in (1, 2, 3):
        how: Any = {"strategy": "sharded", "strategy_option": (f"zero={zero}",), "mesh": "data=2,shard=2"}
        assert ranks(4).run(trained, "words", clip_norm=0.1, **how) == [alone("words", clip_norm=0.1)] * 4


def test_another_grain_is_another_run(alone: Any) -> None:
    assert alone("words")[0] != trained("words", grain=3)[0], "a trial that can fail"


@pytest.mark.parametrize("name", ["wide", "tiny"])
def test_limbs_were_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    monkeypatch.setattr(
        "evener.components.exact_sum.gradients.folded", lambda *a: made.append(1) or grid.folded(*a)
    )
    trained(name)
    assert len(made) > 5


def test_tiny_gradients_are_not_lost() -> None:
    weights = []
    for task in (tiny(), tiny(power=0)):
        with Engine(task, exact="bits", device="cpu", grain=2, block=2, steps=5) as engine:
            for batch in engine.batches():
                engine.step(batch)
            weights.append(engine.state_dict()["model"])
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-6, atol=1e-6)
        assert name == "size" or not torch.equal(weight, dict(Uneven().state_dict())[name])


# State


def resumed(directory: str | None, state: Any, steps: int, **settings: Any) -> tuple[Any, tuple[str, ...]]:
    config: dict[str, Any] = {
        "exact": "bits",
        "device": "cpu",
        "grain": 2,
        "steps": steps,
        "epochs": 9,
    } | settings
    with Engine(uneven(), **config) as engine:
        if state is not None:
            engine.load_state_dict(state)
        elif directory is not None and Path(directory, "latest").exists():
            engine.load(Path(directory))
        for batch in engine.batches():
            engine.step(batch)
        if directory is not None:
            engine.save(Path(directory))
        return engine.state_dict(), digests(engine)


@pytest.mark.parametrize("kept", spread(["memory", "file"], SLOW, ALWAYS))
def test_a_resume_on_other_ranks_has_the_bits_of_a_run_that_went_on(
    ranks: Ranks, tmp_path: Path, kept: str
) -> None:
    _, through = resumed(None, None, 9)
    directory = str(tmp_path) if kept == "file" else None
    state, _ = ranks(2).run(resumed, directory, None, 4, balance=RANDOM)[0]
    zero = {"strategy": "sharded", "strategy_option": ("zero=2",)}
    state, _ = ranks(3).run(
        resumed, directory, copy.deepcopy(state) if kept == "memory" else None, 7, **zero
    )[0]
    _, found = resumed(directory, state if kept == "memory" else None, 9)
    assert found == through


def taken_again(**settings: Any) -> tuple[str, ...]:
    """Each step is taken, and its passes once more before its update, as after the death of another rank."""
    config: dict[str, Any] = {"exact": "bits", "device": "cpu", "grain": 2, "steps": 4} | settings
    with Engine(uneven(), **config) as engine:
        learner, engine.learner.may_leave_out = engine.learner, True
        for batch in engine.batches():
            learner.run(batch, lambda: 1.0, engine.steps_done)
            learner.undo(engine.steps_done)
            engine.step(batch)
        return digests(engine)


def test_a_step_that_is_taken_again_has_the_same_bits() -> None:
    _, through = resumed(None, None, 4)
    assert taken_again() == through


class Explodes(nn.Linear):
    """Has a gradient that is not finite for sample 20, in the first block of a step, and a huge one for 21."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.where(x[:, :1] == 20, torch.inf, torch.where(x[:, :1] == 21, 1e12, 1.0))
        return super().forward(x) * factor


def exploding() -> Task:
    data = torch.cat([torch.arange(47.0)[:, None], tasks.draws(47, 5)], 1)
    return replace(
        tasks.plain(),
        model=lambda: Explodes(6, 3),
        train=torch.utils.data.TensorDataset(data, tasks.classes(47, 3)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        evaluate=None,
    )


def left_out(policy: str, **settings: Any) -> Any:
    config: dict[str, Any] = {"exact": "bits", "device": "cpu", "grain": 2, "non_finite": policy} | settings
    with Engine(exploding(), **config) as engine:
        try:
            left = [engine.step(batch).left_out for batch in engine.batches()]
        except DivergenceError as error:
            return str(error).split(" on rank")[0]
        return *digests(engine), left


def test_a_step_that_is_left_out_leaves_the_units(ranks: Ranks) -> None:
    one = left_out("skip")
    assert sum(one[-1]) == 2
    assert left_out("skip", balance="equal") == one
    for found in [
        *ranks(2).run(left_out, "skip", balance=RANDOM),
        *ranks(3).run(left_out, "skip", balance="1,0,3"),
    ]:
        assert found == one
    zero = {"strategy": "sharded", "strategy_option": ("zero=2",)}
    assert ranks(2).run(left_out, "skip", **zero)[0] == one


def test_what_is_not_finite_ends_the_run(ranks: Ranks) -> None:
    assert "is not finite in step" in left_out("stop") or "the loss is" in left_out("stop")
    assert set(ranks(2).run(left_out, "stop")) == {left_out("stop")}


# Refusals


def test_parameters_that_are_thawed_are_refused() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        made[0].requires_grad_(False)
        return made

    with Engine(replace(tasks.plain(), model=model), exact="bits", device="cpu") as engine:
        batches = engine.batches()
        engine.step(next(batches))
        engine.model.get_parameter("0.weight").requires_grad_(True)
        with pytest.raises(
            ConfigurationError, match=r"cannot follow a change of requires_grad.*0.weight is thawed"
        ):
            engine.step(next(batches))


def test_complex_parameters_are_refused() -> None:
    class Turns(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    with pytest.raises(ConfigurationError, match="turn is complex"):
        Engine(replace(tasks.plain(), model=Turns), exact="bits", device="cpu")


class Adds(Ddp):
    """A strategy whose synchronizer has sums of its own."""

    def synchronizer(self, learner: Any) -> Synchronizer:
        found = NoSync(learner)
        learner.exact = None
        return found


def test_a_synchronizer_with_other_sums_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"does not use Learner.exact"):
        Engine(tasks.plain(), strategy=Adds(), exact="bits", device="cpu")


def refused_where_divided() -> None:
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True)  # noqa: E731
    task = replace(tasks.plain(), optimizer=sgd)
    with Engine(task, exact="bits", device="cpu", strategy="ddp"):
        pass
    with pytest.raises(ConfigurationError, match=r"a fused SGD.*without fused=True"):
        Engine(task, exact="bits", device="cpu", strategy="sharded", strategy_option=("zero=2",))
    with pytest.raises(
        ConfigurationError, match=r"(convolution.weight|transposed) is not contiguous.*use ddp"
    ):
        Engine(tasks.layouts(), exact="bits", device="cpu", strategy="sharded", strategy_option=("zero=1",))


def test_what_rounds_pieces_otherwise_is_refused(ranks: Ranks) -> None:
    ranks(2).run(refused_where_divided)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, foreach=False),
        lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        *spread(
            [
                lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
                lambda p: torch.optim.Adagrad(p),
                lambda p: torch.optim.NAdam(p),
            ],
            NIGHTLY,
        ),
    ],
)
def test_an_update_of_pieces_has_the_bits_of_that_of_the_whole(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = lambda: torch.randn(40_007, generator=generator)  # noqa: E731
    first, gradients = drawn(), [drawn() * 10.0 ** drawn() for _ in range(4)]

    def updated(cuts: list[int]) -> Tensor:
        pieces = [nn.Parameter(piece.clone()) for piece in first.tensor_split(cuts)]
        optimizer = make(pieces)
        for gradient in gradients:
            for piece, rows in zip(pieces, gradient.tensor_split(cuts), strict=True):
                piece.grad = rows.clone()
            optimizer.step()
        state = [[value for value in optimizer.state[p].values() if value.ndim] for p in pieces]
        return torch.cat([torch.stack([p.detach(), *kept]) for p, kept in zip(pieces, state, strict=True)], 1)

    whole = updated([])
    for cuts in ([13_333, 26_667], [1, 2, 3, 5, 8], list(range(7, 4_007, 7))):
        assert torch.equal(updated(cuts), whole)
