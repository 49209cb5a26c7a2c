"""Datasets named on the command line, and files of predictions.

=========  ======================================================================
``.npy``   one tensor
``.npz``   tensors by name: dictionaries, nested ones as ``a.b``, tuples as 0, 1
``.csv``   the same, if each has one number or one row of numbers for a sample
``.pt``    any value, as ``torch.load`` returns it
=========  ======================================================================
"""

from __future__ import annotations

import codecs
import csv
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evener.checkpoint.outputs import check_output
from evener.core.os_errors import storage_errors
from evener.core.plugins import find
from evener.core.task.task import Task
from evener.core.types import Tree
from evener.data.batch import map_leaves
from evener.errors import ConfigurationError, DataError
from evener.files import replacing

_SHOWN = 8
"""Number of outputs that are listed."""

# Reading


class Rows(Dataset[Any]):
    """Dataset of the rows of one tensor, or of several tensors by name or position, as inputs.

    Raises:
        DataError: If the tensors have different numbers of rows.
    """

    def __init__(self, tree: Tree, source: str) -> None:
        self._tree, sizes = tree, set[int]()
        map_leaves(lambda leaf: sizes.add(_rows(leaf, source)), tree)
        if len(sizes) != 1:
            raise DataError(
                f"{source} holds tensors of {sorted(sizes)} rows; rows are samples, equally many in each"
            )
        self._size = sizes.pop()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return map_leaves(lambda leaf: leaf[index], self._tree)


def _rows(leaf: Any, source: str) -> int:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        raise DataError(f"{source} holds a {type(leaf).__name__} without rows, where tensors are expected")
    return len(leaf)


def has_inputs_alone(data: str) -> bool:
    """Returns True if ``data`` names a file, whose rows are inputs without targets."""
    return Path(data).suffix in _READERS


def dataset_called(data: str, task: Task) -> Dataset[Any]:
    """Returns the named dataset: ``train`` or ``evaluate`` of the task, a file, or ``package.module:dataset``.

    Raises:
        ConfigurationError: If there is no such dataset.
        DataError: If the file cannot be read.
    """
    if data in ("train", "evaluate"):
        found: Dataset[Any] | None = getattr(task, data)
        if found is None:
            raise ConfigurationError(
                f"task {task.name} has no dataset `{data}`: name another one with --data"
            )
        return found
    if has_inputs_alone(data):
        return _of_file(Path(data))
    known = ["train", "evaluate", *(f"FILE{suffix}" for suffix in _READERS)]
    value = find(data, "dataset", "dataset, or a function that makes one", _is_dataset_like, known=known)
    made: Dataset[Any] = value() if not hasattr(value, "__getitem__") or isinstance(value, type) else value
    return made


def _is_dataset_like(value: object) -> bool:
    return callable(value) or hasattr(value, "__getitem__")


def _of_file(path: Path) -> Dataset[Any]:
    if not path.is_file():
        raise ConfigurationError(f"there are no data at {path}")
    try:
        return Rows(_READERS[path.suffix](path), str(path))
    except DataError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{path} cannot be read as {path.suffix}: {reason}") from error


def _npz(path: Path) -> Tree:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


_READERS: dict[str, Callable[[Path], Tree]] = {
    ".npy": lambda path: torch.from_numpy(np.load(path, allow_pickle=False)),
    ".npz": _npz,
    ".pt": lambda path: torch.load(path, map_location="cpu", weights_only=True),
}


# Writing


def check_out(path: Path, overwrite: bool) -> None:
    """Checks that predictions can be written to ``path``.

    Raises:
        ConfigurationError: If files with this suffix are not supported, or the file exists and ``overwrite`` is False.
    """
    if path.suffix not in _WRITERS:
        raise ConfigurationError(
            f"{path} ends with none of {', '.join(_WRITERS)}, by which its format is chosen"
        )
    check_output(path)
    if path.exists() and not overwrite:
        raise ConfigurationError(
            f"{path} is there already: name another file with --out, or give --overwrite"
        )


def write_outputs(path: Path, outputs: Tree) -> None:
    """Writes predictions in the format of the file's suffix. The file is written whole or not at all.

    Raises:
        ConfigurationError: If the outputs do not fit the format.
        StorageError: If the file cannot be written.
    """
    write = _WRITERS[path.suffix]
    with (
        storage_errors(f"the outputs cannot be written to {path}"),
        replacing(path, follow=True, sync=True) as file,
    ):
        write(file, outputs)


def shapes(outputs: Tree) -> str:
    """Returns the names and shapes of the outputs as text."""
    try:
        found = tensors(outputs, "")
    except ConfigurationError:
        return "outputs that are not all tensors"
    return _first(f"{name} {tuple(value.shape)}" for name, value in found.items())


def _first(words: Iterable[str]) -> str:
    """Joins the first words, and says how many more there are: a list may have some for each sample."""
    words = [*words]
    more = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def tensors(outputs: Tree, suffix: str, name: str = "") -> dict[str, Tensor]:
    """Returns the outputs by name, without those that are None; nested names are joined with dots.

    Raises:
        ConfigurationError: If an output is not a tensor, which a file with this ``suffix`` cannot hold.
    """
    if isinstance(outputs, Tensor):
        return {name or "outputs": outputs}
    if outputs is None:
        return {}
    if isinstance(outputs, Mapping):
        entries = {str(key): value for key, value in outputs.items()}
    elif isinstance(outputs, tuple | list):
        entries = {str(key): value for key, value in enumerate(outputs)}
    else:
        raise ConfigurationError(
            f"the model's outputs hold a {type(outputs).__name__}, which a {suffix} file cannot: --out FILE.pt can"
        )
    found: dict[str, Tensor] = {}
    for key, value in entries.items():
        found |= tensors(value, suffix, f"{name}.{key}" if name else key)
    return found


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Converts a tensor to NumPy. bfloat16 becomes float32, because NumPy has no bfloat16; no value changes."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _write_npy(file: BinaryIO, outputs: Tree) -> None:
    found = tensors(outputs, ".npy")
    if len(found) != 1:
        raise ConfigurationError(
            f"the model has {len(found)} outputs ({_first(found)}), and a .npy file holds one: --out FILE.npz has "
            "them by name"
        )
    np.save(file, _array(*found.values()))


def _write_npz(file: BinaryIO, outputs: Tree) -> None:
    found = tensors(outputs, ".npz")
    # np.savez takes some names, such as "file", for its own arguments.
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in found.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, _array(value), allow_pickle=False)


def _write_csv(file: BinaryIO, outputs: Tree) -> None:
    found = tensors(outputs, ".csv")
    sizes = {name: len(value) for name, value in found.items()}
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigurationError(
            f"the outputs have different numbers of rows ({listed}): --out FILE.npz holds them"
        )
    columns = [column for name, value in found.items() for column in _columns(name, value)]
    writer = csv.writer(codecs.getwriter("utf-8")(file))
    writer.writerow([name for name, _ in columns])
    writer.writerows(zip(*(values for _, values in columns), strict=True))


def _columns(name: str, value: Tensor) -> list[tuple[str, Any]]:
    """Returns the named columns of one output, as numbers in the fewest digits that reproduce them."""
    if value.ndim > 2:
        raise ConfigurationError(
            f"{name} is of shape {tuple(value.shape)}, and a .csv file has one row of numbers for a sample: --out "
            "FILE.npz or FILE.pt hold it"
        )
    texts = _array(value).astype(str)
    if value.ndim == 1:
        return [(name, texts)]
    return [(f"{name}_{column}", texts[:, column]) for column in range(texts.shape[1])]


_WRITERS: dict[str, Callable[[BinaryIO, Tree], None]] = {
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".csv": _write_csv,
    ".pt": lambda file, outputs: torch.save(outputs, file),
}
