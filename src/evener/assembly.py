"""From the settings of a run, which are words and numbers, to the parts that they stand for."""

from __future__ import annotations

import torch

from evener.balance.base import Balancer, Equal
from evener.balance.emulate import Throttle
from evener.balance.registry import BALANCERS, fixed_weights, make_balancer
from evener.balance.shares import parse_caps
from evener.config import RunConfig
from evener.errors import ConfigurationError
from evener.strategies.base import Settings
from evener.strategies.reading import Reading


def balancer_of(config: RunConfig, reading: Reading, lookahead: int) -> Balancer:
    """The balancer of the settings; where the data decide who computes what, one that changes nothing."""
    world_size = reading.ranks
    if reading.parts is not None and config.balance not in BALANCERS:
        raise ConfigurationError(
            f"balance {config.balance!r} cannot divide data that are partitioned by sample: a rank computes what it "
            "holds; leave balance out, and give a faster rank a larger part"
        )
    if not reading.balanced:
        return Equal(world_size)
    caps = parse_caps(config.caps, world_size)
    return make_balancer(config.balance, world_size, caps=caps, quantum=config.quantum, lookahead=lookahead)


def settings_of(config: RunConfig, world_size: int) -> Settings:
    """What the strategy is told."""
    dtype = getattr(torch, config.dtype) if config.dtype else None
    throttle = Throttle.parse(config.throttle, config.throttle_at, world_size)
    return Settings(
        seed=config.seed,
        dtype=dtype,
        clip_norm=config.clip_norm,
        all_reduce=config.allreduce,
        compression=config.compress,
        bucket_bytes=None if config.bucket_mb is None else round(config.bucket_mb * 2**20),
        throttle=throttle if config.throttle or config.throttle_at else None,
        weights=fixed_weights(config.balance, world_size),
    )
