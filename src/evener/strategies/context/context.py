"""The strategy ``context``: divides the positions of every sequence over the ranks; the model is replicated.

For sequences whose activations are too large for one device. Each rank computes its positions through all layers, which
look at one position at a time. Only attention combines positions (:mod:`evener.nn.attention`)::

    rank 0   positions 0 1 6 7   ─▶ embed ─▶ norm ─▶ ┐           ┌ ─▶ mlp ─▶ head ─▶ loss of 0 1 6 7 ─┐
                                                     ├ attention ┤                                    ├ sum
    rank 1   positions 2 3 4 5   ─▶ embed ─▶ norm ─▶ ┘           └ ─▶ mlp ─▶ head ─▶ loss of 2 3 4 5 ─┘

Totals, counts and gradients are summed over the ranks of the axis, as over ranks that divide the samples. A batch is
cut after it has been loaded, padding included. In evaluation the outputs for all positions are gathered in order, so
that metrics see whole sequences, whatever they count.

The modules of a model do not show whether it looks along the sequence in some other way. So the model is tried before
the first step (:mod:`evener.strategies.context.equivalence_check`).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.components.microbatches import can_be_cut
from evener.components.output_difference import alike
from evener.core.types import Tree
from evener.data.batch import MicroBatch, map_leaves, map_named
from evener.distributed.mesh import Layout, Mesh
from evener.errors import ConfigurationError, LossError, TaskError
from evener.nn import collectives_no_grad as messages
from evener.nn.attention import METHODS
from evener.nn.attention_dispatch import attend_within
from evener.nn.head_parallel_attention import fewest_heads
from evener.nn.sequence_layout import ORDERS, DividedSequence
from evener.nn.vocabulary_loss import VocabularyParallelCrossEntropy
from evener.strategies.base import Strategy
from evener.strategies.context.cutting import Cutting
from evener.strategies.context.equivalence_check import check_likeness, check_total
from evener.strategies.ddp import summing
from evener.strategies.interfaces import BatchSlicer, ModelCall, Stepper, StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.steppers.plain import Plain
from evener.strategies.sync_batch_norm import normalize_together
from evener.strategies.synchronizer import Synchronizer

AXIS = "context"
"""Mesh axis over which positions are divided."""
_LONGEST = 4096
"""Positions on which a model that gives masks to attention is tried at most, with two samples."""


@dataclass(frozen=True)
class ContextParallel(Strategy):
    """Divides the positions of the sequences over the ranks.

    Raises:
        ConfigurationError: If an option has a value that does not exist or is out of range.
    """

    axis: ClassVar[str] = AXIS
    combines: ClassVar[tuple[str, ...]] = ("pipeline", "data", "shard", "tensor")

    method: str = "ring"
    """Method by which attention reaches other ranks' positions: ``ring``, or ``ulysses``, which divides the heads."""
    order: str = "zigzag"
    """``zigzag``, in which all ranks have equal work under a causal mask, or ``contiguous``."""
    dim: int = 1
    """Dimension of the positions in inputs and targets."""
    cut: str | None = None
    """Names of the tensors that are sequences, such as ``inputs.words,targets``. None takes all with dimension
    ``dim``."""
    output_dim: int | None = None
    """Dimension of the positions in outputs. None finds it by its size if that is possible."""
    trial: int = 128
    """Number of positions of the first batch on which pieces and whole sequences are compared; 0 skips the trial. If
    attention is given masks, two samples are tried besides, on up to 4,096 positions."""

    def __post_init__(self) -> None:
        for name, known in (("method", tuple(METHODS)), ("order", ORDERS)):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"strategy 'context': there is no {name} {getattr(self, name)!r}; there are "
                    f"{' and '.join(known)}"
                )
        if self.dim < 1 or (self.output_dim is not None and self.output_dim < 1):
            raise ConfigurationError(
                f"strategy 'context': dim={self.dim}, output_dim={self.output_dim}; dimension 0 is the samples, so "
                "that positions are 1 or more"
            )
        if self.trial < 0:
            raise ConfigurationError(f"strategy 'context': trial={self.trial}; it must be 0 or more")

    def for_own_loop(self) -> Strategy:
        return self

    def layout(self, world_size: int, settings: StrategySettings) -> Layout:
        return Layout({AXIS: world_size})

    def parallelize(self, model: nn.Module, mesh: Mesh, settings: StrategySettings) -> nn.Module:
        if self.method == "ulysses":
            _check_heads(model, mesh.degree(AXIS))
        # Pipeline stages enter attention by themselves, because a call of the model ends with the stage.
        if mesh.degree("pipeline") == 1:
            attend_within(model)
        return normalize_together(model, mesh)

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return self.around(learner, summing(learner))

    def stepper(self, learner: Learner) -> Stepper:
        return Plain(learner)

    def pieces(self, learner: Learner) -> BatchSlicer:
        # A separate process group keeps attention's messages in backward apart from gradient buckets.
        group = learner.mesh.new_group(AXIS)
        return BatchSlicer() if group is None else SequencePieces(self, learner, group)


def _check_heads(model: nn.Module, ranks: int) -> None:
    """Raises ConfigurationError if there are fewer heads than ranks. Along other mesh axes ranks may have different
    numbers of heads; the fewest count, so that all ranks refuse together."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and fewest_heads(module) < ranks:
            raise ConfigurationError(
                f"{name or 'the model'} has {fewest_heads(module)} heads on a rank, which method 'ulysses' cannot "
                f"divide over the {ranks} ranks of the axis 'context': use method 'ring', or fewer ranks there"
            )


class SequencePieces(BatchSlicer):
    """Cuts micro-batches to the positions of this rank."""

    def __init__(self, options: ContextParallel, learner: Learner, group: ProcessGroup) -> None:
        names = None if options.cut is None else frozenset(name.strip() for name in options.cut.split(","))
        self._cutting = Cutting(options.dim, names)
        self._options, self._learner, self._group = options, learner, group
        self._counted = False
        self._tried: set[bool] = set()
        """Modes in which the model was tried; True is training."""
        self._found: dict[str, int] = {}

    def trained(self, micro: MicroBatch) -> MicroBatch:
        sequence = self._sequence(self._cutting.length(micro))
        piece = self._with_inputs(micro, sequence)
        piece = dataclasses.replace(piece, targets=self._targets(micro.targets, sequence))
        if not self._counted:
            self._counted = True
            self._check_count(micro.targets, sequence)
        self._try(micro)
        return piece

    def evaluated(self, micro: MicroBatch) -> MicroBatch:
        self._try(micro)
        return self._with_inputs(micro, self._sequence(self._length_of_inputs(micro)))

    def whole(self, outputs: Tree, piece: MicroBatch) -> Tree:
        sequence: DividedSequence = piece.sequence
        return map_named(lambda name, leaf: self._whole(name, leaf, sequence), outputs, "outputs")

    def of_loop(self, batch: Any, micro: MicroBatch) -> MicroBatch:
        whole = dataclasses.replace(micro, inputs=batch, targets=None)
        return self._with_inputs(whole, self._sequence(self._cutting.length(whole)))

    def try_call(self, call: ModelCall, micro: MicroBatch) -> None:
        mode = self._learner.model.training
        if mode in self._tried:
            return
        self._tried |= {mode, False}  # first: the trial calls the model, too
        sequence: DividedSequence = micro.sequence
        whole = map_leaves(lambda leaf: _joined(leaf, sequence), call)
        given = SequencePieces(dataclasses.replace(self._options, cut=None), self._learner, self._group)
        given._try(dataclasses.replace(micro, inputs=whole, targets=None, sequence=None))

    def _sequence(self, length: int) -> DividedSequence:
        options = self._options
        return DividedSequence(self._group, length, options.order, options.method, options.dim)

    def _length_of_inputs(self, micro: MicroBatch) -> int:
        return self._cutting.length(dataclasses.replace(micro, targets=None))

    def _with_inputs(self, micro: MicroBatch, sequence: DividedSequence) -> MicroBatch:
        inputs = self._cutting.part(micro.inputs, "inputs", lambda leaf: sequence.part(leaf, sequence.dim))
        return dataclasses.replace(micro, inputs=inputs, sequence=sequence)

    def _targets(self, targets: Any, sequence: DividedSequence, rank: int | None = None) -> Any:
        return self._cutting.part(targets, "targets", lambda leaf: sequence.part(leaf, sequence.dim, rank))

    # Checks before the first step

    def _check_count(self, targets: Any, sequence: DividedSequence) -> None:
        """Raises TaskError unless the loss counts of all pieces add up to the count of the whole targets."""
        try:
            count = self._learner.task.exact_loss().count
        except LossError:
            return  # the user's own loop counts by itself
        ranks = range(self._group.size())
        of_pieces = [float(count(self._targets(targets, sequence, rank))) for rank in ranks]
        whole = float(count(targets))
        if not math.isclose(sum(of_pieces), whole, rel_tol=1e-6):
            raise TaskError(
                f"strategy 'context' divides the loss's terms with the positions, but the targets of a batch have "
                f"{whole:g} terms, and their pieces {' + '.join(f'{number:g}' for number in of_pieces)}. A loss of "
                "whole sequences cannot be divided so: use one that counts positions, or strategy 'ddp'"
            )

    def _check_total(self, outputs: Tree, targets: Any, sequence: DividedSequence) -> None:
        """Raises TaskError unless the loss totals of all pieces add up to the total of the whole."""
        learner = self._learner
        if isinstance(learner.task.loss, VocabularyParallelCrossEntropy):
            return  # a sum over positions, which may expect divided scores
        try:
            loss = learner.task.exact_loss()
        except LossError:
            return  # the user's own loop has its own

        def of_rank(rank: int) -> tuple[Tree, Tree]:
            cut = map_named(
                lambda name, leaf: (
                    sequence.part(leaf, self._found[name], rank).contiguous() if name in self._found else leaf
                ),
                outputs,
                "outputs",
            )
            return cut, self._targets(targets, sequence, rank)

        pieces = map(of_rank, range(self._group.size()))
        check_total(loss, (outputs, targets), pieces, learner.settings.precision.coarsest)

    def _try(self, micro: MicroBatch) -> None:
        options = self._options
        mode = self._learner.model.training
        if self._tried >= {mode} or not options.trial:
            return
        self._tried |= {mode, False}
        length = self._length_of_inputs(micro)
        short = min(options.trial, length)
        if self._tried_on(micro, short) and short < length:
            # A window or a document that is longer than the trial, and than a piece, looks like a causal mask in both.
            first = micro.rows(0, min(2, len(micro.samples))) if can_be_cut(micro) else micro
            most = max(_LONGEST, options.trial)
            self._tried_on(first, min(most, length))
            if most < length and self._group.rank() == 0:
                warnings.warn(
                    f"strategy 'context': attention is given masks, which were tried on {most} positions of {length}. "
                    "A sliding window or documents that are longer than this would be taken for a causal mask: set "
                    f"the option trial={length} if there are any",
                    stacklevel=2,
                )

    def _tried_on(self, micro: MicroBatch, length: int) -> bool:
        """Tries the model on the first positions. Returns True, on all ranks, if attention was given square masks."""
        options, mode, ranks = self._options, self._learner.model.training, self._group.size()
        if length > ranks and length % ranks == 0:
            length -= 1  # unequal pieces: no other dimension can be mistaken for the positions
        inputs = self._cutting.part(micro.inputs, "inputs", lambda leaf: leaf.narrow(options.dim, 0, length))
        targets = self._cutting.part(
            micro.targets, "targets", lambda leaf: leaf.narrow(options.dim, 0, length)
        )
        there = self._at_model(dataclasses.replace(micro, inputs=inputs, targets=targets))
        short, sequence = dataclasses.replace(there, targets=None), self._sequence(length)
        piece = self._with_inputs(short, sequence)
        outputs = check_likeness(self._learner, short, piece, lambda outputs: self.whole(outputs, piece))
        if mode and targets is not None and outputs is not None:
            self._check_total(outputs, there.targets, sequence)
        return any(self._learner.session.control.gather_objects(bool(sequence.square_masks)))

    def _at_model(self, micro: MicroBatch) -> MicroBatch:
        """Returns the micro-batch on the model's device, in the run's types. The copy of a batch that stays in the
        host's memory is cut first, and is neither."""
        there, convert = micro.to(self._learner.session.device), self._learner.convert
        return there if convert is None else there.map(convert)

    # Whole outputs from those of pieces

    def _whole(self, name: str, leaf: Any, sequence: DividedSequence) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shapes = [told.shape for told in messages.descriptions(leaf, self._group)]
        fitting = [dim for dim in range(1, leaf.dim()) if _has_positions(shapes, dim, sequence.sizes)]
        known = self._options.output_dim or self._found.get(name)
        if known is not None and known in fitting:
            fitting = [known]
        if len(fitting) > 1:
            raise ConfigurationError(
                f"strategy 'context': {name}, of shape {tuple(leaf.shape)} on this rank, has {sequence.size} of the "
                f"{sequence.length} positions along dimension {' or '.join(map(str, fitting))}; say along which, with "
                "the option output_dim"
            )
        if fitting:
            self._found[name] = fitting[0]
            gathered = messages.gathered(leaf, fitting[0], sequence.sizes, self._group)
            return sequence.in_order(gathered, fitting[0])
        return self._common(name, leaf, shapes)

    def _common(self, name: str, leaf: Tensor, shapes: list[tuple[int, ...]]) -> Tensor:
        """Returns an output without positions. Raises TaskError if it is not the same on all ranks."""
        same = len(set(shapes)) == 1
        if same:
            rows = messages.gathered(leaf[None], 0, [1] * len(shapes), self._group)
            same = all(alike(rows[0], row) for row in rows)
        if not same:
            raise TaskError(
                f"strategy 'context': {name}, of shape {tuple(leaf.shape)}, has no dimension for positions and differs "
                "from rank to rank: it was made of a piece of each sequence. Let the model give outputs of positions, "
                "or use strategy 'ddp'"
            )
        return leaf


def _joined(leaf: Any, sequence: DividedSequence) -> Any:
    """Returns whole sequences, from the pieces of all ranks, if ``leaf`` is one."""
    dim = sequence.dim
    if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != sequence.size:
        return leaf
    return sequence.in_order(messages.gathered(leaf, dim, sequence.sizes, sequence.group), dim)


def _has_positions(shapes: list[tuple[int, ...]], dim: int, sizes: list[int]) -> bool:
    """Returns True if every rank has its piece's positions along ``dim``, and all other dimensions are equal."""
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    return len(others) == 1 and [shape[dim] for shape in shapes] == sizes
