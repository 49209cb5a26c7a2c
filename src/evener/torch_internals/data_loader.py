"""The iterators of DataLoader: ``_BaseDataLoaderIter``.

An onlooker times how long a script waits for samples, in the loop of the script's own. A DataLoader may be made
before Evener sees it, and its iterators have no public class.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["LoaderIterator"]
