"""What of a batch is cut along its sequences, and what a trial of the model leaves as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.model_trial import undisturbed
from evener.data.batch import MicroBatch
from evener.errors import TaskError
from evener.strategies.context.cutting import Cutting
from tests.comparing import worst


def test_the_trial_leaves_all_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[2].eval()
    nn.init.zeros_(model[0].bias)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with undisturbed(model):
        assert not model[1].training
        assert model[0].bias.detach().abs().min() > 0, "what is zero hides what it multiplies"
        model[1].running_mean.add_(1)
        model[1].num_batches_tracked = torch.tensor(7)
    assert [module.training for module in model] == [True, True, False]
    assert worst(before, model.state_dict()) == 0


@dataclass
class Item:
    words: Tensor
    weight: Tensor


def test_tensors_are_named_by_their_place() -> None:
    words, weight = torch.arange(12).view(2, 6), torch.ones(2)
    micro = MicroBatch({"a": words, "b": [Item(words, weight), "x"]}, words, torch.arange(2))
    cutting = Cutting(1, None)
    assert cutting.length(micro) == 6
    cut = cutting.part(micro.inputs, "inputs", lambda leaf: leaf[:, :2])
    assert (cut["a"].shape, cut["b"][0].words.shape, cut["b"][0].weight.shape) == ((2, 2), (2, 2), (2,))
    only = Cutting(1, frozenset({"inputs.b.0.words", "targets"}))
    cut = only.part(micro.inputs, "inputs", lambda leaf: leaf[:, :2])
    assert (cut["a"].shape, cut["b"][0].words.shape) == ((2, 6), (2, 2))


def test_pieces_lie_as_the_whole_does() -> None:
    """nanoGPT and T5 ask for ``targets.view(-1)``."""
    words = torch.arange(12).view(2, 6)
    piece = Cutting(1, None).part(words, "inputs", lambda leaf: leaf[:, 2:4])
    assert piece.view(-1).tolist() == [2, 3, 8, 9]


def test_an_object_with_tensors_inside_is_refused() -> None:
    class Sparse(dict[str, Tensor]):
        def to(self, device: Any) -> Any:
            return self

    with pytest.raises(TaskError, match="cannot cut inputs, which is of type Sparse"):
        Cutting(1, None).length(MicroBatch(Sparse(), torch.ones(1, 2), torch.arange(1)))
