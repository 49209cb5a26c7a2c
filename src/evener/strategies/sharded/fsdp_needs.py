"""What PyTorch's FSDP2 needs: models that it can hold, outputs that are no views, a mesh of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from evener.components.model_init import marks_kept
from evener.components.sharded_tensor.local import is_divided
from evener.data.batch import map_leaves, named_leaves
from evener.errors import TaskError
from evener.strategies.sharded.units import is_unit
from evener.torch_internals.autograd import is_view, is_within_backward
from evener.torch_internals.modules import own_buffers, own_parameters


def check_layers(model: nn.Module) -> None:
    """Raises TaskError if the model has sparse gradients, complex weights or trained ones without any number."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TaskError(
                f"{name or 'the model'} has sparse gradients, which PyTorch's FSDP2 does not sum: make it "
                "sparse=False, or use strategy 'ddp'"
            )
    found = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if found is not None:
        raise TaskError(f"{found} is complex, which PyTorch's FSDP2 does not shard: use strategy 'ddp'")
    found = next((name for name, p in model.named_parameters() if p.requires_grad and not p.numel()), None)
    if found is not None:
        raise TaskError(
            f"{found} is empty, and PyTorch's FSDP2 sums no empty gradient: give it requires_grad=False, or use zero=2"
        )


def check_types(model: nn.Module) -> None:
    """Raises TaskError if the trained parameters have several dtypes."""
    types: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            types.setdefault(parameter.dtype, name)
    if len(types) > 1:
        words = ", ".join(f"{name} of {dtype}" for dtype, name in types.items())
        raise TaskError(
            f"PyTorch's FSDP2 shards parameters of one type, the model has {words}: set dtype, or use strategy 'ddp'"
        )


def to_host(model: nn.Module, device: torch.device) -> None:
    """Moves all sharded parameters to host memory, in place. Buffers and whole parameters stay on ``device``."""
    with marks_kept(model):
        model.to("cpu")
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            own_buffers(module)[name] = None if buffer is None else buffer.to(device)
        for parameter in own_parameters(module).values():
            if parameter is not None and not is_divided(parameter):
                parameter.data = parameter.data.to(device)


@contextmanager
def outputs_shown(unit: nn.Module) -> Iterator[None]:
    """Context in which FSDP2 takes over ``unit``, and gets outputs in which it finds every tensor to hook on."""
    unit.register_forward_hook(_shown)
    yield
    unit.register_forward_hook(_returned)


class _Shown(NamedTuple):
    """An output, and the tensors in it."""

    output: Any
    tensors: tuple[Tensor, ...]


def _shown(_: nn.Module, __: Any, output: Any) -> Any:
    """Clones outputs that are views: a later in-place write to a view would drop the hook that FSDP2 puts on it. Lists
    the tensors of an object, as of a class derived from dict, in which FSDP2 of torch 2.11 finds none."""
    found = map_leaves(lambda leaf: leaf.clone() if _is_traced_view(leaf) else leaf, output)
    if isinstance(found, Tensor) or type(found) in (tuple, list, dict):
        return found
    return _Shown(found, tuple(each for _, each in named_leaves(found, "") if isinstance(each, Tensor)))


def _returned(_: nn.Module, __: Any, output: Any) -> Any:
    return output.output if isinstance(output, _Shown) else output


def _is_traced_view(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and is_view(leaf)


def _refuse_graphs(_: nn.Module, __: Any, output: Any) -> None:
    """Refuses gradients that go backward through a unit and of which a graph is wanted. Their own gradients would need
    the weights that FSDP2 frees after backward."""
    for _name, leaf in named_leaves(output, ""):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]


def _refuse_graph(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise TaskError(
            "a gradient with a graph of its own (create_graph=True), as for a penalty on gradients, goes through "
            "weights of a unit, which PyTorch's FSDP2 frees after it. Make the model one unit (an empty 'wrap'), take "
            "the gradient in its forward, and return it or its penalty as an output; or use zero=1 or strategy 'ddp'"
        )


def around_passes(
    model: nn.Module, begin: Callable[..., None], end: Callable[..., None]
) -> tuple[RemovableHandle, ...]:
    """Has ``begin`` and ``end`` called around forward passes of the whole model, but not around those that backward
    computes again. Passes under ``torch.inference_mode`` run as under ``torch.no_grad``: memory that FSDP2 makes for
    weights in that mode serves no other pass. Gradients that have graphs of their own are refused."""
    undo = ExitStack()

    def first(*given: Any) -> None:
        if not is_within_backward():
            begin(*given)

    def last(*given: Any) -> None:
        if not is_within_backward():
            end(*given)

    def leave_inference(*_: Any) -> None:
        if torch.is_inference_mode_enabled():
            undo.enter_context(torch.inference_mode(mode=False))
            undo.enter_context(torch.no_grad())

    def restore(*_: Any) -> None:
        undo.close()

    return (
        model.register_forward_pre_hook(first, prepend=True),
        model.register_forward_pre_hook(leave_inference, prepend=True),
        model.register_forward_hook(last),
        model.register_forward_hook(restore, always_call=True),
        *(unit.register_forward_hook(_refuse_graphs) for unit in model.modules() if is_unit(unit)),
    )


@contextmanager
def refusal_explained(name: str) -> Iterator[None]:
    """Turns FSDP2's refusal of the module ``name`` into a TaskError."""
    try:
        yield
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise TaskError(f"{name} cannot be sharded by PyTorch's FSDP2: {error}") from error


_MESHES = itertools.count()


def device_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Returns a mesh with a name of its own. DTensor caches results by mesh, and would take one of a group that is gone
    for another of the same ranks and name."""
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"shard {next(_MESHES)}",))
