"""Parts of a checkpoint that are no tensors, of another form than Evener writes: they are named where they are read."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from evener import checkpoint
from evener.checkpoint.run_mark import MARK, identity_in
from evener.checkpoint.tensor_index import INDEX
from evener.errors import DataError
from tests.checkpoint.strangers import entered, summed

SAID: dict[str, Any] = {"options": [], "scheduler": {}, "losses": {}, "trained": {}}


@pytest.mark.parametrize(
    "rest",
    [
        [],
        {"format": checkpoint.FORMAT},
        {"format": "2"},
        {"format": 2, "ranks": 1, "progress": {}, "optimizer": {}, "model": {}, "data": {}, "settings": {}},
    ],
    ids=str,
)
def test_a_rest_of_another_form(place: Path, rest: Any) -> None:
    torch.save(rest, place / "rest.pt")
    summed(place)
    with pytest.raises(DataError, match=r"its rest.pt does not hold"):
        checkpoint.find(place)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("kept", wrong) for wrong in ("{", "[]", '{"best": 3}', 7, "[" * 100_000, '{"guard": {}}')),
        *(("kept", wrong) for wrong in ('{"best": {"metric": "loss", "lowest": true, "value": "low"}}',)),
        ("kept", '{"best": {"metric": "loss", "lowest": true, "value": 1.0, "steps": "4"}}'),
        *(("identity", wrong) for wrong in ({}, {"run": "a"}, {"run": "a", "history": [["b"]]}, "a")),
        *(
            ("identity", wrong)
            for wrong in ({"run": 3, "history": []}, {"run": "a", "history": [["b", inf]]})
        ),
        *(("said", wrong) for wrong in ("a", {}, {"scheduler": 3}, {"scheduler": {}})),
        *(
            ("said", {**SAID, **wrong})
            for wrong in ({"options": [3]}, {"losses": [3]}, {"trained": 3}, {"modules": 3})
        ),
        *(("scheduler", wrong) for wrong in ([3], {3: 4})),
        *((name, 3) for name in ("balancer", "loss_scale", "model", "settings", "data")),
        ("model", {3: 4}),
        ("ranks", -1),
    ],
    ids=str,
)
def test_a_part_of_another_form_is_named(place: Path, name: str, wrong: Any) -> None:
    rest = torch.load(place / "rest.pt", weights_only=True)
    torch.save({**rest, name: wrong}, place / "rest.pt")
    summed(place)
    with pytest.raises(DataError, match=rf"its rest.pt does not hold {name}"):
        checkpoint.find(place)


@pytest.mark.parametrize(
    "wrong",
    [
        {"class": None},
        {"groups": 3},
        {"groups": [3]},
        {"groups": [{}]},
        {"groups": [{"params": [3]}]},
        {"groups": [{3: 4, "params": []}]},
        {"state": {3: {}}},
        {"state": {"0.weight": 3}},
        {"state": {"none": {}}},
    ],
    ids=str,
)
def test_an_optimizer_of_another_form(place: Path, wrong: dict[str, Any]) -> None:
    rest = torch.load(place / "rest.pt", weights_only=True)
    torch.save({**rest, "optimizer": {**rest["optimizer"], **wrong}}, place / "rest.pt")
    summed(place)
    with pytest.raises(DataError, match=r"its rest.pt does not hold optimizer"):
        checkpoint.find(place)


@pytest.mark.parametrize(
    "wrong", [{"samples": "3"}, {"seed": None}, {"position": -1}, {"parts": 3}, {"steps": True}], ids=str
)
def test_a_progress_of_another_form(place: Path, wrong: dict[str, Any]) -> None:
    rest = torch.load(place / "rest.pt", weights_only=True)
    torch.save({**rest, "progress": {**rest["progress"], **wrong}}, place / "rest.pt")
    summed(place)
    with pytest.raises(DataError, match=r"its rest.pt does not hold progress"):
        checkpoint.find(place)


def test_a_weight_that_is_no_tensor(place: Path) -> None:
    rows = json.loads((place / INDEX).read_text())
    del rows["model/0.weight"]
    (place / INDEX).write_text(json.dumps(rows))
    rest = torch.load(place / "rest.pt", weights_only=True)
    torch.save({**rest, "model": {"0.weight": 3}}, place / "rest.pt")
    summed(place)
    with pytest.raises(DataError, match=r"it has no tensor for 0.weight"):
        entered("load", place)


def test_a_mark_with_a_step_that_is_none(place: Path) -> None:
    mark = json.loads((place / MARK).read_text())
    (place / MARK).write_text(json.dumps({**mark, "history": [["a", inf]]}))
    assert identity_in(place, 1) is None
