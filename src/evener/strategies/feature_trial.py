"""Tries whether a model computes the same from a rank's columns of the features as from all of them.

Before the layers that are divided by features, a rank has only its columns. A normalization over the features there, or
a sum of them, would be that of the rank's columns, and nothing would show it. So before the first step the model runs
on the first samples in two ways, in evaluation and in training mode, and the outputs must be the same::

    whole    x[:, 0:7] ─▶ code before ─▶ [:, 0:4] ─▶ divided layer ─▶ rest ─▶ outputs
    piece    x[:, 0:4] ─▶ code before ───────────▶ divided layer ─▶ rest ─▶ the same outputs?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.model_trial import state_kept, training_without_dropout, undisturbed
from evener.components.output_difference import difference
from evener.components.sharded_tensor.local import local
from evener.core.types import Tree
from evener.data.batch import MicroBatch, leaves_of, map_leaves
from evener.data.feature_slice import cut_columns
from evener.data.fetch import first_inputs
from evener.errors import EvenerError, TaskError
from evener.hardware import accelerators
from evener.nn.feature_parallel import FeatureParallelLinear
from evener.nn.fqn import clean_name
from evener.strategies.learner import Learner
from evener.torch_internals.modules import AnyDropout

_SAMPLES = 4
_Shapes = dict[str, list[torch.Size]]


def try_columns(learner: Learner, ranks: Sequence[int], width: int) -> None:
    """Compares the model's outputs for the first samples and for this rank's columns of them. All ranks must call this
    together.

    Args:
        ranks: The ranks that have the columns of a sample, in order.
        width: The number of features.

    Raises:
        TaskError: If the outputs differ, or if the model cannot run on the columns.
    """
    if not _has_numbers(learner.model):
        return
    layers = _layers(learner.model)
    given = _first(learner, next(iter(layers.values())), ranks, width)
    if given is None:
        return
    whole, piece = (_at_model(learner, inputs) for inputs in given)
    model, device = learner.model, learner.session.device
    trains = [module for module in model.modules() if module.training]
    for mode in ("evaluation", "training"):
        before = accelerators.generator_states(device)
        found: list[Tree] = []
        dropped: list[_Shapes] = []
        with learner.synchronizer.forward(), undisturbed(model), ExitStack() as stack:
            if mode == "training":
                stack.enter_context(training_without_dropout(model, trains))
            for micro, narrowed in ((whole, layers), (piece, {})):
                with state_kept(model), _narrowing(narrowed, width), _dropping(model) as shapes:
                    dropped.append(shapes)
                    found.append(_outputs(learner, micro, layers, width))
            drew = not all(map(torch.equal, before, accelerators.generator_states(device)))
        _check_dropouts(*dropped)
        if mode == "training" and drew:
            return
        said = learner.session.control.gather_objects(
            difference(
                found[0], found[1], learner.settings.precision.coarsest, "all features", "a rank's columns"
            )
        )
        if wrong := next(filter(None, said), None):
            raise TaskError(
                f"strategy 'dimension': the model does not compute from the columns of the ranks what it computes from "
                f"all {width} features ({wrong}; tried in {mode} mode). {_cures(layers)}"
            )


def _has_numbers(model: nn.Module) -> bool:
    """Returns False for a model of which only the memory or the calls are looked at."""
    tensors = [local(parameter.detach()) for parameter in model.parameters()]
    return all(type(tensor) is Tensor and not tensor.is_meta for tensor in tensors)


def _layers(model: nn.Module) -> dict[str, FeatureParallelLinear]:
    """Returns the divided layers, by name."""
    return {
        clean_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, FeatureParallelLinear) and module.columns is not None
    }


def _cures(layers: Mapping[str, nn.Module]) -> str:
    return (
        f"Before {' and '.join(name or 'the model' for name in layers)}, each rank has some of the features only, and "
        "nothing may look at several of them: put a normalization or a dropout of the features, and what else reads "
        "them, into the data set or behind that layer; write all layers that read them as "
        "evener.nn.FeatureParallelLinear; or use strategy 'ddp'"
    )


def _first(
    learner: Learner, layer: FeatureParallelLinear, ranks: Sequence[int], width: int
) -> tuple[Any, Any] | None:
    """Returns the inputs of the first samples, and this rank's columns of them. Returns None for a data set that cannot
    be read from its beginning without a trace."""
    task, dataset = learner.task, learner.task.train
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return None
    assert layer.columns is not None
    if not hasattr(dataset, "columns"):
        whole = first_inputs(dataset, task.collate, _SAMPLES)
        return whole, cut_columns(whole, layer.columns, width)
    piece = first_inputs(learner.portion(dataset), task.collate, _SAMPLES)
    rows = learner.session.control.gather_objects(leaves_of(piece))
    places = iter(range(len(rows[0])))

    def joined(leaf: Any) -> Any:
        place = next(places)
        pieces = [rows[rank][place] for rank in ranks]
        apart = isinstance(leaf, Tensor) and leaf.dim() > 1 and sum(p.shape[-1] for p in pieces) == width
        return torch.cat(pieces, -1) if apart else leaf

    return map_leaves(joined, piece), piece


def _at_model(learner: Learner, inputs: Any) -> MicroBatch:
    """Returns the inputs as a micro-batch on the model's device, in the run's types."""
    micro = MicroBatch(inputs, None, torch.arange(_SAMPLES)).to(learner.session.device)
    return micro if learner.convert is None else micro.map(learner.convert)


@contextmanager
def _narrowing(layers: Mapping[str, FeatureParallelLinear], width: int) -> Iterator[None]:
    """Has the layers read this rank's columns of all features, inside the block."""

    def narrowed(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        assert isinstance(layer, FeatureParallelLinear)
        columns = layer.columns
        assert columns is not None
        return map_leaves(
            lambda leaf: leaf[..., columns.start : columns.stop] if leaf.shape[-1] == width else leaf,
            (args, kwargs),
        )

    hooks = [
        layer.register_forward_pre_hook(narrowed, prepend=True, with_kwargs=True) for layer in layers.values()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _dropping(model: nn.Module) -> Iterator[_Shapes]:
    """Records the shapes of what dropout modules get, inside the block."""
    shapes: _Shapes = {}

    def noted(name: str, module: nn.Module, args: Any) -> None:
        shapes.setdefault(name, []).append(args[0].shape)

    hooks = [
        module.register_forward_pre_hook(partial(noted, clean_name(name)))
        for name, module in model.named_modules()
        if isinstance(module, AnyDropout) and module.p
    ]
    try:
        yield shapes
    finally:
        for hook in hooks:
            hook.remove()


def _check_dropouts(whole: _Shapes, piece: _Shapes) -> None:
    """Raises TaskError if a dropout gets a rank's columns, whose masks would be those of the rank."""
    for name, shapes in whole.items():
        if shapes != piece.get(name):
            raise TaskError(
                f"strategy 'dimension': the dropout {name} gets some of the features on each rank, of which it would "
                "drop others than one device: put it behind the layer that reads the features, or into the data set"
            )


def _outputs(learner: Learner, micro: MicroBatch, layers: Mapping[str, nn.Module], width: int) -> Tree:
    try:
        with torch.no_grad(), learner.micro_scope(micro, 0):
            return learner.stepper.outputs(micro)
    except EvenerError:
        raise
    except Exception as error:
        raise TaskError(
            f"strategy 'dimension': the model cannot run where {' and '.join(layers)} reads some of the {width} "
            f"features: {type(error).__name__}: {error}. {_cures(layers)}"
        ) from error
