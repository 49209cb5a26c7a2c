"""A prepared loop goes on from a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import evener
from evener.errors import CheckpointError, ConfigurationError, DataError
from tests.tiers import ALWAYS, NIGHTLY, spread
from tests.training.prepare.running import Loop, Weights, prepared, rows, with_settings
from tests.training.reporting.test_run_dir import room


def halves(path: str, stop: int | None, resume: bool) -> tuple[Weights, list[float]]:
    """Three epochs, of which the first run takes ``stop`` steps, and the second the rest."""
    loop = Loop(True)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.7)
    parts = {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader, "scheduler": scheduler}
    told, steps = [], 0
    if resume:
        found = evener.load(path, **parts)
        # Before a pass begins, the place is the one that was loaded.
        evener.save(path, **parts, steps=found["steps"])
        evener.load(path, **parts)
        steps = found["steps"]
    while loop.loader.epoch < 3:
        for x, y in loop.loader:
            loop.optimizer.zero_grad()
            told.append(loop.backward(x, y).item() + evener.draw(torch.rand).sum().item() * 0)
            loop.optimizer.step()
            steps += 1
            if steps == stop:
                evener.save(path, **parts, steps=steps)
                return loop.weights(), told
        scheduler.step()
    return loop.weights(), told


def through_two_loaders(path: str, stop: int | None, resume: bool) -> Weights:
    """Both shuffled; ``stop`` and the rest as above."""
    loop = Loop(True, drop_last=True)
    others = evener.prepare(DataLoader(rows(20, 3), batch_size=6, shuffle=True, drop_last=True))
    parts = {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader, "others": others}
    steps = evener.load(path, **parts)["steps"] if resume else 0
    while steps < 7:
        for (x, y), (other, label) in zip(others, loop.loader, strict=False):
            loop.optimizer.zero_grad()
            (loop.loss(loop.model(x), y) + loop.loss(loop.model(other), label)).backward()
            loop.optimizer.step()
            steps += 1
            if steps == stop:
                evener.save(path, **parts, steps=steps)
                return loop.weights()
    return loop.weights()


def test_a_loop_through_two_loaders_goes_on_from_a_file(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "loop.pt")
    with with_settings():
        weights = through_two_loaders(path, None, False)
    ranks(2).run(prepared, lambda _: through_two_loaders(path, 5, False), balance="2,1")
    for found in ranks(3).run(prepared, lambda _: through_two_loaders(path, None, True), balance="1,1,2"):
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stop", spread([3, 5, 7], NIGHTLY, ALWAYS, ALWAYS))
def test_a_loop_goes_on_from_a_file_on_another_number_of_ranks(ranks: Any, tmp_path: Path, stop: int) -> None:
    path = str(tmp_path / "loop.pt")
    with with_settings():
        weights, told = halves(path, None, False)
    (_, first), _ = ranks(2).run(prepared, lambda _: halves(path, stop, False), balance="2,1")
    for found, rest in ranks(3).run(prepared, lambda _: halves(path, None, True), balance="1,0,2"):
        assert [*first, *rest] == pytest.approx(told, rel=1e-11)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def goes_on(path: str, samples: int = 26, **options: Any) -> int:
    """Saves after two batches of six of 26 samples. Returns the number of samples that another loader reads then."""
    loop = Loop(True)
    for batch, _ in enumerate(loop.loader):
        if batch == 1:
            evener.save(path, loader=loop.loader)
            break
    other = evener.prepare(DataLoader(rows(samples), **({"batch_size": 6, "shuffle": True} | options)))
    evener.load(path, loader=other)
    return sum(len(x) for x, _ in other)


@pytest.mark.parametrize("options", [{"samples": 50}, {"batch_size": 4}, {"shuffle": False}])
def test_in_the_middle_of_an_epoch_a_loader_goes_on_with_the_same_data_and_batches_alone(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with with_settings():
        assert goes_on(str(tmp_path / "loop.pt")) == 26 - 2 * 6
        with pytest.raises(ConfigurationError, match="samples would be repeated or lost"):
            goes_on(str(tmp_path / "loop.pt"), **options)


def test_files_that_cannot_be_read_or_written_are_told(tmp_path: Path) -> None:
    with with_settings():
        loop = Loop(True)
        evener.save(tmp_path / "good.pt", model=loop.model, best=0.5)
        assert evener.load(tmp_path / "good.pt", model=loop.model) == {"best": 0.5}
        with pytest.raises(ConfigurationError, match=r"has no 'optimizer'; it has model, best"):
            evener.load(tmp_path / "good.pt", optimizer=loop.optimizer)
        with pytest.raises(DataError, match=r"there is no file .*none.pt on rank 0"):
            evener.load(tmp_path / "none.pt")
        whole = (tmp_path / "good.pt").read_bytes()
        for number, wrong in enumerate((whole[: len(whole) // 2], b"", b"something else")):
            (tmp_path / "bad.pt").write_bytes(wrong)
            with pytest.raises(
                DataError, match=r"bad.pt cannot be read, it is damaged or no file of evener.save"
            ):
                evener.load(tmp_path / "bad.pt")
            assert number < 3
        os.mkfifo(tmp_path / "pipe.pt")
        with pytest.raises(DataError, match=r"pipe.pt cannot be read"):
            evener.load(tmp_path / "pipe.pt")
        torch.save({"model": 1}, tmp_path / "other.pt")
        with pytest.raises(DataError, match=r"other.pt was not written by evener.save"):
            evener.load(tmp_path / "other.pt")
        with pytest.raises(
            CheckpointError, match=r"could not be written on rank 0: .*; what was there before is"
        ):
            evener.save(tmp_path / "good.pt" / "inside", model=loop.model)
        smaller = nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match=r"model does not go on from .*good.pt: Error"):
            evener.load(tmp_path / "good.pt", model=smaller)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_single_bit_that_has_changed_in_a_weight_is_told(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        with with_settings():
            loop = Loop(True)
            evener.save(tmp_path / "good.pt", model=loop.model)
            evener.load(tmp_path / "good.pt", model=loop.model)
            content = bytearray((tmp_path / "good.pt").read_bytes())
            weight = next(loop.model.parameters()).detach().numpy().tobytes()
            content[content.index(weight)] ^= 1
            (tmp_path / "bad.pt").write_bytes(content)
            with pytest.raises(
                DataError, match=r"bad.pt is damaged: its part .*data/\d+ is not what was written"
            ):
                evener.load(tmp_path / "bad.pt", model=loop.model)
    finally:
        torch.serialization.set_crc32_options(True)


def test_a_full_disk_is_told_as_such_and_the_earlier_file_stays(tmp_path: Path) -> None:
    with with_settings():
        loop = Loop(True)
        evener.save(tmp_path / "good.pt", model=loop.model)
        before = (tmp_path / "good.pt").read_bytes()
        for nbytes in (0, 4096, len(before) - 1):
            with (
                room(nbytes),
                pytest.raises(CheckpointError, match=r"on rank 0: File too large.*raise the limit"),
            ):
                evener.save(tmp_path / "good.pt", model=loop.model)
        assert (tmp_path / "good.pt").read_bytes() == before


def test_files_of_another_form_are_told(tmp_path: Path) -> None:
    with with_settings():
        loop = Loop(True)
        evener.save(tmp_path / "good.pt", model=loop.model, best=0.5)
        good = torch.load(tmp_path / "good.pt", weights_only=True)
        short = good["random"][:-1]
        for name, wrong in (
            *(("states", wrong) for wrong in (3, {3: 4})),
            ("values", 3),
            *(("steps", wrong) for wrong in ("3", -1, None)),
            *(("random", wrong) for wrong in (3, [3], short, torch.ones(3))),
            *(("batches", wrong) for wrong in (3, {}, {"step": 1}, {"step": "1", "balancer": {}})),
        ):
            torch.save({**good, name: wrong}, tmp_path / "odd.pt")
            with pytest.raises(DataError, match=rf"odd.pt is damaged, .*: its {name} are of another form"):
                evener.load(tmp_path / "odd.pt", model=loop.model)
        torch.save({**good, "states": {"\x1b[2J": 1}}, tmp_path / "odd.pt")
        with pytest.raises(ConfigurationError, match=r"it has \\x1b\[2J, best") as caught:
            evener.load(tmp_path / "odd.pt", model=loop.model)
        assert "\x1b" not in str(caught.value)


def test_the_state_of_a_fused_optimizer_has_the_shapes_of_its_parameters(tmp_path: Path) -> None:
    """The kernel would write beyond the memory of a smaller one."""
    with with_settings():
        loop = Loop(True)
        optimizer = torch.optim.AdamW(loop.model.parameters(), fused=True)
        for each in loop.model.parameters():
            each.grad = torch.zeros_like(each)
        optimizer.step()
        evener.save(tmp_path / "good.pt", optimizer=optimizer)
        good = torch.load(tmp_path / "good.pt", weights_only=True)
        good["states"]["optimizer"]["state"][0]["exp_avg"] = torch.zeros(0)
        torch.save(good, tmp_path / "odd.pt")
        with pytest.raises(
            ConfigurationError, match=r"optimizer does not go on from .*exp_avg has the shape"
        ):
            evener.load(tmp_path / "odd.pt", optimizer=optimizer)
        assert not optimizer.state


@pytest.mark.parametrize(("before", "after"), [("Adam", "SGD"), ("SGD", "Adam"), ("RMSprop", "Adam")])
def test_the_file_of_an_optimizer_of_another_kind_is_refused(before: str, after: str, tmp_path: Path) -> None:
    with with_settings():
        loop = Loop(True)
        one, other = (getattr(torch.optim, name)(loop.model.parameters(), lr=0.1) for name in (before, after))
        for each in loop.model.parameters():
            each.grad = torch.zeros_like(each)
        one.step()
        evener.save(tmp_path / "file.pt", optimizer=one)
        with pytest.raises(
            ConfigurationError, match=f"of another kind, which has no .*, and this one is {after}:"
        ):
            evener.load(tmp_path / "file.pt", optimizer=other)
