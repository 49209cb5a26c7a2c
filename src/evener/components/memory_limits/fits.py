"""Checks that a model fits into memory if each rank holds all of it."""

from __future__ import annotations

from torch import nn

from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.hardware.memory_size import memory_nbytes

GIB = 2**30


def check_room(model: nn.Module, session: Session) -> None:
    """Compares the minimum need of a replica, weights and gradients, with the memory of every rank.

    All ranks must call this together.

    Raises:
        ConfigurationError: On all ranks, if one has too little memory.
    """
    need = sum(p.nbytes * (1 + p.requires_grad) for p in model.parameters())
    have = memory_nbytes(session.device, session.environment.local_world_size)
    rooms = session.control.gather_objects(have)
    short = [rank for rank, room in enumerate(rooms) if room < need]
    if short:
        raise ConfigurationError(
            f"weights and gradients of {type(model).__name__} need {need / GIB:.3g} GiB on every rank, and rank "
            f"{short[0]} has {rooms[short[0]] / GIB:.3g} GiB: use strategy 'sharded', of which each rank holds a part, "
            "or fewer ranks on a host"
        )
