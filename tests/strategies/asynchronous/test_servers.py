"""Several parameter servers against one: the same training, and the same errors."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import ConfigurationError, EvenerError, RankError
from evener.hardware import accelerators
from evener.hardware.timers import HostStopwatch
from evener.strategies import Asynchronous
from evener.strategies.asynchronous.ledger import ages
from evener.training.engine import Engine
from evener.training.fit import fit
from tests.comparing import handed_on, worst
from tests.distributed.processes import call
from tests.strategies.asynchronous.test_asynchronous import (
    ROUNDING,
    Stalling,
    everything,
    on,
    repeated,
    trained,
)
from tests.strategies.local_steps.test_local_steps import Words, adam, decaying, task
from tests.tiers import ALWAYS, NIGHTLY, spread

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def plain() -> Task:
    return task(adam, True, scheduler=decaying, scheduler_interval="step")


def synchronized() -> Task:
    return task(adam, scheduler=decaying, scheduler_interval="step")


def stalling(seed: int, optimizer: Any = adam) -> Task:
    return task(optimizer, model=partial(Stalling, seed), scheduler=decaying, scheduler_interval="step")


@pytest.mark.parametrize(
    ("size", "servers", "clip_norm"),
    spread(
        [(2, 2, None), (2, 2, 0.05), (3, 2, 0.05), (3, 2, None), (3, 3, None), (3, 3, 0.05)], ALWAYS, NIGHTLY
    ),
)
def test_without_staleness_several_servers_are_data_parallelism(
    ranks: Any, size: int, servers: int, clip_norm: float | None
) -> None:
    strategy = Asynchronous(staleness=0, sync_every=4, servers=servers)
    synchronous = on(ranks, size, synchronized, strategy="ddp", clip_norm=clip_norm)
    found = on(ranks, size, synchronized, strategy=strategy, clip_norm=clip_norm)
    assert worst(synchronous[0], found[0]) < ROUNDING
    assert found[3][-1] == pytest.approx(0.02 * 0.95**22)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (Asynchronous(sync_every=4, staleness=3, servers=2), adam),
        (Asynchronous(sync_every=4, buffer=4, damping=0.5, delayed_nesterov=3, servers=3), MOMENTUM),
    ],
)
def test_a_repetition_with_one_server_has_the_same_bits(
    ranks: Any, strategy: Asynchronous, optimizer: Any
) -> None:
    oldest = 0
    for seed in range(2):
        build = partial(stalling, seed, optimizer)
        found = on(ranks, 3, build, strategy=strategy)
        again = repeated(found, 3, build, strategy=replace(strategy, servers=1))
        assert worst(found[0], again[0]) == 0
        oldest = max(oldest, *(age for merges in found[2] for age in ages(merges)))
    assert oldest > 0


def test_clipping_counts_the_gradients_of_all_servers(ranks: Any) -> None:
    strategy = Asynchronous(sync_every=4, staleness=3, servers=2)
    found = on(ranks, 3, partial(stalling, 1), strategy=strategy, clip_norm=0.05)
    again = repeated(found, 3, partial(stalling, 1), strategy=replace(strategy, servers=1), clip_norm=0.05)
    assert worst(found[0], again[0]) < 1e-7


def test_other_numbers_of_servers_go_on_from_a_checkpoint(ranks: Any) -> None:
    def settings(servers: int) -> dict[str, Any]:
        return {"strategy": Asynchronous(staleness=0, sync_every=4, servers=servers), "epochs": 2}

    whole = on(ranks, 2, synchronized, strategy="ddp")[0]
    places = [(3, settings(3)), (2, settings(1)), (2, settings(2))]
    states = handed_on(ranks, synchronized, places, [8, 12, 24])
    for state in states:
        assert worst({name: state["model"][name] for name in whole}, whole) < ROUNDING


def devices_of_threads(servers: int) -> list[tuple[bool, torch.device]]:
    """The devices that threads make their own, and whether it is the main thread's."""
    taken, main = list[tuple[bool, torch.device]](), threading.current_thread()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            accelerators,
            "set_current",
            lambda device: taken.append((threading.current_thread() is main, device)),
        )
        strategy = Asynchronous(staleness=0, sync_every=4, servers=servers)
        trained(synchronized, {"strategy": strategy, "epochs": None, "steps": 1})
    return taken


@pytest.mark.parametrize(("servers", "of_ranks"), [(1, [1, 0]), (2, [1, 1])])
def test_threads_of_servers_have_the_device_of_their_rank(
    ranks: Any, servers: int, of_ranks: list[int]
) -> None:
    """They update weights there, and a thread begins with the first device of the process."""
    found = ranks(2).run(devices_of_threads, servers)
    assert found == [[(False, torch.device("cpu"))] * number for number in of_ranks]


def threads_that_pause() -> tuple[bool, bool]:
    """Whether the main thread pauses the clock of its work, and whether another thread does."""
    pausing, main = set[bool](), threading.current_thread()
    pause = HostStopwatch.pause

    def paused(watch: HostStopwatch) -> None:
        pausing.add(threading.current_thread() is main)
        pause(watch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostStopwatch, "pause", paused)
        strategy = Asynchronous(staleness=0, sync_every=4, servers=2)
        trained(synchronized, {"strategy": strategy, "epochs": 1, "clip_norm": 0.05})
    return True in pausing, False in pausing


def test_waits_of_a_server_are_none_of_its_rank_s_worker(ranks: Any) -> None:
    assert ranks(2).run(threads_that_pause) == [(True, False)] * 2


class Failing(torch.optim.SGD):
    """Fails in its third step on the rank that holds the last layer alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 3 and torch.distributed.get_rank() == 1 and held:
            raise ValueError("no third step")
        super().step()


def error_of(build: Any, strategy: Asynchronous) -> str:
    try:
        trained(build, {"strategy": strategy, "timeout_seconds": 20.0})
    except (EvenerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing() -> Task:
    return task(partial(Failing, lr=0.1))


@pytest.mark.slow
def test_an_error_on_another_server_ends_the_run() -> None:
    strategy = Asynchronous(sync_every=12, servers=2)
    with pytest.raises(RankError, match="rank 1 raised ValueError: no third step"):
        call(
            fit, failing, strategy=strategy, processes=3, device="cpu", dtype="float64", epochs=1, show=False
        )


class Bad(Words):
    """Has a loss that is not a number on rank 2."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words) * (float("nan") if torch.distributed.get_rank() == 2 else 1.0)


def test_a_gradient_that_is_not_a_number_is_named_with_several_servers(ranks: Any) -> None:
    build = partial(task, model=partial(Bad, False))
    for said in ranks(3).run(error_of, build, Asynchronous(sync_every=12, servers=2)):
        assert said.startswith("DivergenceError")
        assert "rank 2" in said


@pytest.mark.parametrize(
    ("build", "servers", "words"),
    [
        (plain, 3, "servers is 3, and there are 2 ranks"),
        (everything, 2, "does not go with a penalty"),
        (partial(task, model=partial(torch.nn.Linear, 6, 4, bias=False)), 2, "the model has 1 parameters"),
    ],
)
def test_servers_that_cannot_be_are_refused(ranks: Any, build: Any, servers: int, words: str) -> None:
    assert all(words in said for said in ranks(2).run(error_of, build, Asynchronous(servers=servers)))


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="servers is 0"):
        Asynchronous(servers=0)


def words_of(strategy: Asynchronous) -> str:
    with Engine(synchronized(), RunConfig(device="cpu", strategy=strategy)) as engine:
        return engine.learner.synchronizer.words


def test_the_header_says_where_the_servers_are(ranks: Any) -> None:
    said = ranks(2).run(words_of, Asynchronous(servers=2))[0]
    assert said.startswith("parameter servers on ranks 0 to 1, those of 12 samples")
