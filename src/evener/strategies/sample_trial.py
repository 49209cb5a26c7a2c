"""Tries whether a model computes a sample's outputs from that sample alone, as every division of a batch needs it.

A model that normalizes over the batch by code of its own, or compares samples with each other, trains on several ranks
as if each rank's samples were the batch, without an error. So before the first step each rank runs the model on a few
samples twice, and the second time other samples stand behind the first ones::

    a b c d ─▶ model ─▶ outputs of a and b
    a b a b ─▶ model ─▶ the same outputs?

Both runs have the same shapes, so that rounding is no difference, and draw the same random numbers. Dropout does
nothing, and ``torch.nn``'s BatchNorm, which ranks compute together, uses its running statistics. Only a difference in
most numbers of an output counts: a choice that rounding turned, such as that of an expert, changes a few. Then the
model also runs on fewer samples: an output whose number of rows stays the same has something else in its rows. One
whose rows are as long as there are samples has a number for each pair of them, of which half may change.

A model may also compute its own loss. That of ``a b a b`` is the same as that of ``a b`` if it is a mean, and double if
it is a sum; that of a contrastive loss is neither. A mean over all samples lies between those over two parts of them;
a product of two means, as the balance of a mixture of experts is, need not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evener.components.loss_trial import WithoutMessages, ask_for_others
from evener.components.microbatches import has_values_of_samples
from evener.components.model_trial import (
    has_moving_attributes,
    has_users_hooks,
    state_kept,
    training_without_dropout,
    undisturbed,
)
from evener.core.types import Tree
from evener.data.batch import Batch, map_leaves, named_leaves
from evener.distributed import signals as interrupt
from evener.hardware import accelerators
from evener.hardware.generators import seeded
from evener.nn.context import Scope, resumed
from evener.nn.recompute_guard import apart
from evener.strategies.learner import Learner
from evener.torch_internals.modules import AnyBatchNorm, compiled_from

_MOST = 4
"""Number of samples that are tried."""
_SEED = 0x5EED
_FAR, _FAR_IN_HALF = 0.01, 0.1
"""Means of the differences of an output that count, as parts of the mean of its numbers. Medians count from a tenth."""

_OUTSIDE, _NOISES, _TURNS = 1e-4, 20, 3
"""How far a mean may lie outside of those of parts, as a part of itself, and in differences that rounding made. In how
many ways parts are chosen."""

Outputs = list[tuple[str, Any]]
"""Outputs of a model with their names; None in place of what is no tensor."""


class ModelRun(NamedTuple):
    """How a model is run on the samples of a batch."""

    model: nn.Module
    call: Callable[[Any], Tree]
    """Runs the model on inputs and returns its outputs."""
    inputs: Any
    samples: Tensor
    """The numbers of the samples, in the order of the rows."""
    may_be_columns: bool
    """True if the samples need not be along the first dimension."""
    shares: Sequence[int]
    """The number of samples of each rank. All that have some try equally many, so that what a trial cannot restore,
    such as a generator in a closure, stays the same on all."""

    @property
    def number(self) -> int:
        """The number of samples to try."""
        return min(len(self.samples), _MOST, *filter(None, self.shares))

    @property
    def is_by_samples(self) -> bool:
        """True if some input tensors surely have a row for each sample, and all else is the same for any samples.

        Tensors with another number of rows may hold several rows for each sample, as the words of all samples one after
        another do, so that samples could not be chosen from them. They do not if it is a size within a sample, as that
        of a mask of positions is.
        """
        samples = len(self.samples)
        leaves = [leaf for _, leaf in named_leaves(self.inputs, "")]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        of_samples = [t for t in tensors if t.shape[:1] == (samples,)]
        known = {1, samples}.union(*(t.shape[1:] for t in of_samples))
        return (
            self.number > 1
            and bool(of_samples)
            and all(t.ndim == 0 or len(t) in known for t in tensors)
            and all(type(t) is Tensor and t.layout is torch.strided for t in tensors)
            and not (self.may_be_columns and any(samples in t.shape[1:] for t in tensors))
            and all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str) for leaf in leaves)
            and not has_values_of_samples(self.inputs, samples)
        )


class SampleTrial:
    """Tries a model once, on the first micro-batch that has two samples."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._is_done = learner.session.world_size == 1 or not can_try(learner)

    def run(self, batch: Batch) -> None:
        """Tries the model, if it has not been. Warns as :func:`warn_if_mixed` does."""
        if self._is_done:
            return
        micro = next((m for m in batch.micro_batches if m.weight and len(m.samples) > 1), None)
        if micro is None:
            return
        self._is_done = True
        learner, task = self._learner, self._learner.task
        if learner.replays is None:
            call, may_be_columns = partial(task.forward, learner.model), task.collate is not None
            run = ModelRun(learner.model, call, micro.inputs, micro.samples, may_be_columns, batch.shares)
            if run.is_by_samples:
                warn_if_mixed(learner, run)


def warn_if_mixed(learner: Learner, run: ModelRun) -> None:
    """Tries a model on samples whose rows are known.

    Warns:
        UserWarning: On the first rank, if what it computes of samples depends on other samples of the batch.
    """
    try:
        found = _what_is_mixed(learner, run)
    except Exception:  # of the user's code, which will say so itself where it cannot compute a batch
        interrupt.check()
        return
    if found and not learner.session.rank:
        warnings.warn(
            f"{found}: it normalizes over the batch, or compares samples. On several ranks the model sees those of "
            "its own rank alone, which is another training than that of one device. torch.nn's BatchNorm is "
            "brought together by itself; elsewhere evener.nn.all_gather(rows, evener.nn.data_group()) brings the "
            "samples of all ranks together, and a comparison of samples may be made in the loss",
            stacklevel=2,
        )


def _what_is_mixed(learner: Learner, run: ModelRun) -> str:
    """Describes an output that depends on other samples. Returns "" if there is none, or if that cannot be told."""
    tried = run.number
    half = tried // 2
    first, beside = [*range(tried)], [index % half for index in range(tried)]
    is_coarse = learner.settings.precision.coarsest.itemsize <= 2 or torch.is_autocast_enabled(
        learner.session.device.type
    )
    far = _FAR_IN_HALF if is_coarse else _FAR
    whole, other = _computed(learner, run, first), _computed(learner, run, beside)
    if not all(map(torch.equal, whole.drawn, other.drawn)):
        return ""  # if how much is drawn depends on the samples, so do the numbers
    moved, odd = _moved(whole.outputs, other.outputs, half, far), dict[str, str]()
    if not whole.draws and any(_is_loss(leaf) for _, leaf in whole.outputs):
        once, twice = (_computed(learner, run, beside[:number]).outputs for number in (half, 2 * half))
        odd = _no_means(once, twice, far) or (
            _not_between(learner, run, whole.outputs, once, twice) if not is_coarse else {}
        )
    if (not moved and not odd) or not _are_same(whole.outputs, _computed(learner, run, first).outputs, far):
        return ""
    fewer = _computed(learner, run, first[:-1]).outputs
    shapes = {name: leaf.shape for name, leaf in fewer if isinstance(leaf, Tensor)}
    rows = {name: leaf.shape[:1] for name, leaf in whole.outputs if isinstance(leaf, Tensor)}
    wide = {name for name, leaf in whole.outputs if isinstance(leaf, Tensor) and tried in leaf.shape[1:]}
    pairs = {name for name in wide if tried - 1 in shapes.get(name, ())[1:]}
    for name, move in moved.items():
        has_rows = rows[name] == (tried,) and shapes.get(name, ())[:1] == (tried - 1,)
        if has_rows and (move.median > far / 10 or name in pairs):
            return (
                f"the model's {name} for a sample changed by {move.mean:.0%} when other samples were beside it in the "
                "batch"
            )
    return next(iter(odd.values()), "")


def _are_same(outputs: Outputs, others: Outputs, far: float) -> bool:
    pairs = [(one, other) for (_, one), (_, other) in zip(outputs, others, strict=False) if _is_loss(one)]
    is_near = all(abs(float(other) - float(one)) <= far * abs(float(one)) for one, other in pairs)
    return is_near and not _moved(outputs, others, None, far)


def _no_means(once: Outputs, twice: Outputs, far: float) -> dict[str, str]:
    """Returns which losses are neither a mean nor a sum, for these are the same, or double, for samples that are there
    twice. Says what they are."""
    found = {}
    for (name, one), (_, two) in zip(once, twice, strict=False):
        if _is_loss(one) and _is_loss(two):
            single, double = float(one), float(two)
            if min(abs(double - single), abs(double - 2 * single)) > far * abs(single):
                found[name] = (
                    f"the model's {name}, one number, is {single:.4g} for some samples and {double:.4g} for the same "
                    "samples twice, which is neither a mean nor a sum over them"
                )
    return found


def _not_between(
    learner: Learner, run: ModelRun, whole: Outputs, once: Outputs, twice: Outputs
) -> dict[str, str]:
    """Returns which losses lie outside of those of two parts of the samples. Says what they are.

    Args:
        once: Outputs for some samples; ``twice``: for the same, each of which is there twice. They show how much the
            number of rows changes by rounding alone.
    """
    found, rows = dict[str, str](), [*range(run.number)]
    for turn in rows[:_TURNS]:
        turned, half = [*rows[turn:], *rows[:turn]], run.number // 2
        try:
            parts = [_computed(learner, run, part).outputs for part in (turned[:half], turned[half:])]
        except Exception:  # of code that cannot compute so few samples
            interrupt.check()
            return found
        for (name, all_), *others in zip(whole, once, twice, *parts, strict=False):
            if all(_is_loss(leaf) for leaf in (all_, *(leaf for _, leaf in others))):
                value, (single, double, one, other) = float(all_), (float(leaf) for _, leaf in others)
                outside = max(min(one, other) - value, value - max(one, other))
                near = max(
                    _OUTSIDE * abs(value), _NOISES * min(abs(double - single), abs(double - 2 * single))
                )
                if outside > near and abs(value - one - other) > near:
                    found[name] = (
                        f"the model's {name}, one number, is {one:.6g} and {other:.6g} for two parts of some samples, "
                        f"and {value:.6g} for all of them, which is no mean over them"
                    )
    return found


def _is_loss(leaf: Any) -> bool:
    return type(leaf) is Tensor and not leaf.ndim and leaf.is_floating_point()


def _moved(outputs: Outputs, others: Outputs, rows: int | None, far: float) -> dict[str, _Move]:
    """Returns which outputs differ in their first rows, and how far."""
    found = {}
    for (name, one), (_, other) in zip(outputs, others, strict=False):
        if _are_alike(one, other):
            move = _move(one[:rows], other[:rows])
            if move.mean > far:
                found[name] = move
    return found


class _Computed(NamedTuple):
    outputs: Outputs
    drawn: list[Tensor]
    """The states of the generators afterwards."""
    draws: bool
    """True if random numbers were drawn."""


def _computed(learner: Learner, run: ModelRun, rows: list[int]) -> _Computed:
    """Runs the model on some rows."""
    model, device = run.model, learner.session.device
    trains = [m for m in model.modules() if m.training and not isinstance(m, AnyBatchNorm)]

    def chosen(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.shape[:1] == run.samples.shape
        return leaf[torch.tensor(rows, device=leaf.device)] if has_rows else leaf

    own = Scope(run.samples[: len(rows)], 0, learner.settings.seed, 1, ask_for_others)
    with apart(), undisturbed(model), training_without_dropout(model, trains), state_kept(model):
        # With gradients, blocks that are recomputed would take these for their first calls.
        has_gradients = learner.settings.recompute is None
        with (
            seeded(_SEED, device),
            resumed(own),
            WithoutMessages(),
            redirect_stdout(StringIO()),
            torch.set_grad_enabled(has_gradients),
        ):
            before = accelerators.generator_states(device)
            found = run.call(map_leaves(chosen, run.inputs))
            drawn = accelerators.generator_states(device)
        outputs = [(name, _plain(leaf)) for name, leaf in named_leaves(found, "outputs")]
        return _Computed(outputs, drawn, not all(map(torch.equal, before, drawn)))


def can_try(learner: Learner) -> bool:
    """Returns False if a forward pass of one rank alone would be waited for by others or have effects that last, or if
    the model has no numbers."""
    settings, model = learner.settings, learner.model
    own = (*model.parameters(), *model.buffers())
    return (
        learner.mesh.degree("data") == learner.session.world_size
        and settings.compiling.how is None
        and settings.bits is None
        and not settings.offload.kinds
        and not has_users_hooks(model)
        and not has_moving_attributes(model)
        and all(type(tensor.detach()) is Tensor and not tensor.is_meta for tensor in own)
        and all(m.running_mean is not None for m in model.modules() if isinstance(m, AnyBatchNorm))
        and all(compiled_from(m) is None for m in model.modules())
    )


def _plain(leaf: Any) -> Any:
    is_told = isinstance(leaf, Tensor) and (leaf.ndim > 0 or leaf.requires_grad)
    return leaf.detach().clone() if is_told else None


def _are_alike(one: Any, other: Any) -> bool:
    both = all(type(leaf) is Tensor and leaf.layout is torch.strided for leaf in (one, other))
    return both and one.is_floating_point() and one.ndim > 0 and one.numel() > 0 and one.shape == other.shape


class _Move(NamedTuple):
    """How far an output moved, as parts of the size of its numbers."""

    mean: float
    median: float


def _move(one: Tensor, other: Tensor) -> _Move:
    told = (one != 0) | (other != 0)
    if not told.any():
        return _Move(0.0, 0.0)
    sizes, moves = one[told].abs().double(), (one - other)[told].abs().double()
    size = float(sizes.mean())
    return _Move(float(moves.mean()) / size, float(moves.median()) / size) if size else _Move(0.0, 0.0)
