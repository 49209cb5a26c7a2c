"""Parts of the trainer: evaluations and predictions, losses by the kind of a model, optimizers of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from evener.errors import ConfigurationError, DataError, LossError
from tests.integrations.test_hf_outputs import texts
from tests.integrations.test_transformers import answered, answers, classifier, model, trainer

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")


def test_predictions_of_unlike_lengths_are_filled_up(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), {"processes": 1}, per_device_eval_batch_size=2)
    found = made.predict(texts(9))
    assert found.predictions.shape == (9, 7, 20)
    lengths = [len(text["labels"]) for text in texts(9)]
    assert found.label_ids.shape == (9, 7)
    for labels, length, text in zip(found.label_ids, lengths, texts(9), strict=True):
        assert labels.tolist() == [*text["labels"].tolist(), *[-100] * (7 - length)]
    alone = made.predict(texts(9)[4:5]).predictions[0]
    np.testing.assert_allclose(found.predictions[4][: len(alone)], alone, rtol=1e-9)
    assert (found.predictions[0][4:] == -100).all()
    assert found.metrics["test_loss"] == pytest.approx(made.evaluate(texts(9))["eval_loss"], rel=1e-12)


def test_samples_without_labels_have_predictions_alone(tmp_path: Path) -> None:
    given = {"model": classifier(), "data_collator": answers, "compute_metrics": lambda _: {"known": 1}}
    made = trainer(str(tmp_path), {"processes": 1}, given=given)
    whole = made.predict(answered(5))
    inputs = [{name: value for name, value in item.items() if name != "label"} for item in answered(5)]
    found = made.predict(inputs)
    assert found.label_ids is None
    assert {"test_loss", "test_known"} <= whole.metrics.keys()
    assert not {"test_loss", "test_known"} & found.metrics.keys()
    np.testing.assert_allclose(found.predictions, whole.predictions)
    made.train_dataset = inputs
    with pytest.raises(DataError, match="and no labels"):
        made.train()


def test_what_is_kept_for_metrics_may_be_chosen(tmp_path: Path) -> None:
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {"score": float((prediction.predictions == prediction.label_ids).mean())}

    given = {
        **{"model": classifier(), "data_collator": answers, "compute_metrics": metrics},
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        "eval_dataset": {"one": answered(5), "two": answered(4)},
    }
    made = trainer(str(tmp_path), {"processes": 1}, given=given)
    found = made.evaluate()
    assert seen == [(5,), (4,)]
    assert {"eval_one_loss", "eval_one_score", "eval_two_loss", "eval_two_score"} <= found.keys()
    made.args.prediction_loss_only = True
    assert "eval_one_score" not in made.evaluate()
    assert made.predict(answered(5)).predictions is None
    with pytest.raises(ConfigurationError, match="ignore_keys names logits"):
        made.evaluate(ignore_keys=["logits"])


@pytest.mark.parametrize(
    ("labels", "problem", "real"),
    [
        *((3, None, False), (3, None, True), (1, None, True), (3, "regression", True)),
        *((3, "single_label_classification", False), (3, "multi_label_classification", True)),
    ],
)
def test_the_loss_of_one_answer_for_each_text_is_the_models_own(
    labels: int, problem: str | None, real: bool
) -> None:
    from evener.integrations.transformers.losses import loss_of

    made, batch = classifier(labels, problem).eval(), answers(answered(7, labels, real))
    wanted = batch.pop("labels")
    loss = loss_of(made)
    own = made(**batch, labels=wanted)
    found = loss.total(own.logits, wanted) / loss.count(wanted)
    torch.testing.assert_close(found, own.loss)
    parts = [(own.logits[:3], wanted[:3]), (own.logits[3:], wanted[3:])]
    torch.testing.assert_close(sum(loss.total(*part) for part in parts), loss.total(own.logits, wanted))
    assert sum(float(loss.count(part)) for _, part in parts) == float(loss.count(wanted))


def test_the_loss_of_a_model_that_writes_an_answer_is_its_own() -> None:
    from evener.integrations.transformers.losses import loss_of

    torch.manual_seed(1)
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    made = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0)
    ).eval()
    labels = torch.tensor([[3, 4, 5], [6, -100, -100]])
    inputs = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    own = made(**inputs, labels=labels)
    shifted = made.prepare_decoder_input_ids_from_labels(labels)
    loss, found = loss_of(made), made(**inputs, decoder_input_ids=shifted)
    torch.testing.assert_close(loss.total(found.logits, labels) / loss.count(labels), own.loss)


def test_inputs_of_a_decoder_are_made_of_labels_as_the_model_does() -> None:
    """Unless the collator has made some. Workers that collate get no weights."""
    from evener.integrations.transformers.batches import Collation

    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    made = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    labels, words = torch.tensor([[3, 4, 5], [6, -100, -100]]), torch.ones(2, 4, dtype=torch.long)
    expected = made.prepare_decoder_input_ids_from_labels(labels)
    collation = Collation(lambda _: {"input_ids": words, "labels": labels}, made, False)
    inputs, targets = collation([{}, {}])
    assert inputs.keys() == {"input_ids", "decoder_input_ids"}
    assert torch.equal(inputs["decoder_input_ids"], expected)
    assert torch.equal(targets, labels)
    assert not list(collation._answers.parameters())
    assert list(made.parameters())
    own = Collation(lambda _: {"decoder_input_ids": words, "labels": labels}, made, False)([{}, {}])[0]
    assert torch.equal(own["decoder_input_ids"], words)


def test_labels_that_do_not_go_with_logits_are_refused() -> None:
    from evener.integrations.transformers.losses import SampleLoss

    with pytest.raises(LossError, match=r"shape \(4, 2\) do not go with labels of shape \(4,\)"):
        SampleLoss("regression").total(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(LossError, match="labels are list, not a tensor"):
        SampleLoss(None).count([1])


def weights_of(directory: Path, **given: Any) -> dict[str, Any]:
    settings = {"processes": 1, "dtype": "float64"}
    made = trainer(str(directory), settings, lr_scheduler_type="cosine", given=given)
    made.train()
    found: dict[str, Any] = made.model.state_dict()
    return found


def test_an_optimizer_of_the_users_is_made_again_for_the_tasks_model(tmp_path: Path) -> None:
    usual, own = weights_of(tmp_path), model()
    decayed = [p for name, p in own.named_parameters() if "bias" not in name and "ln_" not in name]
    others = [p for name, p in own.named_parameters() if "bias" in name or "ln_" in name]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    scheduler = transformers.get_scheduler("cosine", optimizer, 2, 12)
    torch.testing.assert_close(weights_of(tmp_path, model=own, optimizers=(optimizer, scheduler)), usual)
    named = weights_of(
        tmp_path, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.999)})
    )
    torch.testing.assert_close(named, usual)
    plain = weights_of(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.01}))
    assert not torch.equal(plain["lm_head.weight"], usual["lm_head.weight"])


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: transformers.get_scheduler("linear", optimizer, 2, 6),
    ],
    ids=["linear", "cosine", "steps", "function", "transformers"],
)
def test_a_scheduler_of_the_users_is_made_again(make: Any) -> None:
    from evener.integrations.transformers.optimizers import bound_again, made_again

    own = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.4)
    scheduler = make(optimizer)
    again = made_again(optimizer, own)(torch.nn.Linear(2, 2).named_parameters())
    other = bound_again(scheduler)(again)
    assert other.optimizer is again
    for _ in range(5):
        assert other.get_last_lr() == pytest.approx(scheduler.get_last_lr())
        for each in (optimizer, scheduler, again, other):
            each.step()
    with pytest.raises(ConfigurationError, match="has taken 5 steps"):
        bound_again(scheduler)


def test_optimizers_that_cannot_be_made_again_are_refused(tmp_path: Path) -> None:
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    several = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 2)])
    for optimizers, words in (
        ((torch.optim.SGD(model().parameters(), lr=0.1), None), "are not the model's"),
        ((optimizer, plateau), "a ReduceLROnPlateau in optimizers= is not honoured"),
        ((optimizer, several), "a ChainedScheduler in optimizers= is not honoured"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trainer(str(tmp_path), given={"model": own, "optimizers": optimizers})
    own.lm_head.weight.grad = torch.zeros_like(own.lm_head.weight)
    optimizer.step()
    with pytest.raises(ConfigurationError, match="has state of steps that it took"):
        trainer(str(tmp_path), given={"model": own, "optimizers": (optimizer, None)})


def test_the_oldest_checkpoints_go_but_not_the_best(tmp_path: Path) -> None:
    from evener.integrations.transformers.trainer_state import rotate

    for step in (1, 2, 3, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    rotate(tmp_path, None, None)
    rotate(tmp_path, 3, str(tmp_path / "checkpoint-1"))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint-1", "checkpoint-3", "checkpoint-4", "checkpoint-notes"}
    rotate(tmp_path, 1, str(tmp_path / "checkpoint-1"))
    assert {path.name for path in tmp_path.iterdir()} == names - {"checkpoint-3"}


def test_a_checkpoint_is_there_whenever_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evener.integrations.transformers import trainer_state

    names, removed = ("checkpoint-4", ".checkpoint-4.partial"), trainer_state.shutil.rmtree
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    whole: list[set[str]] = []

    def seen(path: Path, **options: Any) -> None:
        whole.append({each.read_text() for each in tmp_path.glob("*/content")})
        removed(path, **options)

    monkeypatch.setattr(trainer_state.shutil, "rmtree", seen)
    trainer_state.replace_directory(*(tmp_path / name for name in names))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert (tmp_path / "checkpoint-4" / "content").read_text() == names[1]
    assert whole == [set(names)] * 2
