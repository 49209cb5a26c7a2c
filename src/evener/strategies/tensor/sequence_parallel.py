"""Streams made of a divided model, as :mod:`evener.strategies.tensor.sequence_streams` finds them, and tried.

That functions of the user's own look at no other position cannot be read off modules. So before a stream first divides,
it computes in evaluation mode what it was given, whole and in pieces, which must come to the same. On a GPU that is
known with its next call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.components.sharded_tensor.local import changeable
from evener.errors import EvenerError, TaskError
from evener.hardware import accelerators
from evener.hardware.async_read import Here, Readout, is_late, read
from evener.nn.collectives_no_grad import largest
from evener.nn.dropout import Dropout
from evener.nn.head_parallel_attention import DividedAttention
from evener.nn.rng import draw_apart
from evener.nn.sequence_parallel import (
    Compute,
    InPieces,
    MadeWhole,
    Stream,
    Streamed,
    StreamsInARow,
    in_terms,
    instead_of_forward,
)
from evener.nn.tensor_parallel import Divided, RowLayer
from evener.strategies.tensor.plan import Plan
from evener.strategies.tensor.regions import is_sequence
from evener.strategies.tensor.sequence_streams import ALONE, children, members, outermost, runs
from evener.torch_internals.layers import AnyDropout
from evener.torch_internals.module_tensors import own_parameters


def divide_positions(modules: Mapping[str, nn.Module], plan: Plan, group: ProcessGroup, index: int) -> None:
    """Makes streams of the modules that are so in the plan, whose layers are divided already; in place.

    Args:
        modules: Of the model, by name.
        plan: With all that is divided.
        group: The ranks.
        index: This rank's.

    Raises:
        TaskError: If a weight of a stream is also another module's.
    """
    making = _Streams(modules, plan, group, index)
    for parent, names in outermost(plan.words).items():
        if is_sequence(modules[parent]):
            making.in_a_row(parent)
        else:
            for name in names:
                making.alone(name)
    _check_apart(modules)


def in_terms_of(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of whose gradients each rank has a term."""
    between = (
        own_parameters(each)[key]
        for module in model.modules()
        for each, key in (module.between if isinstance(module, RowLayer) else ())
    )
    found = {parameter for module in model.modules() for parameter in in_terms(module)}
    return found | {parameter for parameter in between if parameter is not None}


class _Streams:
    def __init__(self, modules: Mapping[str, nn.Module], plan: Plan, group: ProcessGroup, index: int) -> None:
        self._modules, self._plan, self._group, self._index = modules, plan, group, index

    def alone(self, name: str) -> None:
        """Of one module."""
        module = self._modules[name]
        instead_of_forward(module, Streamed(module, self._stream([name])))

    def in_a_row(self, parent: str) -> None:
        """Of children of ``nn.Sequential``."""
        module = self._modules[parent]
        assert isinstance(module, nn.Sequential)
        names = children(parent, module)
        found = runs(parent, module, self._plan.words)
        streams = {run: self._stream(names[run.start : run.stop]) for run in found}
        instead_of_forward(module, StreamsInARow(module, streams))

    def _stream(self, names: Sequence[str]) -> Stream:
        modules = [self._modules[name] for name in names]
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        stream = Stream(shown, self._group, self._plan.uses[names[0]].dim, Tried(modules))
        for name, module in zip(names, modules, strict=True):
            for member, inner, word in members(name, module, self._plan.words):
                self._tell(member, inner, word, stream)
        return stream

    def _tell(self, name: str, module: nn.Module, word: str, stream: Stream) -> None:
        if word == "whole":
            instead_of_forward(module, MadeWhole(module, name, stream))
        elif isinstance(module, Divided | DividedAttention):
            module.stream = stream
        elif word != "between":
            if isinstance(module, Dropout):
                module.stream = stream
            elif isinstance(module, AnyDropout) and module.p:
                draw_apart(module, self._index)
            if isinstance(module, (*ALONE, AnyDropout)) or any(
                True for _ in module.parameters(recurse=False)
            ):
                instead_of_forward(module, InPieces(module, name, stream))


def _check_apart(modules: Mapping[str, nn.Module]) -> None:
    """A weight of whose gradient a rank has a term here must not be used whole elsewhere."""
    inside = {parameter for module in modules.values() for parameter in in_terms(module)}
    holders: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for key, parameter in own_parameters(module).items():
            if parameter is not None and parameter in inside:
                holders.setdefault(parameter, []).append(f"{name}.{key}")
    for names in holders.values():
        if len(names) > 1:
            raise TaskError(
                f"{' and '.join(names)} are one weight, which ranks use with positions of their own: give each module "
                "its own weight, or leave sequence out of the plan"
            )


class Tried:
    """Compares what modules compute in pieces with what they compute whole, the first time that they are called.

    Raises:
        TaskError: On all ranks, if it is another.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._tried = False
        self._apart: Readout = Here(0.0)

    def __call__(
        self, stream: Stream, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._tried:
            self._tried = True
            with torch.no_grad(), _undisturbed(self._modules):
                apart = _apart(stream, compute, args, kwargs)
                draws = self._draws(stream, compute, args, kwargs)
            self._apart = read(apart)
            if draws:
                raise TaskError(
                    f"plan: {stream.name} is sequence, and in training a function in its forward draws random numbers, "
                    "which would be the same for the positions of all ranks. Drop with modules; one of your own that "
                    f"draws is to be whole in the plan. Or leave {stream.name} out of it"
                )
            if is_late(apart.device):
                return
        apart_before, self._apart = self._apart.value(), Here(0.0)
        if apart_before:
            raise TaskError(
                f"plan: {stream.name} is sequence, and does not compute from some of the positions what it computes "
                "from all of them (tried in evaluation mode): somewhere in its forward a function looks along the "
                "positions, or counts them. Bring that into a divided layer, give it a module that the plan has as "
                f"whole, or leave {stream.name} out of the plan"
            )

    def _draws(self, stream: Stream, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether anything but dropout modules and attention moves the common generator in training."""
        inner = [each for module in self._modules for each in module.modules()]
        whole = [each for each in inner if isinstance(vars(each).get("forward"), MadeWhole)]
        idle = {inside for each in whole for inside in each.modules()}
        for each in inner:
            each.training = each not in idle and not isinstance(each, (AnyDropout, DividedAttention))
        before = _generators(args[0].device)
        with stream.whole(args[0].shape[stream.dim]):
            compute(*args, **kwargs)
        return not all(map(torch.equal, before, _generators(args[0].device)))


def _generators(device: torch.device) -> list[Tensor]:
    """The states of the generators that all modules draw from; those of a card are on the host, too."""
    return accelerators.generator_states(device)


def _apart(stream: Stream, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """1 where the two differ by more than rounding does on any rank, else 0."""
    with stream.whole(args[0].shape[stream.dim]):
        whole = compute(*args, **kwargs)
    try:
        pieces = stream.in_pieces(compute, *args, **kwargs)
    except EvenerError:
        raise
    except Exception as error:
        raise TaskError(
            f"plan: {stream.name} is sequence, and cannot compute some of the positions: {type(error).__name__}: "
            f"{error}. Leave it out of the plan"
        ) from error
    bound = torch.finfo(whole.dtype).eps ** 0.5 * whole.norm()
    return largest(((whole - pieces).norm() > bound).float(), stream.group)


@contextmanager
def _undisturbed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Evaluation mode, and no parameter of equal elements, which would hide what they are multiplied with."""
    inner = {each: each.training for module in modules for each in module.modules()}
    with ExitStack() as stack:
        stack.enter_context(accelerators.generators_kept(*accelerators.all_of_process()))
        for each, mode in inner.items():
            stack.callback(setattr, each, "training", mode)
            each.training = False
            for buffer in each.buffers(recurse=False):
                stack.callback(buffer.copy_, buffer.clone())
            for parameter in each.parameters(recurse=False):
                _vary(parameter, stack)
        yield


def _vary(parameter: nn.Parameter, stack: ExitStack) -> None:
    """Other elements where all are equal, without asking the device whether they are; ``stack`` takes them back."""
    if parameter.is_floating_point() and parameter.numel() > 1:
        numbers = changeable(parameter, stack)
        waves = torch.arange(numbers.numel(), device=numbers.device).sin().view_as(numbers)
        numbers.add_(0.3 * waves * (numbers.min() == numbers.max()))
