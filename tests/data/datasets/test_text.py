from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evener.data.datasets.text import CharacterText
from evener.data.loader import Loader
from evener.errors import ConfigurationError, DataError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 10, encoding="utf-8")
    return path


def test_windows_follow_each_other_and_predict_the_next_character(text: Path) -> None:
    data = CharacterText(text, 8, train=True)
    assert len(data) == 11
    assert data.vocabulary == "abcdefghij"
    tokens, following = data[1]
    assert data.decode(tokens) == "ijabcdef"
    assert data.decode(following) == "jabcdefg"
    assert tokens.dtype == torch.int64


def test_both_parts_share_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 90 + "é€" * 5, encoding="utf-8")
    train, test = CharacterText(path, 4, train=True), CharacterText(path, 4, train=False)
    assert train.vocabulary == test.vocabulary == "aé€"
    assert (len(train), len(test)) == (22, 2)
    assert test.decode(test[0][0]) == "é€é€"


def test_many_characters_still_fit(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 1000))), encoding="utf-8")
    data = CharacterText(path, 3, train=True)
    assert data[200][1].tolist() == [601, 602, 603]


def test_each_way_of_reading_gives_the_same(text: Path) -> None:
    data = CharacterText(text, 8, train=True)
    (part,) = next(Loader(data, None, batch_size=len(data))).micro_batches
    for index, (tokens, following) in enumerate(data.__getitems__(list(range(len(data))))):
        assert torch.equal(tokens, data[index][0])
        assert torch.equal(following, data[index][1])
        assert torch.equal(tokens, part.inputs[index])
        assert torch.equal(following, part.targets[index])


def test_iteration_ends(text: Path) -> None:
    data = CharacterText(text, 8, train=True)
    with pytest.raises(IndexError):
        data[len(data)]
    assert torch.equal(data[-1][0], data[len(data) - 1][0])


def test_files_that_cannot_work_say_why(tmp_path: Path, text: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        CharacterText(tmp_path / "none", 8, train=True)
    with pytest.raises(DataError, match="cannot be read: no regular file"):
        CharacterText("/proc/self/maps", 8, train=True)
    with pytest.raises(DataError, match="test part has 10 characters, but a window of 10 needs 11"):
        CharacterText(text, 10, train=False)
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match="is empty"):
        CharacterText(tmp_path / "empty", 8, train=True)
    (tmp_path / "binary").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match="is not UTF-8: byte 0xff at 3"):
        CharacterText(tmp_path / "binary", 8, train=True)


@pytest.mark.parametrize(("context", "fraction"), [(0, 0.9), (8, 0), (8, 1)])
def test_values_that_cannot_work_are_refused(text: Path, context: int, fraction: float) -> None:
    with pytest.raises(ConfigurationError):
        CharacterText(text, context, train=True, fraction=fraction)
