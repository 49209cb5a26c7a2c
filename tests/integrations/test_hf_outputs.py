"""Models that take and return dictionaries, on texts of different lengths, by uneven shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evener
from evener.errors import LossError
from evener.integrations.hf_outputs import logits, token_loss

WORDS = 20


class Model(nn.Module):
    """Tied weights, padding that does not count, and a loss of its own where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Any]:
        embedded = self.embedding(input_ids) * attention_mask[..., None]
        scores = self.head(torch.tanh(self.hidden(embedded.cumsum(1))))
        if labels is None:
            return {"logits": scores}
        return {
            "logits": scores,
            "loss": F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
        }


def texts(number: int = 23) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(number):
        words = torch.randint(1, WORDS, (2 + index % 6,), generator=generator)
        hidden = torch.rand(len(words), generator=generator) < 0.5
        found.append({"input_ids": words, "labels": words.masked_fill(hidden, -100)})
    return found


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def pad(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([item[name] for item in items], True, value)

    words = pad("input_ids", 0)
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": pad("labels", -100)}


def task(causal: bool) -> evener.Task:
    return evener.Task(
        model=Model,
        forward=logits,
        loss=token_loss(causal=causal),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        train=texts(),
        evaluate=texts(9),
        collate=padded,
        batch_size=8,
        epochs=2,
    )


def trained(causal: bool, **settings: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    with evener.Engine(task(causal), device="cpu", dtype="float64", **settings) as engine:
        for batch in engine.batches():
            engine.step(batch)
        metrics = engine.evaluate()
        return {name: value.clone() for name, value in engine.state_dict()["model"].items()}, metrics


@pytest.mark.parametrize("causal", [False, True])
def test_texts_of_different_lengths_by_uneven_shares_are_those_of_one_device(
    ranks: Any, causal: bool
) -> None:
    weights, metrics = trained(causal)
    for other, others_metrics in ranks(2).run(trained, causal, balance="3,1"):
        assert other.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(other[name], value, rtol=1e-11, atol=1e-12)
        assert others_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-12)


def test_the_sum_over_the_count_is_the_models_own_mean() -> None:
    batch, model = padded(texts()), Model()
    labels, loss = batch["labels"], token_loss(causal=True)
    own = model(**batch)["loss"]
    total = loss.total(logits(model, {k: v for k, v in batch.items() if k != "labels"}), labels)
    torch.testing.assert_close(total / loss.count(labels), own)


def test_what_has_no_logits_is_refused() -> None:
    with pytest.raises(LossError, match="without a tensor `logits`"):
        logits(nn.Linear(2, 2), torch.ones(1, 2))


def test_labels_that_are_not_one_for_each_place_are_refused() -> None:
    with pytest.raises(LossError, match="one label for each place"):
        token_loss().total(torch.zeros(4, 5, 3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(LossError, match=r"not a tensor of torch\.float32"):
        token_loss().count(torch.zeros(4))
