"""``evener.prepare``: recognizes models, optimizers, DataLoaders, schedulers and losses, and prepares them."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from itertools import chain
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from evener.components.amp.policy import Precision
from evener.core.config.kwargs import LoopSettings
from evener.core.config.run_config import RunConfig
from evener.core.did_you_mean import did_you_mean
from evener.core.losses.torch_losses import is_sum, is_torch_loss
from evener.core.plugins import kind_of
from evener.core.task.task import Cost
from evener.distributed.hosts import beside_a_handled_error
from evener.distributed.loop_watch import loop_watch
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.nn.fqn import clean_name
from evener.strategies.interfaces import StrategySettings
from evener.training.batches.device_mix import why_by_speed
from evener.training.consistency.startup import agree_on_functions, agree_on_optimizer
from evener.training.factory import balance_of, strategy_of
from evener.training.prepare.backward import Passes
from evener.training.prepare.dataloader import PreparedLoader
from evener.training.prepare.learner_of_loop import LearnerOfLoop
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.loss import OverAll
from evener.training.prepare.metric_states import SharedMetrics
from evener.training.prepare.optimizer_step import WatchedOptimizers
from evener.training.prepare.rng import CommonRandom

SETTINGS = (
    *("strategy", "strategy_option", "mesh", "precision", "precision_of"),
    *("compile", "compile_mode", "compile_backend", "compile_check", "recompute"),
    *(
        "allreduce",
        "balance",
        "batch_norm",
        "bucket_mb",
        "max_shares",
        "check_data",
        "compress",
        "device",
        "share_multiple_of",
    ),
    *("seed", "throttle", "throttle_at", "timeout_seconds"),
)
"""The settings of a run that apply to a user's own loop."""

Scheduler = torch.optim.lr_scheduler.LRScheduler


_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_D = TypeVar("_D")
_E = TypeVar("_E")


class _CurrentPreparation:
    """The preparation of this process."""

    place: LoopState | None = None
    given: RunConfig = RunConfig()
    config: RunConfig = RunConfig()
    opened: ExitStack | None = None


@overload
def prepare(a: _A, /, *, cost: Cost | None = None, **settings: Unpack[LoopSettings]) -> _A: ...
@overload
def prepare(
    a: _A, b: _B, /, *, cost: Cost | None = None, **settings: Unpack[LoopSettings]
) -> tuple[_A, _B]: ...
@overload
def prepare(
    a: _A, b: _B, c: _C, /, *, cost: Cost | None = None, **settings: Unpack[LoopSettings]
) -> tuple[_A, _B, _C]: ...
@overload
def prepare(
    a: _A, b: _B, c: _C, d: _D, /, *, cost: Cost | None = None, **settings: Unpack[LoopSettings]
) -> tuple[_A, _B, _C, _D]: ...
@overload
def prepare(
    a: _A, b: _B, c: _C, d: _D, e: _E, /, *, cost: Cost | None = None, **settings: Unpack[LoopSettings]
) -> tuple[_A, _B, _C, _D, _E]: ...
@overload
def prepare(*objects: Any, cost: Cost | None = None, **settings: Unpack[LoopSettings]) -> Any: ...
def prepare(*objects: Any, cost: Cost | None = None, **settings: Unpack[LoopSettings]) -> Any:
    """Makes a training loop written for one device run on all ranks: the same training, at the sum of their speeds.

    ::

        model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss)
        for inputs, targets in loader:                      # this rank's share of each batch, on its device
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()         # gradients are those of the whole batch then
            optimizer.step()

    All ranks must call this together, with the same things. Models get the weights of rank 0, and a BatchNorm that
    normalizes over the samples of all ranks. A `DataLoader` keeps its data, order and workers; its batch size is that
    of all ranks together. A loss returns the mean over all ranks. Optimizers and schedulers are returned unchanged.

    Args:
        objects: Models, optimizers, DataLoaders, schedulers and losses in any order. A loss is a PyTorch module or
            function, an :class:`evener.Loss`, or a function of outputs and targets that returns the mean over its
            samples. A later call adds to this one; one with other settings, or with a model given before, starts anew.
        cost: What each sample of the data of the call's DataLoader costs, such as its number of tokens: a function of
            its index, a sequence, or the name of a column or attribute of the data set. A rank's share is then a part
            of the cost of a batch.
        settings: Settings of the run, such as ``balance="auto"``, ``device="cpu"``, ``allreduce`` or ``seed``.

    Returns:
        The objects in the given order; a single object is returned by itself.

    Raises:
        ConfigurationError: For objects that it does not know or cannot divide, for settings that do not apply to a
            user's own loop, and on all ranks if they do not train the same.
    """
    if not objects:
        raise ConfigurationError(
            "evener.prepare got nothing: give it a model, an optimizer, a DataLoader and a loss"
        )
    given = [_as_given(thing) for thing in objects]
    kinds = [_kind(thing) for thing in given]
    models = [thing for thing, kind in zip(given, kinds, strict=True) if kind == "model"]
    optimizers = [thing for thing, kind in zip(given, kinds, strict=True) if kind == "optimizer"]
    _check_cost(cost, kinds.count("loader"))
    place = _place_of(models, given, dict(settings))
    _check_optimizers(optimizers, models, place)
    functions = [thing for thing, kind in zip(given, kinds, strict=True) if kind in ("loss", "scheduler")]
    agree_on_functions(functions, place.session)
    made = iter(place.models[len(place.models) - len(models) :])
    found = [
        loop_watch().prepared(
            kind, thing, next(made) if kind == "model" else _prepared(thing, kind, place, cost)
        )
        for thing, kind in zip(given, kinds, strict=True)
    ]
    return found[0] if len(found) == 1 else tuple(found)


def current(what: str) -> LoopState:
    """Returns the preparation of this process.

    Raises:
        ConfigurationError: If there is none; the message says that ``what`` needs one.
    """
    if _CurrentPreparation.place is None:
        raise ConfigurationError(f"{what} goes with evener.prepare, which was not called yet with a model")
    return _CurrentPreparation.place


def settings() -> RunConfig:
    """Returns the settings of this process's preparation."""
    return _CurrentPreparation.config


def place_or_none() -> LoopState | None:
    """Returns the preparation of this process, or None if there is none."""
    return _CurrentPreparation.place


def end(error: BaseException | None = None) -> None:
    """Ends the preparation of this process, if there is one, and releases everything.

    Args:
        error: The error by which it ends, if it does.
    """
    opened, _CurrentPreparation.opened, _CurrentPreparation.place = _CurrentPreparation.opened, None, None
    if opened is not None:
        opened.__exit__(
            None if error is None else type(error), error, None if error is None else error.__traceback__
        )


@atexit.register
def _end_at_exit() -> None:
    """Raises the error with which the script has ended once more, if there is one, for what asks whether one is on its
    way."""
    try:
        if error := getattr(sys, "last_value", None):
            raise error
        end()
    except BaseException as error:
        end(error)


def _as_given(thing: Any) -> Any:
    """Returns the original object if an earlier call has wrapped ``thing``."""
    if isinstance(thing, PreparedLoader):
        return thing.given
    return thing.function if isinstance(thing, OverAll) else thing


def _kind(thing: Any) -> str:
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, Scheduler):
        return "scheduler"
    if isinstance(thing, DataLoader):
        return "loader"
    if is_torch_loss(thing) or is_sum(thing):
        return "loss"
    if isinstance(thing, nn.DataParallel | DistributedDataParallel):
        raise ConfigurationError(
            f"a model in {type(thing).__name__} is divided already: give evener.prepare the model itself"
        )
    if isinstance(thing, nn.Module) and any(True for _ in thing.parameters()):
        if isinstance(thing, torch.jit.ScriptModule):
            raise ConfigurationError(
                "evener.prepare cannot watch the calls of a model that is a ScriptModule: put it into a module, as by "
                "nn.Sequential(model), or give the module that was scripted"
            )
        return "model"
    if callable(thing) and not isinstance(thing, type):
        return "loss"
    if isinstance(thing, Iterator):
        raise ConfigurationError(
            f"evener.prepare cannot divide something {kind_of(thing)}, which has no numbers of samples and is read "
            "once: give it the DataLoader itself, or make one of what it yields"
        )
    raise ConfigurationError(
        f"evener.prepare does not know what to do with {kind_of(thing)}: it takes models, optimizers, DataLoaders, "
        "schedulers and losses"
    )


def config_of(settings: dict[str, Any]) -> RunConfig:
    """Returns the settings of a loop.

    Raises:
        ConfigurationError: For a setting that does not go with a loop of the user's own.
    """
    if settings.get("exact", "sums") != "sums":
        raise ConfigurationError(
            "evener.prepare takes no exact=bits: a loop of your own sends a whole share through the model at once, "
            "and grains must be computed one by one; use evener.fit, or evener.Engine with engine.step(batch)"
        )
    for name in settings:
        if name not in SETTINGS:
            known = name in {field.name for field in fields(RunConfig)}
            hint = "is a setting of evener.fit and evener.Engine" if known else did_you_mean(name, SETTINGS)
            raise ConfigurationError(
                f"evener.prepare takes no {name}; {hint or 'it takes ' + ', '.join(SETTINGS)}"
                + (
                    f", and a loop of your own does that itself; prepare takes {', '.join(SETTINGS)}"
                    if known
                    else ""
                )
            )
    config = RunConfig(**settings)
    if Precision.from_settings(config.precision, config.precision_of).is_scaled:
        raise ConfigurationError(
            "evener.prepare scales no loss, which precision fp16 needs: say bf16, or write torch.autocast and "
            "torch.amp.GradScaler into the loop, which work there as on one device"
        )
    return config


def _place_of(models: list[nn.Module], objects: Sequence[Any], settings: dict[str, Any]) -> LoopState:
    """Returns the preparation that a call belongs to: the current one, or a new one."""
    place = _CurrentPreparation.place
    if not models:
        if settings:
            raise ConfigurationError(
                f"{', '.join(settings)} goes with the call of evener.prepare that has the model: say it there"
            )
        return current("preparing what has no model, as a DataLoader before its model,")
    config = config_of(loop_watch().settings(settings))
    is_given_again = place is not None and any(model is other for model in models for other in place.models)
    if place is None or is_given_again or (settings and config != _CurrentPreparation.given):
        return _begin(models, objects, config)
    # Nothing can be divided with a divided model, so this is the next fold, or the next trial.
    if place.division.divides_model:
        go_on = place.random.paused()
        place = _begin(models, objects, config if settings else _CurrentPreparation.given)
        go_on(place.random)
        return place
    try:
        place.add(models, LearnerOfLoop(objects, _CurrentPreparation.config, place.world_size))
    except BaseException as error:
        end(error)
        raise
    return place


def _handed_on(objects: Sequence[Any]) -> tuple[Tensor, list[tuple[torch.optim.Optimizer, dict[str, Any]]]]:
    """Returns what the next preparation takes over from the current one: the random state from which orders are drawn,
    and the whole states of the optimizers among ``objects`` that have parts. A collective call if there is one."""
    place = _CurrentPreparation.place
    if place is None:
        return torch.get_rng_state(), []
    place.strangers = 0  # updates before this call belong to no prepared batch
    place.random.follow()
    return place.random.held(), place.division.whole_states(objects)


def _begin(models: list[nn.Module], objects: Sequence[Any], given: RunConfig) -> LoopState:
    start, states = _handed_on(objects)
    with beside_a_handled_error():  # as in the except block of a loop that the next one replaces
        end()
    for optimizer, state in states:
        optimizer.load_state_dict(state)
    watch = loop_watch()
    watch.opened(end)
    with ExitStack() as opened:
        session = opened.enter_context(
            Session(given.device, given.timeout_seconds, environment=watch.environment)
        )
        random = CommonRandom(session.control.broadcast_object(start), session.rank)
        opened.callback(random.close)
        config = _settled(given, session)
        place = LoopState(session, LearnerOfLoop(objects, config, session.world_size), models, random)
        random.watch()
        opened.callback(place.close)
        opened.callback(Passes(place).close)
        opened.callback(WatchedOptimizers(place).close)
        opened.callback(SharedMetrics(place).close)
        _CurrentPreparation.opened, _CurrentPreparation.place = opened.pop_all(), place
        _CurrentPreparation.config, _CurrentPreparation.given = config, given
    return place


def _settled(config: RunConfig, session: Session) -> RunConfig:
    """Returns the settings with a balance. A collective call if they have none."""
    if config.balance is not None:
        return config
    strategy = strategy_of(config, session.world_size).for_own_loop()
    parts = strategy.layout(session.world_size, StrategySettings()).data_axis(0).degree
    by_speed = balance_of(config, parts, unlike=True) == "auto"
    why = why_by_speed(config, session) if by_speed else ""
    if why and session.rank == 0:
        print(why, file=sys.stderr, flush=True)
    return config.replace(balance="auto" if why else "equal")


def _check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module], place: LoopState
) -> None:
    """Checks the optimizers of a call.

    Raises:
        ConfigurationError: If an optimizer has parameters of no model, or differs between ranks.

    Warns:
        UserWarning: With the name of the first parameter that no optimizer has.
    """
    for optimizer in optimizers:
        place.make.check_optimizer(optimizer)
        place.division.take_optimizer(optimizer)
    held = set(chain.from_iterable(group["params"] for o in optimizers for group in o.param_groups))
    strangers = [p for p in held if not place.mean.owns(p)]
    if strangers:
        raise ConfigurationError(
            f"an optimizer has {len(strangers)} parameters, the first of shape {tuple(strangers[0].shape)}, of no "
            "model that was given: give evener.prepare the model before, or in the same call; make a tensor that is in "
            "none, such as a temperature, an nn.Parameter, and give evener.prepare nn.ParameterList([parameter]) too"
        )
    # Their parameters may be others than those of `models`.
    now = place.models[len(place.models) - len(models) :]
    own = {p: clean_name(name) for model in now for name, p in model.named_parameters()}
    left = [name for p, name in own.items() if p.requires_grad and p not in held]
    if optimizers and left:
        warnings.warn(
            f"{left[0]}, one of {len(left)} parameters, is in no optimizer, and stays as it is; set "
            "requires_grad=False where that is meant",
            stacklevel=3,
        )
    for optimizer in optimizers:
        agree_on_optimizer(optimizer, None, place.learner.names, place.session)


def _check_cost(cost: Cost | None, loaders: int) -> None:
    """Raises ConfigurationError if it is not known whose costs these are."""
    if cost is not None and (loaders == 0 or (loaders > 1 and not isinstance(cost, str))):
        raise ConfigurationError(
            f"cost=... is of the samples of one DataLoader, and this call of evener.prepare has {loaders or 'none'}: "
            "give it in the call with the loader of the training, or the name of a column that the data of all have"
        )


def _prepared(thing: Any, kind: str, place: LoopState, cost: Cost | None) -> Any:
    if kind == "loader":
        return PreparedLoader(thing, _CurrentPreparation.config, place, cost)
    if kind == "loss":
        return OverAll(thing, place)
    return thing
