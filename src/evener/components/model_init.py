"""The task's model on this rank: built, given to the strategy, and filled with the first weights.

First weights are those of rank 0, whatever a model's constructor draws on another. They travel a tensor at a time, and
each rank keeps of it what it holds, so that no other rank ever needs the whole model at once::

    rank 0   task.model() on the CPU ──────────────────┬─ tensor by tensor ─▶ its part
    others   task.model() on meta ─▶ parallelize ──────┴────────────────────▶ their parts

A model that is divided is built on PyTorch's meta device, where tensors have shapes and no numbers. Not every model can
be: one that computes with numbers in its constructor, or holds tensors that are neither parameters nor buffers, is
built for real.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from evener.components.build import explaining_model_errors
from evener.components.sharded_tensor.local import local
from evener.components.sharded_tensor.shard_spec import mark, slice_of
from evener.core.task.task import Task
from evener.distributed import signals as interrupt
from evener.errors import ConfigurationError, TaskError
from evener.nn.dropout import name_dropouts
from evener.nn.fqn import clean_name
from evener.torch_internals.module_tensors import own_buffers, own_parameters


def build_model(task: Task, seed: int) -> nn.Module:
    """The task's model as its function makes it, drawn from ``seed``.

    Raises:
        TaskError: If it makes something else, or a module whose shapes are not known yet.
    """
    torch.manual_seed(seed % 2**63)
    with explaining_model_errors(task):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"Task.model returned {type(model).__name__}; it must return a torch.nn.Module")
    _check_shapes(model)
    return name_dropouts(model)


def _check_shapes(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise TaskError(
                f"{name or 'the model'} is a {type(module).__name__} that has seen no input yet, so that its weights "
                "have no shape: call the model once on a sample in Task.model"
            )


def build_on_meta(task: Task, seed: int) -> nn.Module | None:
    """The same without numbers; None if the model cannot be built so.

    Raises:
        InterruptedRunError: If it was a signal that ended the attempt.
    """
    try:
        with torch.device("meta"):
            model = build_model(task, seed)
    except Exception:
        interrupt.check()
        return None
    return model if next(_stray_tensors(model), None) is None else None


def _stray_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that nobody will find to fill, and those that are real already."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))
    yield from (tensor for tensor in named_tensors(model).values() if not tensor.is_meta)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as the model holds them, under every name by which they are known."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    return {clean_name(name): tensor for name, tensor in found.items()}


def settle_on(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The model on its device in its type; what was on the meta device is memory without numbers then.

    ``Module.to_empty`` would do, but it gives tied parameters a memory each, and forgets which are slices.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (own_parameters(module), own_buffers(module)):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    made.setdefault(id(tensor), _with_memory(tensor, device))
                    held[name] = made[id(tensor)]  # type: ignore[assignment]
    with marks_kept(model):
        return _converted(model, device, dtype)


def _converted(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    if dtype is None:
        return model.to(device=device)
    with _complex_kept(model, device, dtype):
        return model.to(device=device, dtype=dtype)


@contextmanager
def marks_kept(model: nn.Module) -> Iterator[None]:
    """``Module.to`` puts another tensor in the place of a buffer, and exchanges the inner part of a DTensor for one
    without a mark."""
    marked = [
        (held, name, piece)
        for module in model.modules()
        for held in (own_parameters(module), own_buffers(module))
        for name, tensor in held.items()
        if tensor is not None and (piece := slice_of(tensor))
    ]
    yield
    for held, name, piece in marked:
        tensor = held[name]
        assert tensor is not None
        mark(tensor, piece)


@contextmanager
def _complex_kept(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """``Module.to`` takes the real parts of complex tensors alone; here they get the complex type of that precision."""
    kept = [
        (held, name, tensor.data.to(device, in_type(tensor, dtype)))
        for module in model.modules()
        for held in (own_parameters(module), own_buffers(module))
        for name, tensor in held.items()
        if tensor is not None and tensor.is_complex()
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Casting complex values to real")
        yield
    for held, name, value in kept:
        tensor = held[name]
        if isinstance(tensor, nn.Parameter):
            tensor.data = value
        else:
            held[name] = value  # type: ignore[assignment]


def in_type(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of ``tensor`` where floating numbers are of ``dtype``: complex ones have a type of that precision.

    Raises:
        ConfigurationError: If there is none.
    """
    if tensor.is_floating_point():
        return dtype
    if not tensor.is_complex():
        return tensor.dtype
    if dtype not in _COMPLEX:
        words = str(dtype).removeprefix("torch.")
        raise ConfigurationError(
            f"there are no complex numbers in {words}, and the model or the data have some of {tensor.dtype}: "
            "use another dtype"
        )
    return _COMPLEX[dtype]


_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.float16: torch.complex32}


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    vars(made).update(vars(tensor))  # which slice it is, and what the user says of it
    return made


@torch.no_grad()
def share_first_weights(
    model: nn.Module, source: nn.Module | None, group: dist.ProcessGroup | None, is_source: bool
) -> None:
    """Fills the model with the tensors of rank 0's ``source``, of which each rank keeps its part. A collective call.

    Args:
        model: Placed on the device.
        source: Rank 0's whole model; None on other ranks, or where the model itself is whole everywhere.
        group: All ranks; None for one rank alone.
        is_source: Whether this is rank 0.
    """
    whole = named_tensors(source) if source is not None else {}
    seen: set[int] = set()
    for name, tensor in named_tensors(model).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        given = whole.get(name, tensor) if is_source else None
        if group is not None:
            _share(tensor, given, group)
        elif given is not None and given is not tensor:
            _keep(tensor, given)


def _share(tensor: Tensor, given: Tensor | None, group: dist.ProcessGroup) -> None:
    if tensor.layout is not torch.strided:
        _share_sparse(tensor, given, group)
        return
    piece = slice_of(tensor)
    shape = piece.whole_shape(local(tensor).shape) if piece else tensor.shape
    if given is None:
        whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    else:
        whole = given.detach().to(device=tensor.device, dtype=tensor.dtype).contiguous()
    as_bytes = whole.view(-1).view(torch.uint8)  # NCCL does not know every type
    dist.broadcast(as_bytes, group=group, group_src=0)
    _keep(tensor, whole)


def _share_sparse(tensor: Tensor, given: Tensor | None, group: dist.ProcessGroup) -> None:
    """No backend broadcasts a sparse tensor; they are buffers, and small."""
    values = [given.detach().cpu() if given is not None else None]
    dist.broadcast_object_list(values, group=group, group_src=0)
    assert values[0] is not None
    tensor.copy_(values[0].to(tensor.device, tensor.dtype))


def _keep(tensor: Tensor, whole: Tensor) -> None:
    piece = slice_of(tensor)
    local(tensor).copy_(piece.part(whole) if piece else whole)


def whole_size(model: nn.Module) -> int:
    """Numbers that are trained, of the whole model, of which this rank may hold a part."""
    pairs = [(each, slice_of(each)) for each in model.parameters() if each.requires_grad]
    shapes = [piece.whole_shape(local(each).shape) if piece else each.shape for each, piece in pairs]
    return sum(math.prod(shape) for shape in shapes)
