"""The trainer in place of that of transformers; models come from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import evener
from evener.errors import ConfigurationError, DataError
from evener.integrations.hf_outputs import token_loss
from tests.integrations.test_hf_outputs import WORDS, Model, padded, texts

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")  # aliases of arguments


def model() -> Any:
    torch.manual_seed(5)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=16, loss_type="ForCausalLM", **off
    )
    return transformers.GPT2LMHeadModel(config)


def trainer(directory: str, settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Of 23 texts, six of which are for evaluation, with what ``arguments`` say; ``given`` are those of Trainer."""
    from evener.integrations.transformers import Trainer

    given = {
        "model": model(),
        "data_collator": padded,
        "train_dataset": texts(),
        **arguments.pop("given", {}),
    }
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
    return Trainer(args=args, settings={"dtype": "float64", **(settings or {})}, **given)


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
    output = made.train()
    weights = trained(str(tmp_path), {"balance": "equal"}, 8)
    assert output.global_step == made.summary.steps == 6
    for name, value in made.model.state_dict().items():
        torch.testing.assert_close(value, weights[name].to(value.dtype))
    made.save_model()
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), made.model.state_dict())


def classifier(labels: int = 3, problem: str | None = None) -> Any:
    """One answer for each text."""
    torch.manual_seed(6)
    config = transformers.BertConfig(
        **{"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{
            "intermediate_size": 8,
            "max_position_embeddings": 16,
            "num_labels": labels,
            "problem_type": problem,
        },
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    return transformers.BertForSequenceClassification(config)


def answered(number: int = 23, labels: int = 3, real: bool = False) -> list[dict[str, Any]]:
    """Texts with one answer each."""
    found = []
    for index, text in enumerate(texts(number)):
        answer = index % 3 if not real else [float((index + place) % 2) for place in range(labels)]
        found.append({"input_ids": text["input_ids"], "label": answer})
    return found


def answers(items: list[dict[str, Any]]) -> dict[str, Any]:
    words = torch.nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], True, 0)
    labels = {"labels": torch.tensor([item["label"] for item in items])} if "label" in items[0] else {}
    return {"input_ids": words, "attention_mask": (words > 0).long(), **labels}


def right(prediction: Any) -> dict[str, float]:
    """The part of the answers that the largest logit names."""
    return {"right": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def test_without_dividing_anything_it_is_the_trainer_of_transformers(tmp_path: Path) -> None:
    """With all samples in each batch, as the order of samples is another."""
    arguments = {
        **{"per_device_train_batch_size": 23, "per_device_eval_batch_size": 9, "num_train_epochs": 5},
        **{"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "logging_first_step": True},
    }
    data = {"train_dataset": answered(), "eval_dataset": answered(9), "compute_metrics": right}
    given = {"model": classifier(), "data_collator": answers, **data}
    made = trainer(str(tmp_path), {"processes": 1, "dtype": None}, **arguments, given=given)
    output = made.train()
    theirs = transformers.Trainer(classifier(), made.args, answers, **data)
    their_output = theirs.train()
    assert output.global_step == their_output.global_step
    assert output.training_loss == pytest.approx(their_output.training_loss, rel=1e-5)
    for name, value in theirs.model.state_dict().items():
        torch.testing.assert_close(made.model.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    rows, their_rows = map(rows_of, (made, theirs))
    assert [row.keys() for row in rows] == [row.keys() for row in their_rows]
    for row, their_row in zip(rows, their_rows, strict=True):
        assert row == pytest.approx(their_row, rel=1e-4)
    assert made.state.max_steps == theirs.state.max_steps


def rows_of(made: Any, name: str = "") -> list[dict[str, float]]:
    """The log without what clocks say and what takes a count of operations."""
    return [
        {key: value for key, value in row.items() if "runtime" not in key and "per_second" not in key}
        for row in made.state.log_history
        if (name in row if name else "train_runtime" not in row)
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"push_to_hub": True}, r"trainer\.model\.push_to_hub\(\)"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            "lr_scheduler_type='reduce_lr_on_plateau'",
        ),
        ({"optim": "lomo"}, "optim='lomo'.*optimizer_cls_and_kwargs"),
        ({"label_names": ["start_positions"]}, r"label_names=\['start_positions'\] is not honoured"),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 2}}, "with every_n_layers are not honoured"),
    ],
)
def test_what_is_not_honoured_is_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trainer(str(tmp_path), **arguments)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compute_loss_func": len}, "compute_loss_func, a mean over what one rank has"),
        ({"model": None}, "either a model or model_init"),
        ({"model": torch.nn.Linear(2, 2)}, "what Linear's loss is a mean over is not known"),
    ],
)
def test_what_trainer_cannot_take_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trainer(str(tmp_path), given=given)


def tokenizer() -> Any:
    """Of a few words, from no file."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(WORDS - 2))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def test_a_usual_script_is_taken_as_it_is(tmp_path: Path) -> None:
    words = tokenizer()
    rows = [{"text": " ".join(f"w{i}" for i in range(1 + n % 6)), "label": n % 3} for n in range(23)]
    data = [{**row, **words(row["text"])} for row in rows]
    made = trainer(
        *(str(tmp_path), {"dtype": None, "processes": 1}),
        **{"fp16": False, "bf16": True, "push_to_hub": False, "report_to": "none", "run_name": "mine"},
        **{"label_names": ["labels"], "dataloader_pin_memory": False},
        **{
            "dataloader_num_workers": 1,
            "gradient_checkpointing": True,
            "warmup_steps": 0.1,
            "do_train": True,
        },
        **{"gradient_checkpointing_kwargs": {"use_reentrant": False}, "num_train_epochs": 1.5},
        **{"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True},
        given={
            **{"model": None, "model_init": classifier, "data_collator": None, "processing_class": words},
            **{"train_dataset": data, "eval_dataset": data[:5], "compute_metrics": right},
        },
    )
    config = made.config()
    assert (config.precision, config.recompute) == ("bf16", "blocks")
    assert trainer(str(tmp_path), dataloader_num_workers=2).config().workers == 2
    assert config.steps == made.train().global_step == 9
    assert made.state.epoch == 1.5
    assert {"eval_loss", "eval_right"} <= made.evaluate().keys()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "checkpoint-9").pad_token == "[PAD]"


def test_shares_are_by_speed_where_nothing_is_said(tmp_path: Path) -> None:
    for settings, balance in (({}, "auto"), ({"balance": "equal"}, "equal"), ({"strategy": "tensor"}, None)):
        assert trainer(str(tmp_path), {"processes": 1, **settings}).config().balance == balance


def test_settings_that_arguments_say_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="settings say precision"):
        trainer(str(tmp_path), {"precision": "fp16"}, bf16=True)
    with pytest.raises(ConfigurationError, match="settings say keep_best"):
        trainer(str(tmp_path), {"keep_best": "loss"})


def test_a_class_whose_methods_would_not_be_called_is_refused(tmp_path: Path) -> None:
    from evener.integrations.transformers import Trainer

    class Mine(Trainer):
        def compute_loss(self, *_: Any) -> None:
            pass

    with pytest.raises(ConfigurationError, match="Mine has compute_loss, which Evener's Trainer never calls"):
        Mine(model())


def test_a_loss_with_other_terms_is_refused(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), {"processes": 1})
    made._loss = evener.loss(made._loss, scale=2.0)
    with pytest.raises(ConfigurationError, match="it has other terms"):
        made.train()


class Plain(Model):
    """A model that writes no checkpoints of transformers."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(input_ids, attention_mask)


def test_a_model_that_cannot_be_saved_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    given = {"model": Plain(), "loss": token_loss(), "eval_dataset": texts(3)}
    with pytest.raises(ConfigurationError, match="Plain has no save_pretrained"):
        trainer(str(tmp_path), {"processes": 1}, save_strategy="epoch", given=given).train()
    best = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    given["model"].save_pretrained = lambda path: None
    with pytest.raises(ConfigurationError, match="a PreTrainedModel, which Plain is not"):
        trainer(str(tmp_path), {"processes": 1}, **best, given=given).train()
    del given["model"].save_pretrained
    made = trainer(str(tmp_path), {"processes": 1}, given=given)
    assert made.train().global_step == 12
    assert made.evaluate()["eval_loss"] > 0


def test_an_evaluation_without_samples_is_refused(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), {"processes": 1}, eval_strategy="epoch", num_train_epochs=1)
    with pytest.raises(ConfigurationError, match="no eval_dataset"):
        made.train()
    with pytest.raises(ConfigurationError, match="no eval_dataset"):
        made.evaluate()


def test_the_collator_gets_no_columns_but_those_of_the_model(tmp_path: Path) -> None:
    got = []

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        got.extend(items)
        return answers(items)

    items = [{**item, "text": "of no use"} for item in answered(3)]
    given = {"model": classifier(), "data_collator": collate}
    trainer(str(tmp_path), given=given).collation(items)
    assert all(item.keys() == {"input_ids", "label"} for item in got)
    trainer(str(tmp_path), remove_unused_columns=False, given=given).collation(items)
    assert got[-1]["text"] == "of no use"
    with pytest.raises(DataError, match="no column of the dataset is an argument of the model"):
        trainer(str(tmp_path), given=given).collation([{"text": "alone"}])
