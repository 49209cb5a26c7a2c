"""Plain weights: what a run leaves loads in PyTorch alone, and what is given begins a run under any strategy."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from evener.checkpoint.weights_file import export, fill, read_weights
from evener.errors import ConfigurationError, DataError, StorageError
from tests import tasks
from tests.checkpoint.test_checkpoint import Odd, trained
from tests.engines import assert_same, engine_of

# torch 2.15 says that it looks through a sparse tensor.
pytestmark = pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")


def saved(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.learner.tensors().items()}


@pytest.mark.parametrize("name", ["plain", "tokens", "batch_norm"])
def test_the_weights_of_a_run_load_in_pytorch_alone(tmp_path: Path, name: str) -> None:
    """Tied weights and buffers among them."""
    whole = trained(tmp_path / "checkpoints", name, 3)
    path = export(tmp_path)
    assert path == tmp_path / "step-00000003.safetensors"
    model = getattr(tasks, name)().model().double()
    model.load_state_dict(load_file(path))
    assert_same({key: whole[key] for key in model.state_dict()}, model.state_dict(), 0.0)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "steps": "3"}
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_slices_of_several_ranks_become_whole_tensors(ranks: Any, tmp_path: Path) -> None:
    (whole, _) = ranks(2).run(trained, tmp_path / "checkpoints", "penalty", 3, strategy="dimension")
    assert_same(load_file(export(tmp_path)), whole, 0.0)


def test_a_checkpoint_may_be_named_and_a_file_is_not_lost(tmp_path: Path) -> None:
    trained(tmp_path / "checkpoints", "plain", 2)
    to = tmp_path / "deep" / "weights.safetensors"
    assert export(tmp_path / "checkpoints" / "step-00000002", to) == to
    before = to.read_bytes()
    with pytest.raises(ConfigurationError, match=r"is there already.*--overwrite"):
        export(tmp_path, to)
    to.write_bytes(b"")
    assert export(tmp_path, to, overwrite=True).read_bytes() == before
    with pytest.raises(ConfigurationError, match="no checkpoint at"):
        export(tmp_path / "nowhere")


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    trained(tmp_path / "checkpoints", "with_sparse", 1)
    with pytest.raises(DataError, match=r"holds more of the model .*graph \(1 in all\) .*dcp_to_torch_save"):
        export(tmp_path)


def test_a_place_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    trained(tmp_path / "checkpoints", "plain", 1)
    with pytest.raises(StorageError, match=r"the weights cannot be written to /proc/none/w: .*directory"):
        export(tmp_path, Path("/proc/none/w"))


def begun(path: str, name: str, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    with engine_of(name, weights=path, **settings) as engine:
        return saved(engine)


@pytest.mark.parametrize(
    ("size", "name", "settings"),
    [
        (1, "plain", {}),
        (1, "plain", {"strategy": "layers", "devices": "cpu:0,cpu:1"}),
        (1, "plain", {"strategy": "data_parallel", "devices": "cpu:0,cpu:1"}),
        (2, "batch_norm", {"strategy": "ddp"}),
        (2, "batch_norm", {"strategy": "sharded"}),
        (2, "plain", {"strategy": "sharded", "strategy_option": ("zero=2",)}),
        (2, "plain", {"strategy": "tensor"}),
        (2, "plain", {"strategy": "pipeline"}),
        (3, "plain", {"strategy": "dimension"}),
    ],
    ids=str,
)
def test_a_run_begins_with_given_weights(
    ranks: Any, tmp_path: Path, size: int, name: str, settings: dict[str, Any]
) -> None:
    torch.manual_seed(99)
    model = getattr(tasks, name)().model().double()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    for found in ranks(size).run(begun, str(tmp_path / "w.safetensors"), name, settings):
        assert_same(model.state_dict(), {key: found[key] for key in model.state_dict()}, 0.0)


@pytest.mark.parametrize("form", ["safetensors", "state_dict", "wrapped"])
def test_forms_of_a_file(tmp_path: Path, form: str) -> None:
    """From another type, under DDP's names, of tied weights one name."""
    torch.manual_seed(99)
    source, target = tasks.tokens().model(), tasks.tokens().model().double()
    tied = dict(source.state_dict().items())
    first = {id(value): name for name, value in reversed(source.state_dict(keep_vars=True).items())}
    once = {name: tied[name] for name in first.values()}
    assert len(once) < len(tied)
    path = tmp_path / "weights.any"
    if form == "safetensors":
        save_file(once, path)
    else:
        begin = "module._orig_mod." if form == "wrapped" else ""
        torch.save({begin + name: value for name, value in tied.items()}, path)
    fill(target, read_weights(path), "the file")
    assert_same({name: value.double() for name, value in tied.items()}, target.state_dict(), 0.0)


class Inner(nn.Module):
    """A model whose weights all have names that begin as those in DDP do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)


@pytest.mark.parametrize("begin", ["", "module.", "_orig_mod.module."])
def test_a_part_of_the_model_s_that_is_called_module_is_none_of_ddp_s(begin: str) -> None:
    source, target = Inner(), Inner()
    fill(target, {begin + name: value for name, value in source.state_dict().items()}, "the file")
    assert_same(source.state_dict(), target.state_dict(), 0.0)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"0.weight": Evil()}, "zip.pt")
    Path("raw.pt").write_bytes(pickle.dumps({"0.weight": Evil()}))
    for name in ("zip.pt", "raw.pt"):
        with pytest.raises(DataError, match=r"refused.*could run any program"):
            read_weights(Path(name))
    assert not Path("harmed").exists()


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, ConfigurationError, "there are no weights at"),
        (b"nonsense", DataError, "is refused"),
        (b"", DataError, "is refused"),
        (b"\x08\0\0\0\0\0\0\0{broken}", DataError, "cannot be read as safetensors"),
        ({"model": {"0.weight": torch.zeros(1)}}, DataError, "a dict under 'model'"),
        ([torch.zeros(1)], DataError, "holds a list"),
        ({3: torch.zeros(1)}, DataError, "an? int for a name"),
        (
            {"0.weight": torch.eye(2).to_sparse()},
            DataError,
            "a tensor without plain numbers under '0.weight'",
        ),
        ({"0.weight": torch.ones(2, device="meta")}, DataError, "a tensor without plain numbers"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, content: Any, error: type[Exception], words: str) -> None:
    path = tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(error, match=words):
        read_weights(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"2.weight": torch.zeros(3)}, "of another model: they lack nothing and have 2.weight more"),
        ({"0.bias": None}, "they lack 0.bias and have nothing more"),
        ({"0.weight": torch.zeros(3, 4)}, r"0.weight has the shape \(3, 4\) there and \(3, 2\) here"),
        ({"0.bias": torch.zeros(3, dtype=torch.int64)}, "0.bias is of torch.int64 there and torch.float32"),
        ({"0.bias": torch.tensor([1.0, float("inf"), 2.0])}, "not finite: 0.bias has 1 such values of 3"),
        ({"1.running_var": torch.full((3,), float("nan"))}, "not finite: 1.running_var"),
    ],
)
def test_weights_of_another_model_change_nothing(change: dict[str, Any], words: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict() | change
    given = {name: value for name, value in other.items() if value is not None}
    with pytest.raises((ConfigurationError, DataError), match=words):
        fill(model, given, "the file")
    assert_same(before, model.state_dict(), 0.0)


def test_a_mask_of_infinities_may_be_a_buffer() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(2))
    fill(model, model.state_dict() | {"mask": torch.tensor([0.0, float("-inf")])}, "the file")
    assert model.mask.tolist() == [0.0, float("-inf")]


def test_odd_types_and_empty_tensors_go_out_and_in(tmp_path: Path) -> None:
    from evener.checkpoint.weights_file import _bytes, _header  # the form alone: no run has such a model

    class Entry:
        def __init__(self, value: torch.Tensor) -> None:
            self.size, self.properties = value.size(), value

    state = Odd().state_dict() | {"c": torch.tensor([1 + 2j])}
    content = _header({name: Entry(value) for name, value in state.items()}, {"format": "pt"})  # type: ignore[misc]
    (tmp_path / "odd").write_bytes(content + b"".join(bytes(_bytes(value)) for value in state.values()))
    found = read_weights(tmp_path / "odd")
    assert dict(found).keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_weights_and_a_checkpoint_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        engine_of("plain", weights="a", resume="b")
