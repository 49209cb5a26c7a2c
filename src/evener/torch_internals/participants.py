"""How many machines have come to a c10d rendezvous: ``DynamicRendezvousHandler._state_holder``.

The handler knows while it waits, and tells nobody; who starts a run on several machines wants to know which one is
missing.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


def participants(handler: RendezvousHandler | None) -> int | None:
    """Machines that wait in the round that is open, this one among them; None where the backend does not count them."""
    if isinstance(handler, DynamicRendezvousHandler):
        return len(handler._state_holder.state.participants)
    return None
