"""``evener.prepare``: which object is what, and what becomes of it."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from itertools import chain
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from evener.assembly import balance_of, settings_of, strategy_of
from evener.config import RunConfig
from evener.equality import agree_on_optimizer, agreement
from evener.errors import ConfigurationError
from evener.losses.torch_losses import is_sum, is_torch_loss
from evener.nn.names import clean_name
from evener.plugins import kind_of
from evener.prepared.loading import PreparedLoader
from evener.prepared.losses import OverAll
from evener.prepared.place import Place
from evener.prepared.random import CommonRandom
from evener.runtime.session import Session
from evener.settings import LoopSettings
from evener.spelling import did_you_mean
from evener.strategies.base import set_up
from evener.strategies.learner import Learner
from evener.task import Task
from evener.unlike import why_by_speed

SETTINGS = (
    *(
        "allreduce",
        "balance",
        "batch_norm",
        "bucket_mb",
        "caps",
        "check_data",
        "compress",
        "device",
        "quantum",
    ),
    *("seed", "throttle", "throttle_at", "timeout_seconds"),
)
"""Of a run, those that go with a loop of the user's own."""

Scheduler = torch.optim.lr_scheduler.LRScheduler


class _Current:
    """The preparation of this process."""

    place: Place | None = None
    config: RunConfig = RunConfig()
    opened: ExitStack | None = None


def prepare(*objects: Any, **settings: Unpack[LoopSettings]) -> Any:
    """Makes a training loop of one device that of all ranks: the same training, at the sum of their speeds.

    ::

        model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss)
        for inputs, targets in loader:                      # this rank's share of each batch, on its device
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()         # gradients are those of the whole batch then
            optimizer.step()

    All ranks call it with the same things. Models get the weights of rank 0, and a BatchNorm that normalizes by the
    samples of all; a `DataLoader` keeps its data, order and workers, and its batch size is that of all ranks together;
    a loss gives the mean over all; optimizers and schedulers stay what they are.

    Args:
        objects: Models, optimizers, DataLoaders, schedulers and losses in any order: a loss is a module of PyTorch's,
            one of its functions, an :class:`evener.Loss`, or a function of outputs and targets that gives the mean
            over its samples. A later call without a model adds to this one; one with a model begins anew.
        settings: Of the run, such as ``balance="auto"``, ``device="cpu"``, ``allreduce`` or ``seed``.

    Returns:
        The objects in the order in which they were given; one by itself if it was alone.

    Raises:
        ConfigurationError: For what it does not know or cannot divide, for settings that do not go with a loop of
            one's own, and on all ranks if they do not train the same.
    """
    if not objects:
        raise ConfigurationError(
            "evener.prepare got nothing: give it a model, an optimizer, a DataLoader and a loss"
        )
    kinds = [_kind(thing) for thing in objects]
    models = [thing for thing, kind in zip(objects, kinds, strict=True) if kind == "model"]
    place = _begin(models, objects, dict(settings)) if models else _joined(dict(settings))
    made = iter(_held_by(place.learner, len(models)) if models else ())
    found = [
        next(made) if kind == "model" else _prepared(thing, kind, place)
        for thing, kind in zip(objects, kinds, strict=True)
    ]
    return found[0] if len(found) == 1 else tuple(found)


def current(what: str) -> Place:
    """The preparation of this process.

    Raises:
        ConfigurationError: If there is none, for ``what``.
    """
    if _Current.place is None:
        raise ConfigurationError(f"{what} goes with evener.prepare, which was not called yet with a model")
    return _Current.place


def place_or_none() -> Place | None:
    """The preparation of this process, if there is one."""
    return _Current.place


def end() -> None:
    """Ends the preparation of this process, if there is one, and gives everything back."""
    opened, _Current.opened, _Current.place = _Current.opened, None, None
    if opened is not None:
        error = getattr(sys, "last_value", None)  # of a script that ends with it
        opened.__exit__(
            None if error is None else type(error), error, None if error is None else error.__traceback__
        )


atexit.register(end)


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
    if isinstance(thing, nn.Module):
        return "model" if any(True for _ in thing.parameters()) else "loss"
    if callable(thing) and not isinstance(thing, type):
        return "loss"
    raise ConfigurationError(
        f"evener.prepare does not know what to do with {kind_of(thing)}: it takes models, optimizers, DataLoaders, "
        "schedulers and losses"
    )


def config_of(settings: dict[str, Any]) -> RunConfig:
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
    return RunConfig(**settings)


def _joined(settings: dict[str, Any]) -> Place:
    if settings:
        raise ConfigurationError(
            f"{', '.join(settings)} goes with the call of evener.prepare that has the model: say it there"
        )
    return current("preparing without a model")


def _begin(models: list[nn.Module], objects: Sequence[Any], settings: dict[str, Any]) -> Place:
    end()
    config = config_of(settings)
    with ExitStack() as opened:
        session = opened.enter_context(Session(device=config.device, timeout_seconds=config.timeout_seconds))
        random = CommonRandom(
            session.control.broadcast_object(torch.get_rng_state()), session.world_size == 1
        )
        config = _settled(config, session)
        learner = _learner(models, objects, config, session)
        if session.world_size == 1:
            torch.set_rng_state(random.state)  # building the learner has drawn
        place = Place(session, learner, _held_by(learner, len(models)), random)
        opened.callback(place.close)
        _Current.opened, _Current.place, _Current.config = opened.pop_all(), place, config
    return place


def _settled(config: RunConfig, session: Session) -> RunConfig:
    """The settings with what divides a batch. A collective call where they leave it open."""
    if config.balance is not None:
        return config
    by_speed = balance_of(config, session.world_size, unlike=True) == "auto"
    why = why_by_speed(config, session) if by_speed else ""
    if why and session.rank == 0:
        print(why, file=sys.stderr, flush=True)
    return config.replace(balance="auto" if why else "equal")


def _learner(models: list[nn.Module], objects: Sequence[Any], config: RunConfig, session: Session) -> Learner:
    whole = models[0] if len(models) == 1 else nn.ModuleList(models)
    loaders = [thing for thing in objects if isinstance(thing, DataLoader)]
    optimizers = [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
    _check_optimizers(optimizers, whole)
    task = Task(
        model=lambda: whole,
        loss=nn.CrossEntropyLoss(),  # not asked for: the loop has its own
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),  # neither
        train=_data_of(loaders),
    )
    strategy = strategy_of(config, session.world_size)
    settings = settings_of(config, strategy, session.world_size)
    learner = set_up(strategy, task, session, settings, agreement(task, config, session))
    for optimizer in optimizers:
        agree_on_optimizer(optimizer, None, learner.names, session)
    return learner


def _data_of(loaders: Sequence[DataLoader[Any]]) -> Any:
    """What the ranks compare a few samples of; an iterable data set is refused later, in its own words."""
    return next((each.dataset for each in loaders if hasattr(each.dataset, "__getitem__")), [0])


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Raises:
    ConfigurationError: If an optimizer has parameters of no model.

    Warns:
        UserWarning: With the name of the first parameter that no optimizer has.
    """
    own = {p: clean_name(name) for name, p in model.named_parameters()}
    held = set(chain.from_iterable(group["params"] for o in optimizers for group in o.param_groups))
    strangers = [p for p in held if p not in own]
    if strangers:
        raise ConfigurationError(
            f"an optimizer has {len(strangers)} parameters, the first of shape {tuple(strangers[0].shape)}, of no "
            "model that was given: give evener.prepare all models in one call, and optimizers of their parameters"
        )
    left = [name for p, name in own.items() if p.requires_grad and p not in held]
    if optimizers and left:
        warnings.warn(
            f"{left[0]}, one of {len(left)} parameters, is in no optimizer, and stays as it is; set "
            "requires_grad=False where that is meant",
            stacklevel=4,
        )


def _held_by(learner: Learner, number: int) -> list[nn.Module]:
    """The models as they are now."""
    return [learner.model] if number == 1 else list(learner.model.children())


def _prepared(thing: Any, kind: str, place: Place) -> Any:
    if kind == "loader":
        return PreparedLoader(thing, _Current.config, place)
    if kind == "loss":
        return OverAll(thing, place)
    if kind == "optimizer":
        _watch(thing, place)
    return thing


def _watch(optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Has each update looked at before, and counted."""

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        closure = next((one for one in (*args[1:], kwargs.get("closure")) if one is not None), None)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if closure is None and not place.is_over:
            place.mean.check_all_summed("optimizer.step()")
            place.mean.check_none_put_off(parameters)
            place.mean.check_sound(parameters, place.steps)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: place.took_step())
