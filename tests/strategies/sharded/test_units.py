"""Which modules are units."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from evener.errors import ConfigurationError, TaskError
from evener.strategies.sharded.units import units_of


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


class Other(nn.Sequential):
    pass


def model(**parts: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, part in parts.items():
        made.add_module(name, part)
    return made


def tied() -> nn.Module:
    made = model(blocks=nn.ModuleList([block(), block(), block()]))
    made.blocks[2][0].weight = made.blocks[0][0].weight
    return made


once = block()


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (model(blocks=nn.ModuleList([block(), block()]), head=nn.Linear(2, 2)), ["blocks.0", "blocks.1"]),
        (nn.Sequential(block(), block()), ["0", "1"]),
        (model(blocks=nn.Sequential(block(), Other(nn.Linear(2, 2)), block())), ["blocks.0", "blocks.2"]),
        (model(heads=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])), []),
        (model(blocks=nn.ModuleList([block()])), []),
        (model(blocks=nn.ModuleList([once, once])), []),
        (nn.Sequential(nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh())), []),
        (
            nn.Sequential(nn.Sequential(block(), block()), nn.Sequential(block(), block())),
            ["0", "1"],
        ),
        (
            model(
                stages=nn.ModuleList([nn.ModuleList([block(), block()]), nn.ModuleList([block(), block()])])
            ),
            ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
        ),
        (tied(), ["blocks.1"]),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2),
            ["layers.0", "layers.1"],
        ),
    ],
    ids=[
        "blocks and a head",
        "the model itself",
        "another class between",
        "single layers",
        "only one",
        "one twice",
        "nothing to hold",
        "the outermost",
        "lists of lists",
        "tied",
        "transformer",
    ],
)
def test_repeated_blocks_are_units(made: nn.Module, expected: list[str]) -> None:
    assert list(units_of(made, None)) == expected


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        ("", []),
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ("head, blocks.1", ["blocks.1", "head"]),
        ("blocks.*.*", ["blocks.0.0", "blocks.1.0"]),
        ("blocks.0,blocks.0.0", ["blocks.0", "blocks.0.0"]),
        ("h*", ["head"]),
    ],
)
def test_named_modules_are_units(wrap: str, expected: list[str]) -> None:
    made = model(blocks=nn.ModuleList([block(), block()]), head=nn.Linear(2, 2))
    found = units_of(made, wrap)
    assert list(found) == expected
    assert all(module is made.get_submodule(name) for name, module in found.items())


@pytest.mark.parametrize(
    ("made", "wrap", "kind", "words"),
    [
        (
            model(head=nn.Linear(2, 2)),
            "blocks.*",
            ConfigurationError,
            r"called 'blocks\.\*'; Module has head",
        ),
        (
            model(head=nn.Linear(2, 2), act=nn.Tanh()),
            "head,act",
            ConfigurationError,
            "called 'act'; Module has head",
        ),
        (tied(), "blocks.0", TaskError, "its weight blocks.2.0.weight is used outside of it too"),
    ],
)
def test_what_cannot_be_a_unit_is_refused(made: Any, wrap: str, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        units_of(made, wrap)
