"""Builds the task's model on this rank, and initializes its weights after the strategy has divided it.

All ranks get the first weights of rank 0, whatever a model's constructor draws on other ranks. They are broadcast one
tensor at a time, and each rank keeps its part. So no rank but 0 ever needs memory for the whole model::

    rank 0   task.model() on the CPU ──────────────────┬─ tensor by tensor ─▶ its part
    others   task.model() on meta ─▶ parallelize ──────┴────────────────────▶ their parts

A model to divide is built on PyTorch's meta device, where tensors have shapes but no values. A model that computes with
values in its constructor, or holds tensors that are neither parameters nor buffers, cannot be built there. Nor can one
that comes out otherwise there than on rank 0. It is built on the CPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from evener.components.build import explaining_model_errors
from evener.components.modes import begin_training
from evener.components.sharded_tensor.local import local
from evener.components.sharded_tensor.shard_spec import set_shard_spec, shard_spec, take_attributes
from evener.core.task.task import Task
from evener.distributed import signals as interrupt
from evener.errors import ConfigurationError, TaskError
from evener.nn.dropout import name_dropouts
from evener.nn.fqn import clean_name
from evener.torch_internals.modules import own_buffers, own_parameters


def build_model(task: Task, seed: int) -> nn.Module:
    """Builds the task's model with random numbers from ``seed``, in training mode.

    Raises:
        TaskError: If the task returns no module, or a module with lazy parameters, whose shapes are not known yet.
    """
    torch.manual_seed(seed % 2**63)
    with explaining_model_errors(task):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"Task.model returned {type(model).__name__}; it must return a torch.nn.Module")
    _check_shapes(model)
    begin_training(model)
    return name_dropouts(model)


def _check_shapes(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise TaskError(
                f"{name or 'the model'} is a {type(module).__name__} that has seen no input yet, so that its weights "
                "have no shape: call the model once on a sample where you make it (in Task.model, or before "
                "evener.prepare)"
            )


def build_on_meta(task: Task, seed: int) -> nn.Module | None:
    """Builds the task's model on the meta device. Returns None if that is not possible.

    Raises:
        InterruptedRunError: If a signal ended the attempt.
    """
    try:
        with torch.device("meta"):
            model = build_model(task, seed)
    except Exception:
        interrupt.check()
        return None
    return model if next(_stray_tensors(model), None) is None else None


def _stray_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yields tensors that cannot be found later to be initialized, and tensors that are not on the meta device."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))
    yield from (tensor for tensor in named_tensors(model).values() if not tensor.is_meta)


def named_tensors(model: nn.Module, clean: bool = True) -> dict[str, Tensor]:
    """Returns the parameters and buffers as the model holds them, under each of their names.

    Args:
        clean: False for the names in the model's state, which may have prefixes of wrappers.
    """
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    return {clean_name(name) if clean else name: tensor for name, tensor in found.items()}


def holds_the_same(model: nn.Module, other: nn.Module) -> bool:
    """Returns True if both models hold tensors of the same names, shapes and types.

    One on the meta device may lack some of another: ``orthogonal`` of torch passes over what cannot be computed there.
    """
    held, others = named_tensors(model), named_tensors(other)
    return held.keys() == others.keys() and all(
        (tensor.shape, tensor.dtype) == (others[name].shape, others[name].dtype)
        for name, tensor in held.items()
    )


def settle_on(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Moves the model to its device and data type. Tensors on the meta device get uninitialized memory.

    ``Module.to_empty`` is not used: it gives tied parameters separate memory, and loses the marks of shards.
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
    """Keeps the marks of shards, with all that the user has set on them, within a block that calls ``Module.to``, which
    replaces buffers, and replaces a DTensor by one without attributes."""
    marked = [
        (held, name, piece, {**vars(tensor)})
        for module in model.modules()
        for held in (own_parameters(module), own_buffers(module))
        for name, tensor in held.items()
        if tensor is not None and (piece := shard_spec(tensor))
    ]
    yield
    for held, name, piece, attributes in marked:
        tensor = held[name]
        assert tensor is not None
        set_shard_spec(take_attributes(tensor, attributes), piece)


@contextmanager
def _complex_kept(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Keeps complex tensors complex within a block that calls ``Module.to``, which would drop their imaginary parts.
    They get the complex type of the same precision."""
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
    """Returns the type of ``tensor`` when floating-point numbers have type ``dtype``. Complex tensors get the complex
    type of that precision.

    Raises:
        ConfigurationError: If there is no such complex type.
    """
    if tensor.is_floating_point():
        return dtype
    if not tensor.is_complex():
        return tensor.dtype
    if dtype not in _COMPLEX:
        dtype_name = str(dtype).removeprefix("torch.")
        raise ConfigurationError(
            f"there are no complex numbers in {dtype_name}, and the model or the data have some of {tensor.dtype}: "
            "use another dtype"
        )
    return _COMPLEX[dtype]


def as_floating(leaf: Any, dtype: torch.dtype) -> Any:
    """Returns a tensor with the type of `in_type`. Returns anything else unchanged."""
    return leaf.to(in_type(leaf, dtype)) if isinstance(leaf, Tensor) else leaf


_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.float16: torch.complex32}


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    vars(made).update(vars(tensor))  # its shard mark, and attributes that the user has set
    return made


@torch.no_grad()
def share_first_weights(
    model: nn.Module, source: nn.Module | None, group: dist.ProcessGroup | None, is_source: bool
) -> None:
    """Fills the model with the tensors of rank 0's ``source``. Each rank keeps its part. All ranks must call this
    together.

    Args:
        model: The model on its device.
        source: The whole model on rank 0. None on other ranks, or if ``model`` itself is whole on all ranks.
        group: All ranks. None for a single rank.
        is_source: True on rank 0.
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


@torch.no_grad()
def share_whole_weights(
    model: nn.Module, group: dist.ProcessGroup | None, device: torch.device, is_source: bool
) -> None:
    """Gives all ranks the tensors of rank 0's ``model``, which is whole on each of them. All ranks must call this
    together.

    Args:
        group: All ranks. None for a single rank.
        device: Sends and receives, one tensor at a time, wherever the model is.
    """
    for tensor in {id(each): each for each in named_tensors(model).values()}.values():
        if group is not None:
            there = tensor.detach().to(device)
            _share(there, there if is_source else None, group)
            tensor.copy_(there)


def _share(tensor: Tensor, given: Tensor | None, group: dist.ProcessGroup) -> None:
    if tensor.layout is not torch.strided:
        _share_sparse(tensor, given, group)
        return
    piece = shard_spec(tensor)
    shape = piece.whole_shape(local(tensor).shape) if piece else tensor.shape
    if given is None:
        whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    else:
        whole = given.detach().to(device=tensor.device, dtype=tensor.dtype).contiguous()
    as_bytes = whole.view(-1).view(torch.uint8)  # NCCL does not support every type
    dist.broadcast(as_bytes, group=group, group_src=0)
    _keep(tensor, whole)


def _share_sparse(tensor: Tensor, given: Tensor | None, group: dist.ProcessGroup) -> None:
    """Broadcasts a sparse tensor as an object, because no backend broadcasts sparse tensors. They are small buffers."""
    values = [given.detach().cpu() if given is not None else None]
    dist.broadcast_object_list(values, group=group, group_src=0)
    assert values[0] is not None
    tensor.copy_(values[0].to(tensor.device, tensor.dtype))


def _keep(tensor: Tensor, whole: Tensor) -> None:
    """Writes this rank's part of ``whole`` into ``tensor``, unless it is there: backward of a pass that is under way
    takes a weight that was written to for another."""
    piece, held = shard_spec(tensor), local(tensor)
    part = piece.part(whole) if piece else whole
    if held.is_meta or not torch.equal(held, part):
        held.copy_(part)


def whole_size(model: nn.Module) -> int:
    """Returns the number of trained values of the whole model, of which this rank may hold only a part."""
    pairs = [(each, shard_spec(each)) for each in model.parameters() if each.requires_grad]
    shapes = [piece.whole_shape(local(each).shape) if piece else each.shape for each, piece in pairs]
    return sum(math.prod(shape) for shape in shapes)
