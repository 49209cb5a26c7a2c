from __future__ import annotations

import copy
import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener import checkpoint
from evener.checkpoint import writer as saving
from evener.checkpoint.run_mark import Identity, write_mark
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError, DataError
from evener.training.engine import Engine
from tests import tasks
from tests.tiers import ALWAYS, NIGHTLY, SLOW, crossed, spread


class Odd(nn.Module):
    """Parameters and buffers of unusual kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.a = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("unsaved", torch.arange(3), persistent=False)
        self.register_buffer("empty", torch.empty(0))


def test_the_digest_is_what_its_definition_says() -> None:
    model = Odd()
    words = hashlib.sha256()
    for name, values in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        words.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        raw = values.detach().reshape(-1)
        words.update((raw.view(torch.int16) if raw.dtype == torch.bfloat16 else raw).numpy().tobytes())
    assert checkpoint.weights_digest(model) == words.hexdigest()


def test_the_digest_sees_every_bit_and_no_layout() -> None:
    model, first = Odd(), checkpoint.weights_digest(Odd())
    with torch.no_grad():
        model.b.data = model.b.detach().t().contiguous().t()
        assert checkpoint.weights_digest(model) == first
        model.unsaved[1] += 1
        assert checkpoint.weights_digest(model) != first
        model.unsaved[1] -= 1
        model.b[0, 0] = -0.0
        assert checkpoint.weights_digest(model) != first


def test_the_thread_of_a_save_has_the_device_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's writer asks for the current one, and a thread begins with the first: ranks would take memory there."""
    taken: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        saving.accelerators,
        "set_current",
        lambda device: taken.append((threading.current_thread().name, device)),
    )
    with Engine(tasks.plain(), RunConfig(device="cpu", strategy="single", steps=1)) as engine:
        engine.save(tmp_path, wait=False)
        engine.finish_saving()
    assert taken == [("evener-checkpoint", torch.device("cpu"))]


def test_tied_weights_count_under_each_name() -> None:
    tied, untied = (
        nn.ModuleList([nn.Linear(2, 2, bias=False)] * 2),
        nn.ModuleList([nn.Linear(2, 2, bias=False)]),
    )
    untied.append(nn.Linear(2, 2, bias=False))
    untied.load_state_dict(tied.state_dict())
    assert checkpoint.weights_digest(tied) == checkpoint.weights_digest(untied)


class WithSparse(nn.Module):
    """A buffer that is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        places = torch.tensor([[0, 1, 2], [2, 0, 1]])
        graph = torch.sparse_coo_tensor(places, torch.ones(3), (3, 3), check_invariants=False)
        self.register_buffer("graph", graph)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.graph, self.linear(x).t()).t()


def test_the_digest_takes_sparse_tensors() -> None:
    first, second = WithSparse(), WithSparse()
    second.load_state_dict(first.state_dict())
    assert checkpoint.weights_digest(first) == checkpoint.weights_digest(second)
    second.graph = second.graph * 2
    assert checkpoint.weights_digest(first) != checkpoint.weights_digest(second)


def trained(path: Path | None, name: str, steps: int, **settings: Any) -> dict[str, torch.Tensor]:
    """Goes on from ``path`` if there is a checkpoint, up to ``steps``, and saves there."""
    task = tasks._task(model=WithSparse) if name == "with_sparse" else getattr(tasks, name)()
    config = RunConfig(**({"dtype": "float64", "device": "cpu", "epochs": 9} | settings), steps=steps)
    with Engine(task, config) as engine:
        if path is not None and (path / checkpoint.LATEST).exists():
            engine.load(path)
        for batch in engine.batches():
            engine.step(batch)
        if path is not None:
            engine.save(path)
        return {key: value.to_dense().clone() for key, value in engine.learner.tensors().items()}


KINDS = ("tokens", "branches", "batch_norm", "with_sparse", "penalty")


@pytest.mark.parametrize(
    ("name", "moves"), crossed(KINDS, [(1, 2), (2, 1), (3, 2)], lambda kind: (ALWAYS, NIGHTLY, NIGHTLY))
)
def test_a_checkpoint_is_gone_on_from_on_other_ranks(
    ranks: Any, tmp_path: Path, name: str, moves: tuple[int, int]
) -> None:
    """Tied weights, parameters that are never used, buffers, sparse ones, a scheduler."""
    path, (before, after) = tmp_path / "checkpoints", moves
    ranks(before).run(trained, path, name, 5)
    whole = trained(None, name, 9)
    for weights in ranks(after).run(trained, path, name, 9):
        assert weights.keys() == whole.keys()
        for key, value in whole.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("before", "after"), spread([(3, 2), (2, 1), (1, 3)], ALWAYS, NIGHTLY, NIGHTLY))
def test_slices_are_written_by_who_holds_them_and_read_by_who_needs_them(
    ranks: Any, tmp_path: Path, before: int, after: int
) -> None:
    path = tmp_path / "checkpoints"
    ranks(before).run(trained, path, "penalty", 4, strategy="dimension")
    whole = trained(None, "penalty", 7)
    for weights in ranks(after).run(trained, path, "penalty", 7, strategy="dimension"):
        for key, value in whole.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-11, atol=1e-12)


def test_a_checkpoint_is_found_by_run_directory_by_folder_and_by_name(tmp_path: Path) -> None:
    trained(tmp_path / "checkpoints", "plain", 3)
    named = tmp_path / "checkpoints" / "step-00000003"
    for place in (tmp_path, tmp_path / "checkpoints", named):
        assert checkpoint.find(place).path == named
    trained(tmp_path / "checkpoints", "plain", 5)
    trained(tmp_path / "checkpoints", "plain", 6)
    kept = ["latest", "step-00000005", "step-00000006"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept


def test_a_save_that_is_killed_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, "plain", 3)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saving.state_dict_saver, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, "plain", 5)
    assert checkpoint.find(tmp_path).rest["progress"]["steps"] == 3


@pytest.mark.parametrize("keep", [0, -1])
def test_a_save_that_would_keep_nothing_is_refused(tmp_path: Path, keep: int) -> None:
    with Engine(tasks.plain(), device="cpu") as engine:
        saved = engine.save(tmp_path)
        with pytest.raises(ConfigurationError, match="keep"):
            engine.save(tmp_path, keep=keep)
    assert saved.is_dir()


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no checkpoint at .*there is no .*latest"):
        checkpoint.find(tmp_path)


def test_a_run_that_saved_nothing_is_to_begin_anew(tmp_path: Path) -> None:
    write_mark(tmp_path, Identity().as_plain())
    with pytest.raises(
        ConfigurationError, match="ended before it saved one: begin it anew, without --resume"
    ):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", None, 99], ids=str)
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: Any) -> None:
    trained(tmp_path, "plain", 1)
    path = tmp_path / "step-00000001" / "rest.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        rest = torch.load(path)
        torch.save({**rest, "format": content} if content else {"model": {}}, path)
    words = (
        r"cannot be read as a checkpoint|is no checkpoint|in format 99, this version of Evener reads format 2"
    )
    with pytest.raises(DataError, match=words):
        checkpoint.find(tmp_path)


def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trained(tmp_path, "plain", 2)
    adam = tasks._task(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    wide = tasks._task(model=lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)))
    longer = tasks._task(train=torch.utils.data.TensorDataset(torch.zeros(99, 6), torch.zeros(99).long()))
    for task, words in (
        (adam, "of a SGD, the task's optimizer is a Adam"),
        (wide, r"0.weight has the shape \(8, 6\) there and \(9, 6\) here"),
        (tasks.batch_norm(), "of another model: it lacks"),
        (longer, "a training set of 47 samples, this one has 99"),
    ):
        with Engine(task, device="cpu", dtype="float64", batch_size=13) as engine:
            before = checkpoint.weights_digest(engine.model)
            with pytest.raises(ConfigurationError, match=words):
                engine.load(tmp_path)
            assert checkpoint.weights_digest(engine.model) == before


def test_a_state_may_be_used_twice() -> None:
    """What is taken up stays the giver's, and what is given is no window on the training."""
    task = tasks._task(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))

    def go_on(state: dict[str, Any] | None) -> dict[str, Any]:
        with Engine(task, device="cpu", steps=6) as engine:
            if state is not None:
                engine.load_state_dict(state)
            for batch in engine.batches():
                engine.step(batch)
                if state is None and engine.steps_done == 3:
                    kept = engine.state_dict()
            return kept if state is None else engine.state_dict()

    state = go_on(None)
    before = copy.deepcopy(state)
    first, second = go_on(state), go_on(state)
    for found, wanted in ((first, second), (state, before)):
        for name, entries in wanted["optimizer"]["state"].items():
            assert all(
                torch.equal(found["optimizer"]["state"][name][key], value) for key, value in entries.items()
            )
        assert all(torch.equal(found["model"][name], value) for name, value in wanted["model"].items())


def test_a_state_before_the_first_step_is_one_before_the_first_step() -> None:
    """Adam counts its steps, and an empty state must stay one."""
    task = tasks._task(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    with Engine(task, device="cpu", steps=2) as engine:
        state = engine.state_dict()
        assert state["optimizer"]["state"] == {}
        for batch in engine.batches():
            engine.step(batch)
        steps = {float(entries["step"]) for entries in engine.state_dict()["optimizer"]["state"].values()}
    assert steps == {2.0}


def test_names_are_those_of_the_plain_model() -> None:
    def compiled() -> nn.Module:
        return torch.compile(tasks.plain().model(), backend="eager")  # type: ignore[return-value]

    with Engine(tasks._task(model=compiled), device="cpu", steps=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
        state = engine.state_dict()
    assert set(state["model"]) == set(tasks.plain().model().state_dict())
    assert set(state["optimizer"]["state"]) == set(state["model"])
    with Engine(tasks.plain(), device="cpu", steps=2) as engine:
        engine.load_state_dict(state)


def test_a_state_is_taken_up_by_name_and_not_by_place() -> None:
    """The same groups, with their parameters in another order."""

    def task(backwards: bool) -> Any:
        def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            chosen = parameters[::-1] if backwards else parameters
            return torch.optim.Adam(chosen, lr=0.1)

        return tasks._task(optimizer=optimizer)

    def steps(backwards: bool, until: int, state: dict[str, Any] | None = None) -> dict[str, Any]:
        with Engine(task(backwards), device="cpu", dtype="float64", steps=until) as engine:
            if state is not None:
                engine.load_state_dict(state)
            for batch in engine.batches():
                engine.step(batch)
            return engine.state_dict()

    whole = steps(False, 6)
    gone_on = steps(True, 6, steps(False, 3))
    for name, value in whole["model"].items():
        torch.testing.assert_close(gone_on["model"][name], value, rtol=0, atol=0)
    for name, entries in whole["optimizer"]["state"].items():
        assert torch.equal(gone_on["optimizer"]["state"][name]["exp_avg"], entries["exp_avg"])


PLACES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (2, {"balance": "3,1"}),
    (3, {}),
    (2, {"strategy": "sharded"}),
    (3, {"strategy": "sharded", "strategy_option": ("zero=2",)}),
    (2, {"strategy": "dimension"}),
    (2, {"strategy": "tensor"}),
    (2, {"strategy": "pipeline"}),
)


@pytest.mark.parametrize(
    ("after", "how"), spread(PLACES, NIGHTLY, SLOW, NIGHTLY, NIGHTLY, ALWAYS, SLOW, NIGHTLY, NIGHTLY), ids=str
)
def test_fifty_steps_later_elsewhere_it_is_still_the_same_training(
    ranks: Any, tmp_path: Path, after: int, how: dict[str, Any]
) -> None:
    """Saved on four ranks in mid-epoch."""
    ranks(4).run(trained, tmp_path, "penalty", 10, epochs=99)
    whole = trained(None, "penalty", 60, epochs=99)
    for weights in ranks(after).run(trained, tmp_path, "penalty", 60, epochs=99, **how):
        for key, value in whole.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-12, atol=1e-13)
