from __future__ import annotations

from tests.elsewhere import memory

__all__ = ["memory"]
