"""What ``default_collate`` is made of: ``collate`` and ``default_collate_fn_map`` of ``torch.utils.data._utils``.

The documentation of ``default_collate`` shows them as the way to extend it, under a path that is private.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch.utils.data._utils.collate import collate, default_collate_fn_map

__all__ = ["collate", "default_collate_fn_map"]
