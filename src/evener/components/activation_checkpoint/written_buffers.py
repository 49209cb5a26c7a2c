"""Protects buffers that a block's forward writes into, such as the running statistics of BatchNorm.

A recomputation must not write into them again, and must begin with their old values. So it uses copies in their place.
The first call copies all buffers and finds out which are written. It also compares values, because PyTorch does not
count the writes of BatchNorm in a tensor's version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evener.errors import ConfigurationError
from evener.torch_internals.autograd import version
from evener.torch_internals.modules import own_buffers

Place = tuple[dict[str, Any], str]
"""The place of a buffer: the dict of a module's buffers, and the key in it."""
Copies = list[tuple[Place, Tensor]]


class WrittenBuffers:
    """Finds the buffers that a block writes into, and copies them before each call.

    Args:
        name: The name of the block, for messages.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name, self._block = name, block
        self._written: list[Place] | None = None

    @contextmanager
    def first(self, copies: Copies) -> Iterator[None]:
        """Context for the call in the forward pass. Fills ``copies`` with the old values of the written buffers.

        Raises:
            ConfigurationError: If the call writes into a buffer that the first call did not write.
        """
        every = list(self._places())
        before = [(held[key], version(held[key])) for held, key in every]
        copies += [
            ((held, key), held[key].clone())
            for held, key in (every if self._written is None else self._written)
        ]
        yield
        written = [
            (held, key)
            for (held, key), (tensor, number) in zip(every, before, strict=True)
            if held[key] is not tensor or version(tensor) != number
        ]
        if self._written is None:
            copies[:] = [
                ((held, key), copy)
                for (held, key), copy in copies
                if _among((held, key), written) or not torch.equal(held[key], copy)
            ]
            self._written = [place for place, _ in copies]
        self._check(written)

    def _places(self) -> Iterator[Place]:
        for module in self._block.modules():
            held = own_buffers(module)
            yield from ((held, key) for key, buffer in held.items() if buffer is not None)

    def _check(self, written: Sequence[Place]) -> None:
        new = [
            key
            for held, key in written
            if self._written is not None and not _among((held, key), self._written)
        ]
        if new:
            raise ConfigurationError(
                f"{self._name} writes into its buffer {new[0]}, and did not when it was first called, so that what it "
                "was before is not known when the block is computed again: leave recompute out"
            )


def _among(place: Place, places: Sequence[Place]) -> bool:
    return any(place[0] is held and place[1] == key for held, key in places)


@contextmanager
def in_place_of(copies: Copies) -> Iterator[None]:
    """Replaces the buffers by clones of ``copies`` during the ``with`` statement."""
    were = [(held, key, held[key]) for (held, key), _ in copies]
    for (held, key), copy in copies:
        held[key] = copy.clone()
    try:
        yield
    finally:
        for held, key, buffer in were:
            held[key] = buffer
