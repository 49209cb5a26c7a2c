from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from evener.collectives.tuning.measure import measure_links
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.distributed.session import Session
from evener.errors import ConfigurationError, InterruptedRunError, RankError
from evener.hardware.diagnosis.findings import Finding
from evener.hardware.survey.facts import Speed, Survey
from evener.training import survey as surveying
from evener.training.engine import Engine
from evener.training.fit import fit
from evener.training.survey import (
    cores_of,
    head_line,
    pairs_of,
    survey_devices,
    with_links,
    with_speeds,
    worst_of_hosts,
)
from tests import tasks
from tests.hardware.survey.fake_nvml import FakeCard, FakeNvml
from tests.hardware.survey.machines import card, host, on_cpu, survey


def test_of_few_ranks_all_pairs_are_measured_and_of_many_the_neighbours() -> None:
    assert pairs_of(1) == []
    assert pairs_of(3) == [(0, 1), (0, 2), (1, 2)]
    assert len(pairs_of(8)) == 28
    assert pairs_of(64)[-1] == (63, 0)
    assert len(pairs_of(64)) == 64


def linked() -> list[tuple[float, float]]:
    assert dist.group.WORLD is not None
    found = measure_links([(0, 1), (2, 1), (0, 2)], dist.group.WORLD)
    return [(link.alpha_seconds, link.beta_seconds_per_byte) for link in found]


def test_links_between_ranks_are_the_same_on_all(ranks: Any) -> None:
    first, *others = ranks(3).run(linked)
    assert len(first) == 3
    assert all(0 <= alpha < 1 and 0 <= beta < 1e-5 for alpha, beta in first)
    assert others == [first, first]


def test_ranks_that_fail_are_a_part_of_the_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise RankError("rank 1 died\nwith a traceback")

    monkeypatch.setattr(surveying, "launch", launch)
    assert with_links(on_cpu(), 60).links_error == "RankError: rank 1 died"

    def interrupted(*_: object, **__: object) -> None:
        raise InterruptedRunError("interrupted", 2)

    monkeypatch.setattr(surveying, "launch", interrupted)
    with pytest.raises(InterruptedRunError):
        with_links(on_cpu(), 60)


def test_a_card_is_asked_right_after_its_measurement_why_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is hot while it works, and cools down before the next question."""
    fakes, measured = [FakeCard(uuid="GPU-uuid-0"), FakeCard(uuid="GPU-uuid-1")], []

    def measure(device: Any) -> Speed:
        measured.append(str(device))
        fakes[1].reasons = 0x40 if str(device) == "cuda:1" else 0
        return Speed(str(device))

    monkeypatch.setattr(surveying, "measure", measure)
    monkeypatch.setattr(surveying, "find_nvml", lambda: FakeNvml(fakes))
    machine = survey(card(0), card(1), card(2, device=None, uuid="other"), ranks=2)
    found = with_speeds(machine)
    assert measured == ["cpu", "cuda:0", "cuda:1"]
    assert [each.brakes for each in found.cards] == [(), ("heat",), ()]
    assert [each.device for each in found.speeds] == measured


def test_what_cannot_be_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="asked for 0 processes"):
        survey_devices(0, "cpu")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="run it by itself on each machine"):
        survey_devices(2, "cpu")


def test_the_threads_of_a_rank_are_those_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("evener.distributed.session.usable_cores", lambda: 8)
    assert survey_devices(3, "cpu", measured=False).plan.threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(surveying.torch, "get_num_threads", lambda: 5)
    assert survey_devices(3, "cpu", measured=False).plan.threads == 5


# At the head of a run

SLOW = Finding("slow", "threads-oversubscribed", "8 ranks", "unset OMP_NUM_THREADS")
WRONG = Finding("wrong", "driver-too-old", "driver 5", "update it")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([("a", None), ("b", None)], ""),
        ([("a", None), ("b", SLOW)], "host b: slow: 8 ranks; unset"),
        ([("a", SLOW), ("b", WRONG), ("b", None)], "host b: wrong: driver 5; update"),
        ([("a", SLOW), ("b", SLOW), ("c", SLOW)], "host a and 2 more: slow: 8 ranks; unset"),
    ],
)
def test_of_several_hosts_the_worst_is_told(found: list[Any], words: str) -> None:
    told = worst_of_hosts(found)
    assert told.startswith(words)
    assert bool(told) == bool(words)


def test_ranks_with_cores_of_their_own_do_not_share_them() -> None:
    allowed = [("a", frozenset({0, 1})), ("b", frozenset({0})), ("a", frozenset({2, 3}))]
    assert cores_of("a", allowed) == {0, 1, 2, 3}
    assert cores_of("b", allowed) == {0}
    assert cores_of("a", [("a", frozenset({0, 1}))] * 8) == {0, 1}


def bound(threads: int) -> str:
    """The line that a rank has where each is bound to a core of its own, of 64."""
    with Session(device="cpu") as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(surveying, "cores_allowed", lambda: frozenset({2 * session.rank, 2 * session.rank + 1}))
        patch.setattr(surveying, "glance", lambda plan, *_, **__: replace(on_cpu(), plan=plan))
        patch.setattr(surveying.torch, "get_num_threads", lambda: threads)
        return head_line(session, RunConfig())


def test_all_cores_of_the_ranks_of_a_host_count(ranks: Any) -> None:
    assert ranks(3).run(bound, 2) == ["", "", ""]
    first, *others = ranks(3).run(bound, 3)
    assert first.startswith("slow: 3 ranks of 3 threads on 6 usable cores")
    assert others == ["", ""]


class Heard(Observer):
    def __init__(self) -> None:
        self.words: list[str] = []

    def event(self, record: Any) -> None:
        self.words.append(record.words)


def run(monkeypatch: pytest.MonkeyPatch, machine: Any, **settings: Any) -> list[str]:
    heard = Heard()
    if machine is not None:
        monkeypatch.setattr(surveying, "glance", machine)
    usual = {"processes": 1, "device": "cpu", "steps": 1}
    fit(tasks.plain, show=False, observers=[heard], **(usual | settings))
    return heard.words


def test_a_run_is_told_the_worst_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def glance(plan: Any, *_: object, **options: Any) -> Survey:
        plans.append((plan, options))
        return replace(
            on_cpu(), plan=plan, host=host(cores=64, allowed_cores=64, cpu_quota=0.5, shm_nbytes=1 << 26)
        )

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("evener.distributed.session.usable_cores", lambda: 4)
    (words,) = run(monkeypatch, glance, device="cpu", balance="1")
    assert words.startswith("slow: 1 rank of 4 threads on 1 usable core; unset OMP_NUM_THREADS")
    ((plan, options),) = plans
    assert (plan.ranks, plan.threads, plan.device, plan.workers, plan.balanced) == (1, 4, "cpu", 0, True)
    assert options == {"accelerators": False}


def balanced(strategy: str, balance: str | None) -> bool:
    """Whether the line at the head of a run takes unlike cards to have shares by speed."""
    plans = []

    def glance(plan: Any, *_: object, **__: object) -> Survey:
        plans.append(plan)
        return on_cpu()

    config = RunConfig(device="cpu", strategy=strategy, balance=balance)
    with Engine(tasks.plain(), config) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(surveying, "glance", glance)
        head_line(engine.session, config)
    return all(plan.balanced for plan in plans)


def test_unlike_cards_are_found_only_where_they_would_have_equal_work(ranks: Any) -> None:
    cases = [("ddp", None), ("ddp", "auto"), ("ddp", "equal"), ("tensor", None)]
    found = [ranks(2).run(balanced, strategy, balance)[0] for strategy, balance in cases]
    assert found == [True, True, False, False]


def test_a_run_on_an_ordinary_machine_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, lambda plan, *_, **__: replace(on_cpu(), plan=plan)) == []


def test_a_machine_that_cannot_be_surveyed_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def glance(*_: object, **__: object) -> Survey:
        raise RuntimeError("CUDA error: unknown\nsecond line")

    (words,) = run(monkeypatch, glance)
    assert words.startswith("note: this machine could not be surveyed: RuntimeError: CUDA error: unknown; ")


def headed(hosts: tuple[str, ...], slow: int) -> str:
    """The line that a rank has of hosts with one rank each, of which one is slow."""
    with Session(device="cpu") as session, pytest.MonkeyPatch.context() as patch:
        place = replace(session.environment, host=hosts[session.rank], local_rank=0, local_world_size=1)
        patch.setattr(session, "environment", place)
        patch.setattr(surveying, "_glanced", lambda *_: SLOW if session.rank == slow else None)
        return head_line(session, RunConfig())


def test_every_host_looks_at_itself(ranks: Any) -> None:
    told = ranks(3).run(headed, ("a", "b", "c"), 2)
    assert told == [f"host c: {SLOW.message}"] * 3
