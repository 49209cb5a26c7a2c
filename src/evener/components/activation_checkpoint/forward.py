"""A block's ``forward`` that may be computed again.

::

    kept        forward ──────────────────── backward        holds all that backward needs
    again       forward ───────────── again, backward        holds its inputs

``torch.utils.checkpoint`` does it, with the same random numbers and in the same precision. What it does not know of is
done around it: the counting and the messages of Evener's layers (:mod:`evener.nn.recompute_guard`), and buffers.

As with precision, ``forward`` is exchanged, and no module is put around another: names, state and hooks stay. So hooks
of the block, by which FSDP2 gathers its weights, are not called again; its weights are there when backward comes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from evener.components.activation_checkpoint.written_buffers import Copies, WrittenBuffers, in_place_of
from evener.components.repeated_blocks import repeated_blocks
from evener.core.config.recompute import Recompute
from evener.errors import ConfigurationError
from evener.nn.fqn import clean_name
from evener.nn.recompute_guard import RecomputedCall
from evener.torch_internals.dispatch import active_fake_mode


class Watch(Protocol):
    """Who looks on while blocks are computed. Repetitions then go to the end of the block, and not just as far as
    backward needs it."""

    def called(self, name: str) -> Any:
        """A block was computed first; returns what :meth:`again` is given."""

    def again(self, call: Any) -> AbstractContextManager[Any]:
        """Around its repetition."""

    def returned(self, call: Any, found: Any) -> None:
        """What the repetition came to."""


class Recomputed:
    """In the place of the ``forward`` of a block."""

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name, self.called = name, False
        self.kept = False
        """Whether it is not computed again."""
        self.watch: Watch | None = None
        self._block, self._inner = block, block.forward
        self._buffers = WrittenBuffers(name, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self._block.training):
            return self._inner(*args, **kwargs)
        self.called = True
        if self.kept:
            return self._inner(*args, **kwargs)
        call = _Call(self._buffers, self.watch)
        early = nullcontext() if self.watch is None else set_checkpoint_early_stop(False)
        with early:
            compute = partial(self._compute, call, kwargs)
            found = checkpoint(compute, *args, use_reentrant=False, context_fn=call.contexts)
        if self.watch is not None:
            call.noted = self.watch.called(self.name)
        return found

    def _compute(self, call: _Call, kwargs: dict[str, Any], *args: Any) -> Any:
        found = self._inner(*args, **kwargs)
        if self.watch is not None and call.noted is not None:
            self.watch.returned(call.noted, found)
        return found

    def __reduce__(self) -> Any:
        """A copy of the block has copies of its own, and nobody who looks on."""
        return _copied, (self.name, self._block, self._inner, self.kept)


def _copied(name: str, block: nn.Module, inner: Any, kept: bool) -> Recomputed:
    made = Recomputed(name, block)
    made._inner, made.kept = inner, kept
    return made


class _Call:
    """One call of a block, until its backward."""

    def __init__(self, buffers: WrittenBuffers, watch: Watch | None) -> None:
        self._buffers, self._watch = buffers, watch
        self._segment, self._copies = RecomputedCall(), Copies()
        self.noted: Any = None

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the first computation, and around each repetition."""
        return self._first(), _Repeatedly(self._again)

    @contextmanager
    def _first(self) -> Iterator[None]:
        with self._segment.first(), self._buffers.first(self._copies):
            yield

    @contextmanager
    def _again(self) -> Iterator[None]:
        seen = nullcontext() if self._watch is None else self._watch.again(self.noted)
        with in_place_of(self._copies), self._segment.again(), seen:
            yield


class _Repeatedly:
    """A context that may be entered once more, for a backward that comes in parts."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        made = self._make()
        made.__enter__()
        self._entered.append(made)

    def __exit__(self, *error: Any) -> Any:
        return self._entered.pop().__exit__(*error)


class Blocks:
    """The blocks of a model that may be computed again."""

    def __init__(self, forwards: Iterable[Recomputed] = ()) -> None:
        self._forwards = {each.name: each for each in forwards}
        self._checked = not self._forwards

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the model."""
        return tuple(self._forwards)

    def keep(self, names: Collection[str]) -> None:
        """From now on these are kept, and all others computed again."""
        for each in self._forwards.values():
            each.kept = each.name in names

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """In the block somebody looks on."""
        try:
            for each in self._forwards.values():
                each.watch = watch
            yield
        finally:
            for each in self._forwards.values():
                each.watch = None

    def check(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """After the first step: that no block was called would be said by nobody.

        Args:
            gather: Brings together what all ranks tell; a collective call.

        Raises:
            ConfigurationError: Then.
        """
        if self._checked:
            return
        self._checked = True
        called = [each.name for each in self._forwards.values() if each.called]
        if not any(gather(called)):
            raise ConfigurationError(
                f"recompute: no rank has called {', '.join(self.names[:4])} in a step, so that nothing is computed "
                "again: what is around these blocks uses their parts, or a strategy has cut them open. Leave recompute "
                "out"
            )


def recompute_blocks(asked: Recompute | None, model: nn.Module) -> Blocks:
    """Takes the place of ``forward`` of what ``model`` repeats, if that is asked for.

    Raises:
        ConfigurationError: If it repeats nothing, or nobody can choose yet.
    """
    if asked is None:
        return Blocks()
    if asked.is_budget and active_fake_mode() is not None:
        raise ConfigurationError(
            f"which blocks recompute={asked.text} takes is measured in the run's first steps and not known before: "
            "estimate the least memory with recompute=blocks, and the most without"
        )
    made = []
    for name in repeated_blocks(model):
        block = model.get_submodule(name)
        block.forward = forward = Recomputed(clean_name(name), block)
        made.append(forward)
    if not made:
        raise ConfigurationError(
            "recompute computes modules again that a model repeats in an nn.ModuleList or nn.Sequential, and "
            f"{type(model).__name__} has no two of one class there that have modules inside: write its layers as such "
            "blocks, or leave recompute out"
        )
    return Blocks(made)
