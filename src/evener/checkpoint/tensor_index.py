"""The index of a checkpoint, ``tensors.json``: its tensors, their types and shapes, and where each piece is stored.

PyTorch keeps this in a pickle, ``.metadata``, and reads it without checking what code the pickle would run. Evener
writes and reads JSON, and gives PyTorch the object that it would have read. The pickle is still written for PyTorch's
tools, and not read. The JSON is not trusted either: types, shapes, file names and lengths are checked against each
other and against the files.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from evener.files import read_json

INDEX = "tensors.json"
PICKLE = ".metadata"
_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_LONGEST_SIZE = 64
"""Maximum number of dimensions of a tensor."""
_MOST_NUMBERS = 1 << 60
"""Limit for the number of elements of a tensor."""
_MOST_DIVIDED = 6
"""Maximum number of dimensions along which a tensor is cut into pieces."""

Rows = Mapping[str, Mapping[str, Any]]
"""By key: ``dtype``, ``size``, and ``pieces``, each with ``offsets``, ``sizes``, ``file``, ``start`` and ``length``."""


@dataclass(frozen=True)
class StoredPiece:
    """Place of a piece's bytes, with the attribute names that PyTorch's reader uses."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class IndexWriter(FileSystemWriter):
    """Writes the pieces of this rank and, on the first rank, the index."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # torch 2.11 gives the places to a copy of `metadata`.
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
        with (Path(self.path) / INDEX).open("w") as file:
            json.dump(_rows(metadata), file)
            file.flush()
            os.fsync(file.fileno())


class IndexReader(FileSystemReader):
    """Reads pieces with an index that was read and checked before."""

    def __init__(self, place: Path, metadata: Metadata) -> None:
        super().__init__(place)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def index_in(place: Path) -> Metadata:
    """Returns the index of a checkpoint.

    Raises:
        OSError: If it, or a file that it names, cannot be read.
        ValueError: If it is no index, or contradicts itself or the files.
    """
    return _metadata(read_json(place / INDEX), _Files(place))


def files_of(metadata: Metadata) -> set[str]:
    """Returns the names of the files that hold the tensors."""
    return {place.relative_path for place in metadata.storage_data.values()}


# Writing


def _rows(metadata: Metadata) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "a checkpoint's state is of tensors alone"
        pieces = [
            {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **_place(metadata, key, chunk)}
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        rows[key] = {"dtype": dtype, "size": list(entry.size), "pieces": pieces}
    return rows


def _place(metadata: Metadata, key: str, chunk: ChunkStorageMetadata) -> dict[str, Any]:
    info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
    return {"file": info.relative_path, "start": info.offset, "length": info.length}


# Reading


class _Files:
    """The files of a checkpoint. The size of each is read once."""

    def __init__(self, place: Path) -> None:
        self._place, self._known = place, dict[str, int]()

    def nbytes(self, name: str) -> int:
        if name not in self._known:
            if not _FILE.fullmatch(name):
                raise ValueError(f"it names the file {name!r}, which is none of a checkpoint's")
            found = os.stat(self._place / name)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{name} is no regular file")
            self._known[name] = found.st_size
        return self._known[name]


def _metadata(rows: Any, files: _Files) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, StoredPiece] = {}
    for key, row in _checked(rows, dict, "it").items():
        dtype = _dtype(_at(row, "dtype", str))
        size, pieces = _size(_at(row, "size", list)), _at(row, "pieces", list)
        chunks = []
        for piece in pieces:
            chunk = ChunkStorageMetadata(_size(_at(piece, "offsets", list)), _size(_at(piece, "sizes", list)))
            place = StoredPiece(_at(piece, "file", str), _at(piece, "start", int), _at(piece, "length", int))
            _check_piece(key, chunk, size, dtype.itemsize, place, files)
            chunks.append(chunk)
            if places.setdefault(MetadataIndex(key, chunk.offsets), place) is not place:
                raise ValueError(f"two pieces of {key!r} begin at one place")
        if not _is_tiled(size, chunks):
            raise ValueError(
                f"the pieces of {key!r} are not the {size.numel()} numbers that it has, each once"
            )
        entries[key] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    return Metadata(entries, storage_data=places)


def _check_piece(
    key: str, chunk: ChunkStorageMetadata, size: torch.Size, itemsize: int, place: StoredPiece, files: _Files
) -> None:
    ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
    if len(ends) != len(size) or any(end > whole for end, whole in zip(ends, size, strict=True)):
        raise ValueError(f"a piece of {key!r} lies outside of it")
    end = place.offset + place.length
    fits = 0 <= place.offset <= end <= files.nbytes(place.relative_path)
    if not fits or chunk.sizes.numel() * itemsize > place.length:
        raise ValueError(f"a piece of {key!r} has no room in {place.relative_path}")


def _is_tiled(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Returns True if the pieces cover a tensor, each element once. Takes time linear in the number of pieces.

    A box is determined by its corners with alternating signs, and so is a sum of boxes. Where boxes meet, their corners
    cancel. The corners of the whole remain if and only if the sum of the boxes is the whole::

        +───-      +───-───+───-      +───────-
        │   │      │   │   │   │  =   │       │
        -───+      -───+───-───+      -───────+
    """
    chunks = [chunk for chunk in chunks if chunk.sizes.numel()]
    if not size.numel():
        return not chunks
    divided = [
        axis
        for axis, whole in enumerate(size)
        if any((chunk.offsets[axis], chunk.sizes[axis]) != (0, whole) for chunk in chunks)
    ]
    if len(divided) > _MOST_DIVIDED:
        raise ValueError(f"a tensor is divided along {len(divided)} of its dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    for chunk, sign in ((whole, -1), *((chunk, 1) for chunk in chunks)):
        ends = [(chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]) for axis in divided]
        for sides in itertools.product((0, 1), repeat=len(divided)):
            at = tuple(end[side] for end, side in zip(ends, sides, strict=True))
            corners[at] += sign * (-1) ** sum(sides)
    return not any(corners.values())


def _checked(value: Any, kind: type[Any], what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _at(row: Any, name: str, kind: type[Any]) -> Any:
    if type(row) is not dict or name not in row:
        raise ValueError(f"an entry has no {name}")
    return _checked(row[name], kind, name)


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)  # getattr would import modules of some names
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of numbers")
    return found


def _size(numbers: list[Any]) -> torch.Size:
    if len(numbers) > _LONGEST_SIZE:
        raise ValueError(f"{len(numbers):,} dimensions are no shape")
    strange = next((number for number in numbers if type(number) is not int), 0)
    if type(strange) is not int:  # may be a whole structure, so it is not printed
        raise ValueError(f"a {type(strange).__name__} in a shape is no length")
    if any(not 0 <= number < _MOST_NUMBERS for number in numbers) or math.prod(numbers) >= _MOST_NUMBERS:
        raise ValueError("a shape has a negative length, or one of more numbers than there can be")
    return torch.Size(numbers)
