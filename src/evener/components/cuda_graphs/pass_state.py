"""What a pass changes beside gradients: buffers, and the generators of random numbers."""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch
from torch import Tensor, nn

from evener.hardware import accelerators
from evener.nn.fqn import clean_name


class PassState:
    """A copy of the buffers of ``model`` and of the states of the generators, on the host and on ``device``."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._buffers = [(clean_name(name), each, each.clone()) for name, each in model.named_buffers()]
        self._drawn = accelerators.generator_states(device)
        self._of_python = random.getstate(), np.random.get_state()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The copies by name."""
        return {name: value for name, _, value in self._buffers}

    def restore(self) -> None:
        """Gives buffers and generators these values. Autograd, which may have saved buffers, does not count it as a
        write."""
        for _, buffer, value in self._buffers:
            buffer.data.copy_(value)
        accelerators.draw_from(self._drawn, self._device)
        random.setstate(self._of_python[0])
        np.random.set_state(self._of_python[1])


def host_draws(device: torch.device) -> bytes:
    """Returns the states of the generators whose numbers no graph of ``device`` draws: those of Python, NumPy and, but
    for graphs of the host, of PyTorch on the host."""
    of_torch = b"" if device.type == "cpu" else torch.get_rng_state().numpy().tobytes()
    return pickle.dumps((random.getstate(), np.random.get_state(), of_torch))
