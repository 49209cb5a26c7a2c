"""Private names of modules, of their wrappers, and of data loaders.

- ``Module._parameters`` and ``_buffers`` are dicts of a module's own parameters and buffers, which Evener replaces.
  ``named_parameters`` leaves out entries that are None, and ``setattr`` goes through the module's ``__setattr__``,
  which lazy and parametrized modules override.
- ``Module._modules`` is the dict of a module's own modules. Evener looks at it in every step of a prepared loop, where
  ``Module.modules`` would take too long.
- ``_BatchNorm`` and ``_DropoutNd`` are the base classes of torch's BatchNorms and Dropouts, also of classes that users
  derive from them. There is no public base class.
- ``Module._forward_hooks``, ``_forward_pre_hooks``, ``_backward_hooks`` and ``_backward_pre_hooks`` hold the hooks of a
  module, and ``_has_any_global_hook`` tells whether all modules have any. There is no public way to ask. A replayed
  CUDA graph would silently leave them out.
- ``Module._call_impl`` is what calling a module comes to: its hooks around its ``forward``. Where a module is not
  called, because another rank has its weights, its hooks must not run either. There is no public place around both.
- ``_orig_mod``, ``_checkpoint_wrapped_module`` and ``_fsdp_wrapped_module`` are attributes in which ``torch.compile``
  and other wrappers hold the wrapped module. They become part of the names of parameters. They have no public name, and
  ``torch.distributed.checkpoint.state_dict`` removes them only for state dicts.
- ``collate`` and ``default_collate_fn_map`` of ``torch.utils.data._utils`` implement ``default_collate``. Its
  documentation shows how to extend it with them, under the private path.
- ``_BaseDataLoaderIter`` is the base class of a DataLoader's iterators. Evener measures with it how long a script's own
  loop waits for samples. The script may create the DataLoader before Evener sees it, and the class has no public name.
  Its ``_dataset`` tells batches of training from those of an evaluation.
- ``parametrize._cache`` holds what ``parametrize.cached`` keeps: weights as parametrizations computed them. There is no
  public way to compute anew in its context.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.nn.utils import parametrize
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "CALLED",
    "COMPILED",
    "HOLDERS",
    "WRAPPERS",
    "AnyBatchNorm",
    "AnyDropout",
    "LoaderIterator",
    "collate",
    "compiled_from",
    "dataset_of",
    "default_collate_fn_map",
    "has_backward_hooks",
    "has_hooks",
    "own_buffers",
    "own_parameters",
    "parametrized_anew",
]

CALLED = "_call_impl"
"""Method of a module that runs its hooks and ``forward``; an attribute of this name takes its place."""
COMPILED = "_orig_mod"
HOLDERS = ("_parameters", "_buffers", "_modules")
"""Attributes of a module with what is found as if it were an attribute of its own."""
WRAPPERS = (COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes of ``torch.compile``, ``checkpoint_wrapper`` and FSDP's first version that hold the wrapped module."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the module's own parameters by name. Writing to the dict replaces them."""
    return module._parameters


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the module's own modules by name."""
    return module._modules


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the module's own buffers by name. Writing to the dict replaces them."""
    return module._buffers


def has_hooks(module: nn.Module) -> bool:
    """Returns True if calls of the module or their gradients have hooks, of its own or of all modules."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or bool(modules._has_any_global_hook())  # type: ignore[no-untyped-call]


def has_backward_hooks(module: nn.Module) -> bool:
    """Returns True if the module has hooks for the gradients of its inputs or outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def compiled_from(model: nn.Module) -> nn.Module | None:
    """Returns the module from which ``torch.compile`` made ``model``. Returns None if ``model`` is not compiled."""
    found = getattr(model, COMPILED, None)
    return found if isinstance(found, nn.Module) else None


def dataset_of(iterator: LoaderIterator) -> object:
    """Returns the dataset whose batches the iterator of a DataLoader gives."""
    return iterator._dataset


@contextmanager
def parametrized_anew() -> Iterator[None]:
    """Context in which parametrizations neither use nor keep what ``parametrize.cached`` has kept."""
    held, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = held
