"""Reads MNIST from its four IDX files: from a directory of the user, or downloaded once for all ranks of a host.

``pooch`` downloads to a temporary name and renames the file after its checksum was verified, so every file in the
cache is complete. All ranks of a host call this at the same time: a file lock lets one rank download while the others
wait. Y. LeCun, C. Cortes and C. Burges, "The MNIST database of
handwritten digits"; the format is described at http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pooch
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from evener.errors import DataError

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Gray images, stored as bytes. An item is a float32 image ``(1, height, width)`` from 0 to 1 and an int64
    label."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self._pixels = pixels  # uint8 (n, height, width)
        self._labels = labels  # uint8 (n,)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._pixels[index].float().div_(255).unsqueeze(0), self._labels[index].long()

    def gather_batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the images ``(n, 1, height, width)`` and labels ``(n,)`` of ``samples``, int64 ``(n,)``."""
        return self._pixels[samples].float().div_(255).unsqueeze(1), self._labels[samples].long()


def mnist(train: bool, data_dir: Path | str | None = None, cache_dir: Path | str | None = None) -> Images:
    """Returns the 60,000 training images or the 10,000 test images.

    Args:
        train: True for the training images, False for the test images.
        data_dir: The directory of the IDX files, with ``.gz`` or without. If given, nothing is downloaded.
        cache_dir: The directory for downloads; ``None`` for the user's cache directory.

    Raises:
        DataError: If a file is missing, has the wrong checksum or the wrong format, or no mirror has it.
    """
    part = "train" if train else "t10k"
    pixels = _table(f"{part}-images-idx3-ubyte", 3, data_dir, cache_dir)
    labels = _table(f"{part}-labels-idx1-ubyte", 1, data_dir, cache_dir)
    if len(pixels) != len(labels):
        raise DataError(
            f"MNIST has {len(pixels)} images but {len(labels)} labels: the files do not belong together"
        )
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels))


def read_idx(content: bytes, dimensions: int, name: str) -> NDArray[np.uint8]:
    """Parses an IDX file of unsigned bytes: two zero bytes, 8, the number of dimensions, their sizes, the data.

    Raises:
        DataError: If ``content`` is no such file, has another number of dimensions, or has the wrong length.
    """
    head = 4 + 4 * dimensions
    expected = bytes((0, 0, 8, dimensions))
    if content[:4] != expected or len(content) < head:
        raise DataError(
            f"{name} is not an IDX file of {dimensions} dimensions: it starts with 0x{content[:4].hex()}, "
            f"not 0x{expected.hex()}; fetch it anew"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) != head + size:
        raise DataError(
            f"{name} has {len(content)} bytes, but its header {shape} means {head + size}; fetch it anew"
        )
    return np.frombuffer(bytearray(content[head:]), dtype=np.uint8).reshape(shape)


def download(
    name: str, md5: str, directory: Path, mirrors: Sequence[str], timeout_seconds: float = 600
) -> Path:
    """Returns the path of the verified file ``name`` in ``directory``, downloaded from the first mirror that has it.

    Does not download if the file is already in ``directory``.

    Raises:
        DataError: If no mirror gave the right file, or another process held the lock for longer than
            ``timeout_seconds``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = directory / f".{name}.lock"
    try:
        with FileLock(lock, timeout=timeout_seconds):
            return _from_mirrors(name, md5, directory, mirrors)
    except Timeout as error:
        raise DataError(
            f"another process has been downloading {name} for {timeout_seconds:g} s and holds {lock}; "
            "wait for it or end it, or download the file yourself and give its directory with --data-dir"
        ) from error


def _from_mirrors(name: str, md5: str, directory: Path, mirrors: Sequence[str]) -> Path:
    problems = []
    for mirror in mirrors:
        try:
            return Path(pooch.retrieve(mirror + name, f"md5:{md5}", name, directory, progressbar=True))
        except (OSError, ValueError) as error:  # OSError: of requests; ValueError: a wrong checksum
            problems.append(f"{mirror}: {error}")
    raise DataError(
        f"{name} could not be downloaded; put it into a directory and give that with --data-dir\n  "
        + "\n  ".join(problems)
    )


def _table(
    name: str, dimensions: int, data_dir: Path | str | None, cache_dir: Path | str | None
) -> NDArray[np.uint8]:
    packed = f"{name}.gz"
    if data_dir is not None:
        path = _local(name, Path(data_dir))
    else:
        path = download(packed, MD5[packed], Path(cache_dir or pooch.os_cache("evener")), MIRRORS)
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(_verified(content, path))
    return read_idx(content, dimensions, str(path))


def _local(name: str, directory: Path) -> Path:
    """Returns the path of the file ``name`` or ``name.gz`` in a directory of the user."""
    for path in (directory / f"{name}.gz", directory / name):
        if path.is_file():
            return path
    if not directory.is_dir():
        raise DataError(f"there is no directory {directory}; give the one in which {name}.gz lies")
    found = sorted(path.name for path in directory.iterdir())
    raise DataError(
        f"{directory} holds neither {name}.gz nor {name}, but {', '.join(found[:8]) or 'nothing'}"
        f"{', ...' if len(found) > 8 else ''}; give the directory of the MNIST files, or none to download"
    )


def _verified(content: bytes, path: Path) -> bytes:
    seen = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if seen != MD5[path.name]:
        raise DataError(f"{path} has the MD5 checksum {seen}, not {MD5[path.name]}; fetch it anew")
    return content
