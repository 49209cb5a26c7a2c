"""Compares the terms of a task (optimizer options, scheduler, loss) with those at the time of the checkpoint.

A checkpoint holds the learning rate, the momentum and the scheduler's state. If the task changes them, the change would
silently have no effect. So a checkpoint also holds the task's terms, and each difference is reported together with the
value that is used. Options of the optimizer and the scheduler come from the checkpoint unless the settings override
them. The loss and the choice of trained parameters come from the task.

A learning rate and its scheduler belong together. If they are overridden, the task's scheduler is stepped as often as
the training was, so that the rate is what the task would have had from the beginning::

    checkpoint   lr 0.1, halved every epoch     0.1   0.05  0.025 |
    task now     lr 0.2, halved every epoch     0.2   0.1   0.05  | 0.025 ...  with --override lr
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evener.core.task.task import Task
from evener.core.text import few
from evener.data.batch import map_leaves
from evener.errors import ConfigurationError
from evener.nn.fqn import clean_name
from evener.training.consistency.task_description import described

SCHEDULE = frozenset({"lr", "scheduler"})
_SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Options that schedulers add to the groups of an optimizer."""
_OF_DEVICE = ("params", "foreach", "fused", "capturable")
_MOST_TOLD = 5
Tell = Callable[[str], object]


class TaskTerms:
    """The terms of a task, as they were before the first step.

    Args:
        override: Options to take from the task if a checkpoint has other values.

    Raises:
        ConfigurationError: If ``override`` names something that the optimizer does not have.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        override: Collection[str],
    ) -> None:
        self._scheduler = scheduler
        self._groups = [_copied(group) for group in optimizer.param_groups]
        self._schedule = map_leaves(_copy_of, scheduler.state_dict()) if scheduler is not None else {}
        self._override = _names_in(override, {key for group in self._groups for key in group} - {*_SCHEDULED})
        losses = {**described(task.loss, "Task.loss"), **described(task.penalty, "Task.penalty")}
        interval = {"Task.scheduler_interval": task.scheduler_interval} if scheduler is not None else {}
        self.said: dict[str, Any] = {
            "options": [{key: _text(value) for key, value in group.items()} for group in self._groups],
            "scheduler": _texts(described(scheduler, "the scheduler") | interval),
            "losses": _texts(losses),
            "trained": {clean_name(name): p.requires_grad for name, p in model.named_parameters()},
            "modules": _modules_without_tensors(model),
        }

    def chosen(self, saved: Mapping[str, Any], tell: Tell) -> frozenset[str]:
        """Returns the options to take from the task, after reporting all differences.

        Args:
            saved: The terms in the checkpoint.

        Raises:
            ConfigurationError: If the checkpoint has a scheduler of another kind, whose state cannot be used.
        """
        options, both = self._differing(saved), [saved["scheduler"], self.said["scheduler"]]
        changes = _changes(*both)
        schedule = bool(changes or "lr" in options) and bool(self._override & SCHEDULE)
        kinds = [each.get("the scheduler", "None") for each in both]
        if kinds[0] != kinds[1] and not schedule:
            raise ConfigurationError(
                f"the checkpoint was made with the scheduler {kinds[0]}, and the task has {kinds[1]}, which cannot go "
                "on from its state: say override scheduler (--override scheduler) to use the task's learning rate and "
                "scheduler as if they had been there from the beginning, or use the same"
            )
        over = frozenset(options.keys() & self._override - SCHEDULE) | (SCHEDULE if schedule else frozenset())
        for name, (old, new) in options.items():
            _tell_of_option(f"{name} of the optimizer", name, old, new, name in over, tell)
        for name, (old, new) in list(changes.items())[:_MOST_TOLD]:
            _tell_of_option(name, "scheduler", old, new, schedule, tell)
        self._tell_of_the_task_s(saved, tell)
        self._take_over(saved, over)
        return over

    def _differing(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Returns options of the optimizer's groups that differ, each with its old and its new value."""
        found: dict[str, tuple[str, str]] = {}
        for key in dict.fromkeys(
            key for group in self.said["options"] for key in group if key not in _SCHEDULED
        ):
            olds, news = (
                [group.get(key, "none") for group in side]
                for side in (saved["options"], self.said["options"])
            )
            if olds != news:
                found[key] = ", ".join(dict.fromkeys(olds)), ", ".join(dict.fromkeys(news))
        return found

    def _tell_of_the_task_s(self, saved: Mapping[str, Any], tell: Tell) -> None:
        for name, (old, new) in list(_changes(saved["losses"], self.said["losses"]).items())[:_MOST_TOLD]:
            tell(f"{name} is {new}, and was {old} when the checkpoint was made: the task's is used")
        changes = _changes(saved.get("modules", {}), self.said["modules"])
        # A rank may have some alone.
        both = {name: pair for name, pair in changes.items() if "none" not in pair}
        for name, (old, new) in list(both.items())[:_MOST_TOLD]:
            tell(f"module {name} is {new}, and was {old} when the checkpoint was made: the task's is used")
        before, now = saved["trained"], self.said["trained"]
        for text, kind in (("are not trained any more", False), ("are trained now", True)):
            names = [name for name in now if name in before and now[name] is kind is not before[name]]
            if names:
                tell(
                    f"{few(names)} {text}: the task's choice is used, and the checkpoint was made with another"
                )

    def _take_over(self, saved: Mapping[str, Any], over: Collection[str]) -> None:
        """Records the terms that are in use, for the next checkpoint."""
        for place, group in enumerate(self.said["options"]):
            before = saved["options"][place] if place < len(saved["options"]) else {}
            kept = {
                key: text for key, text in before.items() if key in group and not _is_overridden(key, over)
            }
            group.update(kept)
        if not set(over) >= SCHEDULE:
            self.said["scheduler"] = dict(saved["scheduler"])

    def overridden(self, optimizer: Mapping[str, Any], over: Collection[str]) -> dict[str, Any]:
        """Returns the saved state of the optimizer with the overridden options replaced by the task's."""
        groups = [
            {**saved, **{key: value for key, value in _copied(group).items() if _is_overridden(key, over)}}
            for saved, group in zip(optimizer["groups"], self._groups, strict=False)
        ]
        return {**optimizer, "groups": groups if over else optimizer["groups"]}

    def replay(self, times: int) -> None:
        """Steps the task's scheduler ``times`` times from its start. The optimizer must have the initial rates."""
        if self._scheduler is None:
            return
        self._scheduler.load_state_dict(map_leaves(_copy_of, self._schedule))
        with warnings.catch_warnings():  # PyTorch misses the optimizer's steps, which were taken before
            warnings.simplefilter("ignore")
            for _ in range(times):
                self._scheduler.step()


def _modules_without_tensors(model: nn.Module) -> dict[str, str]:
    """Returns PyTorch's modules that have no parameters, such as activations, with their options. No strategy replaces
    them, and no name or shape of a weight tells them apart."""
    return {
        clean_name(name): f"{type(module).__qualname__}({module.extra_repr()})"
        for name, module in model.named_modules()
        if type(module).__module__.startswith("torch.nn.modules.")
        and not any(True for _ in (*module.children(), *module.parameters()))
    }


def _names_in(override: Collection[str], options: Collection[str]) -> frozenset[str]:
    names = frozenset(name.strip() for text in override for name in text.split(","))
    known = {*options, *SCHEDULE}
    if unknown := sorted(names - known):
        raise ConfigurationError(
            f"override names {', '.join(unknown)}; the task's optimizer and scheduler have {', '.join(sorted(known))}"
        )
    return names


def _is_overridden(key: str, over: Collection[str]) -> bool:
    return key in over or ("lr" in over and key in _SCHEDULED)


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in group.items() if key not in _OF_DEVICE}
    copied: dict[str, Any] = map_leaves(_copy_of, own)
    return copied


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor" if value.is_meta else str(value.tolist())
    return (
        str(value)
        if isinstance(value, bool | int | float | str | tuple | list | None)
        else type(value).__qualname__
    )


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Converts values to text. Leaves out constants in code, which differ between versions of Python."""
    return {name: str(value) for name, value in facts.items() if not name.startswith("constants in ")}


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys((*before, *now))
    both = {name: (before.get(name, "none"), now.get(name, "none")) for name in names}
    return {name: (old, new) for name, (old, new) in both.items() if old != new}


def _tell_of_option(name: str, option: str, old: str, new: str, is_new: bool, tell: Tell) -> None:
    if is_new:
        tell(f"{name} is the task's, {new}, and was {old} until now")
    else:
        tell(
            f"{name} is the checkpoint's, {old}, and not the task's, {new}: --override {option} takes the task's "
            f'(override=("{option}",) in Python)'
        )


def _copy_of(leaf: Any) -> Any:
    """Copies a value. A tensor, such as a learning rate, is detached, because it may keep other tensors alive."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
