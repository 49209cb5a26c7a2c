"""Stores the random generators of a rank before each step, in a file that outlives its process.

The file is mapped into memory: writing is copying, and copied bytes stay when the process is killed. Python's and
NumPy's generators are slow to read and rarely used in a step, so they are first checked for changes.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

_SLOT_NBYTES = 64 * 1024
_SLOTS = 2
_HEADER = struct.Struct("qq")
"""Number of the step, and of bytes."""
_MT19937_NBYTES = 625 * 4
"""Size of NumPy's state: 624 words, and the index of the next one."""


class Generators:
    """States of the CPU generators of PyTorch, NumPy and Python before each of the last two steps."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_SLOTS * _SLOT_NBYTES)
            self._map = mmap.mmap(file.fileno(), _SLOTS * _SLOT_NBYTES)
        self.kept = -1
        """The last step for which this process has stored the states."""
        self._python, self._numpy = _Python(), _NumPy()

    def keep(self, step: int) -> None:
        """Stores the current states as those with which step ``step`` begins."""
        self.kept = step
        states = self._python.state(), self._numpy.state(), torch.get_rng_state().numpy().tobytes()
        data, at = pickle.dumps(states, protocol=5), step % _SLOTS * _SLOT_NBYTES
        self._map[at : at + _HEADER.size] = _HEADER.pack(-1, 0)
        self._map[at + _HEADER.size : at + _HEADER.size + len(data)] = data
        self._map[at : at + _HEADER.size] = _HEADER.pack(step, len(data))

    def draw(self, step: int) -> bool:
        """Sets the generators to the states stored for ``step``. Returns False if there are none."""
        at = step % _SLOTS * _SLOT_NBYTES
        number, size = _HEADER.unpack(self._map[at : at + _HEADER.size])
        known: bool = size > 0 and number == step
        if known:
            _set_states(*pickle.loads(self._map[at + _HEADER.size :][:size]))
        return known


def _set_states(of_python: bytes, of_numpy: bytes, of_torch: bytes) -> None:
    random.setstate(pickle.loads(of_python))
    np.random.set_state(pickle.loads(of_numpy))
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


class _Python:
    """Python's own generator, pickled again only after it was used."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._pickled = b""

    def state(self) -> bytes:
        state = random.getstate()
        _, words, gauss = state
        # The last word is the index of the next word; the words change together.
        mark = words[0], words[1], words[-1], gauss
        if mark != self._known:
            self._known, self._pickled = mark, pickle.dumps(state, protocol=5)
        return self._pickled


class _NumPy:
    """NumPy's global generator, read again only after it was used."""

    def __init__(self) -> None:
        self._known: bytes | None = None
        self._pickled = b""

    def state(self) -> bytes:
        words = self._words()
        if words is None or words != self._known:
            state: Any = np.random.get_state(legacy=False)
            # Normal numbers are drawn in pairs, and drawing the second changes no word.
            self._known = None if state["has_gauss"] else words
            self._pickled = pickle.dumps(state, protocol=5)
        return self._pickled

    def _words(self) -> bytes | None:
        """Returns the state's bytes in memory, or None for a generator of another kind."""
        generator: Any = get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return None
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_NBYTES)
