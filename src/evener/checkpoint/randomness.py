"""The states of a rank's random generators: PyTorch's on its device and on the CPU, NumPy's and Python's own.

What draws from them by place (:mod:`evener.nn.dropout`, the order of samples) needs none of it. It is for everything
else, such as PyTorch's own dropout: a run that goes on on as many ranks draws what it would have drawn.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def drawn(device: torch.device) -> Tensor:
    """The states, as bytes."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).tolist()
    return torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)


def draw_on(found: Tensor, device: torch.device) -> None:
    """Sets the generators to what :func:`drawn` gave."""
    states = json.loads(bytes(found.tolist()))
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(numbers, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8), device)
