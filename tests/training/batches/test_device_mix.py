"""How a batch is divided where the settings leave it open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.core.records import Note
from evener.tools.estimate import estimate_memory
from evener.training.batches import device_mix as unlike
from evener.training.batches.device_mix import difference
from evener.training.engine import Engine
from evener.training.factory import balance_of
from evener.training.fit import check_plan
from tests import tasks


@pytest.mark.parametrize(
    ("settings", "parts", "differ", "expected"),
    [
        ({}, 2, True, "auto"),
        ({}, 2, False, "equal"),
        ({}, 1, True, "equal"),
        ({"balance": "equal"}, 2, True, "equal"),
        ({"balance": "3,1"}, 2, True, "3,1"),
        ({"balance": "auto"}, 2, False, "auto"),
        ({"batch_norm": "local"}, 2, True, "equal"),
        ({"compile": "whole", "compile_mode": "reduce-overhead"}, 2, True, "equal"),
        ({"compile": "whole"}, 2, True, "auto"),
    ],
    ids=str,
)
def test_only_what_is_left_open_depends_on_the_devices(
    settings: dict[str, Any], parts: int, differ: bool, expected: str
) -> None:
    assert balance_of(RunConfig(**settings), parts, differ) == expected


@pytest.mark.parametrize(
    ("kinds", "settings", "words"),
    [
        (["A", "A"], {}, ""),
        (["A", "B", "A"], {}, "the ranks' devices are not alike (A, B)"),
        (["A", "A"], {"throttle": "1,0.5"}, "the ranks are emulated to be unequal"),
        (["A", "A"], {"throttle_at": ("9:1:0.5",)}, "the ranks are emulated to be unequal"),
        (["A", "A"], {"throttle": "0.5,0.5"}, ""),
        (["A", "A"], {"throttle": "1, 1.0"}, ""),
    ],
    ids=str,
)
def test_what_makes_ranks_unequal_is_said(kinds: list[str], settings: dict[str, Any], words: str) -> None:
    assert difference(kinds, RunConfig(**settings)) == words


def test_a_cpu_is_known_by_its_name_and_the_threads_that_it_gives_a_rank() -> None:
    assert unlike.kind_of(torch.device("cpu")).startswith(f"{torch.get_num_threads()} x ")


class Notes(Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def event(self, record: Any) -> None:
        if isinstance(record, Note):
            self.heard.append(record.words)


@contextmanager
def on_devices(names: str, wants_bits: bool) -> Iterator[None]:
    """Each rank has the device of one letter; the last one may ask for deterministic algorithms."""
    with pytest.MonkeyPatch.context() as patched:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        patched.setattr(unlike, "kind_of", lambda device: names[rank])
        torch.use_deterministic_algorithms(wants_bits and rank == len(names) - 1)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def divided(
    names: str, wants_bits: bool = False, task: str = "plain", state: Any = None, **settings: Any
) -> tuple[str, list[str], Any]:
    """Who divided two steps, what was said of it, and the state afterwards."""
    notes = Notes()
    with (
        on_devices(names, wants_bits),
        Engine(getattr(tasks, task)(), device="cpu", steps=99, observers=[notes], **settings) as engine,
    ):
        if state is not None:
            engine.load_state_dict(state)
        begun = engine.steps_done
        for batch in engine.batches():
            engine.step(batch)
            if engine.steps_done == begun + 2:
                break
        engine.evaluate()
        return type(engine.balancer).__name__, notes.heard, engine.state_dict()


@pytest.mark.parametrize(
    ("names", "settings", "expected"),
    [
        ("AB", {}, "BySpeed"),
        ("AA", {}, "Equal"),
        ("AA", {"throttle": "1,0.5"}, "BySpeed"),
        ("AB", {"balance": "equal"}, "Equal"),
        ("AB", {"wants_bits": True}, "Equal"),
        ("AB", {"strategy": "tensor", "task": "plain"}, "Equal"),
        ("AB", {"task": "stream"}, "BySpeed"),
        ("AB", {"task": "stream_of_parts"}, "Equal"),
    ],
    ids=str,
)
def test_unlike_devices_divide_by_speed_without_being_told(
    ranks: Any, names: str, settings: dict[str, Any], expected: str
) -> None:
    found = ranks(2).run(divided, names, **settings)
    assert [balancer for balancer, *_ in found] == [expected] * 2
    words = [note for note in found[0][1] if "balance equal" in note]
    assert len(words) == (expected == "BySpeed"), found[0][1]


def test_a_run_goes_on_over_other_devices_than_it_began_on(ranks: Any) -> None:
    (_, _, alike), _ = ranks(2).run(divided, "AA")
    (balancer, _, learned), _ = ranks(2).run(divided, "AB", state=alike)
    assert balancer == "BySpeed"
    assert {found[0] for found in ranks(2).run(divided, "AA", state=learned)} == {"Equal"}


def test_weights_for_parts_of_the_model_need_not_be_said() -> None:
    assert check_plan(RunConfig(strategy="tensor", processes=2, device="cpu")) == 2


def test_an_estimate_says_that_shares_will_not_stay_equal() -> None:
    def notes(**settings: Any) -> str:
        return " ".join(estimate_memory(tasks.plain, processes=2, device="cpu", **settings).notes)

    assert "balance auto moves samples" in notes(throttle="1,0.5")
    assert "balance auto" not in notes()
    assert "balance auto" not in notes(throttle="1,0.5", balance="equal")
