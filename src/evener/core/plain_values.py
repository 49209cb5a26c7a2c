"""Values that a checkpoint can hold: those that PyTorch reads again with ``weights_only=True``, which runs no code.

PyTorch writes anything that can be pickled, and refuses most of it when it is read. A learning rate of NumPy's would
make every checkpoint of a run unreadable, and nobody would know until the run is to go on. So what is written is looked
at before: NumPy's numbers become Python's, and anything else that could not be read is refused by its name.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evener.core.plugins import kind_of
from evener.errors import ConfigurationError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def as_plain(value: Any) -> Any:
    """Returns nested dictionaries, lists and tuples with Python's numbers in place of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {as_plain(key): as_plain(entry) for key, entry in value.items()}
    return type(value)(map(as_plain, value)) if type(value) in (list, tuple) else value


def serialized(rest: Mapping[str, Any]) -> bytes:
    """Returns the content of the file of what is not a tensor.

    Raises:
        ConfigurationError: If a part of it could not be read again.
    """
    buffer, plain = io.BytesIO(), as_plain(dict(rest))
    if strange := unreadable(plain):
        raise ConfigurationError(strange)
    torch.save(plain, buffer)
    return buffer.getvalue()


def unreadable(value: Any, name: str = "the state") -> str:
    """Describes the first part of a value that could be written and not be read again. Returns "" if there is none."""
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return ""
    if type(value) in (dict, OrderedDict, list, tuple):
        return next(filter(None, (unreadable(entry, place) for place, entry in _parts(value, name))), "")
    if _is_read_again(value):
        return ""
    return (
        f"{name} is {kind_of(value)}, which a checkpoint cannot hold, because to read it might run code of a stranger: "
        "let state_dict return numbers, text, None, tensors, and lists and dictionaries of them"
    )


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield from ((f"{name}[{place}]", entry) for place, entry in enumerate(value))
        return
    for key, entry in value.items():
        yield f"a key of {name}", key
        yield f"{name}.{key}", entry


def _is_read_again(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # any kind of error, of a user's object
        return False
    return True
