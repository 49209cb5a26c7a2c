from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from evener.data.batch import Batch, MicroBatch, map_leaves
from tests.waiting_copies import CPU, DEVICE, CopiesToHost


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Record:
    values: Any
    name: str


class Graph:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: Any) -> Graph:
        return Graph(str(device))


def micro_batch(inputs: Any, weight: int = 1) -> MicroBatch:
    return MicroBatch(inputs, torch.zeros(3), torch.tensor([4, 0, 7]), weight)


def test_the_host_waits_for_a_batch_that_comes_to_it() -> None:
    there = micro_batch(torch.ones(3, device=DEVICE))
    with CopiesToHost() as copies:
        assert there.to(CPU, non_blocking=True).inputs.device == CPU
    assert copies.waits == [True]


def test_a_placeholder_counts_for_nothing() -> None:
    assert micro_batch(None).size == 3
    assert micro_batch(None, weight=0).size == 0


def test_every_kind_of_tree_moves_and_keeps_its_type() -> None:
    one = torch.ones(2)
    tree = {
        "a": (one, [one]),
        "b": Point(one, one),
        "c": Record([one], "n"),
        "d": None,
        "e": Graph(),
        "f": "text",
    }
    moved = micro_batch(tree).to("meta").inputs
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert isinstance(moved["b"], Point)
    assert moved["b"].y.is_meta
    assert moved["c"].values[0].is_meta
    assert moved["c"].name == "n"
    assert moved["d"] is None
    assert moved["e"].device == "meta"
    assert moved["f"] == "text"
    assert not one.is_meta


def test_other_mappings_keep_their_type() -> None:
    mapped = map_leaves(lambda leaf: leaf + 1, OrderedDict(a=1, b=(2,)))
    assert mapped == OrderedDict(a=2, b=(3,))
    assert type(mapped) is OrderedDict


def test_a_batch_moves_its_micro_batches_but_not_the_ids() -> None:
    batch = Batch(0, 0, 0, 6, (3, 3), [micro_batch(torch.ones(3)), micro_batch(torch.ones(3))], last=True)
    moved = batch.to("meta")
    assert all(part.inputs.is_meta and part.targets.is_meta for part in moved.micro_batches)
    assert not any(part.samples.is_meta for part in moved.micro_batches)
    assert moved.shares == (3, 3)
    assert moved.last


@pytest.mark.gpu
def test_a_batch_moves_to_the_gpu() -> None:
    assert micro_batch({"a": torch.ones(3)}).to("cuda").inputs["a"].is_cuda
