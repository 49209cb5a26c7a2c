"""States of a rank's random generators: PyTorch's on its device and on the CPU, NumPy's and Python's.

Numbers that are drawn by position (:mod:`evener.nn.dropout`, the order of samples) do not need these states. They are
for everything else, such as PyTorch's own dropout: a run that resumes on the same number of ranks draws what it would
have drawn.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evener.errors import DataError
from evener.hardware import accelerators


def drawn(device: torch.device) -> Tensor:
    """Returns the states, as bytes."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    host, *card = accelerators.generator_states(device)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": host.tolist(),
    }
    for state in card:
        states[device.type] = state.tolist()
    return torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)


def draw_on(found: Tensor, device: torch.device) -> None:
    """Sets the generators to the result of :func:`drawn`.

    Raises:
        DataError: If ``found`` is something else.
    """
    try:
        _set(json.loads(bytes(found.tolist())), device)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the checkpoint's states of random generators cannot be used: {error}") from error


def _set(states: Any, device: torch.device) -> None:
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(numbers, dtype=np.uint32), *rest))
    torch_states = [states[name] for name in ("torch", device.type) if name in states]
    accelerators.draw_from([torch.tensor(state, dtype=torch.uint8) for state in torch_states], device)
