"""Tries the models of a prepared loop in their first calls, for what would train wrongly without an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from evener.hardware.timers import waiting
from evener.strategies.interfaces import ModelCall
from evener.strategies.learner import Learner
from evener.strategies.sample_trial import ModelRun, can_try, warn_if_mixed
from evener.torch_internals.autograd import is_within_transform
from evener.training.prepare.current_batch import CurrentBatch
from evener.training.prepare.positions import call_model_as, try_first_call
from evener.training.prepare.weak_hook import WeakHook


class FirstCalls:
    """The trials of one preparation.

    Args:
        learner: Returns the learner of the models.
        current: The current batches; the last one is the innermost. Empty during a trial of samples, so that what a
            model asks of the loop ends the trial.
        kept: Makes a context that leaves the random numbers as they were.
    """

    def __init__(
        self,
        learner: Callable[[], Learner],
        current: list[CurrentBatch],
        kept: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._learner, self._current, self._kept = learner, current, kept
        self._handles = weakref.WeakKeyDictionary[nn.Module, RemovableHandle]()
        model, cut = learner().model, learner().cut
        if cut.divides:
            self._handles[model] = try_first_call(model, cut, lambda: self._current[-1:])

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Tries those of the models that it does not know yet."""
        for model in models if self._learner().session.world_size > 1 else ():
            if model not in self._handles:
                hook = _BeforeCall(self.try_samples)
                self._handles[model] = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def try_samples(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each call of a model until it was tried, which takes a call in training on a row for each
        sample of the batch, outside of transforms such as ``torch.func.vmap``: their tensors cannot be looked at."""
        handle = self._handles.get(model)
        if handle is None or not self._current or not model.training or is_within_transform():
            return
        batch, learner = self._current[-1], self._learner()
        given, samples = ModelCall(args, kwargs), batch.micro.samples
        call, shares = partial(call_model_as, model), batch.shares
        run = ModelRun(model, call, given, samples, batch.may_be_columns, shares)
        if batch.samples and run.is_by_samples and all(p in learner.names for p in model.parameters()):
            handle.remove()
            if can_try(learner):
                with waiting(), self._without_batch(), self._kept():
                    warn_if_mixed(learner, run)

    @contextmanager
    def _without_batch(self) -> Iterator[None]:
        held = list(self._current)
        self._current.clear()
        try:
            yield
        finally:
            self._current[:] = held

    def close(self) -> None:
        """Ends the trials that are left."""
        while self._handles:
            self._handles.popitem()[1].remove()


class _BeforeCall(WeakHook):
    def __call__(self, *given: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(*given)
