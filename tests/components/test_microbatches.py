"""Micro-batches in pieces, trees in parcels, and letters in the order in which they come."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

from evener.components.microbatches import joined, pieces_of
from evener.components.tree_spec import holes_in, put_together, signature, taken_apart
from evener.data.batch import MicroBatch
from evener.strategies.pipeline.p2p import Inbox


def micro(samples: int, weight: int = 1, **more: object) -> MicroBatch:
    inputs = {"x": torch.arange(2.0 * samples).view(samples, 2), "how": "well", "none": None, **more}
    return MicroBatch(inputs, torch.arange(samples), torch.arange(samples) + 100, weight)


def test_pieces_are_of_nearly_equal_size_and_together_all() -> None:
    found = pieces_of(micro(7), 3)
    assert [len(piece.samples) for piece in found] == [2, 2, 3]
    assert torch.cat([piece.samples for piece in found]).tolist() == list(range(100, 107))
    assert joined([piece.inputs for piece in found])["x"].tolist() == micro(7).inputs["x"].tolist()
    assert all(piece.inputs["how"] == "well" and piece.inputs["none"] is None for piece in found)


def test_what_cannot_be_cut_stays_one() -> None:
    assert len(pieces_of(micro(2), 5)) == 2
    for whole in (micro(1, weight=0), micro(6, edges=torch.zeros(2, 9)), micro(6, graph=object())):
        assert pieces_of(whole, 3) == [whole]


@pytest.mark.parametrize("own", [["a", "b", "c"], (1, 2, 3, 4, 5, 6), [[0, 1], [2]], {"deep": [0.5] * 6}])
def test_plain_values_of_samples_stay_with_all_their_rows(own: object) -> None:
    """Nobody knows which names or lengths belong to the rows of a piece."""
    whole = micro(6, own=own)
    assert pieces_of(whole, 3) == [whole]


def test_plain_values_of_the_batch_go_with_each_piece() -> None:
    found = pieces_of(micro(6, size=(224, 224), cache=[None] * 6, pair=(torch.zeros(6), 0.5)), 3)
    assert [piece.inputs["size"] for piece in found] == [(224, 224)] * 3


def test_a_parcel_is_its_form_and_its_tensors() -> None:
    tree = (torch.ones(2, 3), {"sizes": torch.Size([4]), "deep": [torch.zeros(1, dtype=torch.int64), None]})
    form, tensors = taken_apart(tree)
    form = pickle.loads(pickle.dumps(form))
    assert [(hole.shape, hole.dtype) for hole in holes_in(form)] == [
        ((2, 3), torch.float32),
        ((1,), torch.int64),
    ]
    again = put_together(form, tensors)
    assert again[0] is tree[0]
    assert again[1]["deep"][0] is tree[1]["deep"][0]
    assert again[1]["sizes"] == (4,)
    assert taken_apart(tree)[0] == form != taken_apart((torch.ones(2, 4), tree[1]))[0]
    assert taken_apart((torch.ones(2, 3).requires_grad_(), tree[1]))[0] != form


def test_signatures_are_of_shapes_and_not_of_numbers() -> None:
    def told(rows: int, *more: object) -> str | None:
        return signature((torch.randn(rows, 2), None, 3, *more))

    assert told(3) == told(3)
    assert len({told(3), told(4), told(3, 4), told(3, torch.ones(2))}) == 4
    assert told(3, "words") is told(3, object()) is None


@pytest.mark.parametrize("ahead", [True, False])
def test_what_comes_too_early_is_kept(ahead: bool) -> None:
    begun, come = list[str](), list[str]()

    def begin(key: str) -> Callable[[], str]:
        begun.append(key)

        def wait() -> str:
            come.append(key)
            return key.upper()

        return wait

    inbox = Inbox(["a", "b", "c", "d"], begin, ahead)
    assert begun == ["a"] * ahead
    assert inbox.receive("b") == "B"
    assert come == ["a", "b"]
    assert begun == ["a", "b"] + ["c"] * ahead
    assert [inbox.receive(key) for key in "cad"] == ["C", "A", "D"]
    assert begun == come == ["a", "b", "c", "d"]
