"""What machines agree on in a c10d rendezvous: ``_RendezvousState`` and ``_NodeDesc``.

torch hands it to a backend as a pickle, and unpickles whatever the backend gives back. Evener's backend keeps it as
JSON, for which the classes must be known.

Tested with torch 2.11, 2.13.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as NodeDesc
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState as RendezvousState

__all__ = ["NodeDesc", "RendezvousState"]
