"""Private names of autograd: its engine, attributes and hooks of tensors, and calls of ``autograd.Function``.

- ``_engine_run_backward`` runs the engine directly. ``torch.autograd.backward`` cannot be used under a mode for
  functions: the mode is suspended until it returns, so it does not see the forward passes that activation
  checkpointing repeats in it. A mode that is entered around the engine itself stays active.
- ``Variable._execution_engine.queue_callback`` calls a function when the backward pass that is under way is over, as
  DistributedDataParallel needs it. There is no public way.
- ``Tensor._version`` counts in-place writes. With it autograd detects that a saved tensor was changed. PyTorch's notes
  document the attribute, and there is no public one.
- ``Tensor._base`` is the tensor of which another is a view. FSDP2 registers a hook on the outputs of a module, and an
  in-place operation on a view drops it silently. Also, a view of a weight shares the weight's memory. PyTorch's notes
  on views document the attribute, and there is no public one.
- ``Tensor._backward_hooks`` and ``..._post_accumulate_grad_hooks`` hold the hooks of a tensor. Code that replaces a
  weight by a shard would silently lose the user's hooks without them. Nor could hooks be delayed until gradients are
  summed over the ranks.
- ``RemovableHandle.next_id`` counts the hooks that were registered, of tensors and modules. It has no underscore, and
  no documentation. A step must not look at each of many parameters for hooks that came since the last one.
- ``_SingleLevelFunction`` has the ``setup_context`` of a function that defines none. ``torch.fx`` has no node for a
  call of an ``autograd.Function``: while it traces, ``apply`` runs the function's ``forward`` like any code, and its
  own ``backward`` is silently lost. ``apply`` cannot be patched: modules bind it to names (``relu = MyReLU.apply``),
  and from torch 2.15 on it goes directly to C++. There it looks up the class's ``forward``, and its ``setup_context``
  if that is not the one of ``_SingleLevelFunction``. Outputs of ``forward`` that are no tensors are returned unchanged.
- ``torch._C._current_graph_task_id`` is the number of the backward pass that runs on this thread, as
  ``torch.utils.checkpoint`` asks for it, and -1 outside of one. There is no public way.
- ``torch._C._functorch.peek_interpreter_stack`` tells whether a transform of ``torch.func`` is under way, in which
  tensors have no memory of their own and new ones are wrapped too. There is no public way.
- ``torch._C._set_grad_enabled`` is what ``torch.no_grad`` and ``torch.enable_grad`` call. ``apply`` of an
  ``autograd.Function`` turns gradients off in C++ while ``forward`` runs, so that ``torch.is_grad_enabled()`` does not
  tell there whether the caller has them. A mode for functions sees the one and not the other.
- ``_top_saved_tensors_default_hooks`` returns the innermost ``saved_tensors_hooks`` that are in force, and
  ``torch.utils.checkpoint._checkpoint_hook`` is what ``checkpoint(..., use_reentrant=False)`` enters around code that
  backward runs again. There is no public way to see that code runs inside either.
- ``torch.distributed.pipelining._backward`` splits backward into the part for a stage's inputs and the part for its
  weights, which zero-bubble schedules need. The public way is the runtime of a whole schedule, which needs
  micro-batches of one shape. The module is imported at the first backward, because importing torch's compiler with it
  takes a second.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from types import FrameType
from typing import Any, Generic, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, _SingleLevelFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward, saved_tensors_hooks
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

T = TypeVar("T", bound=Tensor)

# Attributes of tensors


def version(tensor: Tensor) -> int:
    """Returns the version of a tensor, a number that rises with every in-place write."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Returns True if the tensor is a view for autograd."""
    return tensor._base is not None


def base_of(tensor: Tensor) -> Tensor | None:
    """Returns the tensor of which this one is a view. Returns None if it is no view for autograd."""
    return tensor._base


Hooks = tuple[Any, Any]
"""The hooks of a tensor that run before its gradient is accumulated, and those that run after."""


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Returns True if the tensor has hooks of ``register_post_accumulate_grad_hook``."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def hooks_of(tensor: Tensor) -> Hooks | None:
    """Returns the hooks of ``register_hook`` and ``register_post_accumulate_grad_hook``; None if there are none."""
    found = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return found if found[0] or found[1] else None


def hooked(tensors: Iterable[T]) -> list[T]:
    """Returns those tensors that have hooks."""
    return [each for each in tensors if each._backward_hooks or each._post_accumulate_grad_hooks]


class HookedTensors(Generic[T]):
    """Knows which of some tensors have hooks. Looks at each of them only if a hook was registered anywhere since.

    Args:
        tensors: Returns the tensors; always the same ones.
    """

    def __init__(self, tensors: Callable[[], Iterable[T]]) -> None:
        self._tensors, self._registered = tensors, -1
        self._had: dict[T, None] = {}
        """Those that had hooks at some time, and may have been without when others were looked for."""

    def now(self) -> list[T]:
        """Returns those that have hooks now."""
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            self._had |= dict.fromkeys(hooked(self._tensors()))
        return hooked(self._had) if self._had else []


def give_hooks(tensor: Tensor, hooks: Hooks) -> None:
    """Replaces the hooks of ``tensor`` by ``hooks``. The handles of these hooks can still remove them."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


# The engine


def after_backward(function: Callable[[], None]) -> None:
    """Calls ``function`` when the backward pass that is under way is over. Its errors are those of that pass. May be
    called in hooks only."""
    Variable._execution_engine.queue_callback(function)


def run_backward(
    around: AbstractContextManager[Any],
    tensors: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Tensor | Sequence[Tensor] | None,
) -> None:
    """Does the same as ``torch.autograd.backward``, and enters ``around`` while the engine runs."""
    into = () if inputs is None else _several(inputs)
    _run(around, tensors, gradients, retain_graph, create_graph, into, True, accumulate_grad=True)


def run_grad(
    around: AbstractContextManager[Any],
    outputs: Tensor | Sequence[Any],
    inputs: Tensor | Sequence[Any],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    allow_unused: bool,
) -> tuple[Tensor | None, ...]:
    """Does the same as ``torch.autograd.grad`` of tensors or edges, and enters ``around`` while the engine runs."""
    into = _several(inputs)
    found: tuple[Tensor | None, ...] = _run(
        around, outputs, gradients, retain_graph, create_graph, into, allow_unused, accumulate_grad=False
    )
    return found


def _run(
    around: AbstractContextManager[Any],
    tensors: Tensor | Sequence[Any],
    gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,
    create_graph: bool,
    *rest: Any,
    accumulate_grad: bool,
) -> Any:
    """Runs the engine from ``tensors``. The default gradient of a tensor of one element is 1."""
    roots = _several(tensors)
    given = (None,) * len(roots) if gradients is None else _several(gradients)
    started = (
        torch.ones_like(root)
        if gradient is None and isinstance(root, Tensor) and root.numel() == 1
        else gradient
        for root, gradient in zip(roots, given, strict=True)
    )
    retain = create_graph if retain_graph is None else retain_graph
    with around:
        return _engine_run_backward(
            roots, tuple(started), retain, create_graph, *rest, accumulate_grad=accumulate_grad
        )


def _several(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)


def is_within_backward() -> bool:
    """Returns True if a backward pass calls this code, as it does with what it computes again."""
    return torch._C._current_graph_task_id() != -1


def is_within_transform() -> bool:
    """Returns True inside a function that a transform of ``torch.func`` calls, such as ``grad`` or ``vmap``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# Calls of ``autograd.Function``

Record = Callable[[type[Function], tuple[Any, ...]], Any]


@contextmanager
def applied(record: Record) -> Iterator[None]:
    """Calls ``record(function, args)`` at each call of an ``autograd.Function`` in the block.

    If ``record`` returns a value, that is the result of the call; if None, the function runs. Covers only classes that
    exist when the block begins.
    """
    replacements = {kind: _recorded(kind, record) for kind in _all_below(Function)}
    with ExitStack() as replaced:
        for kind, functions in replacements.items():
            for name, replacement in functions.items():
                replaced.enter_context(mock.patch.object(kind, name, staticmethod(replacement)))
        yield


def function_around() -> type[Function] | None:
    """Returns the ``autograd.Function`` in whose ``forward`` the calling code runs. Returns None if there is none."""
    forwards = {getattr(kind.forward, "__code__", None): kind for kind in _all_below(Function)}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return None if frame is None else forwards[frame.f_code]


def saving_hooks() -> object:
    """Returns the innermost hooks of saved tensors that are in force, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def without_checkpoints(
    begun: Callable[[], Callable[[Tensor], None]] = lambda: lambda tensor: None,
) -> Iterator[None]:
    """Context in which non-reentrant ``torch.utils.checkpoint`` keeps all tensors, so that backward runs nothing again.
    Calls ``begun`` at each, and what it returns with every tensor that the checkpoint would not keep."""

    def entered(*_: object) -> saved_tensors_hooks:
        note = begun()

        def pack(tensor: Tensor) -> Tensor:
            note(tensor)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    with mock.patch.object(checkpoint, "_checkpoint_hook", entered):
        yield


class GradientMode(TorchFunctionMode):
    """Tells inside its block whether gradients are on, also in the ``forward`` of an ``autograd.Function``, where it
    tells whether they are on for the caller."""

    def __init__(self) -> None:
        super().__init__()
        self._on = torch.is_grad_enabled()

    def is_on(self) -> bool:
        """Returns True if the code that is running, or has called the function that is running, has gradients on."""
        return self._on and not torch.is_inference_mode_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            self._on = bool(args[0])
        elif torch.is_grad_enabled():
            self._on = True  # a function that was left may have turned them off
        return func(*args, **(kwargs or {}))


def _all_below(kind: type[Function]) -> list[type[Function]]:
    """Returns all classes derived from ``kind``, directly or not, without ``kind`` itself."""
    return [each for below in kind.__subclasses__() for each in (below, *_all_below(below))]


def _recorded(kind: type[Function], record: Record) -> dict[str, Callable[..., Any]]:
    """Returns replacements, by name, for ``forward`` and ``setup_context`` of a class."""
    forward, setup_context = kind.forward, kind.setup_context
    sets_up = setup_context is not _SingleLevelFunction.setup_context
    given: list[Any] = []  # results of record for calls whose context is not set up yet

    def forward_recorded(*args: Any, **kwargs: Any) -> Any:
        found = record(kind, args if sets_up else args[1:])  # otherwise the first argument is the context
        result = forward(*args, **kwargs) if found is None else found
        if sets_up:
            given.append(found)
        return result

    def set_up(context: Any, inputs: Any, output: Any) -> None:
        if given.pop() is None:
            setup_context(context, inputs, output)

    return {"forward": forward_recorded} | ({"setup_context": set_up} if sets_up else {})


# Backward in two parts


@cache
def _theirs() -> Any:
    return importlib.import_module("torch.distributed.pipelining._backward")


class _TangledError(Exception):
    """Backward cannot be taken in two parts where it meets that of the inputs."""


def _apart(groups: Callable[..., Any], outputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Wraps PyTorch's ``get_param_groups``, which groups weights by where their backward meets that of the inputs.

    The wrapped function raises ``_TangledError`` if a group has several such places, or if one of ``outputs`` is made
    of weights without the inputs: that part of backward meets nothing, and would be left out.
    """

    def checked(inputs: list[Any], weights: list[Any], reverse_edges: Any) -> Any:
        theirs = _theirs()
        found = groups(inputs, weights, reverse_edges)
        of_inputs, _ = theirs.reverse_closure(inputs, set(), reverse_edges)
        of_weights_alone, _ = theirs.reverse_closure(weights, of_inputs, reverse_edges)
        ends = {theirs._get_grad_fn_or_grad_acc(output) for output in outputs}
        if any(len(group["intermediates"]) > 1 for group in found) or not of_weights_alone.isdisjoint(ends):
            raise _TangledError
        return found

    return checked


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> list[dict[str, Any]]:
    """Adds to the gradients of ``inputs``. Returns the groups that :func:`backward_of_weights` needs.

    Without ``inputs``, :func:`backward_of_weights` does the whole backward. It also does so if a weight is used in
    several places, such as a position bias that several blocks add: there PyTorch's second part would go through a part
    of the graph twice, and either fail or give wrong gradients. The same holds for an output that does not depend on
    the inputs, as after ``detach``: PyTorch's second part would give its weights no gradient.
    """
    whole = {"outputs": list(outputs), "gradients": None if gradients is None else list(gradients)}
    if not inputs or not outputs:
        return [whole]
    theirs = _theirs()
    try:
        with mock.patch.object(theirs, "get_param_groups", _apart(theirs.get_param_groups, outputs)):
            _, groups = theirs.stage_backward_input(
                list(outputs), whole["gradients"], list(inputs), iter(weights)
            )
        return list(groups)
    except _TangledError:
        torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=list(inputs))
        return [whole]


def backward_of_weights(groups: list[dict[str, Any]], weights: Sequence[nn.Parameter]) -> None:
    """Adds to the gradients of ``weights``, with the ``groups`` of :func:`backward_of_inputs`.

    Copies the first gradient of a weight. If weights are only added, PyTorch gives them and the stage's input the same
    tensor as gradient, and adding the next micro-batch's gradient in place would change all of them.
    """
    if groups and "outputs" in groups[0]:
        if groups[0]["outputs"]:
            torch.autograd.backward(groups[0]["outputs"], groups[0]["gradients"], inputs=list(weights))
        return
    without = [weight for weight in weights if weight.grad is None]
    _theirs().stage_backward_weight(iter(weights), groups)
    for weight in without:
        if weight.grad is not None:
            weight.grad = weight.grad.clone()
