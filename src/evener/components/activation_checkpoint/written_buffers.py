"""Buffers that a block's forward writes into, such as the running statistics of BatchNorm.

A repetition must not write into them once more, and must begin with what they were: so it gets copies in their place.
Which these are is found at the first call, for which all buffers are copied: by their numbers too, for PyTorch does not
count what BatchNorm writes as a write.
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
"""Where a buffer is held: the buffers of a module, and its key there."""
Copies = list[tuple[Place, Tensor]]


class WrittenBuffers:
    """Of a block.

    Args:
        name: Of the block, for messages.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name, self._block = name, block
        self._written: list[Place] | None = None

    @contextmanager
    def first(self, copies: Copies) -> Iterator[None]:
        """Around the call in the forward pass, which fills ``copies``.

        Raises:
            ConfigurationError: If it writes into a buffer into which the first call did not.
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
    """Copies of ``copies`` are where the buffers were."""
    were = [(held, key, held[key]) for (held, key), _ in copies]
    for (held, key), copy in copies:
        held[key] = copy.clone()
    try:
        yield
    finally:
        for held, key, buffer in were:
            held[key] = buffer
