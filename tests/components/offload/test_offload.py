"""What is kept outside of a device's memory changes no number, under every strategy, and is told and estimated."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import evener
from evener.components.offload import activations as saved
from evener.components.offload import host_storage as outside
from evener.components.offload import optimizer as updates
from evener.core.config.offload import Offload
from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.errors import ConfigurationError, StorageError
from evener.strategies.memory_attribution import nbytes_of
from evener.strategies.sharded.sharded import Sharded
from evener.tools.estimate import estimate_memory
from evener.tools.estimate.measure import measure_memory
from evener.training.engine import Engine
from tests.components.offload.late import late
from tests.strategies.seven import step_by_hand
from tests.tiers import ALWAYS, NIGHTLY, SLOW, spread
from tests.training.test_activation_checkpoint_tuning import STAGES, expert_words, of_two, tower, words

BOTH = "optimizer,activations"


@contextmanager
def smaller(apart: bool = False) -> Iterator[None]:
    """What is small goes too, and updates have many portions; with ``apart`` as on a GPU, copies arriving late."""
    with (
        mock.patch.object(saved, "SMALLEST", 256),
        mock.patch.object(updates, "SMALLEST", 64),
        mock.patch.object(updates, "WINDOW", 2000),
        mock.patch.dict(outside.OUTSIDES, {"cpu": late} if apart else {}),
    ):
        yield


def trained(task: Any, offload: str | None, apart: bool = False, **settings: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"device": "cpu", "dtype": "float64", "steps": 4, "strategy": "single"}
    with smaller(apart), tempfile.TemporaryDirectory() as directory:
        to = directory if offload else None
        with Engine(task(), offload=offload, offload_to=to, **(usual | settings)) as engine:
            losses = [engine.step(batch).loss for batch in engine.batches()]
            state = engine.state_dict()
            return {
                "losses": losses,
                "tensors": {name: value.detach().clone() for name, value in engine.learner.tensors().items()},
                "optimizer": state["optimizer"]["state"],
                "peaks": engine.learner.offloaded.peaks,
                "state": state,
            }


def pair(task: Any, offload: str, apart: bool = False, **settings: Any) -> tuple[dict[str, int], float]:
    """What went outside, and how far apart a training is from one that keeps all: losses, weights and state."""
    kept, other = trained(task, None, **settings), trained(task, offload, apart, **settings)
    torch.testing.assert_close(other["losses"], kept["losses"], rtol=0, atol=0)
    torch.testing.assert_close(other["optimizer"], kept["optimizer"], rtol=0, atol=0)
    errors = [float((other["tensors"][name] - value).abs().max()) for name, value in kept["tensors"].items()]
    return other["peaks"], max(errors)


def assert_same(found: tuple[dict[str, int], float], offload: str = BOTH) -> None:
    peaks, error = found
    assert error == 0
    assert peaks.keys() == set(offload.split(","))
    assert all(peaks.values()), peaks


@pytest.mark.parametrize("apart", spread([False, True], NIGHTLY, ALWAYS), ids=["computed with", "apart"])
@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 17, "clip_norm": 0.1},
        pytest.param({"recompute": "blocks"}, marks=SLOW),
        pytest.param({"dtype": None, "precision": "fp16", "steps": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_it_is_the_same_training(settings: dict[str, Any], apart: bool) -> None:
    assert_same(pair(words if "recompute" in settings else tower, BOTH, apart, **settings))


def by_hand(offload: str | None) -> list[float]:
    with smaller(), tempfile.TemporaryDirectory() as directory:
        to = directory if offload else None
        settings: dict[str, Any] = {"device": "cpu", "strategy": "single", "steps": 4}
        with Engine(tower(), offload=offload, offload_to=to, **settings) as engine:
            losses = [step_by_hand(engine, batch) for batch in engine.batches()]
            assert all(engine.learner.offloaded.peaks.values())
        return losses


@pytest.mark.slow
def test_a_loop_by_hand_is_the_same_training() -> None:
    assert by_hand(BOTH) == by_hand(None)


def test_state_is_taken_up_and_given_whole() -> None:
    """From a run with offload to one without, and back."""
    half, whole = trained(tower, BOTH, steps=3)["state"], trained(tower, None)
    for offload in (BOTH, None):
        with smaller(), tempfile.TemporaryDirectory() as directory:
            to = directory if offload else None
            settings: dict[str, Any] = {"device": "cpu", "dtype": "float64", "strategy": "single", "steps": 4}
            with Engine(tower(), offload=offload, offload_to=to, **settings) as engine:
                engine.load_state_dict(half)
                if offload:
                    assert nbytes_of(engine.learner)["optimizer"] < 64 * 40
                assert [engine.step(batch).loss for batch in engine.batches()] == whole["losses"][3:]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    found = {}
    for offload in (None, BOTH):
        settings: dict[str, Any] = {"device": "cpu", "strategy": "single", "offload": offload, "epochs": 1}
        settings |= {"offload_to": tmp_path} if offload else {}
        with smaller(), Engine(tower(), **settings) as engine:
            for batch in engine.batches():
                engine.step(batch)
                if engine.steps_done == 2:
                    engine.save(tmp_path / str(offload))
            engine.finish_saving()
            found[offload] = engine.learner.tensors()
    for offload in (None, BOTH):
        to = {"offload": BOTH, "offload_to": tmp_path} if offload is None else {}
        with smaller(), Engine(tower(), device="cpu", strategy="single", epochs=1, **to) as engine:
            engine.load(tmp_path / str(offload))
            for batch in engine.batches():
                engine.step(batch)
            for name, value in engine.learner.tensors().items():
                assert torch.equal(value, found[None][name])
                assert torch.equal(value, found[BOTH][name])


def wide() -> Any:
    layers = lambda: nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 6))  # noqa: E731
    return tower(model=lambda: nn.Sequential(*(layers() for _ in range(3))))


def test_memory_that_runs_out_in_the_midst_gives_the_rooms_back() -> None:
    """A limit in the third step, under which the samples are taken in pieces."""
    limits: dict[str, Any] = {"micro_batch": "auto", "memory_limit_at": ("2:0:150KB",), "dtype": "float64"}
    kept, other = trained(wide, None), trained(wide, BOTH, **limits)
    torch.testing.assert_close(other["losses"], kept["losses"], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        of_two("uneven", "ddp", tower, tier=ALWAYS, balance="2,1", micro_batch=24),
        of_two("weights in parts", Sharded(zero=3)),
        of_two("gradients in parts", Sharded(zero=2, shard_sizes="2,1"), tower),
        of_two("optimizer in parts", Sharded(zero=1), tower, NIGHTLY),
        of_two("tensor", "tensor"),
        of_two("context", "context", tier=NIGHTLY),
        of_two("experts", "experts", expert_words, NIGHTLY),
        of_two("pipeline", "pipeline", tier=NIGHTLY, strategy_option=STAGES),
        of_two("in two parts", "pipeline", strategy_option=(*STAGES, "schedule=zero-bubble")),
        of_two("bf16", "ddp", dtype=None, precision="bf16"),
    ],
)
def test_it_is_the_same_training_on_ranks(ranks: Any, task: Any, settings: dict[str, Any]) -> None:
    for found in ranks(2).run(pair, task, BOTH, **settings):
        assert_same(found)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", Sharded(zero=3)], ids=str)
def test_it_is_the_same_training_on_ranks_with_memory_apart(ranks: Any, strategy: Any) -> None:
    for found in ranks(2).run(pair, words, BOTH, True, strategy=strategy):
        assert_same(found)


@pytest.mark.parametrize("compile", spread(["blocks", "whole"], SLOW, NIGHTLY))
def test_what_compiled_models_save_goes_outside(ranks: Any, compile: str) -> None:
    settings: dict[str, Any] = {"compile": compile, "compile_backend": "aot_eager", "steps": 3}
    for found in ranks(2).run(pair, words, BOTH, timeout=200, strategy="ddp", **settings):
        assert_same(found)


def test_a_disk_that_is_full_in_the_midst_of_a_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(outside, "_reserve", full)
    for offload in ("activations", "optimizer"):
        with pytest.raises(
            StorageError, match=r"offload: No space left on device: .* bytes in /.*; make room"
        ):
            trained(tower, offload)


# What is told


@pytest.mark.parametrize(
    ("offload", "apart"),
    [
        ("activations", True),
        *(
            pytest.param(*each, marks=SLOW)
            for each in (("activations", False), ("optimizer", True), ("optimizer", False))
        ),
    ],
)
def test_an_estimate_is_what_is_counted(offload: str, apart: bool, tmp_path: Path) -> None:
    config = RunConfig(device="cpu", strategy="single", processes=1, offload=offload, offload_to=tmp_path)
    made = outside.Outside(outside.Pretended(), outside.AtOnce(), apart)
    with smaller(apart), mock.patch.object(outside, "pretended", return_value=lambda device, asked: made):
        of_all = estimate_memory(words(), config)
        with Session(device="cpu", environment=Environment()) as session:
            found = measure_memory(words(), config, session)
        of_all_without = estimate_memory(words(), config.replace(offload=None, offload_to=None))
    estimate, without = of_all.ranks[0], of_all_without.ranks[0]
    assert estimate.peak == pytest.approx(found.peak, rel=0.03)
    assert estimate.between == pytest.approx(found.between, rel=0.03)
    assert found.peak < 0.95 * without.peak
    assert estimate.outside == found.outside > 0 == without.outside
    assert "outside of the device" in str(of_all)
    assert "outside of the device" not in str(of_all_without)
    assert not list(tmp_path.iterdir())


def test_a_gpu_is_estimated_without_one(tmp_path: Path) -> None:
    config = RunConfig(device="cuda", strategy="single", processes=1, offload=BOTH)
    with smaller():
        there = estimate_memory(words(), config).ranks[0]
        without = estimate_memory(words(), config.replace(offload=None)).ranks[0]
    assert there.at_peak["activations"] < 0.4 * without.at_peak["activations"]
    assert there.at_peak["optimizer"] < 0.6 * without.at_peak["optimizer"]
    assert there.between < without.between


def test_a_run_says_what_was_where(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"device": "cpu", "processes": 1, "steps": 2, "offload_to": tmp_path}
    summary = evener.fit("tests.components.offload.test_offload:tower", offload=BOTH, **settings).summary
    assert summary.offload.startswith(
        f"optimizer and activations kept in files in {tmp_path}: at most optimizer "
    )
    assert summary.offload.endswith("activations 0 B (nothing of 1 MiB or more was saved)")
    assert f"optimizer and activations kept in files in {tmp_path}\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload": "optimizer"}, "a rank on a CPU has everything in the memory of the host already"),
        ({"offload": "weights"}, "offload is 'weights'; it must be optimizer, activations, or both"),
        ({"offload_to": Path("x")}, "offload_to x would do nothing: say with offload what is kept there"),
        ({"offload_to": ""}, "offload_to is empty; leave it out, or name a directory"),
        (
            {"offload": "activations", "offload_to": Path(), "recompute": "60%"},
            "is a budget, for which each block's",
        ),
        (
            {"offload": "optimizer", "offload_to": Path(), "strategy": "data_parallel"},
            "one device for each rank",
        ),
        (
            {
                "offload": "activations",
                "offload_to": Path(),
                "compile": "auto",
                "compile_mode": "reduce-overhead",
            },
            "CUDA graphs, which know activations by their place",
        ),
    ],
)
def test_it_is_refused_with_the_way_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Engine(words(), **({"device": "cpu", "strategy": "single"} | settings))


def test_what_cannot_be_outside_is_found_before_ranks_are_started() -> None:
    with pytest.raises(ConfigurationError, match=r"^offload optimizer: a rank on a CPU has everything"):
        evener.fit("digits", offload="optimizer", device="cpu", processes=2)


def test_settings_are_read() -> None:
    both = Offload.from_settings(" activations, optimizer", Path("/there"))
    assert both.optimizer
    assert both.activations
    assert both.words == "optimizer,activations"
    assert not Offload.from_settings(None, None).kinds
