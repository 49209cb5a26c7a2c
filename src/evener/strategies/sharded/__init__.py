"""Sharded state: PyTorch's FSDP2 in units (ZeRO-3), and rows with one owner each (ZeRO-1 and ZeRO-2)."""

from evener.strategies.sharded.sharded import Sharded

__all__ = ["Sharded"]
