"""Names of modules, of what wraps them, and of data loaders.

- ``Module._parameters`` and ``_buffers`` are a module's own, to be replaced in place. ``named_parameters`` leaves out
  those that are None, and ``setattr`` goes through ``__setattr__`` of a module that may have its own (lazy and
  parametrized ones do).
- ``_BatchNorm`` and ``_DropoutNd`` are the classes from which torch's BatchNorms and Dropouts derive. A model may hold
  any of them, also of classes that the user derived, and no public class is common to them.
- ``_orig_mod``, ``_checkpoint_wrapped_module`` and ``_fsdp_wrapped_module`` are what ``torch.compile`` and others that
  wrap modules put into names: the wrapped module is held in an attribute, which becomes a part of the names of
  parameters. Nothing public names it, and ``torch.distributed.checkpoint.state_dict`` strips the names for state
  dicts alone.
- ``collate`` and ``default_collate_fn_map`` of ``torch.utils.data._utils`` are what ``default_collate`` is made of. Its
  documentation shows them as the way to extend it, under a path that is private.
- ``_BaseDataLoaderIter`` is the class of a DataLoader's iterators. An onlooker times how long a script waits for
  samples, in the loop of the script's own. A DataLoader may be made before Evener sees it, and its iterators have no
  public class.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "COMPILED",
    "WRAPPERS",
    "AnyBatchNorm",
    "AnyDropout",
    "LoaderIterator",
    "collate",
    "compiled_from",
    "default_collate_fn_map",
    "own_buffers",
    "own_parameters",
]

COMPILED = "_orig_mod"
WRAPPERS = (COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes of ``torch.compile``, ``checkpoint_wrapper`` and FSDP's first version that hold the wrapped module."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns them by name; writing to the dict replaces them."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns them by name; writing to the dict replaces them."""
    return module._buffers


def compiled_from(model: nn.Module) -> nn.Module | None:
    """Returns the module that ``torch.compile`` was given; None if ``model`` is not its work."""
    found = getattr(model, COMPILED, None)
    return found if isinstance(found, nn.Module) else None
