"""The trainer in place of that of transformers; models come from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import evener
from evener.errors import ConfigurationError
from tests.integrations.test_dictionaries import WORDS, padded, texts

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")


def model() -> Any:
    torch.manual_seed(5)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=16, loss_type="ForCausalLM", **off
    )
    return transformers.GPT2LMHeadModel(config)


def trainer(directory: str, settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
    from evener.integrations.transformers import Trainer

    usual = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = transformers.TrainingArguments(output_dir=directory, **(usual | arguments))
    return Trainer(model(), args, padded, texts(), settings={"dtype": "float64", **(settings or {})})


def trained(directory: str, settings: dict[str, Any], size: int) -> dict[str, Tensor]:
    made = trainer(directory, {**settings, "processes": 1})
    config = made.config().replace(batch_size=size, micro_batch=size // 2, processes=None)
    with evener.Engine(made.task(config), config) as engine:
        for batch in engine.batches():
            engine.step(batch)
        weights: dict[str, Tensor] = engine.state_dict()["model"]
        return {name: value.clone() for name, value in weights.items()}


def test_it_is_the_training_of_one_device(ranks: Any, tmp_path: Path) -> None:
    alone = trained(str(tmp_path), {"balance": "equal"}, 8)
    for other in ranks(2).run(trained, str(tmp_path), {"balance": "3,1"}, 8):
        for name, value in alone.items():
            torch.testing.assert_close(other[name], value, rtol=1e-11, atol=1e-12)


def test_its_model_has_the_weights_that_came_of_it(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), {"processes": 1}, gradient_accumulation_steps=2)
    summary = made.train()
    weights = trained(str(tmp_path), {"balance": "equal"}, 8)
    assert summary.steps == 6
    for name, value in made.model.state_dict().items():
        torch.testing.assert_close(value, weights[name].to(value.dtype))
    made.save_model()
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), made.model.state_dict())


def test_it_evaluates_after_every_epoch_where_it_is_asked_to(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), {"processes": 1}, eval_strategy="epoch", num_train_epochs=1)
    with pytest.raises(ConfigurationError, match="no eval_dataset"):
        made.train()
    made.eval_dataset = texts(9)
    assert made.train().metrics.keys() == {"loss"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"save_strategy": "steps"}, "save_strategy='steps'"),
        ({"optim": "adafactor"}, "optim='adafactor'"),
        ({"num_train_epochs": 1.5}, "whole number"),
    ],
)
def test_what_is_not_honoured_is_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trainer(str(tmp_path), **arguments)


def test_a_loss_with_other_terms_is_refused(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), {"processes": 1})
    made._loss = evener.loss(made._loss, scale=2.0)
    with pytest.raises(ConfigurationError, match="it has other terms"):
        made.train()
