"""How state is kept in parts: PyTorch's FSDP2 in units, and rows with owners."""

from evener.strategies.sharded.sharded import Sharded

__all__ = ["Sharded"]
