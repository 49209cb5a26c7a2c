"""The random generators of a rank, left before each step where they outlive its process.

In a file that is mapped into memory: to write is to copy, and what was copied stays when the process is killed. Of
Python's generator and NumPy's, which are slow to read and seldom drawn from in a step, it is looked first whether they
have moved.
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
"""NumPy's state: 624 words, and which of them is next."""


class Generators:
    """Those of PyTorch on the CPU, NumPy and Python, as they were before each of the last two steps."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_SLOTS * _SLOT_NBYTES)
            self._map = mmap.mmap(file.fileno(), _SLOTS * _SLOT_NBYTES)
        self.kept = -1
        """The last step for which this process has kept them."""
        self._python, self._numpy = _Python(), _NumPy()

    def keep(self, step: int) -> None:
        """As they are now is how step ``step`` begins."""
        self.kept = step
        states = self._python.state(), self._numpy.state(), torch.get_rng_state().numpy().tobytes()
        data, at = pickle.dumps(states, protocol=5), step % _SLOTS * _SLOT_NBYTES
        self._map[at : at + _HEADER.size] = _HEADER.pack(-1, 0)
        self._map[at + _HEADER.size : at + _HEADER.size + len(data)] = data
        self._map[at : at + _HEADER.size] = _HEADER.pack(step, len(data))

    def draw(self, step: int) -> bool:
        """Sets the generators to what was kept for ``step``; whether that is known."""
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
    """Python's own generator, pickled anew when it was drawn from."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._pickled = b""

    def state(self) -> bytes:
        state = random.getstate()
        _, words, gauss = state
        mark = (
            words[0],
            words[1],
            words[-1],
            gauss,
        )  # the last word is a place among others that change together
        if mark != self._known:
            self._known, self._pickled = mark, pickle.dumps(state, protocol=5)
        return self._pickled


class _NumPy:
    """NumPy's global generator, read anew when it was drawn from."""

    def __init__(self) -> None:
        self._known: bytes | None = None
        self._pickled = b""

    def state(self) -> bytes:
        words = self._words()
        if words is None or words != self._known:
            state: Any = np.random.get_state(legacy=False)
            # A second normal number is kept from the first, and drawing it moves nothing.
            self._known = None if state["has_gauss"] else words
            self._pickled = pickle.dumps(state, protocol=5)
        return self._pickled

    def _words(self) -> bytes | None:
        """As they lie in memory; None for a generator of another kind."""
        generator: Any = get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return None
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_NBYTES)
