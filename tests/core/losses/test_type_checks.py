from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.core.losses import exact
from evener.errors import DataError, LossError

SCORES, TARGETS = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])


@dataclass
class WithLogits:
    loss: Tensor | None
    logits: Tensor


class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face's: a mapping whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Inception(NamedTuple):
    aux_logits: Tensor
    logits: Tensor


OUTPUTS: dict[str, tuple[Any, str, str]] = {
    "tuple": ((SCORES, (SCORES, SCORES)), "[0]", "a tuple of 2 (Tensor, tuple)"),
    "tuple, later": ((None, SCORES), "[1]", "a tuple of 2 (NoneType, Tensor)"),
    "list": ([SCORES], "[0]", "a list of 1 (Tensor)"),
    "named tuple": (Inception(SCORES, SCORES), ".logits", "an Inception with aux_logits, logits"),
    "dataclass": (WithLogits(None, SCORES), ".logits", "a WithLogits with loss, logits"),
    "model output": (
        ModelOutput(loss=SCORES.sum(), logits=SCORES),
        ".logits",
        "a ModelOutput with loss, logits",
    ),
    "dict": ({"aux": SCORES, "out": SCORES}, "['out']", "a dict with aux, out"),
    "dict of others": ({"loss": SCORES, "boxes": SCORES}, "['boxes']", "a dict with loss, boxes"),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize(
    "call", [exact(nn.CrossEntropyLoss()).total, evener.accuracy], ids=["loss", "metric"]
)
def test_outputs_that_are_no_tensor_get_the_line_that_chooses_one(name: str, call: Any) -> None:
    outputs, accessor, words = OUTPUTS[name]
    with pytest.raises(LossError, match=r"needs one tensor.*Say in the task") as caught:
        call(outputs, TARGETS)
    assert words in str(caught.value)
    line = str(caught.value).split("\n\n")[1].strip()
    assert line == f"forward=lambda model, inputs: evener.call_model(model, inputs){accessor}"
    chosen = eval(line.removeprefix("forward="), {"evener": evener})(
        lambda inputs: inputs, ModelOnly(outputs)
    )
    assert chosen is SCORES


class ModelOnly:
    """Inputs that the stand-in for a model gives back as they are."""

    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outputs, name)

    def __getitem__(self, key: Any) -> Any:
        return self.outputs[key]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (None, r"the model returned None; let its forward\(\) return"),
        (3, r"are an int\. Say in the task which tensor the loss is of, with what is the tensor in place of"),
        ((None, None), r"a tuple of 2 \(NoneType, NoneType\).*in place of"),
    ],
)
def test_outputs_without_a_tensor(outputs: Any, words: str) -> None:
    with pytest.raises(LossError, match=words):
        exact(nn.MSELoss()).total(outputs, SCORES)


@pytest.mark.parametrize("targets", [["cat", "dog"], ("cat",), "cat"])
def test_targets_that_are_strings(targets: Any) -> None:
    for call in (
        lambda: exact(nn.CrossEntropyLoss()).count(targets),
        lambda: evener.accuracy(SCORES, targets),
    ):
        with pytest.raises(
            DataError, match=r"the targets are strings, such as 'cat'.*classes\.index\(label\)"
        ):
            call()


@pytest.mark.parametrize("targets", [{"a": TARGETS}, [TARGETS, TARGETS], None, []])
def test_targets_that_are_no_tensor(targets: Any) -> None:
    with pytest.raises(LossError, match="needs targets that are one tensor, and they are a"):
        exact(nn.CrossEntropyLoss()).count(targets)
