"""Imported last by the process whose forks the ranks are: no rank's garbage collector looks at PyTorch.

Each rank would do so once, and copy all that it looks at.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
