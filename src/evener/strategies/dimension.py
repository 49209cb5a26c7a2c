"""Every rank reads all samples but only its slice of their features, for features too many for one device.

The first layer is divided along its input features (:mod:`evener.nn.feature_parallel`), the rest of the model is
replicated, and every rank computes it for the whole batch::

    rank 0   x[:, 0:4] ─▶ W[:, 0:4] ─┐         ┌─▶ all other layers ─▶ loss
                                     ├─ sum ───┤
    rank 1   x[:, 4:7] ─▶ W[:, 4:7] ─┘         └─▶ all other layers ─▶ loss         the same on both

What belongs to whom decides what is exchanged:

- *Slices* belong to one rank, and so do their gradients: nothing to exchange, but a norm of all gradients needs the
  squares of all ranks.
- *Replicated parameters* get the same gradient on every rank, of all samples, to be taken once and not summed. Ranks
  on devices of two kinds round differently, though, and their replicas would drift apart: all take rank 0's bits.

Buffers, too, are rank 0's. Only the sum in the first layer moves activations: samples * out_features numbers a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.collectives.buckets import DEFAULT_BUCKET_NBYTES
from evener.collectives.registry import make
from evener.data.columns import columns_of, divide_columns
from evener.errors import ConfigurationError, TaskError
from evener.hardware.stopwatch import waiting
from evener.nn.feature_parallel import FeatureParallelLinear, divide_features
from evener.runtime.session import Session
from evener.strategies.base import Settings, clip_gradients, gradient_norm, gradient_values
from evener.strategies.single import Single
from evener.task import Task

_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of torch that look at a weight as a whole, which nobody holds here."""


class Dimension(Single):
    """The features divided over the ranks: a slice of the first layer each, and a replica of all else.

    The layers that read the features are the model's :class:`~evener.nn.FeatureParallelLinear`, or if it has none its
    first ``nn.Linear``. Fixed weights of ``balance`` are the ranks' parts of the features; else these are equal.

    Raises:
        TaskError: If no layer can be divided, or its weight is also another layer's.
        ConfigurationError: If there are more ranks than features, or a setting that cannot be.
    """

    def __init__(self, task: Task, session: Session, settings: Settings) -> None:
        if settings.compression is not None:
            raise ConfigurationError(
                f"strategy 'dimension' sends no gradients that {settings.compression!r} could compress; leave it out"
            )
        self._group = session.group
        self._portions: dict[int, Any] = {}  # of the task's own data sets, which live as long
        self._all_reduce = make(settings.all_reduce, session.group, session.timeout_seconds)
        super().__init__(task, session, settings)
        _check_optimizer(self.optimizer)
        self._own = {layer.weight for layer in self._layers.values()}
        # Not by rank: every rank must draw the same, for it computes the same samples.
        torch.manual_seed((settings.seed << 20) % 2**63)

    @property
    def data_ranks(self) -> Sequence[int]:
        return (0,)

    @property
    def data_rank(self) -> int:
        return 0

    def portion(self, dataset: Any) -> Any:
        if id(dataset) in self._portions:
            return self._portions[id(dataset)]
        portion = columns_of(dataset, self._columns[self.session.rank], self._width)
        if dataset is self.task.train or dataset is self.task.evaluate:
            self._portions[id(dataset)] = portion
        return portion

    def prepare(self, model: nn.Module) -> nn.Module:
        self._share(value for value in model.state_dict().values() if isinstance(value, Tensor))
        layers = _feature_layers(model)
        self._width = next(iter(layers.values())).in_features
        weights = self.settings.weights or [1.0] * self.session.world_size
        self._columns = divide_columns(self._width, weights)
        mine = self._columns[self.session.rank]
        self._layers = {name: divide_features(layer, mine, self._sum) for name, layer in layers.items()}
        return model

    def _sum(self, partial: Tensor) -> None:
        self._all_reduce(partial).wait()

    def complete(self) -> tuple[str, ...]:
        missing = super().complete()
        self.sum_gradients(list(self.model.parameters()))
        return missing

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Every rank has the sum already; those of replicated parameters become rank 0's bits."""
        replicated = (p for p in parameters if p.grad is not None and p not in self._own)
        self._share(gradient_values(parameter) for parameter in replicated)

    def share_buffers(self, source: int) -> None:
        buffers = [module._buffers[name] for module, name in self._loose_buffers]
        self._share((buffer for buffer in buffers if buffer is not None), source)

    def _share(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Gives all ranks the values of rank ``source``: of small tensors of one type together, of large ones alone."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        alone = self.settings.bucket_bytes or DEFAULT_BUCKET_NBYTES
        for tensor in tensors:
            if tensor.nbytes >= alone and tensor.is_contiguous():
                self._broadcast(tensor.detach(), source)
            else:
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        for alike in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            self._broadcast(flat, source)
            parts = torch.split(flat, [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        with waiting():
            dist.broadcast(tensor, group=self._group, group_src=source)

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """To the norm over all ranks' slices, and the replicated gradients once."""
        if self.settings.clip_norm is None:
            return
        given = list(parameters)
        own = gradient_norm(p for p in given if p in self._own)
        replicated = gradient_norm(p for p in given if p not in self._own)
        rows = self.session.control.exchange([float(own) ** 2]).wait()
        norm = math.sqrt(sum(row[0] for row in rows) + float(replicated) ** 2)
        clip_gradients(given, self.settings.clip_norm, torch.tensor(norm, dtype=torch.float64))

    # The model as one device would hold it

    def add_penalty(self) -> None:
        """Of the whole weights: a penalty may be any function of them, not only a sum over their elements."""
        if self.task.penalty is not None:
            with self._undivided():
                super().add_penalty()

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """The layers hold their whole weights; afterwards their slices again, and their part of the gradients."""
        slices = {layer: layer.weight for layer in self._layers.values()}
        for layer, part in slices.items():
            layer.weight = nn.Parameter(self._whole(part), part.requires_grad)
        try:
            yield
        finally:
            for layer, part in slices.items():
                whole = layer.weight
                layer.weight = part
                if whole.grad is not None:
                    _add_gradient(part, self._part(whole.grad))

    def _whole(self, part: Tensor) -> Tensor:
        """The slices of all ranks side by side."""
        pieces = [part.new_empty(part.shape[0], len(columns)) for columns in self._columns]
        pieces[self.session.rank] = part.detach().contiguous()
        for rank, piece in enumerate(pieces):
            self._broadcast(piece, rank)
        return torch.cat(pieces, 1)

    def _part(self, whole: Tensor) -> Tensor:
        """This rank's columns."""
        mine = self._columns[self.session.rank]
        return whole[..., mine.start : mine.stop].clone()

    def tensors(self) -> dict[str, Tensor]:
        named = super().tensors()
        return named | {name: self._whole(named[name]) for name in self._weight_names()}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for name in self._weight_names():
            state["model"][name] = self._whole(state["model"][name])
        return state | {"optimizer": self._map_own(state["optimizer"], self._whole)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = self._weight_names()
        model = {
            name: self._part(value) if name in names else value for name, value in state["model"].items()
        }
        super().load_state_dict(
            state | {"model": model, "optimizer": self._map_own(state["optimizer"], self._part)}
        )

    def _weight_names(self) -> list[str]:
        return [f"{name}.weight" if name else "weight" for name in self._layers]

    def _map_own(self, state: Mapping[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """An optimizer's state with ``function`` of what it keeps for each element of the divided weights."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        own = {index for index, parameter in enumerate(parameters) if parameter in self._own}
        mapped = {
            index: {name: _mapped(value, function) for name, value in kept.items()} if index in own else kept
            for index, kept in state["state"].items()
        }
        return {**state, "state": mapped}

    def close(self) -> None:
        self._all_reduce.close()


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return function(value) if isinstance(value, Tensor) and value.ndim == 2 else value


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer).__name__ in _NOT_ELEMENTWISE:
        raise ConfigurationError(
            f"{type(optimizer).__name__} looks at a weight as a whole, but each rank of strategy 'dimension' holds a "
            "slice; use an optimizer that treats each element alone, such as SGD or AdamW"
        )


def _feature_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that read the features, by name.

    Raises:
        TaskError: If there are none, or they cannot be divided alike.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    marked = {name: layer for name, layer in linear.items() if isinstance(layer, FeatureParallelLinear)}
    layers: dict[str, nn.Linear] = {**marked} or dict(list(linear.items())[:1])
    if not layers:
        raise TaskError(
            f"strategy 'dimension' divides the first torch.nn.Linear by its features; {type(model).__name__} has none"
        )
    _check_alike(layers)
    _check_untied(model, layers)
    return layers


def _check_alike(layers: Mapping[str, nn.Linear]) -> None:
    widths = {name: layer.in_features for name, layer in layers.items()}
    if len(set(widths.values())) > 1:
        raise TaskError(
            f"the FeatureParallelLinear layers read different numbers of features, {widths}; let the others be "
            "torch.nn.Linear"
        )


def _check_untied(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for layer in layers.values():
        if len(names[layer.weight]) > 1:
            raise TaskError(
                f"{' and '.join(names[layer.weight])} are one weight, of which each rank would hold a slice; give each "
                "layer its own"
            )
