from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener import checkpoint
from evener.errors import ConfigurationError, DataError

STATE: dict[str, Any] = {"model": {"w": torch.ones(2)}, "optimizer": {}, "progress": {"steps": 3}}


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


def test_tied_weights_count_under_each_name() -> None:
    tied, untied = (
        nn.ModuleList([nn.Linear(2, 2, bias=False)] * 2),
        nn.ModuleList([nn.Linear(2, 2, bias=False)]),
    )
    untied.append(nn.Linear(2, 2, bias=False))
    untied.load_state_dict(tied.state_dict())
    assert checkpoint.weights_digest(tied) == checkpoint.weights_digest(untied)


def test_a_state_is_found_by_run_directory_by_folder_and_by_file(tmp_path: Path) -> None:
    path = checkpoint.save(STATE, tmp_path / "checkpoints")
    for place in (tmp_path, tmp_path / "checkpoints", path):
        assert checkpoint.load(place)["model"]["w"].tolist() == [1, 1]


def test_a_save_that_fails_leaves_the_state_before(tmp_path: Path) -> None:
    checkpoint.save(STATE, tmp_path)
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save({**STATE, "progress": lambda: 3}, tmp_path)
    assert checkpoint.load(tmp_path)["progress"] == {"steps": 3}
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE_NAME]


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no checkpoint at .*there is no .*latest\.pt"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", None], ids=["empty", "text", "other"])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / checkpoint.FILE_NAME
    if content is None:
        torch.save({"model": {}}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"latest.pt (cannot be read as|is no) (a )?checkpoint"):
        checkpoint.load(tmp_path)


def test_a_checkpoint_cut_short(tmp_path: Path) -> None:
    path = checkpoint.save(STATE, tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        checkpoint.load(tmp_path)
