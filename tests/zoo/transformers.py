"""Models of transformers, from configurations, with drawn weights: as tasks that any rank can build."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import evener
from evener.core.task.task import Task
from tests.tasks import classes, draws

SAMPLES, WORDS, LENGTH, KINDS = 21, 31, 6, 3
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
OF_WORDS: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
PLAIN: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Dropout of theirs is drawn by the order of calls; where it is a module, it can be made one of samples."""
GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 12, "attn_pdrop": 0.0}


def _task(model: Any, train: Any, forward: Any) -> Task:
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # noqa: E731
    return Task(
        model=lambda: evener.nn.exact_dropout(model()),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train=train,
        evaluate=train,
        batch_size=9,
        epochs=10,
        metrics={},
        forward=forward,
    )


def _words() -> torch.Tensor:
    return classes(SAMPLES * (LENGTH + 1), WORDS - 1).view(SAMPLES, -1) + 1


class Padded(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        real = torch.arange(LENGTH) < 2 + index % 5
        inputs = {"input_ids": _words()[index, 1:].masked_fill(~real, 0), "attention_mask": real.long()}
        return inputs, classes(SAMPLES, KINDS)[index]


def _causal(model: Any) -> Task:
    words = _words()
    data = TensorDataset(words[:, :-1], words[:, 1:])
    return _task(model, data, lambda model, words: model(words).logits.transpose(1, 2))


def _classifying(model: Any) -> Task:
    return _task(model, Padded(), lambda model, inputs: model(**inputs).logits)


def gpt2() -> Task:
    config = transformers.GPT2Config(**GPT2, **OF_WORDS)
    return _causal(lambda: transformers.GPT2LMHeadModel(config))


def llama() -> Task:
    config = transformers.LlamaConfig(**SIZES, **OF_WORDS, num_key_value_heads=1)
    return _causal(lambda: transformers.LlamaForCausalLM(config))


def gpt2_classifier() -> Task:
    config = transformers.GPT2Config(**GPT2, **OF_WORDS, num_labels=KINDS)
    return _classifying(lambda: transformers.GPT2ForSequenceClassification(config))


def bert() -> Task:
    config = transformers.BertConfig(**SIZES, **PLAIN, **OF_WORDS, num_labels=KINDS)
    return _classifying(lambda: transformers.BertForSequenceClassification(config))


def t5() -> Task:
    """Words heard and words said."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(**sizes, vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0)
    words = _words()
    data = TensorDataset(torch.stack((words[:, :-1].flip(1), words[:, :-1]), 1), words[:, 1:])

    def forward(model: nn.Module, pair: torch.Tensor) -> Any:
        found = model(input_ids=pair[:, 0], decoder_input_ids=pair[:, 1])
        return found.logits.transpose(1, 2)

    return _task(lambda: transformers.T5ForConditionalGeneration(config), data, forward)


def vit() -> Task:
    config = transformers.ViTConfig(**SIZES, **PLAIN, image_size=8, patch_size=4, num_labels=KINDS)
    data = TensorDataset(draws(SAMPLES, 3, 8, 8), classes(SAMPLES, KINDS))
    return _task(
        lambda: transformers.ViTForImageClassification(config), data, lambda model, x: model(x).logits
    )
