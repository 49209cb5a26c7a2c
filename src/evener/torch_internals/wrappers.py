"""What ``torch.compile`` and others that wrap modules put into names: ``_orig_mod``, ``_checkpoint_wrapped_module``,
``_fsdp_wrapped_module``.

The wrapped module is held in an attribute, which becomes a part of the names of parameters. Nothing public names it,
and ``torch.distributed.checkpoint.state_dict`` strips the names for state dicts alone.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch import nn

COMPILED = "_orig_mod"
ATTRIBUTES = (COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Of ``torch.compile``, ``checkpoint_wrapper`` and FSDP's first version."""


def compiled_from(model: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile`` was given; None if ``model`` is not its work."""
    found = getattr(model, COMPILED, None)
    return found if isinstance(found, nn.Module) else None
