"""Every example runs, on two ranks, and says what it is meant to show.

They are run on ranks that are up already: a call of ``evener.fit`` or ``evener.launch`` on a rank runs right there.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.training.prepare import prepare as preparing

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"

SHOWN = {
    "own_model": r"accuracy (0\.[89]|1\.)",
    "own_loop": r"step 0: loss 2\.\d+, shares \(32, 32\)(.|\n)*epoch 1: accuracy 0\.[89]",
    "unequal_devices": r"shares \d+ and \d+ of 512: \d\.\dx of equal shares",
    "prepared_loop": r"epoch 1: loss 0\.\d+, accuracy 0\.9\d+ on 2 ranks",
    "gan_two_optimizers": r"epoch 3: discriminator 0\.\d+, generator \d\.\d+",
    "language_model_padding": r"accuracy of the next token (0\.[6-9]|1\.)",
    "packed_sequences": r"padding 0\.44 .*0\.16 packed\n(.|\n)*accuracy of the next token 0\.9\d+",
    "recommendation": r"last loss \d\.\d+",
    "several_inputs": r"loss \d\.\d+, right kind 0\.\d+",
    "metrics_from_torchmetrics": r"accuracy 0\.\d+\nf1 0\.\d+\ncalibration 0\.\d+",
    "predict": r"3[0-6]\d of 360 right",
    "resume": r"stopped after 11 steps(.|\n)*ended after 29 steps(.|\n)*without a stop: (0e\+00|\de-(0[89]|1\d))",
    "early_stopping": r"ended after ([2-9]|1\d) epochs: loss 0\.\d+",
    "keep_the_best": r"best after \d+ steps: accuracy 0\.\d+, kept in step-0+\d+",
    "launch": r"rank 0: 30\.0",
    "partition_by_sample": r"5748 samples in 92 steps.*held 0\.333, 0\.667\naccuracy 0\.9",
    "partition_by_dimension": r"hold \[1333, 667\] of 2000 columns\naccuracy (0\.9|1\.)",
    "image_classifier": r"accuracy 0\.9\d+, rank 0 took 0\.[5-9]",
    "character_model": r"tensor: loss [12]\.\d+ a character",
    "word_model": r"sharded: accuracy of the next word 0\.[67]",
    "graph_network": r"accuracy 0\.[7-9]",
    "mixture_of_experts": r"accuracy 0\.[4-9]\d*, without room 0\.0",
    "iterable_dataset": r"602 samples in 32 steps, last loss \d",
    "shards": r"612 samples in 32 steps, last loss \d",
}
"""What each prints on rank 0 of two."""


OPTIONAL = {"lora": r"last loss 0\.\d+; 8192 of 35072 (.|\n)*the same outputs: True"}
"""Likewise, if PEFT is installed."""


def run_examples(names: list[str], directory: str) -> dict[str, str]:
    """On a rank: what each example printed."""
    with contextlib.chdir(directory):
        return {name: _output(EXAMPLES / f"{name}.py") for name in names}


def _output(path: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.ExitStack() as over:
        over.callback(preparing.end)  # as at the end of a process
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def outputs(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = str(tmp_path_factory.mktemp("examples"))
    printed: dict[str, str] = ranks(2).run(run_examples, list(SHOWN), directory, timeout=300)[0]
    return printed


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_shows_what_it_is_about(outputs: dict[str, str], name: str) -> None:
    assert re.search(SHOWN[name], outputs[name]), outputs[name]


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_example_shows_what_an_optional_package_does(ranks: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("peft")
    printed = ranks(2).run(run_examples, [name], str(tmp_path), timeout=300)[0][name]
    assert re.search(OPTIONAL[name], printed), printed


def test_packed_documents_have_the_loss_of_documents_alone() -> None:
    example = runpy.run_path(str(EXAMPLES / "packed_sequences.py"))
    texts, loss = example["documents"](40), example["task"]().exact_loss()
    reader = example["Reader"]()

    def mean(samples: list[list[torch.Tensor]]) -> torch.Tensor:
        inputs, following = example["collate"](samples)
        return loss.total(reader(**inputs), following) / loss.count(following)

    packed = example["packed"](texts)
    assert len({sum(map(len, sample)) for sample in packed}) > 5, "samples of unequal numbers of tokens"
    torch.testing.assert_close(mean(packed), mean([[text] for text in texts]))


def test_every_example_is_run() -> None:
    """The script of torchrun by the commands of docs/running.md, the others here."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHOWN, *OPTIONAL, "torchrun_script"}
