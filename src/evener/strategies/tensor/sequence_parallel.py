"""Makes sequence-parallel streams in a divided model, as :mod:`evener.strategies.tensor.sequence_streams` finds them.

Modules do not show whether the user's functions look at other positions. So before a stream first divides its input, it
computes it whole and in pieces, in evaluation mode and, without dropout, in training mode; the results must be equal.
On a GPU the comparison is read at the next call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evener.components.model_trial import state_kept
from evener.components.sharded_tensor.local import changeable
from evener.errors import EvenerError, TaskError
from evener.hardware import accelerators
from evener.hardware.async_read import Readout, ReadyValue, is_late, read
from evener.nn.collectives_no_grad import largest
from evener.nn.dropout import Dropout
from evener.nn.head_parallel_attention import DividedAttention
from evener.nn.rng import draw_apart
from evener.nn.sequence_parallel import (
    Compute,
    InPieces,
    MadeWhole,
    SequenceStream,
    Streamed,
    StreamsInARow,
    in_terms,
    instead_of_forward,
)
from evener.nn.tensor_parallel import Divided, RowLayer
from evener.strategies.tensor.plan import TensorPlan
from evener.strategies.tensor.regions import is_sequence
from evener.strategies.tensor.sequence_streams import ALONE, children, members, outermost, runs
from evener.torch_internals.modules import AnyDropout, own_parameters


def divide_positions(
    modules: Mapping[str, nn.Module], plan: TensorPlan, group: ProcessGroup, index: int
) -> None:
    """Makes streams of the modules that the plan calls ``sequence``, in place. Their layers must be divided already.

    Args:
        modules: Modules of the model, by name.
        plan: Plan of everything that is divided.
        group: Ranks that divide the model.
        index: Index of this rank.

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
    """Returns the parameters of whose gradients each rank has only a term."""
    between = (
        own_parameters(each)[key]
        for module in model.modules()
        for each, key in (module.between if isinstance(module, RowLayer) else ())
    )
    found = {parameter for module in model.modules() for parameter in in_terms(module)}
    return found | {parameter for parameter in between if parameter is not None}


class _Streams:
    def __init__(
        self, modules: Mapping[str, nn.Module], plan: TensorPlan, group: ProcessGroup, index: int
    ) -> None:
        self._modules, self._plan, self._group, self._index = modules, plan, group, index

    def alone(self, name: str) -> None:
        """Makes a stream of one module."""
        module = self._modules[name]
        instead_of_forward(module, Streamed(module, self._stream([name])))

    def in_a_row(self, parent: str) -> None:
        """Makes streams of children of an ``nn.Sequential``."""
        module = self._modules[parent]
        assert isinstance(module, nn.Sequential)
        names = children(parent, module)
        found = runs(parent, module, self._plan.words)
        streams = {run: self._stream(names[run.start : run.stop]) for run in found}
        instead_of_forward(module, StreamsInARow(module, streams))

    def _stream(self, names: Sequence[str]) -> SequenceStream:
        modules = [self._modules[name] for name in names]
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        stream = SequenceStream(shown, self._group, self._plan.uses[names[0]].dim, SequenceCheck(modules))
        for name, module in zip(names, modules, strict=True):
            for member, inner, word in members(name, module, self._plan.words):
                self._tell(member, inner, word, stream)
        return stream

    def _tell(self, name: str, module: nn.Module, word: str, stream: SequenceStream) -> None:
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
    """Raises TaskError if a weight that a rank uses with its own positions has several names."""
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


class SequenceCheck:
    """Compares the results of modules in pieces and whole, at the first call.

    Raises:
        TaskError: On all ranks, if the results differ.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._tried = False
        self._apart: Readout = ReadyValue(0.0)

    def __call__(
        self, stream: SequenceStream, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._tried:
            self._tried = True
            with torch.no_grad(), _undisturbed(self._modules):
                apart = self._compared(stream, compute, args, kwargs)
                before = _generators(args[0].device)
                self._train()
                apart_in_training = self._compared(stream, compute, args, kwargs)
                draws = not all(map(torch.equal, before, _generators(args[0].device)))
            self._apart = read(apart + 2 * apart_in_training)
            if draws:
                raise TaskError(
                    f"plan: {stream.name} is sequence, and in training a function in its forward draws random numbers, "
                    "which would be the same for the positions of all ranks. Drop with modules; one of your own that "
                    f"draws is to be whole in the plan. Or leave {stream.name} out of it"
                )
            if is_late(apart.device):
                return
        apart_before, self._apart = self._apart.value(), ReadyValue(0.0)
        if apart_before:
            mode = "training" if apart_before == 2 else "evaluation"
            raise TaskError(
                f"plan: {stream.name} is sequence, and does not compute from some of the positions what it computes "
                f"from all of them (tried in {mode} mode): somewhere in its forward a function looks along the "
                "positions, or counts them. Bring that into a divided layer, give it a module that the plan has as "
                f"whole, or leave {stream.name} out of the plan"
            )

    def _train(self) -> None:
        """Sets the mode of training, but not for dropout modules and attention, and what has all positions."""
        inner = [each for module in self._modules for each in module.modules()]
        whole = [each for each in inner if isinstance(vars(each).get("forward"), MadeWhole)]
        idle = {inside for each in whole for inside in each.modules()}
        for each in inner:
            each.training = each not in idle and not isinstance(each, (AnyDropout, DividedAttention))

    def _compared(
        self, stream: SequenceStream, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Returns 1 if pieces and whole differ on any rank by more than rounding, else 0."""
        with self._kept(), stream.whole(args[0].shape[stream.dim]):
            whole = compute(*args, **kwargs)
        try:
            with self._kept():
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
    def _kept(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(state_kept(module))
            yield


def _generators(device: torch.device) -> list[Tensor]:
    """Returns the states of the generators that all modules draw from. Those of a GPU are on the host, too."""
    return accelerators.generator_states(device)


@contextmanager
def _undisturbed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Sets evaluation mode, and varies parameters of equal elements, which would hide errors in their inputs. Restores
    all of it after the block."""
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
    """Varies the elements of a parameter if all are equal, without waiting for the device; ``stack`` restores them."""
    if parameter.is_floating_point() and parameter.numel() > 0:
        numbers = changeable(parameter, stack)
        waves = torch.arange(1, numbers.numel() + 1, device=numbers.device).sin().view_as(numbers)
        numbers.add_(0.3 * waves * (numbers.min() == numbers.max()))
