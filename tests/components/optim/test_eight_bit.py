"""Optimizer state in few bits: the same after a way through a checkpoint, under every strategy."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.components.optim.eight_bit import check_state, in_eight_bits, name_of, stepping, write
from evener.components.sharded_tensor.local import local
from evener.core.config.run_config import RunConfig
from evener.distributed.session import Session
from evener.errors import ConfigurationError, DivergenceError
from evener.strategies.memory_attribution import nbytes_of
from evener.tools.estimate.measure import measure_memory
from evener.tools.verify import verify
from evener.torch_internals.quantized_state import codes_of, is_quantized, new_state
from evener.training.engine import Engine
from tests.comparing import worst
from tests.strategies import eight
from tests.tiers import ALWAYS, NIGHTLY, spread

with warnings.catch_warnings(action="ignore"):
    optim = pytest.importorskip("torchao.optim")

CPU = torch.device("cpu")
KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
EIGHT = {"optimizer_state": "8bit"}


def engine(task: Callable[[], evener.Task] = eight.task, **settings: Any) -> Engine:
    return Engine(task(), RunConfig(**({"device": "cpu"} | settings)))


# The way through a checkpoint


def codes_and_scales(kind: str, rows: int, seed: int) -> Tensor:
    """Of a first average, of which many a block has a negative number as its largest."""
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(rows, 256))
    state = new_state(getattr(optim, kind)([parameter]), parameter, signed=True)
    sizes = torch.randn(rows, 1, generator=generator).mul(4).exp()
    numbers = torch.randn(rows, 256, generator=generator) * sizes
    numbers[1::3] = -numbers[1::3].abs()
    numbers[2] = 0.0
    return state.copy_(numbers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_codes_become_the_same_codes_again(kind: str, seed: int) -> None:
    kept, again = codes_and_scales(kind, 64, seed), codes_and_scales(kind, 64, 99)
    numbers = kept.dequantize()
    write(again, numbers)
    assert torch.equal(again.dequantize(), numbers)
    of_numbers = numbers.view(64, -1).abs().amax(1) > 0  # a block of zeros has no scale to come back to
    for name, value in codes_of(kept).items():
        rows = torch.as_tensor(codes_of(again)[name]).view(torch.uint8).view(64, -1)[of_numbers]
        assert torch.equal(rows, value.view(torch.uint8).view(64, -1)[of_numbers]), name


def test_a_mere_copy_would_not() -> None:
    kept, again = codes_and_scales("AdamW8bit", 64, 0), codes_and_scales("AdamW8bit", 64, 99)
    again.copy_(kept.dequantize())
    assert not torch.equal(again.dequantize(), kept.dequantize())


def test_numbers_that_no_codes_stood_for_are_rounded() -> None:
    kept = codes_and_scales("AdamW8bit", 32, 0)
    numbers = torch.randn(32, 256, generator=torch.Generator().manual_seed(5))
    numbers[3] = -numbers[3].abs()
    write(kept, numbers)
    plainly = codes_and_scales("AdamW8bit", 32, 0).copy_(numbers)
    assert torch.equal(kept.dequantize(), plainly.dequantize())


@pytest.mark.parametrize("kind", ["8bit", *spread(KINDS, NIGHTLY, ALWAYS, ALWAYS)])
def test_a_run_that_goes_on_is_the_run_that_was_stopped(tmp_path: Path, kind: str) -> None:
    task, settings = (eight.task, EIGHT) if kind == "8bit" else (partial(eight.of_torchao, kind), {})
    with engine(task, **settings) as whole:
        losses = []
        for batch in whole.batches():
            losses.append(whole.step(batch).loss)
            if whole.steps_done == 4:
                whole.save(tmp_path)
                taken = whole.state_dict()
        ended = whole.state_dict()
    for load in (lambda e: e.load(tmp_path), lambda e: e.load_state_dict(taken)):
        with engine(task, **settings) as later:
            load(later)
            state = later.learner.optimizer.state
            kept = {
                key for entries in state.values() for key, value in entries.items() if is_quantized(value)
            }
            assert kept == {"exp_avg", "exp_avg_sq"}
            assert [later.step(batch).loss for batch in later.batches()] == losses[4:]
            assert_equal(later.state_dict()["model"], ended["model"])


def assert_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize(("first", "then"), [(EIGHT, {}), ({}, EIGHT)], ids=["to plain", "from plain"])
def test_a_run_goes_on_with_the_plain_optimizer_and_from_it(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any]
) -> None:
    with engine(steps=4, **first) as begun:
        for batch in begun.batches():
            begun.step(batch)
        begun.save(tmp_path)
        rates = [float(group["lr"]) for group in begun.learner.optimizer.param_groups]
    said: list[str] = []
    with engine(**then) as later:
        later.load(tmp_path, said.append)
        group = later.learner.optimizer.param_groups[0]
        assert isinstance(group["lr"], Tensor) == bool(then)
        assert float(group["lr"]) == pytest.approx(rates[0], rel=1e-6)
        losses = [later.step(batch).loss for batch in later.batches()]
    with engine() as plainly:
        reference = [plainly.step(batch).loss for batch in plainly.batches()]
    assert losses[-1] == pytest.approx(reference[-1], rel=1e-2)
    assert [words for words in said if "optimizer_state" in words]


# What becomes of the task's optimizer


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(3))]


def test_the_optimizer_keeps_groups_and_options() -> None:
    first, second = parameters()
    given = torch.optim.Adam(
        [{"params": [first], "lr": 0.5}, {"params": [second], "eps": 1e-3}],
        lr=0.25,
        betas=(0.5, 0.75),
        weight_decay=0.1,
        amsgrad=True,
    )
    made = in_eight_bits(given)
    assert (type(made).__name__, name_of(made)) == ("Adam8bit", "Adam")
    for group, other in zip(made.param_groups, given.param_groups, strict=True):
        assert all(group[key] == other[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad"))
        assert all(a is b for a, b in zip(group["params"], other["params"], strict=True))


@pytest.mark.parametrize(("kind", "expected"), [("Adam", "Adam8bit"), ("AdamW", "AdamW8bit")])
def test_its_steps_are_those_of_the_plain_one(kind: str, expected: str) -> None:
    """Where a tensor is too small for codes, as far as float32 allows; where it is not, as far as codes do."""
    drawn = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(1))
    runs = []
    for wrap in (in_eight_bits, lambda optimizer: optimizer):
        held = parameters()
        optimizer = wrap(getattr(torch.optim, kind)(held, lr=1e-2, weight_decay=0.1))
        for gradient in drawn:
            held[0].grad, held[1].grad = gradient.clone(), gradient[0, :3].clone()
            with stepping(optimizer, CPU):
                optimizer.step()
        runs.append(held)
        if wrap is in_eight_bits:
            assert type(optimizer).__name__ == expected
            assert is_quantized(optimizer.state[held[0]]["exp_avg"])
            assert not is_quantized(optimizer.state[held[1]]["exp_avg"])
    (large, small), (reference, other) = runs
    assert torch.allclose(small, other, rtol=1e-5)
    assert 1e-7 < (large - reference).norm() / reference.norm() < 0.05


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: torch.optim.SGD(p, lr=0.1),
            r"is for torch.optim.Adam and AdamW, and .* torch.optim.sgd.SGD",
        ),
        (lambda p: torch.optim.AdamW(p, maximize=True), "goes without maximize"),
        (lambda p: torch.optim.AdamW(p, foreach=False, differentiable=True), "goes without differentiable"),
    ],
)
def test_what_cannot_be_made_so_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        in_eight_bits(make(parameters()))


def test_hooks_are_not_lost_in_silence() -> None:
    optimizer = torch.optim.AdamW(parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="whose step hooks would be lost"):
        in_eight_bits(optimizer)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install torchao"):
        in_eight_bits(torch.optim.AdamW(parameters()))


def test_rounding_by_chance_is_refused_where_there_are_replicas() -> None:
    optimizer = optim.AdamW8bit(parameters(), bf16_stochastic_round=True)
    check_state(optimizer, CPU, False, 1)
    with pytest.raises(ConfigurationError, match="replicas would come apart"):
        check_state(optimizer, CPU, False, 2)


def test_scales_of_bitsandbytes_cannot_be_divided() -> None:
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    check_state(kind(parameters()), CPU, False, 2)
    with pytest.raises(ConfigurationError, match="its state cannot be divided"):
        check_state(kind(parameters()), CPU, True, 2)


# Memory and words


def test_it_takes_the_memory_that_is_estimated() -> None:
    with engine(**EIGHT) as small, engine() as usual:
        for each in (small, usual):
            each.step(next(each.batches()))
        few, many = (nbytes_of(each.learner)["optimizer"] for each in (small, usual))
    assert few < 0.3 * many
    estimated = evener.estimate_memory(eight.task, processes=1, device="cpu", **EIGHT).ranks[0]
    with Session(device="cpu") as session:
        measured = measure_memory(eight.task, RunConfig(device="cpu", **EIGHT), session)
    assert estimated.at_peak["optimizer"] == measured.at_peak["optimizer"] == few
    assert estimated.peak == pytest.approx(measured.peak, rel=1e-2)


ESTIMATED_FIRST = """
import torch, evener
from evener.torch_internals.quantized_state import lowest_code, new_state
from tests.strategies import eight

for kind in ("AdamW8bit", "AdamW4bit"):
    evener.estimate_memory(lambda: eight.of_torchao(kind), processes=1, device="cpu")
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    state = new_state(eight.of_torchao(kind).optimizer([weight]), weight, True)
    assert lowest_code(state) < -0.8, lowest_code(state)
    assert state.copy_(torch.ones(64, 64)).dequantize().eq(1).all()
"""


@pytest.mark.slow
def test_an_estimate_leaves_tables_that_mean_something() -> None:
    """torchao works them out once in a process, with the tensors that are at hand then."""
    found = subprocess.run([sys.executable, "-c", ESTIMATED_FIRST], capture_output=True, text=True)
    assert not found.returncode, found.stderr


def test_the_run_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = evener.fit(eight.task, processes=1, steps=1, device="cpu", show=False, **EIGHT)
    words = "optimizer state in few bits: AdamW8bit of torchao, in the place of AdamW"
    assert result.summary.optimizer_state == f"{words}, for 2 of 6 parameters"


# On several ranks


def _trained(settings: dict[str, Any], kind: str, path: str) -> tuple[list[float], dict[str, Tensor], int]:
    task = eight.task if kind == "8bit" else partial(eight.of_torchao, kind)
    with engine(task, check_replicas=2, **settings) as each:
        if Path(path, "latest").exists():
            each.load(Path(path), lambda words: None)
        losses = []
        for batch in each.batches():
            losses.append(each.step(batch).loss)
            if each.steps_done == 4:
                each.save(Path(path))
        whole = {name: value.detach().clone() for name, value in each.learner.tensors().items()}
        return losses, whole, nbytes_of(each.learner)["optimizer"]


STRATEGIES = [
    ("ddp", (), 1, 0.02),
    ("sharded", ("zero=2",), 2, 0.02),
    pytest.param("sharded", ("zero=3",), 2, 0.02, marks=NIGHTLY),
    pytest.param("sharded", ("zero=1",), 2, 0.02, marks=pytest.mark.slow),
    pytest.param("pipeline", (), 1, 0.02, marks=pytest.mark.slow),
    # Columns and rows of a head are other blocks than those of the whole.
    pytest.param("tensor", (), 1.5, 0.1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "options", "less", "apart"), STRATEGIES)
def test_ranks_keep_it_save_it_and_go_on(
    ranks: Any, tmp_path: Path, strategy: str, options: tuple[str, ...], less: float, apart: float
) -> None:
    with engine(**EIGHT) as one:
        reference = [one.step(batch).loss for batch in one.batches()]
        weights, held = dict(one.learner.tensors()), nbytes_of(one.learner)["optimizer"]
    settings = {"strategy": strategy, "strategy_option": options, **EIGHT}
    run = partial(ranks(2).run, _trained)
    losses, found, kept = run(settings, "8bit", str(tmp_path))[0]
    assert losses == pytest.approx(reference, rel=apart)
    assert worst({name: value.detach() for name, value in weights.items()}, found) < apart
    assert kept < 1.15 * held / less
    again, later, _ = run(settings, "8bit", str(tmp_path))[0]
    assert again == losses[4:]
    assert_equal(later, found)
    if strategy != "ddp":
        others = run({"strategy": "ddp", **EIGHT}, "8bit", str(tmp_path))[0][1]
        assert worst(found, others) < apart


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_torchao_are_taken_as_they_are(ranks: Any, tmp_path: Path, kind: str) -> None:
    with engine(partial(eight.of_torchao, kind)) as one:
        reference = [one.step(batch).loss for batch in one.batches()]
    for options in ("zero=2", "zero=3"):
        path, settings = str(tmp_path / options), {"strategy": "sharded", "strategy_option": (options,)}
        losses, found, _ = ranks(2).run(_trained, settings, kind, path)[0]
        assert losses == pytest.approx(reference, rel=0.02)
        assert_equal(ranks(2).run(_trained, settings, kind, path)[0][1], found)


def _with_a_code_changed(on_replica_mismatch: str | None) -> int | str:
    with engine(check_replicas=2, on_replica_mismatch=on_replica_mismatch, **EIGHT) as each:
        try:
            for batch in each.batches():
                each.step(batch)
                if each.steps_done == each.total_steps:  # the state is compared at the end
                    learner = each.learner
                    state = learner.optimizer.state[learner.parameter("0.weight")]
                    codes = codes_of(local(state["exp_avg"]))["codes"]
                    codes[0, 0] += learner.session.rank
        except DivergenceError as error:
            return str(error)
        return int(codes[0, 0])


def test_replicas_with_other_codes_are_found_and_healed(ranks: Any) -> None:
    for words in ranks(2).run(_with_a_code_changed, None):
        assert "the optimizer's exp_avg of 0.weight, codes is one thing on rank 0, another on rank 1" in words
    first, second = ranks(2).run(_with_a_code_changed, "rank0")
    assert isinstance(first, int)
    assert first == second


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_it_is_the_same_training_where_blocks_are_the_same() -> None:
    """Pieces that are multiples of 256 numbers have the blocks of one device."""
    settings: dict[str, Any] = {"strategy": "sharded", "strategy_option": ("zero=2",), "steps": 4, **EIGHT}
    same = verify(eight.task, processes=2, device="cpu", **settings)
    assert same.passed
    assert same.dtype == "float32"


def _refused() -> str:
    with pytest.raises(ConfigurationError) as found:
        engine(strategy="sharded", dtype="float64", **EIGHT)
    return str(found.value)


def test_types_that_fsdp_cannot_mix_are_refused(ranks: Any) -> None:
    assert "say dtype float32 or precision bf16" in ranks(2).run(_refused)[0]
