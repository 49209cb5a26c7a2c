"""What ranks that stay give to one that is new; ranks that die while others stay are in tests/faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from evener.errors import RankError
from evener.training.engine import Engine
from evener.training.lifecycle.handover import CarriedState, RankReplacement, made_anew
from tests import tasks


def inherit(directory: str, steps: list[int]) -> tuple[bool, int, bool, str]:
    """Each rank was to have taken so many steps, and -1 is new; the others' weights are as many."""
    with Engine(tasks.plain(), device="cpu", steps=9) as engine:
        mine = steps[engine.session.rank]
        state = engine.state.local_state()
        state["progress"]["steps"] = mine
        for tensor in state["model"].values():
            tensor.fill_(mine)
        heir = CarriedState(mine, state if mine >= 0 else None)
        found, words = RankReplacement(engine, Path(directory)).inherit(heir)
        equal = all(bool((p == max(steps)).all()) for p in engine.model.parameters())
        return equal, engine.steps_done, heir.state is found.state is None, words


@pytest.mark.parametrize("steps", [[4, -1], [-1, 3], [4, 5], [5, 4]], ids=str)
def test_the_most_advanced_gives_its_state_to_all(ranks: Any, tmp_path: Path, steps: list[int]) -> None:
    source = steps.index(max(steps))
    for equal, done, is_freed, words in ranks(2).run(inherit, str(tmp_path), steps):
        assert equal
        assert done == max(steps)
        assert is_freed, "it is as large as model and optimizer"
        assert words.startswith(f"goes on after step {max(steps)} with what rank {source} had in memory; ")
        assert words.endswith("the random generators of rank [0, 1] begin anew"), "none were kept"


def refused(directory: str) -> str:
    with pytest.raises(RankError) as caught:
        inherit(directory, [-1, -1])
    return str(caught.value)


def test_without_any_state_all_have_to_start_again(ranks: Any, tmp_path: Path) -> None:
    assert set(ranks(2).run(refused, str(tmp_path))) == {
        "no rank that stayed was between two updates: all have to start again"
    }


def test_a_module_that_was_given_up_is_not_taken_for_a_new_one() -> None:
    model = nn.Linear(2, 2)
    assert made_anew(lambda: model) is model
    vars(model.weight)["evener_given_up"] = True
    with pytest.raises(RankError, match="Make the module in the function"):
        made_anew(lambda: model)
