"""Gradients of a prepared loop: after each backward pass, parameters hold the gradients of the whole batch.

On one device a pass computes the gradient of its root, the number on which ``backward`` was called. Here all N ranks
have the same root: a prepared loss has the value of the whole batch, and a penalty depends only on weights, which are
equal. So each rank goes backward from root / N, and the gradients of parameters are summed over the ranks. A prepared
loss multiplies the gradient for this rank's samples by N, so that at every layer they get the gradients of one device::

    root / N  ─┬─▶ loss of all ─▶ N times this rank's part ─▶ layers ─▶ parameters ─┐
               └─▶ penalty ────────────────────────────────▶ parameters ────────────┴─▶ sum over ranks

Gradients that an earlier pass of the step has left are divided by N first. A complete gradient carries a mark. One
without a mark, set by the loop itself, must be the same on all ranks, and is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evener.collectives.base import AllReduce
from evener.components import gradients
from evener.components.delayed_hooks import DelayedHooks, refuse_gradient
from evener.components.sharded_tensor.local import is_divided
from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.distributed.mesh import DIVIDING_TERMS
from evener.errors import ConfigurationError, DivergenceError
from evener.strategies.learner import Learner
from evener.strategies.reducer import all_reduce_of, sum_in_buckets, sum_together
from evener.torch_internals.autograd import version
from evener.training.consistency.replicas import digest, together
from evener.training.prepare.bucket_sums import BucketSums, bucket_sums_of
from evener.training.prepare.gradient_mark import (
    MARK,
    PART,
    WHOLE,
    become_part,
    become_whole,
    mark_of,
    set_mark,
)
from evener.training.prepare.gradient_part import ShownParts
from evener.training.prepare.late_checks import LateChecks, Number
from evener.training.prepare.pass_roots import PassRoots
from evener.training.prepare.rank_checks import WAY_OUT, Exchange
from evener.training.prepare.soundness import SoundnessCheck

_MOST_MODELS = 50
"""Limit for a bit mask of models that fits a float64."""


class MeanOfRanks:
    """Turns the gradients of the models' parameters into those of the mean of all ranks' roots.

    Args:
        models: The models. Those that no backward pass has reached are left alone.
        exchange: Exchanges numbers between all ranks, with a reason.
        later: Checks of what a device is still computing.
    """

    def __init__(
        self, learner: Learner, models: Sequence[nn.Module], exchange: Exchange, later: LateChecks
    ) -> None:
        self._exchange, self._later = exchange, later
        self._delayed = False
        self._all_reduce: AllReduce | None = None
        self._touched: set[nn.Parameter] = set()
        """Parameters that passes have reached since the last sum."""
        self._lacking: set[nn.Parameter] = set()
        """Parameters summed in backward whose gradient is zero because no pass on this rank has reached them."""
        self._hooks = DelayedHooks(self._name)
        self._watched: list[RemovableHandle] = []
        self._buckets: BucketSums | None = None
        self.roots = PassRoots(exchange, later)
        """The numbers from which passes began."""
        self.renew(learner, models)

    def renew(self, learner: Learner, models: Sequence[nn.Module]) -> None:
        """Takes other models, or models that were changed."""
        if len(models) > _MOST_MODELS:
            raise ConfigurationError(
                f"{len(models)} models: put them into one module, or {_MOST_MODELS} at most"
            )
        self.close()
        self._learner = learner
        self._soundness = SoundnessCheck(
            lambda own: [row[0] for row in self._exchange("optimizer.step()", own)], self._later
        )
        self._models = [list(model.parameters()) for model in models]
        self._own = set(chain.from_iterable(self._models))
        specs = {p: shard_spec(p) for p in self._own if not is_divided(p)}
        pieces = {p: spec for p, spec in specs.items() if spec is not None}
        self.shown = ShownParts(pieces, learner.mesh, self._exchange)
        self._is_gathered = any(map(is_divided, self._own))
        """True if passes gather weights."""
        self._in_backward = {p for p in self._own if learner.synchronizer.sums_in_backward(p)}
        """Parameters whose gradients backward sums itself, each rank's part of them."""
        for parameter in self._in_backward:
            if is_divided(parameter) and parameter.requires_grad:
                self._watched.append(parameter.register_hook(refuse_gradient))
        group = learner.mesh.group(*DIVIDING_TERMS)
        self._ranks = 1 if group is None else group.size()
        if group is not None:
            self._all_reduce = all_reduce_of(learner, group)
        self._sparse = gradients.sparse_weights(learner.model)
        whole = not self._in_backward and not self._sparse
        nbytes = learner.settings.bucket_nbytes
        self._buckets = bucket_sums_of(self._models, nbytes, self._all_reduce) if whole else None

    def release(self) -> None:
        """Drops the models, until others are given."""
        self._models, self._own, self._sparse = [], set(), set()
        self._in_backward.clear()
        self.shown = ShownParts({}, self._learner.mesh, self._exchange)
        self._touched.clear()
        self._lacking.clear()
        del self._learner

    @property
    def ranks(self) -> int:
        """Number of ranks whose gradients are summed, N."""
        return self._ranks

    def owns(self, tensor: Tensor) -> bool:
        """Returns True for a parameter of the models, or a whole weight gathered from the parts of one."""
        return tensor in self._own or self._learner.synchronizer.gathered(tensor)

    def is_summed_in_backward(self, tensor: Any) -> bool:
        """Returns True for a parameter of which each rank has a part, whose gradient backward sums."""
        return isinstance(tensor, Tensor) and tensor in self._in_backward

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Context in which backward passes leave their gradients to the next pass outside."""
        before, self._delayed = self._delayed, True
        try:
            yield
        finally:
            self._delayed = before

    def work_is_done(self, tell: Callable[[], None]) -> None:
        """Calls ``tell`` if the ranks are about to wait for each other."""
        if not self._delayed:
            tell()

    # A pass

    def going(self, run: Callable[[float], None], root: Sequence[Number], tolerance: float) -> None:
        """Runs a pass from ``root``, which all ranks have. The gradients that it leaves are this rank's part.

        Raises:
            ConfigurationError: If a parameter's gradient has a hook and the sum is delayed.
        """
        self.shown.hide()
        self.check_all_summed("a backward pass")
        self._hooks.put_off(chain.from_iterable(self._models), self._in_backward, self._delayed)
        summed_later = self._own - self._in_backward
        for parameter in summed_later:
            become_part(parameter, self._ranks)
        before = {p: (p.grad, version(p.grad)) for p in summed_later if p.grad is not None}
        empty = {p for p in self._in_backward if p.grad is None}
        try:
            with self._summing():
                run(1 / self._ranks)
        except BaseException:
            self._hooks.restore()
            raise
        self.roots.add(root, tolerance)
        self._take_summed(empty)
        for parameter in summed_later:
            gradient, (older, number) = parameter.grad, before.get(parameter, (None, 0))
            if gradient is not None and (gradient is not older or version(gradient) != number):
                self._touched.add(parameter)
                set_mark(parameter, PART)

    def _summing(self) -> AbstractContextManager[Any]:
        """Context of a pass: in which FSDP2 sums gradients, or buckets are sent, or nothing is."""
        if self._is_gathered:
            return self._learner.synchronizer.micro_batch(last=True)
        if self._buckets is None or self._delayed:
            return nullcontext()
        known, (model,) = set(self._buckets.parameters), self._models
        ready = not self._hooks.are_put_off and all(p.requires_grad for p in self._touched)
        ready = ready and all(p.requires_grad == (p in known) for p in model if p.numel())
        if min(row[0] for row in self._exchange("the sum of gradients", float(ready))):
            return self._buckets.during()
        return nullcontext()

    def _take_summed(self, empty: Collection[nn.Parameter]) -> None:
        """Marks the gradients that backward has summed. ``empty`` are the parameters that had none before."""
        if not self._in_backward:
            return
        without = set(self._learner.synchronizer.unused(self._in_backward))
        for parameter in self._in_backward:
            if self._name(parameter) not in without:
                self._touched.add(parameter)
                self._lacking.discard(parameter)
            elif parameter in empty:
                self._lacking.add(parameter)
            set_mark(parameter, WHOLE)

    # The sum

    def __call__(self) -> None:
        """Sums the gradients after a backward pass. A collective call, unless it is delayed.

        Raises:
            ConfigurationError: On all ranks alike, if they went backward from different numbers.
        """
        if self._delayed:
            return
        try:
            if self._buckets is not None and self._buckets.is_under_way:
                self._finish_buckets(self._buckets)
                for parameter in self._buckets.parameters:
                    set_mark(parameter, WHOLE)
            else:
                for parameters in self._chosen():
                    self._sum_of(parameters)
            for parameter in self._own - self._in_backward:
                become_whole(parameter, self._ranks)
            self._learner.synchronizer.make_alike(chain.from_iterable(self._models))
        except BaseException:
            self._hooks.restore()
            raise
        self._touched.clear()
        self._lacking.clear()
        self._hooks.call(lambda parameter: set_mark(parameter, WHOLE))
        self.shown.show()

    def _finish_buckets(self, buckets: BucketSums) -> None:
        absent = buckets.send_rest()
        try:
            rows = self._exchange_roots(0, absent)
        except (ConfigurationError, DivergenceError):
            buckets.finish(False)  # the other ranks have sent theirs, too
            raise
        buckets.finish(not any(row[1] for row in rows))

    def _exchange_roots(self, mask: int, absent: int) -> list[list[float]]:
        return self.roots.compare(mask, absent, self._models, self._ranks, self._learner.session.mixed)

    def _chosen(self) -> list[list[nn.Parameter]]:
        """Returns, for each model that a pass reached on any rank, the parameters with a gradient on any rank."""
        mask = sum(2**n for n, model in enumerate(self._models) if not self._touched.isdisjoint(model))
        absent = sum(self._is_absent(p) for model in self._models for p in model if p.requires_grad)
        frozen = {p for p in self._touched - self._in_backward if not p.requires_grad}  # after a delayed pass
        rows = self._exchange_roots(mask, absent + len(frozen))
        chosen = [model for n, model in enumerate(self._models) if any(int(row[0]) >> n & 1 for row in rows)]
        if not any(row[1] for row in rows):
            return [[p for p in model if p.requires_grad] for model in chosen]
        own = [
            [(p.requires_grad or p in frozen) and not self._is_absent(p) for p in model] for model in chosen
        ]
        found = [dict(zip(*pair, strict=True)) for pair in zip(chosen, self._anywhere(own), strict=True)]
        for parameter in self._lacking:
            if not any(model.get(parameter) for model in found):
                parameter.grad = None  # as on one device: no rank has reached it
        return [[p for p, is_there in model.items() if is_there] for model in found]

    def _is_absent(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is None or parameter in self._lacking

    def _anywhere(self, own: list[list[bool]]) -> list[list[bool]]:
        said = self._learner.session.control.gather_objects(own)
        return [[any(flags) for flags in zip(*each, strict=True)] for each in zip(*said, strict=True)]

    @torch.no_grad()
    def _sum_of(self, parameters: Iterable[nn.Parameter]) -> None:
        given = list(parameters)
        for parameter in self._in_backward.intersection(given):
            if parameter.grad is None:  # another rank's part has one
                parameter.grad = torch.zeros_like(parameter)
        present = [p for p in given if p not in self._in_backward]
        if self._all_reduce is not None:
            nbytes = self._learner.settings.bucket_nbytes
            sum_in_buckets(present, self._sparse, nbytes, self._all_reduce)
        for parameter in given:
            set_mark(parameter, WHOLE)

    @torch.no_grad()
    def returned(
        self,
        found: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        root: Sequence[Number],
        tolerance: float,
    ) -> None:
        """Sums the gradients of parameters that ``torch.autograd.grad`` has returned. A collective call."""
        self.roots.add(root, tolerance)
        own = [each for each, tensor in zip(found, inputs, strict=True) if self.owns(tensor)]
        self._exchange_roots(0, 0)
        said = self._anywhere([[each is not None for each in own]])[0] if own else []
        if any(each is None and present for each, present in zip(own, said, strict=True)):
            raise ConfigurationError(
                "torch.autograd.grad found no gradient of a parameter on this rank, and one on another: let all "
                "samples go through it, or call backward()"
            )
        for each in own:
            if each is not None and self._all_reduce is not None:
                sum_together([each], self._all_reduce)
                setattr(each, MARK, WHOLE)

    # Before an update

    def _strange(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters that have a gradient without a mark."""
        if self._ranks == 1:
            return []
        # Of a divided parameter a rank has its part alone, which cannot be compared with that of others.
        whole = (p for p in parameters if shard_spec(p) is None)
        found = {p for p in whole if p.grad is not None and mark_of(p) is None}
        return [p for model in self._models for p in model if p in found]

    def check_all_summed(self, where: str, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Compares gradients that the loop has set itself. A collective call if there are any.

        Raises:
            ConfigurationError: On all ranks alike, if they differ.
        """
        strange = self._strange(self._own if parameters is None else self._own.intersection(parameters))
        if strange:
            self._compare(strange, where)

    def _compare(self, strange: Sequence[nn.Parameter], where: str) -> None:
        digests = {self._name(p): digest(p.grad).item() for p in strange if p.grad is not None}
        rows = self._exchange("the comparison of gradients that were not summed", together(digests))
        if len({row[0] for row in rows}) > 1:
            raise ConfigurationError(
                f"the gradient of {self._name(strange[0])}, one of {len(strange)}, is of rank "
                f"{self._learner.session.rank}'s samples alone at {where}: it came by no backward pass of all ranks. "
                f"{WAY_OUT}"
            )
        for parameter in strange:
            set_mark(parameter, WHOLE)

    def check_alike(self, found: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compares gradients of parameters that went through no prepared loss. A collective call if there are any.

        Raises:
            ConfigurationError: On all ranks alike, if they differ.
        """
        if not found or self._learner.session.mixed:
            return
        digests = {str(number): digest(each.detach()).item() for number, (_, each) in enumerate(found)}
        rows = self._exchange("the comparison of gradients that were not summed", together(digests))
        if len({row[0] for row in rows}) > 1:
            raise ConfigurationError(
                f"torch.autograd.grad was asked for the gradient of {self._name(found[0][0])} by a number that went "
                f"through no prepared loss, and found another one on each rank, of its own samples. {WAY_OUT}. For an "
                "inner step take samples that all ranks have, or, where each sample is a task (MAML), begin with the "
                "p.clone() of each weight. To look at this rank's gradients alone, take them of copy.deepcopy(model)"
            )

    def check_none_put_off(self, parameters: Iterable[nn.Parameter]) -> None:
        """Checks that no gradient of ``parameters`` is still this rank's part alone.

        Raises:
            ConfigurationError: If one waits for a backward pass that sums it.
        """
        left = [p for p in parameters if p.grad is not None and mark_of(p) == PART]
        if left and self._ranks > 1:
            raise ConfigurationError(
                f"optimizer.step() with gradients of rank {self._learner.session.rank}'s samples alone, the first that "
                f"of {self._name(left[0])}: they were put off by evener.no_sync, which the last backward pass before a "
                "step must be outside of"
            )

    def _name(self, parameter: Any) -> str:
        return self._learner.names.get(parameter, "a parameter")

    def check_sound(self, parameters: Iterable[nn.Parameter], step: int) -> None:
        """Checks that the gradients before the update of step ``step`` are finite; see :class:`SoundnessCheck`."""
        self._soundness.check(self._learner, parameters, step, self._are_parts)

    def settle(self) -> None:
        """Checks what a late device has computed by now. Waits for it. A collective call."""
        self._later.settle()
        self.roots.settle(self._ranks)
        self._soundness.settle(self._learner)

    @property
    def _are_parts(self) -> bool:
        learner = self._learner
        return bool(self._in_backward) or learner.mesh.data.degree != learner.session.world_size

    def close(self) -> None:
        """Releases the all-reduce, and removes hooks."""
        if self._buckets is not None:
            self._buckets.close()
        while self._watched:
            self._watched.pop().remove()
        all_reduce, self._all_reduce = self._all_reduce, None
        if all_reduce is not None:
            all_reduce.close()
