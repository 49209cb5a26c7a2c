"""A user's hooks on gradients, which wait in a backward pass until the gradients are summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from evener.errors import ConfigurationError
from evener.torch_internals.autograd import Hooks, give_hooks, hooked, hooks_of

OF_WEIGHTS = (
    "backward began with a number that was computed from divided weights, of which only the sum over samples is known "
    "to be right: let the optimizer decay weights (weight_decay), or use strategy 'ddp', whose weights are whole"
)


def refuse_gradient(_: Tensor) -> None:
    """A hook of a DTensor, whose gradient PyTorch's FSDP2 brings, and autograd must not.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(OF_WEIGHTS)


class DelayedHooks:
    """The hooks of the parameters during a pass.

    Args:
        name_of: Returns the name of a parameter.
    """

    def __init__(self, name_of: Callable[[nn.Parameter], str]) -> None:
        self._name_of = name_of
        self._kept: dict[nn.Parameter, tuple[Hooks, Tensor | None]] = {}
        """Hooks that have to wait for the sum, and the gradient before the pass."""

    @property
    def are_put_off(self) -> bool:
        """True if hooks wait for a sum."""
        return bool(self._kept)

    def put_off(
        self, parameters: Iterable[nn.Parameter], divided: Collection[nn.Parameter], is_delayed: bool
    ) -> None:
        """Takes the hooks away from the parameters, before a pass.

        Args:
            divided: Those that are divided over the ranks.
            is_delayed: Whether the sum is left to a later pass.

        Raises:
            ConfigurationError: If a hook could not be called with the gradient of the whole batch.
        """
        for parameter in parameters:
            hooks = hooks_of(parameter)
            if hooks is None:
                continue
            if parameter in divided:
                found = chain.from_iterable((each or {}).values() for each in hooks)
                if all(hook is refuse_gradient for hook in found):
                    continue
                raise ConfigurationError(
                    f"{self._name_of(parameter)} has a hook on its gradient, of which each rank has a part: change "
                    "gradients after backward, or use strategy 'ddp'"
                )
            if is_delayed:
                raise ConfigurationError(
                    f"{self._name_of(parameter)} has a hook on its gradient, which wants the gradient of the whole "
                    "batch, and evener.no_sync puts that off: leave one of them out"
                )
            if parameter not in self._kept:
                self._kept[parameter] = hooks, parameter.grad
                give_hooks(parameter, (None, {}))
                parameter.grad = None

    @contextmanager
    def until_update(self, hooked_now: Callable[[], Collection[nn.Parameter]]) -> Iterator[None]:
        """Context of the passes of a step, of which each has a part of the gradients. The hooks wait for :meth:`call`
        in the update: before it, a rank may have zeros for a parameter that no rank has used.

        Args:
            hooked_now: Returns the parameters whose hooks have to wait.

        Raises:
            ConfigurationError: If a hook came within the context.
        """
        self.restore()  # after a step that was left between backward and update
        self.put_off(hooked_now(), (), is_delayed=False)
        try:
            yield
            self._check_none_came(hooked_now())
        except BaseException:
            self.restore()
            raise

    def _check_none_came(self, others: Iterable[nn.Parameter] = ()) -> None:
        """Raises ConfigurationError if a hook was registered since others were put off: it has got a part."""
        came = next(chain(others, hooked(self._kept)), None)
        if came is not None:
            raise ConfigurationError(
                f"{self._name_of(came)} got a hook on its gradient within a step, which was called with the part of "
                "one pass or one rank, not with the gradient of the whole batch: register it before the step, as in "
                "the model's constructor"
            )

    def restore(self) -> None:
        """Restores hooks and gradients after a pass has failed."""
        for parameter, (hooks, gradient) in self._kept.items():
            give_hooks(parameter, hooks)
            parameter.grad = gradient
        self._kept.clear()

    @torch.no_grad()
    def call(self, mark: Callable[[nn.Parameter], None]) -> None:
        """Calls the hooks with the gradients of all ranks, those of the last parameters first, as autograd does in most
        models. ``mark`` is called with each parameter before the hooks that run after accumulation."""
        self._check_none_came()
        kept, self._kept = self._kept, {}
        for parameter, (hooks, _) in kept.items():
            give_hooks(parameter, hooks)
        for parameter, ((before, after), older) in reversed(kept.items()):
            found = parameter.grad
            if found is None:
                parameter.grad = older
                continue
            for hook in list((before or {}).values()):
                changed = hook(found)
                found = found if changed is None else changed
            parameter.grad = found if older is None else older.add_(found)
            mark(parameter)
            for hook in list((after or {}).values()):
                with torch.enable_grad():
                    hook(parameter)
