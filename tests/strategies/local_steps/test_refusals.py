"""What local steps refuse, and in which words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, ShareError, TaskError
from evener.nn import all_gather, data_group
from evener.strategies import DiLoCo, LocalSgd
from evener.training.engine import Engine
from evener.training.factory import check_division
from tests.strategies.local_steps.test_local_steps import Terms, samples, task

REFUSED: dict[str, dict[str, Any]] = {
    "replicas=2 cannot be divided over 3 ranks": {"strategy": LocalSgd(replicas=2), "processes": 3},
    "fp16": {"strategy": LocalSgd(), "precision": "fp16"},
    "micro_batch=auto": {"strategy": LocalSgd(), "micro_batch": "auto"},
    "optimizer_state=8bit": {"strategy": LocalSgd(), "optimizer_state": "8bit"},
    "powersgd": {"strategy": LocalSgd(), "compress": "powersgd"},
    "offload": {"strategy": LocalSgd(), "offload": "optimizer"},
    "which may divide its state with zero=1 to 3": {"strategy": LocalSgd(), "mesh": "data=2,shard=2"},
    "cannot be laid over a mesh": {"strategy": LocalSgd(), "mesh": "data=2,tensor=2"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_refused_before_ranks_start(words: str) -> None:
    settings = {"device": "cpu", "processes": 4 if "mesh" in REFUSED[words] else 2, **REFUSED[words]}
    with pytest.raises(ConfigurationError, match=words):
        check_division(RunConfig(**settings), settings["processes"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 0}, "sync_every is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"num_fragments": 5, "sync_every": 4}, "5 fragments cannot merge in turn"),
        ({"fragment_sync_delay": 2, "num_fragments": 2, "sync_every": 4}, "must be less than the 4 batches"),
        ({"fragment_update_alpha": 1.0}, "never merge"),
        ({"outer_lr": 0.0}, "outer_lr is 0.0"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"zero": 4}, "zero is 4; there are 1, 2 and 3"),
        ({"zero": 2, "quorum": 2}, "a quorum does not go with zero"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DiLoCo(**options)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


def by_groups(parameters: Any) -> torch.optim.Optimizer:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.param_groups[0]["weight_decay"] += 1e-9

    return Counting(parameters, lr=0.1)


def meets(outputs: Tensor, targets: Tensor) -> Tensor:
    return all_gather(outputs, data_group()).square().sum() + 0 * targets.sum()


class Meeting(Terms):
    total = staticmethod(meets)


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        (lambda: task(train=Stream()), {}, "iterable data set"),
        (task, {"non_finite": "skip"}, "non_finite=skip"),
        (task, {"on_bad_sample": "skip"}, "cannot be read"),
        (partial(task, torch.optim.LBFGS), {}, "LBFGS"),
        (partial(task, by_groups), {"strategy": LocalSgd(replicas=2)}, "as many processes as replicas"),
        (task, {"strategy": LocalSgd(replicas=2), "balance": "auto"}, "shares by speed"),
        (
            lambda: task(loss=Meeting()),
            {"strategy": LocalSgd(replicas=2)},
            "each replica takes steps of its own",
        ),
        (task, {"max_shares": "5"}, "a local batch has about 12 samples whatever the shares of a round"),
        (task, {"strategy": LocalSgd(num_fragments=9)}, "num_fragments is 9, and the model has 3"),
    ],
)
def test_what_does_not_go_with_local_steps_is_refused(
    build: Any, settings: dict[str, Any], words: str
) -> None:
    config = RunConfig(device="cpu", dtype="float64", **{"strategy": LocalSgd(), "epochs": 1} | settings)
    with pytest.raises((ConfigurationError, TaskError), match=words):
        _steps(build, config)


def _steps(build: Any, config: RunConfig) -> None:
    with Engine(build(), config) as engine:
        for batch in engine.batches():
            engine.step(batch)


def test_a_loop_with_sums_of_its_own_is_refused() -> None:
    with Engine(task(), RunConfig(device="cpu", strategy=LocalSgd(), epochs=1)) as engine:
        for _ in engine.batches():
            with pytest.raises(ConfigurationError, match="takes steps of its own"):
                engine.backward(torch.ones((), requires_grad=True), 1)
            with pytest.raises(ConfigurationError, match="takes steps of its own"):
                engine.update()
            break


@pytest.mark.parametrize(
    ("replicas", "ranks", "shares"), [(2, 4, "3,3,1,1"), (4, 2, "1,2,1,2"), (None, 2, "3,1")]
)
def test_shares_are_of_ranks_or_of_replicas_that_a_rank_carries(
    replicas: int | None, ranks: int, shares: str
) -> None:
    config = RunConfig(strategy=DiLoCo(replicas=replicas), balance=shares, device="cpu")
    check_division(config, ranks)
    with pytest.raises(ShareError, match="weights"):
        check_division(config.replace(balance="1,1,1"), ranks)
