"""The process group for communication in the user's loss or layers.

It is a separate group, so that messages in backward cannot mix with gradient buckets.
"""

from __future__ import annotations

from functools import partial

from torch.distributed import ProcessGroup

from evener.collectives.executor.subgroup import subgroup
from evener.core.phase_marks import marked
from evener.distributed.hosts import destroy
from evener.distributed.mesh import DIVIDING_TERMS, Mesh
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.hardware.timers import waiting


def group_of_passes(mesh: Mesh, session: Session, apart: str = "") -> ProcessGroup | None:
    """Makes the group of the ranks that compute the parts of a batch, and returns it; None if this rank is alone.

    All its ranks must call this together. The group is closed with the mesh.

    Args:
        apart: The name of a strategy whose ranks do not meet in every step; else empty.

    Raises:
        ConfigurationError: If ``apart`` is given.
    """
    if apart:
        raise ConfigurationError(
            f"a loss or a layer wants numbers of other ranks in its pass, and with strategy {apart!r} each replica "
            "takes steps of its own: use ddp, or a loss over a replica's own samples"
        )
    ranks = mesh.group(*DIVIDING_TERMS)
    if ranks is None:
        return None
    with waiting(), marked("start of a process group"):
        made = subgroup(ranks, range(ranks.size()), session.group_timeout.total_seconds())
    assert made is not None
    mesh.close_with_mesh(partial(destroy, made))
    return made
