"""Describes losses, metrics, schedulers and functions by plain values, so that two of them can be compared.

Two ranks, or a run and its checkpoint, may have losses of one class with different weights or label smoothing. Nothing
would fail then, but unlike terms would be summed. So attributes, tensors, closures, defaults and constants are
compared.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evener.core.complex_numbers import as_real

_MOST_ENTRIES = 100
"""Maximum of entries of a list or dictionary that are compared."""
_FEW = 16
"""Size up to which a tensor is compared number by number."""
_MOST_SHOWN = 1 << 16
_MOST_CHUNKS = 1 << 10
_BLOCK = 1 << 18
"""Numbers of a tensor that are processed at once."""
_DEEPEST = 8
_TOLERANCE = 1e-5
"""Relative tolerance for a number that another host may have rounded differently."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_LAST_BITS = 1e-6
"""Relative tolerance for an error that many numbers have in common."""
_INTERNAL = frozenset(vars(nn.Module()))
_SKIPPED = {"optimizer", "_step_count", "last_epoch", "_last_lr", "base_lrs", "_get_lr_called_within_step"}
"""Attributes of schedulers that describe their progress, or follow from the optimizer."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, enum.Enum, type(None))


@dataclass(frozen=True, eq=False)
class TensorSketch:
    """A tensor as a few numbers. Sketches are equal if the tensors differ only by rounding, as between hosts.

    No number is ignored. A large tensor is cut into chunks, and weighted sums of the chunks are compared::

        1.0 1.0 1.0 | 1.0 1.004 1.0 | ...      each sum against what rounding can do to the numbers of its chunk
    """

    form: str
    numbers: tuple[float, ...]
    """All values of a small tensor; some sums, for display, of a large one."""
    exact: str = ""
    """Digest of what must be equal exactly: integers, and which numbers are not finite."""
    sums: bytes = b""
    """For each chunk of a large tensor: weighted sum, weighted sum of absolute values, and largest absolute value."""
    wide: int = 1
    """Number of values in a chunk."""
    unit: float = 0.0
    """Relative distance between neighbouring numbers of the dtype.

    Values that were rounded from others with different last bits may end up as neighbours.
    """

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> TensorSketch:
        """Returns the sketch of a tensor: its values if there are few, else sums over all of them."""
        form = f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"
        if tensor.is_meta or tensor.layout is not torch.strided:
            return cls(form, ())
        flat = as_real(tensor.detach()).flatten()
        unit = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 0.0
        if flat.numel() <= _FEW:
            return cls(form, tuple(flat.double().tolist()), _digest(flat), unit=unit)
        numbers = flat[:: 1 + flat.numel() // _MOST_SHOWN].cpu().double()
        waves = torch.arange(len(numbers), dtype=torch.float64)
        shown = torch.stack([*(numbers @ torch.cos(k * waves) for k in range(4)), numbers.abs().sum()])
        wide = -(-flat.numel() // _MOST_CHUNKS)
        sums = _sums(flat, wide).numpy().tobytes()
        return cls(form, tuple(shown.tolist()), _digest(flat), sums, wide, unit)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSketch) or (self.form, self.exact) != (other.form, other.exact):
            return False
        if self.sums or other.sums:
            return self.sums == other.sums or self._is_close(other)
        scale = max((abs(number) for number in self.numbers if math.isfinite(number)), default=0.0)
        return len(self.numbers) == len(other.numbers) and all(
            a == b or (a != a and b != b) or abs(a - b) <= _TOLERANCE * scale + self.unit * abs(a)
            for a, b in zip(self.numbers, other.numbers, strict=True)
        )

    def _is_close(self, other: TensorSketch) -> bool:
        """Returns True if rounding explains the difference of each chunk's sum.

        Rounding may change all numbers of a chunk by a common factor, one number by a whole unit, and any number by
        what is lost when large numbers are subtracted.
        """
        ours, theirs = (np.frombuffer(each.sums, np.float64).reshape(3, -1) for each in (self, other))
        if ours.shape != theirs.shape:
            return False
        sums, absolute, largest = ours
        spread = max(_TOLERANCE / math.sqrt(self.wide), _LAST_BITS)
        lost = _LAST_BITS * math.sqrt(self.wide) * largest.max()
        with np.errstate(invalid="ignore"):
            near = np.abs(sums - theirs[0]) <= spread * absolute + 2 * self.unit * largest + lost
        return bool(((sums == theirs[0]) | near).all())

    def __str__(self) -> str:
        shown = ", ".join(f"{number:.6g}" for number in self.numbers[:4])
        return f"{self.form}: {shown}{', ...' if len(self.numbers) > 4 else ''}"


def _blocks(flat: Tensor, wide: int) -> Iterator[Tensor]:
    """Yields blocks of whole chunks, on the CPU."""
    return (part.cpu() for part in torch.split(flat, max(1, _BLOCK // wide) * wide))


def _sums(flat: Tensor, wide: int) -> Tensor:
    """Returns the three sums of each chunk in float64. Weights of neighbours differ, so that a swap is detected."""
    weights = 1 + (torch.arange(wide, dtype=torch.float64) * _GOLDEN) % 1
    rows = []
    for block in _blocks(flat, wide):
        numbers = block.double()
        if not math.isfinite(numbers.sum()):
            numbers = numbers.nan_to_num(0.0, 0.0, 0.0)
        chunks = nn.functional.pad(numbers, (0, -len(numbers) % wide)).view(-1, wide)
        absolute = chunks.abs()
        rows.append(torch.stack([chunks @ weights, absolute @ weights, absolute.amax(1)]))
    return torch.cat(rows, 1)


def _digest(flat: Tensor) -> str:
    """Returns a digest of the parts that are the same on all ranks however they round."""
    digest, begin = hashlib.sha256(), 0
    for block in _blocks(flat, 1):
        if not flat.is_floating_point():
            digest.update(block.contiguous().view(torch.uint8).numpy().tobytes())
        elif not math.isfinite(block.sum(dtype=torch.float64)):
            odd = (block.double() * 0).isnan().nonzero()[:, 0]
            digest.update(f"{(odd + begin).tolist()} {block[odd].double().tolist()}".encode())
        begin += len(block)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Constants:
    """Constants and names in the code of a function. Other versions of Python compile it to others."""

    values: tuple[str, ...]
    python: tuple[int, int] = sys.version_info[:2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and (self.python != other.python or self.values == other.values)

    def __str__(self) -> str:
        return ", ".join(self.values) or "none"


def described(value: Any, name: str) -> dict[str, Any]:
    """Describes ``value`` by the names and values of its parts."""
    return dict(_parts(value, name, set(), 0))


Parts = Iterator[tuple[str, Any]]


def _parts(value: Any, name: str, seen: set[int], depth: int) -> Parts:
    if isinstance(value, _PLAIN):
        is_equal = isinstance(value, bool | int | float | str | None) and value == value  # not so of NaN
        yield name, value if is_equal else str(value)
    elif isinstance(value, Tensor):
        yield name, TensorSketch.of_tensor(value)
    elif isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
        yield name, TensorSketch.of_tensor(torch.as_tensor(np.array(value)))
    elif not isinstance(value, torch.device | torch.optim.Optimizer):
        yield name, _kind(value)
        if id(value) not in seen and depth < _DEEPEST:
            seen.add(id(value))
            yield from _inside(value, name, seen, depth + 1)


def _kind(value: Any) -> str:
    named = value if isinstance(value, type | types.FunctionType | types.MethodType) else type(value)
    return str(named.__qualname__)


def _inside(value: Any, name: str, seen: set[int], depth: int) -> Parts:
    """Yields the parts of a value. Skips attributes of objects inside others, which may belong to the machine."""
    parts: Mapping[str, Any] = {}
    if isinstance(value, functools.partial):
        keywords = {f"{key} of {name}": entry for key, entry in value.keywords.items()}
        parts = {f"the function of {name}": value.func, f"the arguments of {name}": value.args, **keywords}
    elif isinstance(value, types.MethodType):
        parts = {f"the object of {name}": value.__self__}
    elif isinstance(value, types.FunctionType):
        yield f"constants in {name}", Constants(tuple(_constants(value.__code__)))
        parts = _bound_to(value, name)
    elif isinstance(value, Mapping):
        parts = {
            f"{name}[{key!r}]": value[key]
            for key in list(value)[:_MOST_ENTRIES]
            if isinstance(key, str | int)
        }
    elif isinstance(value, list | tuple):
        yield f"the length of {name}", len(value)
        parts = {f"{name}[{place}]": entry for place, entry in enumerate(value[:_MOST_ENTRIES])}
    elif isinstance(value, set | frozenset):
        yield f"the members of {name}", str(sorted(str(each) for each in value if isinstance(each, _PLAIN)))
    elif isinstance(value, nn.Module | torch.optim.lr_scheduler.LRScheduler) or depth == 1:
        parts = {f"{name}.{key}": entry for key, entry in _attributes(value).items()}
    for part, entry in parts.items():
        yield from _parts(entry, part, seen, depth)


def _attributes(value: Any) -> dict[str, Any]:
    found = {key: entry for key, entry in getattr(value, "__dict__", {}).items() if key not in _SKIPPED}
    if isinstance(value, nn.Module):
        found = {key: entry for key, entry in found.items() if key not in _INTERNAL}
        tensors = {**dict(value.named_parameters(recurse=False)), **dict(value.named_buffers(recurse=False))}
        found |= tensors | dict(value.named_children())
    return found


def _bound_to(function: types.FunctionType, name: str) -> dict[str, Any]:
    """Returns the values of a function's closure and its defaults."""
    code, found = function.__code__, dict[str, Any]()
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[f"{variable} in {name}"] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    both = {**dict(zip(arguments, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    return found | {f"the default of {argument} in {name}": default for argument, default in both.items()}


def _constants(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _constants(constant)
        elif isinstance(constant, bool | int | float | complex | str | bytes | tuple):
            yield repr(constant)
