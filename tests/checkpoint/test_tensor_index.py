"""Checkpoints of a stranger: what they say of their tensors runs nothing, and files have to bear it out."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from evener import checkpoint
from evener.checkpoint import tensor_index
from evener.checkpoint.randomness import draw_on
from evener.checkpoint.sums import SUMS, sum_of
from evener.checkpoint.tensor_index import INDEX, PICKLE
from evener.config import RunConfig
from evener.engine import Engine
from evener.errors import DataError, EvenerError
from evener.weights import export, filler
from tests import tasks

READER = b"ctorch.distributed.checkpoint.filesystem\nFileSystemReader\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("written")
    with Engine(tasks.plain(), device="cpu", dtype="float64", steps=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
        engine.save(place)
    return place / "step-00000001"


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "checkpoints" / "step-00000001")


def summed(place: Path) -> None:
    """Who can write the files can write their checksums."""
    names = [path.name for path in place.iterdir() if path.name != SUMS and path.is_file()]
    (place / SUMS).write_text(json.dumps({name: sum_of(place / name) for name in names}))


def old(place: Path) -> Path:
    """As before there was an index in JSON."""
    (place / INDEX).unlink()
    summed(place)
    return place


def test_the_index_says_what_pytorchs_own_says(place: Path) -> None:
    ours, theirs = tensor_index.index_in(place), FileSystemReader(place).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for key, info in theirs.storage_data.items():
        found = ours.storage_data[key]
        assert (found.relative_path, found.offset, found.length) == (
            info.relative_path,
            info.offset,
            info.length,
        )


def test_a_checkpoint_of_before_is_read_from_its_pickle(place: Path) -> None:
    new = tensor_index.index_in(place)
    before = tensor_index.index_in(old(place))
    assert before.state_dict_metadata == new.state_dict_metadata
    assert before.storage_data == new.storage_data
    assert export(place).is_file()


def test_pytorchs_pickle_is_not_needed_to_go_on(place: Path) -> None:
    (place / PICKLE).unlink()
    summed(place)
    with Engine(tasks.plain(), device="cpu", dtype="float64", steps=2) as engine:
        engine.load(place)
        assert engine.progress.steps == 1


def code(path: Path) -> bytes:
    """Opcodes that make a directory, by which it is seen that they ran."""
    text = str(path).encode()
    return b"cos\nmkdir\nX" + len(text).to_bytes(4, "little") + text + b"\x85R"


CLASS_IS_CHANGED = READER + b"N}X\x06\x00\x00\x00markedK\x01s\x86b"
ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "BUILD on the class FileSystemReader": lambda ran: CLASS_IS_CHANGED,
    "BUILD on the class Metadata": lambda ran: CLASS_IS_CHANGED.replace(b"filesystem", b"metadata").replace(
        b"FileSystemReader", b"Metadata"
    ),
    "BUILD of a method of the class FileSystem": lambda ran: (
        READER.replace(b"FileSystemReader", b"FileSystem")
        + b"N}X\x0b\x00\x00\x00concat_pathcpathlib\nPosixPath\ns\x86b"
    ),
    "a name that runs": code,
    "a name within a name": lambda ran: b"\x8c\x05torch\x8c\x09os.system\x93",
    "the class of an allowed module's import": lambda ran: (
        b"ctorch.distributed.checkpoint.filesystem\nos.system\n"
    ),
    "a builtin": lambda ran: b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R",
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("door", ["find", "export", "load", "weights"])
def test_a_pickle_that_would_run_code_is_refused_at_every_door(
    place: Path, tmp_path: Path, attack: str, door: str
) -> None:
    """The attack leaves a value on the stack, and lets the description that is expected be read after all."""
    content, ran = (place / PICKLE).read_bytes(), tmp_path / "ran"
    (place / PICKLE).write_bytes(b"\x80\x04" + ATTACKS[attack](ran) + content[2:])
    old(place)
    before = dict(vars(FileSystemReader)), dict(vars(FileSystem)), dict(vars(Metadata))
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        entered(door, place)
    assert (dict(vars(FileSystemReader)), dict(vars(FileSystem)), dict(vars(Metadata))) == before
    assert not ran.exists()


def entered(door: str, place: Path) -> None:
    if door == "find":
        checkpoint.find(place)
    elif door == "export":
        export(place)
    elif door == "weights":
        filler(RunConfig(weights=place))(torch.nn.Linear(1, 1))
    else:
        with Engine(tasks.plain(), device="cpu", dtype="float64", steps=2) as engine:
            engine.load(place)


def test_the_pickle_beside_the_index_is_never_read(place: Path, tmp_path: Path) -> None:
    (place / PICKLE).write_bytes(b"\x80\x04" + code(tmp_path / "ran") + b".")
    summed(place)
    export(place)
    assert not (tmp_path / "ran").exists()


# An index that lies


def piece(rows: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(rows.values()))["pieces"][0]
    return found


def shape(rows: dict[str, Any], size: list[Any]) -> None:
    row = next(iter(rows.values()))
    row["size"], row["pieces"][0]["sizes"] = size, size
    row["pieces"][0]["offsets"] = [0] * len(size)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file of another directory": lambda rows: piece(rows).update(file="../../../etc/passwd"),
    "a file of the system": lambda rows: piece(rows).update(file="/dev/zero"),
    "a file that is not there": lambda rows: piece(rows).update(file="__7_0.distcp"),
    "a pipe": lambda rows: piece(rows).update(file="__8_0.distcp"),
    "a link to a device": lambda rows: piece(rows).update(file="__9_0.distcp"),
    "bytes behind the end": lambda rows: piece(rows).update(start=1 << 40),
    "bytes before the beginning": lambda rows: piece(rows).update(start=-5),
    "more numbers than bytes": lambda rows: shape(rows, [1 << 30]),
    "more numbers than there can be": lambda rows: shape(rows, [1 << 40, 1 << 40]),
    "a negative size": lambda rows: shape(rows, [-1]),
    "a size that is no number": lambda rows: shape(rows, ["4"]),
    "many dimensions": lambda rows: shape(rows, [1] * 1000),
    "a hole": lambda rows: next(iter(rows.values()))["pieces"].clear(),
    "a piece that lies outside": lambda rows: piece(rows).update(offsets=[1000] * len(piece(rows)["sizes"])),
    "a type that is none": lambda rows: next(iter(rows.values())).update(dtype="load"),
    "no pieces": lambda rows: next(iter(rows.values())).pop("pieces"),
    "a row that is none": lambda rows: rows.update(more=3),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused_before_anything_is_read(place: Path, lie: str) -> None:
    os.mkfifo(place / "__8_0.distcp")
    (place / "__9_0.distcp").symlink_to("/dev/zero")
    rows = json.loads((place / INDEX).read_text())
    LIES[lie](rows)
    (place / INDEX).write_text(json.dumps(rows))
    summed_but(place, "__8_0.distcp", "__9_0.distcp")
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        checkpoint.find(place)


def summed_but(place: Path, *names: str) -> None:
    found = {path.name: path for path in place.iterdir() if path.name not in (SUMS, *names)}
    (place / SUMS).write_text(json.dumps({name: sum_of(path) for name, path in found.items()}))


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, "\xff", '{"a": {"dtype": "float32"}}'])
def test_an_index_that_is_none(place: Path, text: str) -> None:
    (place / INDEX).write_bytes(text.encode("latin-1"))
    summed(place)
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        checkpoint.find(place)


# Checksums


@pytest.mark.parametrize(
    "sums",
    [
        {},
        [],
        {"/dev/zero": [1, 1]},
        {"../rest.pt": [1, 1]},
        {"..": [1, 1]},
        {"": [1, 1]},
        {"rest.pt": 3},
        {"rest.pt": ["1", 1]},
        {"rest.pt": [1, 1, 1]},
        {"pipe": [1, 1]},
        {"zero": [1, 1]},
        {"zero": [0, 0]},
    ],
    ids=str,
)
def test_sums_that_check_nothing_or_without_end(place: Path, sums: Any) -> None:
    os.mkfifo(place / "pipe")
    (place / "zero").symlink_to("/dev/zero")
    (place / SUMS).write_text(json.dumps(sums))
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        checkpoint.find(place)


@pytest.mark.parametrize("name", ["rest.pt", INDEX, "__0_0.distcp"])
def test_each_file_that_is_read_has_a_checksum(place: Path, name: str) -> None:
    found = json.loads((place / SUMS).read_text())
    del found[name]
    (place / SUMS).write_text(json.dumps(found))
    with pytest.raises(DataError, match=f"has no checksum of {name}"):
        checkpoint.find(place)


@pytest.mark.parametrize("name", ["rest.pt", INDEX, SUMS, "__0_0.distcp", "../latest"])
@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_no_file_of_a_checkpoint_is_waited_for(place: Path, name: str, kind: str) -> None:
    path = place / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    if name == "../latest":
        assert checkpoint.find(place.parent, lambda _: None).path == place
        return
    with pytest.raises(EvenerError):
        checkpoint.find(place)


@pytest.mark.parametrize(
    "rest",
    [
        [],
        {"format": checkpoint.FORMAT},
        {"format": "2"},
        {"format": 2, "ranks": 1, "progress": {}, "optimizer": {}, "model": {}, "data": {}, "settings": {}},
    ],
    ids=str,
)
def test_a_rest_of_another_form(place: Path, rest: Any) -> None:
    torch.save(rest, place / "rest.pt")
    summed(place)
    with pytest.raises(DataError, match=r"its rest.pt does not hold"):
        checkpoint.find(place)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("kept", wrong) for wrong in ("{", "[]", '{"best": 3}', 7)),
        *(("identity", wrong) for wrong in ({}, {"run": "a"}, {"run": "a", "history": [["b"]]}, "a")),
        *(("said", wrong) for wrong in ("a", {}, {"scheduler": 3})),
    ],
    ids=str,
)
def test_a_part_of_another_form_is_named(place: Path, name: str, wrong: Any) -> None:
    rest = torch.load(place / "rest.pt", weights_only=True)
    torch.save({**rest, name: wrong}, place / "rest.pt")
    summed(place)
    with pytest.raises(DataError, match=rf"its rest.pt does not hold {name}"):
        checkpoint.find(place)


def test_states_of_generators_that_are_none(place: Path) -> None:
    for text in (b"{}", b"[]", b'{"python": [3, [1], null]}', b"\xff"):
        with pytest.raises(DataError, match="random generators"):
            draw_on(torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.device("cpu"))


def test_pickles_of_other_things_are_no_description(place: Path) -> None:
    for thing in (3, {}, torch.Size([1]), Metadata({}), Metadata({"a": 3}, storage_data={})):  # type: ignore[dict-item]
        (place / PICKLE).write_bytes(pickle.dumps(thing))
        if (place / INDEX).exists():
            (place / INDEX).unlink()
        summed(place)
        with pytest.raises(DataError, match="cannot be read as a checkpoint"):
            checkpoint.find(place)
