"""Ranks that must hold the same are compared, told apart by name, and healed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evener.components.sharded_tensor.local import local
from evener.core.config.run_config import RunConfig
from evener.core.records import Note
from evener.errors import ConfigurationError, DivergenceError
from evener.strategies.ddp import Ddp, DdpSum
from evener.strategies.synchronizer import Synchronizer
from evener.training.consistency import replicas
from evener.training.consistency.replicas import (
    FIRST,
    ReplicaPart,
    digest,
    digests_of,
    majority,
    steps_between,
)
from evener.training.engine import Engine
from tests.breaking import brittle
from tests.observers import Remembering
from tests.tiers import ALWAYS, NIGHTLY, spread
from tests.training.test_consistency import EVERY, assert_same

# Digests


@given(
    st.integers(1, 300), st.integers(0, 299), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
)
def test_another_bit_is_another_digest(size: int, place: int, dtype: torch.dtype) -> None:
    numbers = torch.arange(size).to(dtype)
    other = numbers.clone()
    other.view(torch.uint8)[place % size] ^= 1
    assert int(digest(numbers)) != int(digest(other))
    assert 0 <= int(digest(numbers)) < 2**52
    assert int(digest(numbers)) == int(digest(numbers.clone()))


@pytest.mark.parametrize("size", [3, 128, 1000])
def test_a_digest_tells_order(size: int) -> None:
    numbers = torch.randn(size)
    assert int(digest(numbers)) != int(digest(numbers.flip(0)))


MATRIX, COMPLEX = torch.randn(5, 3), torch.randn(6, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("numbers", "others"),
    [
        (torch.zeros(()), torch.ones(())),
        (torch.zeros(0), torch.ones(1)),
        (MATRIX.t(), -MATRIX.t()),
        (COMPLEX, COMPLEX * 1j),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.arange(101.0)[1:], torch.arange(101.0)[:-1]),
        (torch.eye(4).to_sparse(), (2 * torch.eye(4)).to_sparse()),
    ],
    ids=range(7),
)
def test_any_tensor_has_one(numbers: Tensor, others: Tensor) -> None:
    assert int(digest(numbers)) == int(digest(numbers.clone())) != int(digest(others))


def test_a_digest_waits_for_a_copy_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the optimizer's state that is kept outside, which an update leaves under way."""
    room = torch.zeros(4)
    monkeypatch.setattr(replicas.accelerators, "synchronize", lambda device: room.fill_(1.0))
    found = digests_of([ReplicaPart("state", room, ())], torch.device("cpu"))
    assert found == {(): {"state": int(digest(torch.ones(4)))}}


def test_a_majority_is_more_than_half() -> None:
    assert majority([1.0, 2.0, 2.0]) == 1
    assert majority([1.0, 2.0]) is None
    assert majority([1.0, 1.0, 2.0, 2.0]) is None


def test_steps_between_keep_to_the_share() -> None:
    assert steps_between(digest_seconds=0.001, step_seconds=0.005) == 40
    assert steps_between(digest_seconds=0.0, step_seconds=1.0) == FIRST


# Ranks


def rank() -> int:
    return torch.distributed.get_rank()


def train(
    strategy: Any,
    settings: dict[str, Any],
    edit: int | None = None,
    state: bool = False,
    steps: int = 6,
    norm: bool = False,
    save: Path | None = None,
) -> tuple[str, list[Any], dict[str, Any] | None]:
    """What was said, told, and come to; ``edit`` names the rank on which a number is changed after step 2."""
    told = Remembering()
    usual = {"device": "cpu", "dtype": "float64", "steps": steps, "check_replicas": 1, "timeout_seconds": 20}
    engine = Engine(brittle(norm=norm), strategy=strategy, observers=[told], **(usual | settings))
    said, found = "", None
    with engine, torch.no_grad():
        try:
            for batch in engine.batches():
                with torch.enable_grad():
                    engine.step(batch)
                if engine.steps_done == 3 and edit == engine.session.rank:
                    held = [p for p in engine.learner.names if local(p).numel()]  # not all, in a pipeline
                    weight = next((p for p in held if engine.learner.names[p] == "inner.weight"), held[0])
                    chosen = engine.learner.optimizer.state[weight]["momentum_buffer"] if state else weight
                    local(chosen).data[0] += 1  # as memory at fault would: PyTorch does not count it
                if engine.steps_done == 4 and save is not None:
                    engine.save(save)
            found = engine.state_dict()
        except DivergenceError as error:
            said = str(error)
    return said, [event for kind, event in told.told if kind == "event"], found


@pytest.mark.parametrize(
    ("strategy", "settings"),
    spread(EVERY[:6], ALWAYS, NIGHTLY, NIGHTLY, ALWAYS, ALWAYS, ALWAYS),
    ids=str,
)
def test_what_a_strategy_keeps_equal_is(ranks: Any, strategy: str, settings: dict[str, Any]) -> None:
    for said, _, found in ranks(2).run(train, strategy, settings, norm=strategy != "tensor"):
        assert said == ""
        assert found is not None


MESHES = [
    ("sharded", {"mesh": "data=2,shard=2", "strategy_option": ("zero=1",)}),
    ("sharded", {"mesh": "data=2,shard=2", "strategy_option": ("zero=3",)}),
    ("ddp,tensor", {"mesh": "data=2,tensor=2"}),
    ("ddp,pipeline", {"mesh": "pipeline=2,data=2"}),
]


@pytest.mark.parametrize(("strategy", "settings"), spread(MESHES, NIGHTLY, ALWAYS, ALWAYS, ALWAYS), ids=str)
def test_over_a_mesh_those_are_compared_that_hold_the_same(
    ranks: Any, strategy: str, settings: dict[str, Any]
) -> None:
    for said, _, _ in ranks(4).run(train, strategy, settings):
        assert said == ""
    for said, _, _ in ranks(4).run(train, strategy, settings, edit=3):
        assert said.startswith("after step 3 ranks that must hold the same do not: ")
        assert "rank 3" in said or "ranks 1, 3" in said


def test_an_edited_weight_is_named_on_every_rank(ranks: Any) -> None:
    said = ranks(3).run(train, "ddp", {}, edit=1)
    for message, _, _ in said:
        assert message.startswith("after step 3 ranks that must hold the same do not: ")
        assert "is one thing on ranks 0, 2, another on rank 1." in message
        assert "last seen equal after 3 steps" in message


def test_what_the_optimizer_holds_is_compared_at_the_end(ranks: Any) -> None:
    settings = {"check_replicas": 100, "steps": 3}
    for said, _, _ in ranks(3).run(train, "ddp", settings, edit=2, state=True):
        assert "the optimizer's momentum_buffer of inner.weight" in said
        assert "on ranks 0, 1, another on rank 2" in said


def test_ranks_that_differ_are_not_saved(ranks: Any, tmp_path: Path) -> None:
    for said, _, _ in ranks(2).run(train, "ddp", {"check_replicas": 100}, edit=1, save=tmp_path):
        assert said.startswith("after step 3 ")
    assert not list(tmp_path.iterdir())


def edited_after_going_back(every: int, directory: Path) -> str:
    with Engine(brittle(), device="cpu", strategy="ddp", check_replicas=every, steps=6) as engine:
        for batch in engine.batches():
            engine.step(batch)
            if engine.steps_done in (1, 4):
                engine.save(directory)
            if engine.steps_done == 4:
                break
        engine.load(directory / "step-00000001")
        for batch in engine.batches():
            if engine.steps_done == 2 and rank() == 1:
                next(iter(engine.learner.names)).data[0] += 1
            try:
                engine.step(batch)
                if every == 100 and engine.steps_done == 3:
                    engine.save(directory / "after")
            except DivergenceError as error:
                return str(error)
        return "nothing was said"


@pytest.mark.parametrize("every", [1, 100])
def test_a_run_that_went_back_is_compared_as_before(ranks: Any, tmp_path: Path, every: int) -> None:
    for said in ranks(2).run(edited_after_going_back, every, tmp_path):
        assert said.startswith("after step 2 ranks that must hold the same do not: ")
    assert not (tmp_path / "after").exists()


def test_nobody_compares_where_it_is_switched_off(ranks: Any) -> None:
    for said, _, _ in ranks(2).run(train, "ddp", {"check_replicas": 0}, edit=1):
        assert said == ""


def test_without_a_word_they_are_compared_at_the_end(ranks: Any) -> None:
    for said, _, _ in ranks(2).run(train, "ddp", {"check_replicas": None}, edit=1):
        assert said.startswith("after step 5 ")


@pytest.mark.parametrize(
    ("on_replica_mismatch", "edit"),
    spread([("majority", 0), ("majority", 2), ("rank0", 1)], ALWAYS, NIGHTLY, ALWAYS),
)
def test_a_rank_that_went_astray_is_healed(ranks: Any, on_replica_mismatch: str, edit: int) -> None:
    """The others take no step with it: it is found before the next."""
    undisturbed = ranks(3).run(train, "ddp", {})[0][2]
    for said, events, found in ranks(3).run(edited_and_healed, on_replica_mismatch, edit):
        assert said == ""
        (note,) = events
        assert isinstance(note, Note)
        assert (
            "replicas differed after step 2 and were healed: inner.weight is one thing on rank" in note.words
        )
        assert_same(found, undisturbed)


def edited_and_healed(on_replica_mismatch: str, edit: int) -> Any:
    """The weight changes within the third step, behind the optimizer's back."""

    class Slip(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.steps += 1
            if self.steps == 3 and rank() == edit:
                with torch.no_grad():
                    self.param_groups[0]["params"][2].add_(1)

    told = Remembering()
    task = brittle(optimizer=lambda p: Slip(p, lr=0.1, momentum=0.9))
    settings: dict[str, Any] = {"steps": 6, "check_replicas": 1, "on_replica_mismatch": on_replica_mismatch}
    with Engine(task, device="cpu", dtype="float64", strategy="ddp", observers=[told], **settings) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return "", [event for kind, event in told.told if kind == "event"], engine.state_dict()


def test_two_have_no_majority(ranks: Any) -> None:
    def refused(on_replica_mismatch: str, strategy: Any = "ddp") -> str:
        try:
            with Engine(brittle(), device="cpu", strategy=strategy, on_replica_mismatch=on_replica_mismatch):
                return "nothing was said"
        except ConfigurationError as error:
            return str(error)

    for message in ranks(2).run(refused, "majority"):
        assert message.startswith("on_replica_mismatch=majority would do nothing: it takes 3 ranks")
    assert ranks(2).run(refused, "rank0") == ["nothing was said"] * 2
    for message in ranks(2).run(refused, "rank0", Apart()):
        assert "lets the ranks differ between steps" in message


class Apart(Ddp):
    def synchronizer(self, learner: Any) -> Synchronizer:
        found = DdpSum(learner, learner.mesh.group("data"))
        found.keeps_equal = False
        return found


def test_ranks_that_may_differ_are_not_compared(ranks: Any) -> None:
    for said, _, _ in ranks(2).run(train, Apart(), {"check_replicas": None}, edit=1):
        assert said == ""


def test_a_remedy_without_a_comparison_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="would do nothing"):
        RunConfig(on_replica_mismatch="rank0", check_replicas=0)


def test_a_run_of_buffers_that_differ_is_stopped(ranks: Any) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.data[rank()] += 1  # unseen by what shares buffers that were written to
            scores: Tensor = self.layer(x.clamp(max=1))
            return scores

    def said() -> str:
        try:
            with Engine(brittle(model=Counts), device="cpu", strategy="ddp", steps=2) as engine:
                for batch in engine.batches():
                    engine.step(batch)
        except DivergenceError as error:
            return str(error)
        return ""

    for message in ranks(2).run(said):
        assert "seen is one thing on rank 0, another on rank 1" in message
