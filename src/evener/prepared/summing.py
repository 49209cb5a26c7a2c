"""Gradients of a prepared loop, when a backward pass is over: their mean over the ranks, as DDP has it.

A prepared loss back-propagates N times this rank's part of the global mean on each of N ranks, and so the mean of the
ranks' gradients is the gradient of the whole batch. A mean, and no sum, because it leaves alone what is the same on
all ranks: what an earlier backward pass of the step has left already, and a penalty that every rank computes from the
weights::

    mean over ranks of (S + N g_r + p)  =  S + g_0 + g_1 + ... + p
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from evener.collectives.base import AllReduce
from evener.collectives.ddp.buckets import DEFAULT_BUCKET_NBYTES
from evener.collectives.registry import make
from evener.errors import ConfigurationError, DivergenceError
from evener.runtime.mesh import DIVIDING_TERMS
from evener.strategies import gradients
from evener.strategies.afterwards import in_buckets, zeros_of
from evener.strategies.flat import sent_as_one
from evener.strategies.learner import Learner

Exchange = Callable[..., list[list[float]]]
"""From a name and numbers to the numbers of all ranks."""
_MOST_MODELS = 50
"""Of which a row of float64 can tell."""


class MeanOfRanks:
    """Makes the gradients of the models' parameters their mean over the ranks.

    Args:
        models: Of which those that a backward pass has not come to are left alone.
        exchange: Tells all ranks numbers, and what they are for.
    """

    def __init__(self, learner: Learner, models: list[nn.Module], exchange: Exchange) -> None:
        if len(models) > _MOST_MODELS:
            raise ConfigurationError(
                f"{len(models)} models: put them into one module, or {_MOST_MODELS} at most"
            )
        self._learner, self._exchange = learner, exchange
        self._models = [[p for p in model.parameters() if p.requires_grad] for model in models]
        self._delayed = False
        self._own: set[nn.Parameter] = set()
        """Those whose gradient is of this rank's samples, and was not summed."""
        self._put_off: set[nn.Parameter] = set()
        """Those for which that was said."""
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._own.add)  # type: ignore[no-untyped-call]
            for p in {p: None for model in self._models for p in model}
        ]
        group, settings = learner.mesh.group(*DIVIDING_TERMS), learner.settings
        self._ranks = 1 if group is None else group.size()
        self._all_reduce: AllReduce | None = None
        if group is not None:
            seconds, inside = learner.session.timeout_seconds, learner.session.inner_backend
            self._all_reduce = make(settings.all_reduce, group, seconds, settings.compression, inside)
        self._sparse = gradients.sparse_weights(learner.model)

    @property
    def ranks(self) -> int:
        """N."""
        return self._ranks

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Backward passes inside leave gradients to the next one outside."""
        before, self._delayed = self._delayed, True
        try:
            yield
        finally:
            self._delayed = before

    def work_is_done(self, tell: Callable[[], None]) -> None:
        """Calls ``tell`` where ranks are about to wait for each other."""
        if not self._delayed:
            tell()

    def __call__(self) -> None:
        """After a backward pass. A collective call, unless it is delayed."""
        self._put_off |= self._own
        self._own.clear()
        if self._delayed:
            return
        if self._all_reduce is not None:
            for parameters in self._touched():
                self._mean_of(parameters, self._all_reduce)
        self._put_off.clear()

    def _touched(self) -> list[list[nn.Parameter]]:
        """The parameters of the models that a rank has been backward through, which have a gradient on any."""
        mask = sum(2**n for n, model in enumerate(self._models) if not self._put_off.isdisjoint(model))
        absent = sum(p.grad is None for model in self._models for p in model)
        rows = self._exchange("the sum of gradients", float(mask), float(absent))
        chosen = [model for n, model in enumerate(self._models) if any(int(row[0]) >> n & 1 for row in rows)]
        if not any(row[1] for row in rows):
            return chosen
        own = [[p.grad is not None for p in model] for model in chosen]
        said = self._learner.session.control.gather_objects(own)
        anywhere = [[any(flags) for flags in zip(*each, strict=True)] for each in zip(*said, strict=True)]
        return [
            [p for p, found in zip(model, flags, strict=True) if found]
            for model, flags in zip(chosen, anywhere, strict=True)
        ]

    def _mean_of(self, parameters: Iterable[nn.Parameter], all_reduce: AllReduce) -> None:
        present = [p for p in parameters if p.numel()]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = zeros_of(parameter, parameter in self._sparse)
        for bucket in in_buckets(present, self._learner.settings.bucket_bytes or DEFAULT_BUCKET_NBYTES):
            found = [p.grad for p in bucket if p.grad is not None]
            if found[0].is_sparse:
                for gradient in found:
                    all_reduce(gradient).wait()
                    gradient /= self._ranks
            else:
                sent_as_one(found, partial(self._mean_of_flat, all_reduce))

    def _mean_of_flat(self, all_reduce: AllReduce, flat: Tensor) -> None:
        all_reduce(flat).wait()
        flat /= self._ranks

    def check_all_summed(self, where: str) -> None:
        """Raises:
        ConfigurationError: If gradients are of this rank's samples alone, and nobody has said that they shall be.
        """
        if self._own and self._ranks > 1:
            raise ConfigurationError(
                f"the gradient of {self._first(self._own)}, one of {len(self._own)}, is of rank "
                f"{self._learner.session.rank}'s samples alone at {where}: backward went through no prepared loss. "
                "Give the loss function to evener.prepare and call what it returns, or say evener.global_mean(value) "
                "of a mean that the model computed itself"
            )

    def check_none_put_off(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises:
        ConfigurationError: If the gradients of ``parameters`` wait for a backward pass that sums them.
        """
        left = self._put_off.intersection(parameters)
        if left and self._ranks > 1:
            raise ConfigurationError(
                f"optimizer.step() with gradients of rank {self._learner.session.rank}'s samples alone, the first that "
                f"of {self._first(left)}: they were put off by evener.no_sync, which the last backward pass before a "
                "step must be outside of"
            )

    def _first(self, parameters: set[nn.Parameter]) -> str:
        return next(name for p, name in self._learner.names.items() if p in parameters)

    def check_sound(self, parameters: Iterable[nn.Parameter], step: int) -> None:
        """Raises:
        DivergenceError: If a gradient is not finite, on all ranks alike, before the update.
        """
        self._learner.look_at(p for p in parameters if p in self._learner.names)
        name = self._learner.unsound.name()
        if name is not None:
            raise DivergenceError(
                f"the gradient of {name} is not finite before the update of step {step}: the run stops here. Try a "
                "lower learning rate or clip the gradients"
            )

    def close(self) -> None:
        """Lets the parameters go."""
        for hook in self._hooks:
            hook.remove()
        if self._all_reduce is not None:
            self._all_reduce.close()
