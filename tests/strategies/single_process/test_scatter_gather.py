from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from evener.data.batch import MicroBatch
from evener.errors import TaskError
from evener.strategies.single_process.scatter_gather import (
    UnjoinableError,
    cut,
    different,
    is_ambiguous,
    join,
)

CPU = torch.device("cpu")


@dataclass
class Named:
    rows: Tensor
    mask: None = None


def rows(n: int = 5, *shape: int) -> Tensor:
    return torch.arange(n * max(1, *shape, 1)).view(n, *shape)


def micro(inputs: Any, targets: Any = None, n: int = 5) -> MicroBatch:
    return MicroBatch(inputs, rows(n) if targets is None else targets, torch.arange(10, 10 + n))


def test_parts_are_rows_of_every_tensor() -> None:
    whole = micro({"a": rows(5, 2), "b": (Named(rows()), [rows(), None]), "flag": True, "kind": "x"})
    first, second = cut(whole, [2, 3])
    assert first.samples.tolist() == [10, 11]
    assert second.samples.tolist() == [12, 13, 14]
    assert torch.equal(second.inputs["a"], rows(5, 2)[2:])
    assert torch.equal(second.inputs["b"][0].rows, rows()[2:])
    assert torch.equal(first.inputs["b"][1][0], rows()[:2])
    assert first.inputs["b"][1][1] is None
    assert (first.inputs["flag"], first.inputs["kind"]) == (True, "x")
    assert torch.equal(first.targets, rows()[:2])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.zeros(()), r"inputs is a tensor of shape \(\)"),
        ((rows(), torch.zeros(4, 5)), r"inputs\[1\] is a tensor of shape \(4, 5\)"),
        ({"x": rows(), "n": 7}, r"inputs\['n'\] is of type int"),
        ({"x": Named(torch.zeros(2))}, r"inputs\['x'\].rows is a tensor of shape \(2,\)"),
        ((rows(), ["a"] * 5), r"inputs\[1\] is a list without tensors"),
        ((rows(), [0] * 5), r"inputs\[1\] is a list without tensors"),
        (torch.eye(5).to_sparse(), r"inputs is a sparse tensor"),
        (pack_sequence([torch.zeros(2), torch.zeros(1)]), "inputs is a PackedSequence"),
    ],
)
def test_what_has_no_rows_is_refused_by_its_name(inputs: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        cut(micro(inputs), [2, 3])
    with pytest.raises(TaskError, match=words.replace("inputs", "targets", 1)):
        cut(micro(rows(), inputs), [2, 3])


def test_a_sequence_as_long_as_the_batch_is_ambiguous() -> None:
    assert is_ambiguous(micro([rows(2), rows(2)], n=2, targets=rows(2))) is True
    assert is_ambiguous(micro([rows(3), rows(3)], n=3, targets=rows(3))) is False
    assert is_ambiguous(micro({"x": Named([rows(1)])}, n=1, targets=rows(1))) is True
    assert is_ambiguous(micro(rows(2), rows(2), n=2)) is False


def test_outputs_are_joined_row_by_row() -> None:
    parts = [{"y": rows(n, 2), "more": (Named(rows(n)), None)} for n in (3, 1)]
    joined = join(parts, [3, 1], CPU)
    assert torch.equal(joined["y"], torch.cat([rows(3, 2), rows(1, 2)]))
    assert torch.equal(joined["more"][0].rows, torch.cat([rows(3), rows(1)]))
    assert joined["more"][1] is None


@pytest.mark.parametrize(
    "parts",
    [
        [torch.zeros(4, 3), torch.zeros(4, 3)],
        [torch.zeros(()), torch.zeros(())],
        [[torch.zeros(3)], [torch.zeros(1)] * 2],
        [(torch.zeros(3), 1.5), (torch.zeros(1), 1.5)],
    ],
)
def test_other_outputs_are_not(parts: Any) -> None:
    with pytest.raises(UnjoinableError):
        join(parts, [3, 1], CPU)


def test_parts_that_tell_rows_from_other_dimensions_differ() -> None:
    assert [different(n, 3) for n in (3, 4, 9)] == [[2, 1, 0], [3, 1, 0], [5, 4, 0]]
    with pytest.raises(UnjoinableError):
        different(2, 2)
