"""Checkpoints of a stranger: what they say of their tensors runs nothing, and files have to bear it out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from evener import checkpoint
from evener.checkpoint import tensor_index
from evener.checkpoint.checksums import SUMS, sum_of
from evener.checkpoint.rng_state import draw_on
from evener.checkpoint.tensor_index import INDEX, PICKLE
from evener.checkpoint.weights_file import export
from evener.errors import DataError, EvenerError
from evener.training.engine import Engine
from tests import tasks
from tests.checkpoint.strangers import entered, summed


def test_the_index_says_what_pytorchs_own_says(place: Path) -> None:
    ours, theirs = tensor_index.index_in(place), FileSystemReader(place).read_metadata()
    for entry in theirs.state_dict_metadata.values():
        if hasattr(entry.properties, "strides"):  # of torch 2.15, which nothing reads
            entry.properties.strides = None
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for key, info in theirs.storage_data.items():
        found = ours.storage_data[key]
        assert (found.relative_path, found.offset, found.length) == (
            info.relative_path,
            info.offset,
            info.length,
        )


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


@pytest.mark.parametrize("door", ["find", "export", "load", "weights"])
def test_the_pickle_beside_the_index_is_never_read(place: Path, tmp_path: Path, door: str) -> None:
    (place / PICKLE).write_bytes(b"\x80\x04" + code(tmp_path / "ran") + b".")
    summed(place)
    export(place)
    (place / INDEX).unlink()
    summed(place)
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        entered(door, place)
    assert not (tmp_path / "ran").exists()


# An index that lies


def piece(rows: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(rows.values()))["pieces"][0]
    return found


def halves(rows: dict[str, Any], *begins: int) -> None:
    """Pieces of half the rows each, with as many numbers together as the tensor has."""
    row = rows["model/0.weight"]
    (whole,) = row["pieces"]
    half = row["size"][0] // 2
    row["pieces"] = [{**whole, "offsets": [begin, 0], "sizes": [half, *row["size"][1:]]} for begin in begins]


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
    "the same half twice": lambda rows: halves(rows, 0, 0),
    "halves that overlap": lambda rows: halves(rows, 0, 1),
    "a size of many digits": lambda rows: shape(rows, [0, 1 << 70]),
    "a type that would be imported": lambda rows: next(iter(rows.values())).update(dtype="_inductor"),
    "state of no parameter": lambda rows: rows.update({"optimizer/none/a": rows["model/0.weight"]}),
    "state without a name": lambda rows: rows.update({"optimizer/": rows["model/0.weight"]}),
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


def box(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


PINWHEEL = (([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]))


@pytest.mark.parametrize(
    ("size", "boxes", "tiles"),
    [
        ([3, 3], [*PINWHEEL, ([1, 1], [1, 1])], True),
        ([3, 3], PINWHEEL, False),
        ([3, 3], [*PINWHEEL, ([0, 0], [1, 1])], False),
        ([], [([], [])], True),
        ([], [], False),
        ([], [([], []), ([], [])], False),
        ([0, 3], [], True),
        ([0, 3], [([0, 0], [0, 3])], True),
        ([4], [([0], [2]), ([2], [0]), ([2], [2])], True),
        ([4], [([0], [2]), ([1], [2])], False),
        ([1 << 20], [([i], [1]) for i in range(20_000)], False),
        ([20_000], [([i], [1]) for i in range(20_000)], True),
    ],
)
def test_pieces_cover_each_number_once(size: list[int], boxes: Any, tiles: bool) -> None:
    assert tensor_index._is_tiled(torch.Size(size), [box(*each) for each in boxes]) is tiles


def test_a_tensor_in_pieces_along_too_many_dimensions() -> None:
    boxes = [box([i] * 30, [1] * 30) for i in range(2)]
    with pytest.raises(ValueError, match="divided along 30"):
        tensor_index._is_tiled(torch.Size([2] * 30), boxes)


def test_nothing_that_lay_in_memory_is_exported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an index leaves numbers out all the same, zeros are there."""
    monkeypatch.setattr(checkpoint.StoredCheckpoint, "fill", lambda *_: None)
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: torch.full(*size, 7, **kind))
    weights = load_file(export(place))
    assert all(not value.any() for value in weights.values())


def test_no_weight_takes_the_place_of_the_header(place: Path) -> None:
    rows = json.loads((place / INDEX).read_text())
    rows["model/__metadata__"] = rows["model/0.weight"]
    (place / INDEX).write_text(json.dumps(rows))
    summed(place)
    with pytest.raises(DataError, match="a weight with the name __metadata__"):
        export(place)


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
        {"more": [4, 0]},
    ],
    ids=str,
)
def test_sums_that_check_nothing_or_without_end(place: Path, sums: Any) -> None:
    os.mkfifo(place / "pipe")
    (place / "zero").symlink_to("/dev/zero")
    (place / "more").write_bytes(b"more")
    (place / SUMS).write_text(json.dumps(sums))
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        checkpoint.find(place)


def test_files_that_evener_does_not_write_are_not_read(place: Path) -> None:
    """One may have no end that its length tells of: of a sparse file of terabytes, which takes no room."""
    sums = json.loads((place / SUMS).read_text())
    with (place / "large").open("wb") as file:
        file.truncate(8 << 40)
    (place / SUMS).write_text(json.dumps({**sums, "large": [8 << 40, 0]}))
    with pytest.raises(DataError, match="'large' is no file of a checkpoint"):
        checkpoint.find(place)


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="no /proc")
def test_a_file_of_the_kernels_ends_before_it_begins(place: Path) -> None:
    sums = json.loads((place / SUMS).read_text())
    (place / "__1_0.distcp").symlink_to("/proc/self/pagemap")
    (place / SUMS).write_text(json.dumps({**sums, "__1_0.distcp": [0, 0]}))
    with pytest.raises(DataError, match=r"__1_0\.distcp cannot be read"):
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


def test_states_of_generators_that_are_none(place: Path) -> None:
    for text in (b"{}", b"[]", b'{"python": [3, [1], null]}', b"\xff"):
        with pytest.raises(DataError, match="random generators"):
            draw_on(torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.device("cpu"))
