"""Builds the parts of a run (strategy, balancer, strategy settings, learner) from its settings, which are words and
numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from evener.balance.base import Balancer, Equal
from evener.balance.by_speed_large import BySpeedOfMany
from evener.balance.controller import DEFAULT_LOOKAHEAD
from evener.balance.registry import BALANCERS, decides, fixed_weights, make_balancer
from evener.balance.shares import parse_max_shares
from evener.balance.throttle import Throttle
from evener.checkpoint.weights_file import filler
from evener.collectives.registry import check_compression, find
from evener.components.amp.policy import Precision
from evener.components.compile import Compiling
from evener.components.memory_limits.limits import MemoryLimits
from evener.core.config.exact_bits import ExactBits
from evener.core.config.offload import Offload
from evener.core.config.recompute import Recompute
from evener.core.config.run_config import AUTO, RunConfig
from evener.core.plugins import is_named
from evener.core.task.task import Task
from evener.distributed.environment import MIXED
from evener.distributed.mesh import DataAxis
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.strategies.base import Strategy, set_up
from evener.strategies.composed import degrees_of, laid
from evener.strategies.dataset_view import Reading
from evener.strategies.interfaces import StrategySettings
from evener.strategies.learner import Learner
from evener.strategies.registry import strategies_called
from evener.training.consistency.startup import agreement


def balance_of(config: RunConfig, parts: int, unlike: bool) -> str:
    """Returns the name of the balance that divides a batch into ``parts`` parts.

    If the settings name none, unlike devices get ``auto``: shares by measured speed, so that fast devices do not wait
    for slow ones. Devices that are alike get equal shares, so that the same command gives the same bits. Equal shares
    are also taken if BatchNorm is local, because each division then trains something else, and with a mode of
    torch.compile, which may record one graph for each size.
    """
    if config.balance is not None:
        return config.balance
    by_division = config.batch_norm == "local" or config.compile_mode is not None
    return "auto" if unlike and parts > 1 and not by_division else "equal"


def balancer_of(
    config: RunConfig,
    reading: Reading,
    lookahead: int,
    data: DataAxis | None = None,
    bits: ExactBits | None = None,
) -> Balancer:
    """Returns the balancer of the settings, or one that changes nothing if the data decide which rank computes what.

    Settings without a balance, which `evener.training.batches.device_mix` has not settled, mean equal shares.

    Args:
        data: The data axis, which says which rank computes which part. Given if each rank knows only its own times.
        bits: Set if shares are whole blocks.
    """
    balance = balance_of(config, reading.ranks, unlike=False)
    if reading.parts is not None and balance not in BALANCERS:
        raise ConfigurationError(
            f"balance {balance!r} cannot divide data that are partitioned by sample: a rank computes what it "
            "holds; leave balance out, and give a faster rank a larger part"
        )
    if not reading.balanced:
        if reading.parts is not None:
            _refuse_ignored(config, "the data are partitioned by sample, and a rank computes what it holds")
        return Equal(reading.ranks)
    if data is not None and balance == "auto":
        limits = {
            "max_shares": parse_max_shares(config.max_shares, reading.ranks),
            "share_multiple_of": _multiple(config, bits),
        }
        return BySpeedOfMany(reading.ranks, data.index, data.teams, lookahead=lookahead, **limits)
    return balancer_called(balance, config, reading.ranks, lookahead, bits)


def _multiple(config: RunConfig, bits: ExactBits | None) -> int:
    return config.share_multiple_of if bits is None else bits.block


def balancer_called(
    balance: str,
    config: RunConfig,
    parts: int,
    lookahead: int = DEFAULT_LOOKAHEAD,
    bits: ExactBits | None = None,
) -> Balancer:
    """Returns the balancer with that name, within the limits of the settings, for ``parts`` parts of a batch."""
    max_shares = parse_max_shares(config.max_shares, parts)
    # Whole blocks are made of the shares of any balancer (evener.data.grains), also of one that knows no multiples.
    multiple = 1 if bits is not None and is_named(balance, "balancer", BALANCERS) else _multiple(config, bits)
    return make_balancer(
        balance, parts, max_shares=max_shares, share_multiple_of=multiple, lookahead=lookahead
    )


def strategy_of(config: RunConfig, world_size: int) -> Strategy:
    """Returns the strategy of the settings, laid over ``world_size`` ranks.

    Raises:
        ConfigurationError: If no strategy has the name or the options, or it cannot be laid over this number of ranks.
    """
    return laid(strategies_named(config), config.mesh, world_size)


def strategies_named(config: RunConfig) -> tuple[Strategy, ...]:
    """Returns the strategies of the settings, before they are laid over ranks.

    Raises:
        ConfigurationError: If no strategy has the name or the options.
    """
    given = config.strategy
    if isinstance(given, str):
        return strategies_called(given, config.strategy_option)
    if config.strategy_option:
        raise ConfigurationError(
            f"strategy_option {', '.join(config.strategy_option)} goes with a strategy's name; {given} has its options "
            "already: give them to its class"
        )
    parts = given if isinstance(given, tuple | list) else (given,)
    strange = [part for part in parts if not isinstance(part, Strategy)]
    if strange or not parts:
        raise ConfigurationError(f"strategy is {given!r}; it must be a name, a Strategy, or a tuple of them")
    return tuple(part for part in parts if isinstance(part, Strategy))


def suggested_processes(config: RunConfig) -> int | None:
    """Returns the number of ranks that strategy and mesh need, or None if any number will do."""
    if any(part.one_process for part in strategies_named(config)):
        return 1
    degrees = degrees_of(config.mesh)
    return math.prod(degrees.values()) if degrees else None


def _refuse_streams(config: RunConfig) -> None:
    """Refuses all-reduce and compression written for CUDA streams on other devices, where they would silently mix up
    data.
    """
    own = [name for name in (config.allreduce, config.compress) if name not in (None, "native")]
    if config.device not in (None, "cpu", "cuda", MIXED) and own:
        raise ConfigurationError(
            f"{own[0]!r} sums on the cpu and on cuda alone: on {config.device} leave allreduce and compress out"
        )


def settings_of(config: RunConfig, strategy: Strategy, world_size: int) -> StrategySettings:
    """Returns the settings that the strategy gets.

    Raises:
        ConfigurationError: If the strategy cannot be laid over ``world_size`` ranks, or a setting does not go with it.
        ShareError: If shares, limits or throttle do not fit its parts of a batch.
    """
    _refuse_streams(config)
    dtype = getattr(torch, config.dtype) if config.dtype else None
    settings = StrategySettings(
        seed=config.seed,
        dtype=dtype,
        compiling=Compiling(
            config.compile, config.compile_mode, config.compile_backend, config.compile_check
        ),
        fits=config.micro_batch == AUTO,
        limits=MemoryLimits.parse(config.memory_limit, config.memory_limit_at, world_size),
        precision=Precision.from_settings(config.precision, config.precision_of),
        recompute=Recompute.parse(config.recompute) if config.recompute else None,
        offload=Offload.from_settings(config.offload, config.offload_to),
        optimizer_state=config.optimizer_state,
        batch_norm=config.batch_norm,
        fuses=config.fused_optimizer == "auto",
        lean=config.lean,
        cuda_graphs=config.cuda_graphs,
        update_in_backward=config.update_in_backward,
        audit=config.audit,
        clip_norm=config.clip_norm,
        all_reduce=config.allreduce,
        compression=config.compress,
        bucket_bytes=None if config.bucket_mb is None else round(config.bucket_mb * 2**20),
        batch_size=config.batch_size,
        micro_batch=config.samples_at_once,
        devices=_devices_of(config, strategy),
    )
    if settings.recompute is not None:
        settings.recompute.sizes(world_size)
        strategy.check_recompute(settings.recompute)
    if settings.offload.kinds and strategy.one_process:
        raise ConfigurationError(
            f"offload {settings.offload.words} goes with one device for each rank, and strategy {strategy.label!r} has "
            "several in one process: use ddp, sharded or pipeline, or leave it out"
        )
    data = strategy.layout(world_size, settings).data_axis(0)
    if strategy.one_process and config.balance not in (None, "equal"):
        raise ConfigurationError(
            f"balance {config.balance!r} divides a batch over ranks, and strategy {strategy.label!r} has one: over its "
            f"devices data_parallel divides by its own option, strategy_option balance={config.balance}"
        )
    if data.degree == 1 < world_size:
        _refuse_ignored(
            config, f"with strategy {strategy.label!r} all {world_size} ranks compute every sample"
        )
    # If all ranks compute the same samples, the weights divide the model, not the batch.
    balance = balance_of(config, data.degree, unlike=False)
    divides_model = data.degree == 1 and strategy.batch_parts(world_size) is None
    weights = fixed_weights(balance, world_size) if divides_model else None
    return replace(settings, throttle=_throttle_of(config, data, world_size), weights=weights)


def _devices_of(config: RunConfig, strategy: Strategy) -> tuple[str, ...] | None:
    if config.devices is None:
        return None
    if not strategy.one_process:
        raise ConfigurationError(
            f"devices {config.devices!r} are those of one process, and strategy {strategy.label!r} has one device for "
            "each rank: leave devices out, or use strategy data_parallel or layers"
        )
    return tuple(config.devices.split(","))


def _refuse_ignored(config: RunConfig, why: str) -> None:
    """Refuses settings about shares of a batch if no batch is divided."""
    balances = config.balance not in (None, "equal") and decides(balance_of(config, 1, unlike=False))
    asked = {
        f"balance {config.balance!r}": balances,
        "max_shares": config.max_shares,
        "share_multiple_of": config.share_multiple_of != 1,
    }
    ignored = [name for name, is_set in asked.items() if is_set]
    if ignored:
        raise ConfigurationError(f"{' and '.join(ignored)} would do nothing: {why}; leave it out")


def _throttle_of(config: RunConfig, data: DataAxis, world_size: int) -> Throttle | None:
    """Returns the throttle with one factor for each rank.

    If several ranks compute a part of the batch together, the settings may also give one factor for each part.
    """
    if not (config.throttle or config.throttle_at):
        return None
    parts = config.throttle.count(",") + 1 if config.throttle else world_size
    if parts == data.degree and parts != world_size:
        of_parts = Throttle.parse(config.throttle, (), parts).factors
        return replace(
            Throttle.parse(None, config.throttle_at, world_size), factors=tuple(data.owners(of_parts))
        )
    return Throttle.parse(config.throttle, config.throttle_at, world_size)


def check_division(config: RunConfig, world_size: int) -> None:
    """Finds settings that cannot work on ``world_size`` ranks, before any rank is started.

    Raises:
        ConfigurationError, ShareError: As :func:`settings_of`, and for an all-reduce that does not exist.
    """
    strategy = strategy_of(config, world_size)
    settings = settings_of(config, strategy, world_size)
    degree = strategy.batch_parts(world_size) or strategy.layout(world_size, settings).data_axis(0).degree
    if config.allreduce is not None:
        find(config.allreduce)
    if config.compress is not None:
        check_compression(config.compress, config.allreduce, others=["powersgd"])
    if settings.weights is None:
        balancer_called(balance_of(config, degree, unlike=True), config, degree)


def bits_of(config: RunConfig, task: Task) -> ExactBits | None:
    """Returns how batches are cut into grains and blocks, or None if the run is not exact in bits.

    Raises:
        ConfigurationError: If a grain is larger than a batch.
    """
    if config.exact != "bits":
        return None
    return ExactBits.chosen(config.batch_size or task.batch_size, config.grain, config.block)


def learner_of(task: Task, config: RunConfig, session: Session) -> Learner:
    """Sets up this rank's learner, after all ranks have checked that they train the same. A collective call."""
    strategy = strategy_of(config, session.world_size)
    settings = replace(settings_of(config, strategy, session.world_size), bits=bits_of(config, task))
    return set_up(strategy, task, session, settings, agreement(task, config, session), filler(config))
