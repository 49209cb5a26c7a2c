"""Which runs may use CUDA graphs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from evener.components.cuda_graphs.permission import RunFacts, reason_against

FINE = RunFacts("cuda", True, "ddp", True, False, False, False, False, "", False, "", "", "", "")
AGAINST: dict[str, tuple[Any, str]] = {
    "records": (False, "a device of type cuda has none"),
    "divides_batches_only": (False, "strategy 'ddp'"),
    "several_passes": (True, "micro_batch=auto and memory_limit"),
    "updates_in_backward": (True, "update_in_backward"),
    "bits": (True, "exact=bits"),
    "recompute": (True, "recompute"),
    "offload": ("optimizer", "offload optimizer"),
    "compiles": (True, "compile_mode=reduce-overhead"),
    "communicates": ("0.norm", "layer 0.norm communicates"),
    "of_samples": ("0.drop", "layer 0.drop draws"),
    "hooked": ("0.fc", "layer 0.fc has hooks"),
    "sparse": ("0.words", "0.words are sparse"),
}


def test_an_ordinary_run_may() -> None:
    assert reason_against(FINE) == ""


@pytest.mark.parametrize("name", AGAINST)
def test_what_is_against_it_is_named(name: str) -> None:
    value, words = AGAINST[name]
    assert words in reason_against(replace(FINE, **{name: value}))


def test_every_fact_decides() -> None:
    assert {field.name for field in fields(RunFacts)} == AGAINST.keys() | {"device", "strategy"}
