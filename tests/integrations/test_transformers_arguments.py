"""Arguments of ``transformers`` that are honoured: the same training as theirs, and on two ranks as on one device."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import evener
from evener.errors import ConfigurationError
from tests.integrations.test_hf_outputs import WORDS, padded, texts
from tests.integrations.test_transformers import answered, answers, classifier, model, trainer

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")  # aliases of arguments


def mixture(balance: float = 0.3) -> Any:
    """Two layers of four experts, of whom a token has two."""
    torch.manual_seed(7)
    config = transformers.MixtralConfig(
        **{"vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4},
        **{"output_router_logits": True, "router_aux_loss_coef": balance, "pad_token_id": 0},
        **{"bos_token_id": 1, "eos_token_id": 1},
    )
    config._experts_implementation = "eager"  # the usual one takes no float64
    return transformers.MixtralForCausalLM(config)


def begun() -> list[dict[str, Tensor]]:
    """Texts whose first word has no label: none is compared with it, and ``transformers`` counts it all the same."""
    found = texts()
    for text in found:
        text["labels"][0] = -100
    return found


WHOLE = {"per_device_train_batch_size": 23, "num_train_epochs": 4}
SEQUENCE = {"train_sampling_strategy": "sequential", "num_train_epochs": 2}
LIKE_THEIRS: dict[str, tuple[Any, dict[str, Any]]] = {
    "smoothed words": (model, {**WHOLE, "label_smoothing_factor": 0.2}),
    "smoothed answers": (classifier, {**WHOLE, "label_smoothing_factor": 0.2}),
    "Adafactor": (model, {**WHOLE, "optim": "adafactor"}),
    "RMSprop with arguments": (model, {**WHOLE, "optim": "rmsprop", "optim_args": "alpha=0.5"}),
    "in sequence": (model, SEQUENCE),
    "complete batches": (model, {**SEQUENCE, "dataloader_drop_last": True}),
    "the balance of a mixture": (mixture, {**WHOLE, "max_grad_norm": 0.0}),
    "the smoothed words of a mixture": (mixture, {**WHOLE, "label_smoothing_factor": 0.2}),
    "a small balance": (lambda: mixture(5e-4), {**WHOLE, "num_train_epochs": 1}),
    "deterministic": (model, {**WHOLE, "full_determinism": True}),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("case", LIKE_THEIRS)
def test_it_is_their_training(case: str, tmp_path: Path) -> None:
    make, arguments = LIKE_THEIRS[case]
    collate, data = (answers, answered()) if make is classifier else (padded, begun())
    given = {"model": make().double(), "data_collator": collate, "train_dataset": data}
    made = trainer(str(tmp_path), {"processes": 1, "dtype": None}, **arguments, given=given)
    output = made.train()
    theirs = transformers.Trainer(make().double(), made.args, collate, data)
    assert output.global_step == theirs.train().global_step
    for name, value in theirs.model.state_dict().items():
        if case == "Adafactor" and name.endswith("c_attn.bias"):
            continue  # that of keys has no gradient but rounding, which Adafactor scales up
        torch.testing.assert_close(made.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def stepped(
    directory: str, settings: dict[str, Any], name: str, arguments: dict[str, Any]
) -> dict[str, Tensor]:
    make = {"mixture": mixture, "model": model}[name]
    made = trainer(directory, {**settings, "processes": 1}, **arguments, given={"model": make()})
    config = made.config().replace(batch_size=7, micro_batch=None, processes=None)
    with evener.Engine(made.task(config), config) as engine:
        for batch in engine.batches():
            engine.step(batch)
        weights: dict[str, Tensor] = engine.state_dict()["model"]
        return {name: value.clone() for name, value in weights.items()}


DIVIDED = [
    ("mixture", {}),
    ("model", {"label_smoothing_factor": 0.2, "train_sampling_strategy": "group_by_length", "data_seed": 5}),
]


@pytest.mark.parametrize(("name", "arguments"), DIVIDED, ids=lambda value: str(value)[:20])
def test_two_ranks_train_as_one_device(ranks: Any, tmp_path: Path, name: str, arguments: Any) -> None:
    alone = stepped(str(tmp_path), {"balance": "equal"}, name, arguments)
    for other in ranks(2).run(stepped, str(tmp_path), {"balance": "3,1"}, name, arguments):
        for key, value in alone.items():
            torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-11)


def order(directory: Path, **arguments: Any) -> list[list[int]]:
    made = trainer(str(directory), {"processes": 1}, **arguments)
    listed = made.task(made.config()).order
    return [] if listed is None else [listed(epoch).tolist() for epoch in (0, 1)]


def test_samples_come_as_the_arguments_say(tmp_path: Path) -> None:
    assert order(tmp_path) == []
    assert order(tmp_path, data_seed=3) != order(tmp_path, data_seed=4)
    first, second = order(tmp_path, train_sampling_strategy="group_by_length")
    assert first != second
    assert sorted(first) == sorted(second) == list(range(23))
    lengths = [len(texts()[index]["input_ids"]) for index in first]
    spread = [max(lengths[i : i + 4]) - min(lengths[i : i + 4]) for i in range(4, 20, 4)]
    assert sum(spread) < 16
    assert order(tmp_path, train_sampling_strategy="sequential", dataloader_drop_last=True)[0] == list(
        range(20)
    )
    with pytest.raises(ConfigurationError, match="leaves nothing of 23 samples in batches of 30"):
        order(tmp_path, dataloader_drop_last=True, per_device_train_batch_size=30)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"torch_compile": True}, {"compile": "auto", "compile_backend": "inductor"}),
        (
            {"torch_compile_backend": "aot_eager", "torch_compile_mode": "default"},
            {"compile": "auto", "compile_backend": "aot_eager", "compile_mode": "default"},
        ),
        ({"fsdp": True}, {"strategy": "sharded", "strategy_option": ("zero=3",), "balance": None}),
        (
            {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True}},
            {"strategy": "sharded", "strategy_option": ("zero=2",), "offload": None},
        ),
    ],
)
def test_arguments_that_are_settings(arguments: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    config = trainer(str(tmp_path), {"processes": 1}, **arguments).config()
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_sharded_as_fsdp_trains_the_same(tmp_path: Path) -> None:
    weights = []
    for arguments in ({}, {"fsdp": "shard_grad_op auto_wrap"}):
        made = trainer(
            str(tmp_path), {"processes": 2, "timeout_seconds": 60.0}, num_train_epochs=1, **arguments
        )
        made.train()
        weights.append({name: value.double() for name, value in made.model.state_dict().items()})
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_metrics_get_inputs_and_losses(tmp_path: Path) -> None:
    seen = []

    def measure(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"mean": float(np.mean(prediction.losses))}

    data = {"eval_dataset": answered(9), "compute_metrics": measure}
    given = {"model": classifier(), "data_collator": answers, "train_dataset": answered(), **data}
    arguments = {"include_for_metrics": ["inputs", "loss"], "per_device_eval_batch_size": 9}
    made = trainer(str(tmp_path), {"processes": 1, "dtype": None}, **arguments, given=given)
    found = made.evaluate()
    theirs = transformers.Trainer(classifier(), made.args, answers, answered(), **data).evaluate()
    assert found["eval_mean"] == pytest.approx(theirs["eval_mean"], rel=1e-5)
    assert found["eval_mean"] == pytest.approx(found["eval_loss"], rel=1e-5)
    ours, other = seen
    assert np.array_equal(ours.inputs, other.inputs)
    assert len(ours.losses) == 9


def test_an_evaluation_in_half_precision(tmp_path: Path) -> None:
    data = {"eval_dataset": answered(9)}
    given = {"model": classifier(), "data_collator": answers, "train_dataset": answered(), **data}
    made = trainer(str(tmp_path), {"processes": 1, "dtype": None}, bf16_full_eval=True, given=given)
    theirs = transformers.Trainer(classifier(), made.args, answers, answered(), **data)
    assert made.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-2)
    assert made.predict(answered(9)).predictions.dtype == np.float32
    assert made._dtype_of_evaluation() == {"dtype": "bfloat16", "precision": None}


class AddsLMHeadModel(transformers.GPT2LMHeadModel):  # type: ignore[misc]
    """A term that an evaluation does not show."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if found.loss is not None and self.training:
            found.loss = found.loss + 1e-3
        return found


def test_a_mixture_whose_loss_was_checked_goes_to_a_process_that_has_made_none(tmp_path: Path) -> None:
    """``transformers`` puts hooks that cannot be sent into a mixture that computes, and notes by its class, where it
    makes one, that there are scores of routers."""
    from evener.integrations.transformers.model_init import copied
    from evener.integrations.transformers.router_loss import with_routers

    made = trainer(str(tmp_path), {"processes": 2}, given={"model": mixture()}, remove_unused_columns=False)
    made._check_loss()
    sent = pickle.loads(pickle.dumps(made.model))
    noted = transformers.utils.output_capturing._CAN_RECORD_REGISTRY
    before = dict(noted)
    noted.clear()
    try:
        inputs, _ = made.collation(begun()[:2])
        assert len(with_routers(copied(sent, deterministic=False), inputs)["router_logits"]) == 2
    finally:
        noted.clear()
        noted.update(before)


@pytest.mark.slow
def test_ranks_of_its_own_train_a_mixture(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), {"processes": 2}, max_steps=1, given={"model": mixture()})
    assert made.train().global_step == 1


def test_a_term_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    own = AddsLMHeadModel(model().config)
    with pytest.raises(
        ConfigurationError, match=r"AddsLMHeadModel's own loss .* in training, .* other terms"
    ):
        trainer(str(tmp_path), {"processes": 1}, given={"model": own}, remove_unused_columns=False).train()


def test_what_is_refused_names_the_way_out(tmp_path: Path) -> None:
    from evener.integrations.transformers import arguments

    known = arguments._HONOURED | arguments._CHANGE_NOTHING
    names = {field.name for field in fields(transformers.TrainingArguments)} - known
    assert names <= arguments._INSTEAD.keys()
    for wrong, words in (
        ({"neftune_noise_alpha": 5.0}, "forward hook"),
        ({"optim": "adamw_torch_8bit"}, "optimizer_state"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "fsdp_config with xla"),
        ({"include_for_metrics": ["outputs"]}, "it takes inputs and loss"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trainer(str(tmp_path), {"processes": 1}, **wrong)
    given = {"model": classifier(1), "data_collator": answers}
    with pytest.raises(ConfigurationError, match="are for regression: leave it out"):
        trainer(str(tmp_path), {"processes": 1}, label_smoothing_factor=0.1, given=given)


def test_ranks_train_a_model_that_comes_in_evaluation_mode() -> None:
    """``from_pretrained`` returns it so, with dropout off."""
    from evener.integrations.transformers.model_init import copied

    given = mixture().eval().requires_grad_(False)
    assert all(module.training for module in copied(given, deterministic=False).modules())
    assert not given.training
