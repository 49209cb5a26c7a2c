"""What the trainer keeps beside a training: log, callbacks, evaluations, checkpoints; on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evener.errors import ConfigurationError
from tests.integrations.test_hf_outputs import texts
from tests.integrations.test_transformers import answered, answers, classifier, rows_of, trainer

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")


class Seen(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes what it is told of, and asks rank ``asks`` to stop after a step, if that is given."""

    def __init__(self, stop_after: int | None = None, asks: int = 0) -> None:
        self.events: list[tuple[str, int]] = []
        self.stop_after, self.asks = stop_after, asks

    def note(self, event: str, state: Any) -> None:
        self.events.append((event, state.global_step))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("begin", state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("epoch begins", state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("step begins", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("step ends", state)
        if state.global_step == self.stop_after and torch.distributed.get_rank() == self.asks:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("epoch ends", state)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("log", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("evaluate", state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("save", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("end", state)


def followed(
    directory: str, settings: dict[str, Any], size: int, resume: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """All that a training leaves, in float64; ``size`` is the batch of a rank."""
    seen = arguments.pop("seen", None) or Seen()
    usual = {
        **{"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"},
        **{"save_steps": 2, "per_device_train_batch_size": size, "per_device_eval_batch_size": 2},
    }
    given = {
        **{"model": classifier().double(), "data_collator": answers, "callbacks": [seen]},
        **{"train_dataset": answered(), "eval_dataset": answered(9), "compute_metrics": mean_logits},
    }
    made = trainer(directory, {"dtype": None, **settings}, **(usual | arguments), given=given)
    output = made.train(resume_from_checkpoint=resume)
    predicted = made.predict(answered(7))
    return {
        "output": output[:2],
        "rows": rows_of(made),
        "events": seen.events,
        "weights": {name: value.clone() for name, value in made.model.state_dict().items()},
        "evaluated": {
            **made.evaluate(),
            "eval_runtime": 0,
            "eval_samples_per_second": 0,
            "eval_steps_per_second": 0,
        },
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
        "state": made.state,
        "summary": made.summary,
    }


def mean_logits(prediction: Any) -> dict[str, float]:
    """What tells orders and copies of samples apart."""
    places = prediction.label_ids + 1.0
    return {"weighted": (prediction.predictions[:, 0] * places).mean(), "samples": len(places)}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], value, rtol=1e-11, atol=1e-12)
    assert [row.keys() for row in other["rows"]] == [row.keys() for row in one["rows"]]
    for row, other_row in zip(one["rows"], other["rows"], strict=True):
        assert other_row == pytest.approx(row, rel=1e-10)
    assert other["evaluated"] == pytest.approx(one["evaluated"], rel=1e-10)
    assert other["output"] == pytest.approx(one["output"], rel=1e-10)
    assert other["predictions"] == pytest.approx(one["predictions"], rel=1e-9)
    assert other["labels"].tolist() == one["labels"].tolist()


def test_two_ranks_by_uneven_shares_leave_what_one_device_leaves(ranks: Any, tmp_path: Path) -> None:
    alone = followed(str(tmp_path / "alone"), {"processes": 1}, 8)
    assert alone["evaluated"]["eval_samples"] == 9
    assert alone["labels"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    results = ranks(2).run(followed, str(tmp_path / "two"), {"balance": "3,1"}, 4)
    for each in results:
        same(alone, each)
        assert each["events"] == alone["events"]
    assert [each["state"].is_world_process_zero for each in results] == [True, False]
    assert sum(results[0]["summary"].shares[:1]) == pytest.approx(0.75, abs=0.03)
    kept = sorted(path.name for path in (tmp_path / "two").iterdir())
    assert kept == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    # What one device has left, two ranks go on with.
    for each in ranks(2).run(
        followed, str(tmp_path / "on"), {"balance": "1,3"}, 4, resume=str(tmp_path / "alone" / "checkpoint-2")
    ):
        same(alone, {**each, "output": alone["output"]})
        assert each["events"][:2] == [("begin", 2), ("step begins", 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_train_epochs": 2, "logging_steps": 3, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"max_steps": 3, "logging_strategy": "epoch", "logging_steps": 5, "eval_steps": 2, "eval_delay": 1},
    ],
    ids=["epochs", "steps"],
)
def test_callbacks_are_told_in_the_order_of_transformers(tmp_path: Path, arguments: dict[str, Any]) -> None:
    seen, theirs = Seen(), Seen()
    ours = {"eval_steps": None, "seen": seen}
    usual = {
        "eval_strategy": "steps",
        "save_total_limit": 1,
        "eval_on_start": True,
        "save_steps": 2,
        **arguments,
    }
    found = followed(str(tmp_path / "ours"), {"processes": 1}, 12, **(ours | usual))
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"),
        **{"per_device_train_batch_size": 12, "use_cpu": True, "disable_tqdm": True},
        **usual,
    )
    other = transformers.Trainer(classifier(), args, answers, answered(), answered(9), callbacks=[theirs])
    other.train()
    steps = found["state"].global_step
    after = theirs.events.index(("end", steps)) + 1
    assert seen.events[:after] == theirs.events[:after]
    for name in ("epoch", "global_step", "max_steps", "num_train_epochs", "logging_steps", "save_steps"):
        assert getattr(found["state"], name) == getattr(other.state, name), name
    assert [path.name for path in (tmp_path / "ours").iterdir()] == [f"checkpoint-{steps}"]


def ended(directory: str) -> tuple[int, list[tuple[str, int]]]:
    seen = Seen(stop_after=2, asks=1)
    found = followed(
        directory, {"timeout_seconds": 30.0}, 4, seen=seen, save_strategy="no", eval_strategy="no"
    )
    return found["state"].global_step, seen.events


def test_what_a_callback_of_one_rank_asks_for_all_ranks_do(ranks: Any, tmp_path: Path) -> None:
    for step, events in ranks(2).run(ended, str(tmp_path)):
        assert step == 2
        assert ("epoch ends", 2) in events
        assert ("step ends", 3) not in events


def test_an_epoch_has_the_steps_that_dropped_samples_leave(tmp_path: Path) -> None:
    made = trainer(
        str(tmp_path),
        {"processes": 1},
        **{"num_train_epochs": 2, "dataloader_drop_last": True, "per_device_train_batch_size": 10},
        **{"logging_strategy": "steps", "logging_steps": 1},
    )
    made.train()
    assert [row["epoch"] for row in made.state.log_history[:4]] == [0.5, 1.0, 1.5, 2.0]


def test_the_run_ends_where_its_metric_became_no_better_and_has_the_best_weights(tmp_path: Path) -> None:
    values = iter([float("nan"), 0.3, 0.2, 0.3, 0.4])
    made = trainer(
        str(tmp_path),
        {"processes": 1, "dtype": None},
        **{"num_train_epochs": 5, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1},
        **{"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True},
        **{"per_device_train_batch_size": 23},
        given={
            "eval_dataset": texts(3),
            "compute_metrics": lambda _: {"score": next(values)},
            "callbacks": [transformers.EarlyStoppingCallback(2)],
        },
    )
    assert made.train().global_step == 4
    assert (made.state.best_metric, made.state.best_global_step) == (0.3, 2)
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    best = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2")
    last = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    torch.testing.assert_close(made.model.state_dict(), best.state_dict())
    assert not torch.equal(last.transformer.wte.weight, best.transformer.wte.weight)


class Breaking(Seen):
    """Breaks the weights once."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.note("step ends", state)
        if self.events.count(("step ends", 4)) == 1 and state.global_step == 4:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)


def test_a_run_that_goes_back_to_its_checkpoint_is_told_as_if_it_had_not(tmp_path: Path) -> None:
    usual = {"logging_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    alone = followed(str(tmp_path), {"processes": 1}, 8, **usual)
    settings = {"processes": 1, "non_finite": "restore", "run_dir": tmp_path / "run", "save_every": "3steps"}
    broken = followed(str(tmp_path), settings, 8, seen=Breaking(), **usual)
    same(alone, broken)
    steps = [step for event, step in broken["events"] if event == "step ends"]
    assert steps == [1, 2, 3, 4, 4, 5, 6] or steps == [1, 2, 3, 4, 5, 4, 5, 6]
    assert sum(event == "begin" for event, _ in broken["events"]) == 1


def test_only_what_is_better_may_be_saved(tmp_path: Path) -> None:
    values = iter([0.1, 0.3, 0.2, 0.3, 0.4])
    made = trainer(
        *(str(tmp_path), {"processes": 1}),
        **{"num_train_epochs": 5, "eval_strategy": "epoch", "save_strategy": "best"},
        **{"metric_for_best_model": "score", "greater_is_better": True, "per_device_train_batch_size": 23},
        given={"eval_dataset": texts(3), "compute_metrics": lambda _: {"score": next(values)}},
    )
    made.train()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2", "checkpoint-5"}


class OnItsOwn(transformers.TrainerCallback):  # type: ignore[misc]
    """Evaluates on what it likes, and saves."""

    trainer: Any
    found: dict[str, float]

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found = self.trainer.evaluate(answered(5), metric_key_prefix="five")
        self.trainer.save_model(f"{args.output_dir}/at-{state.global_step}")


def on_its_own(directory: str, settings: dict[str, Any], size: int) -> dict[str, float]:
    given = {
        **{"model": classifier().double(), "data_collator": answers, "compute_metrics": mean_logits},
        "train_dataset": answered(),
    }
    arguments = {"per_device_train_batch_size": size, "num_train_epochs": 1}
    made = trainer(directory, {"dtype": None, **settings}, **arguments, given=given)
    callback = OnItsOwn()
    callback.trainer = made
    made.add_callback(callback)
    made.train()
    if made.is_world_process_zero():
        saved = type(made.model).from_pretrained(f"{directory}/at-{made.state.global_step}")
        torch.testing.assert_close(saved.state_dict(), made.model.state_dict())
    return callback.found


def test_a_callback_may_evaluate_and_save_in_a_run(ranks: Any, tmp_path: Path) -> None:
    alone = on_its_own(str(tmp_path / "alone"), {"processes": 1}, 8)
    assert alone["five_samples"] == 5
    for each in ranks(2).run(on_its_own, str(tmp_path / "two"), {"balance": "3,1"}, 4):
        for name in ("five_loss", "five_weighted", "five_samples", "epoch"):
            assert each[name] == pytest.approx(alone[name], rel=1e-10)


class EpochStopping(transformers.TrainerCallback):  # type: ignore[misc]
    """Asks for what cannot be."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = True


class Between(transformers.TrainerCallback):  # type: ignore[misc]
    """Waits for what does not come."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pass


def test_what_callbacks_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="Between has on_optimizer_step, which Evener's Trainer never"
    ):
        trainer(str(tmp_path), given={"callbacks": [Between]})
    made = trainer(str(tmp_path), {"processes": 1})
    made.add_callback(EpochStopping)
    with pytest.raises(ConfigurationError, match="should_epoch_stop after step 1"):
        made.train()
    assert isinstance(made.pop_callback(EpochStopping), EpochStopping)
    made.args.metric_for_best_model, made.args.eval_on_start = "score", True
    made.eval_dataset = texts(3)
    with pytest.raises(ConfigurationError, match="'score'; the metrics are eval_loss"):
        made.train()


def test_a_checkpoint_that_there_is_not_is_refused(tmp_path: Path) -> None:
    made = trainer(str(tmp_path / "none"), {"processes": 1}, save_only_model=True, save_strategy="epoch")
    with pytest.raises(ConfigurationError, match="there is no checkpoint in"):
        made.train(resume_from_checkpoint=True)
    made.args.max_steps = 1
    made.train()
    with pytest.raises(ConfigurationError, match="which save_only_model leaves out"):
        made.train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_ranks_of_its_own_give_back_what_callbacks_noted(tmp_path: Path) -> None:
    seen = Seen()
    made = trainer(str(tmp_path), {"processes": 2}, max_steps=2, logging_steps=1, given={"callbacks": [seen]})
    made.train()
    assert [event for event in seen.events if event[0] == "step ends"] == [("step ends", 1), ("step ends", 2)]
    assert [row["step"] for row in made.state.log_history] == [1, 2, 2]
    assert made.summary.world_size == 2
