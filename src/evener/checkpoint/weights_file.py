"""Exports weights from a checkpoint and loads weights into a model: tensors by the names of the plain model.

The export is a safetensors file, which other programs load without Evener. It is written tensor by tensor, so only one
tensor is in memory at a time. The safetensors library itself needs all tensors at once::

    8 bytes   length of the header
    header    JSON: {"__metadata__": {...}, NAME: {"dtype", "shape", "data_offsets"}, ...}, padded to 8 bytes
    data      the tensors, one behind the other, little-endian

Tied weights are stored under each of their names, as ``load_state_dict`` expects.

Weights are loaded from safetensors, from a ``state_dict`` written by ``torch.save``, or from a checkpoint. Rank 0 reads
them into its model before the strategy gives rank 0's initial weights to all ranks.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from evener import checkpoint
from evener.checkpoint.archive import check_archive
from evener.checkpoint.outputs import check_output
from evener.components.model_init import settle_on
from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import url_of
from evener.core.os_errors import storage_errors
from evener.core.text import few, from_here, said
from evener.errors import ConfigurationError, DataError
from evener.files import replacing
from evener.nn.fqn import clean_name

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_PREFIX = "model/"
_AVERAGE = "average/"
_ABOUT = "__metadata__"
"""The key of the metadata in the header of a safetensors file. A tensor cannot have this name."""
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


# Export


def export(run: Path, to: Path | None = None, *, overwrite: bool = False, average: bool = False) -> Path:
    """Writes the weights of a checkpoint as safetensors and returns the path of the file.

    Args:
        run: A checkpoint, or a run directory, whose latest checkpoint is used.
        to: The path of the file; None for ``step-N.safetensors`` in the run directory, or in the working directory if
            that lies elsewhere.
        overwrite: If True, replaces an existing file.
        average: If True, writes the average of the weights (``Task.average``), to ``step-N-average.safetensors`` if
            ``to`` is None. What is not averaged, such as integer buffers, is as in the weights.

    Raises:
        ConfigurationError: If there is no checkpoint, it has no average, or the file exists and ``overwrite`` is False.
        DataError: If the checkpoint cannot be read, or the model's state in it is not all dense tensors.
        StorageError: If the file cannot be written.
    """
    found = checkpoint.find(run)
    home = found.path.parent
    home = home.parent if home.name == "checkpoints" else home
    home = home if url_of(home) is None else Path()
    to = to or home / f"{found.path.name}{'-average' if average else ''}.safetensors"
    if average and not (found.rest.get("averaged") or {}).get("number"):
        raise ConfigurationError(
            f"{found.path} has no average of the weights: the run's task keeps none (Task.average), or it had not begun"
        )
    check_output(to)
    if to.exists() and not overwrite:
        raise ConfigurationError(
            f"{to} is there already: name another file with --to, or replace it with --overwrite"
        )
    entries = _entries(found, average)
    if _ABOUT in entries:
        raise DataError(
            f"{found.path} has a weight with the name {_ABOUT}, under which safetensors has none; take the weights "
            "from the checkpoint with torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        )
    about = {"format": "pt", "steps": str(found.rest["progress"]["steps"])}
    with (
        storage_errors(f"the weights cannot be written to {to}"),
        replacing(to, follow=True, sync=True) as file,
    ):
        file.write(_header(entries, about))
        for name in entries:
            file.write(_bytes(_read(found, name, entries[name], average)))
    return to


def _entries(found: checkpoint.StoredCheckpoint, average: bool = False) -> dict[str, TensorStorageMetadata]:
    """Returns the metadata of the model's tensors in the checkpoint, or of their averages, by name.

    Raises:
        DataError: If the model has state that safetensors cannot store.
    """
    entries = {
        key.removeprefix(_PREFIX): entry
        for key, entry in sorted(found.stored().items())
        if key.startswith(_PREFIX)
    }
    stored = found.stored() if average else {}
    entries = {name: stored.get(_AVERAGE + name, entry) for name, entry in entries.items()}
    others = sorted(found.rest.get("model", {}))
    others += [name for name, entry in entries.items() if entry.properties.dtype not in _TYPES]
    if others:
        raise DataError(
            f"{found.path} holds more of the model than safetensors can: {', '.join(others[:3])} "
            f"({len(others)} in all) is no dense tensor of a type that it has; take them from the checkpoint with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        )
    return entries


def _header(entries: Mapping[str, TensorStorageMetadata], about: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_ABOUT: dict(about)}
    offset = 0
    for name, entry in entries.items():
        dtype = entry.properties.dtype
        nbytes = entry.size.numel() * dtype.itemsize
        place = {"shape": list(entry.size), "data_offsets": [offset, offset + nbytes]}
        header[name] = {"dtype": _TYPES[dtype], **place}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read(
    found: checkpoint.StoredCheckpoint, name: str, entry: TensorStorageMetadata, average: bool = False
) -> Tensor:
    # Zeros, so that uninitialised memory is never exported.
    tensor = torch.zeros(entry.size, dtype=entry.properties.dtype)
    of_average = average and _AVERAGE + name in found.stored()
    found.fill({(_AVERAGE if of_average else _PREFIX) + name: tensor})
    return tensor


def _bytes(tensor: Tensor) -> Any:
    """Returns the memory of a tensor as bytes; ``b""`` for an empty tensor, which has no such view."""
    assert sys.byteorder == "little"
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


# Load


def filler(config: RunConfig) -> Callable[[nn.Module], None]:
    """Returns a function that loads the weights of ``config.weights`` into a model, or does nothing if that is None.

    With ``dtype`` float64 the function converts the model first, so that float64 weights are not rounded to float32.
    """
    path = config.weights

    def fill_model(model: nn.Module) -> None:
        if path is None:
            return
        if config.dtype == "float64":
            place = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
            settle_on(model, place, torch.float64)
        fill(model, read_weights(path), str(path))

    return fill_model


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Returns the tensors of a file or a checkpoint by name.

    Tensors of safetensors and checkpoints are read from disk when they are used; a ``state_dict`` is read at once.

    Raises:
        ConfigurationError: If there is no such file or checkpoint.
        DataError: If the file is neither safetensors nor a plain ``state_dict``, or holds more than tensors.
    """
    if path.is_dir() or url_of(path) is not None:  # elsewhere, of runs alone
        return _stored(checkpoint.find(path))
    if not path.is_file():
        raise ConfigurationError(
            f"there are no weights at {from_here(path)}: name a file of safetensors (evener export writes one) or of a "
            "state_dict, a run directory or a checkpoint"
        )
    with storage_errors(f"the weights cannot be read from {path}"):
        return _safetensors(path) if _is_safetensors(path) else _state_dict(path)


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        begin = file.read(9)
    return path.suffix == ".safetensors" or begin[8:9] == b"{"


class _Lazy(Mapping[str, Tensor]):
    """A mapping from names to tensors that reads each tensor when it is accessed."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _stored(found: checkpoint.StoredCheckpoint) -> Mapping[str, Tensor]:
    """Returns the tensors of the model in a checkpoint."""
    entries = _entries(found)
    return _Lazy(entries, lambda name: _read(found, name, entries[name]))


def _safetensors(path: Path) -> Mapping[str, Tensor]:
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}") from error
    return _Lazy(file.keys(), file.get_tensor)


def _state_dict(path: Path) -> Mapping[str, Tensor]:
    try:
        with path.open("rb") as file:
            check_archive(file)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        message = said(error).partition("\n")[0][:200] or type(error).__name__  # an empty file says nothing
        raise DataError(
            f"{path} is refused: it is no safetensors, and torch.load(weights_only=True) says "
            f"{message!r}. A file that holds more than tensors could run any program here: "
            "save model.state_dict() alone, or safetensors"
        ) from error
    strange = _no_tensors(state)
    if strange:
        raise DataError(
            f"{path} holds {strange}; weights are tensors by name, as in torch.save(model.state_dict(), PATH)"
        )
    weights: Mapping[str, Tensor] = state
    return weights


def _no_tensors(state: Any) -> str:
    """Returns what is wrong with ``state`` as a mapping from names to tensors; empty if nothing is."""
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    for name, value in state.items():
        if not isinstance(name, str):
            return f"a {type(name).__name__} for a name"
        if not isinstance(value, Tensor):
            return f"a {type(value).__name__} under {name!r}"
        if value.is_meta or value.layout is not torch.strided or value.is_quantized:
            return f"a tensor without plain numbers under {name!r}"
    return ""


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Copies plain weights into a model that is not divided. If it raises, the model is unchanged.

    The names may contain the prefixes of DDP or ``torch.compile``. One name of tied weights is enough.

    Args:
        source: The name of the weights in error messages.

    Raises:
        ConfigurationError: If names, shapes or kinds of dtype are not those of the model.
        DataError: If a parameter is not finite, or a buffer has NaN.
    """
    own = {clean_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    own = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    given = _by_own_names(weights, own)
    _check_names(own, given, source)
    _each(own, given, weights, lambda name, value, tensor: _check(name, value, tensor, source))
    _each(own, given, weights, lambda name, value, tensor: value.copy_(tensor))


def _each(
    own: Mapping[str, Tensor],
    given: Mapping[str, str],
    weights: Mapping[str, Tensor],
    act: Callable[[str, Tensor, Tensor], object],
) -> None:
    for name, value in own.items():
        if name in given:
            act(name, value, weights[given[name]])


def _by_own_names(names: Iterable[str], own: Collection[str]) -> dict[str, str]:
    """Returns the names by those without the prefixes of wrappers. Removes DDP's ``module.`` if all names begin with it
    and are not the model's own."""
    plain = {clean_name(name): name for name in names}
    while not plain.keys() <= set(own) and all(name.startswith("module.") for name in plain):
        plain = {clean_name(name.removeprefix("module.")): whole for name, whole in plain.items()}
    return plain


def _check_names(own: Mapping[str, Tensor], given: Mapping[str, str], source: str) -> None:
    known = {id(value) for name, value in own.items() if name in given}
    lacking = sorted(name for name, value in own.items() if name not in given and id(value) not in known)
    strange = sorted(given.keys() - own.keys())
    if lacking or strange:
        raise ConfigurationError(
            f"the weights in {from_here(source)} are of another model: they lack {few(lacking)} and have "
            f"{few(strange)} more"
        )


def _check(name: str, value: Tensor, tensor: Tensor, source: str) -> None:
    if tensor.shape != value.shape:
        raise ConfigurationError(
            f"the weights in {from_here(source)} are of another model: {name} has the shape "
            f"{tuple(tensor.shape)} there and {tuple(value.shape)} here"
        )
    alike = tensor.is_floating_point() == value.is_floating_point()
    if not alike or tensor.is_complex() != value.is_complex():
        raise ConfigurationError(
            f"the weights in {from_here(source)} are of another model: {name} is of "
            f"{tensor.dtype} there and {value.dtype} here"
        )
    bad = torch.isnan(tensor) if not isinstance(value, nn.Parameter) else ~torch.isfinite(tensor)
    if bool(bad.any()):
        raise DataError(
            f"the weights in {source} are not finite: {name} has {int(bad.sum())} such values of {tensor.numel()}; "
            "take those of a step before"
        )
