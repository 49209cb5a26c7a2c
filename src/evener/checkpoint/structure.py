"""Checks the types of a checkpoint's parts that are not tensors, because it may come from a stranger.

An optimizer, a scheduler or an observer uses these parts much later. A wrong type would then cause a traceback or,
worse, be used. So everything is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evener.checkpoint.run_mark import Identity
from evener.files import parsed

Check = Callable[[Any], bool]


def lacks(rest: Any) -> str:
    """Names the parts of ``rest.pt`` that are missing or of a wrong type. Returns "" if none is."""
    wrong = [name for name, check in _PARTS.items() if not check(rest.get(name))]
    wrong += [
        name for name, check in _FURTHER.items() if rest.get(name) is not None and not check(rest[name])
    ]
    return ", ".join(wrong)


def parameters_of(optimizer: Mapping[str, Any]) -> set[str]:
    """Returns the names of the parameters that an optimizer state updates."""
    return {name for group in optimizer["groups"] for name in group["params"]}


def is_kept(found: Any) -> bool:
    """Returns True for the JSON text of a run's other state, as ``RunState.kept_text`` returns it."""
    try:
        parts = parsed(found)
    except (TypeError, ValueError):
        return False
    if not _is_dict(parts, is_named):
        return False
    best, guard = parts.get("best", {}), parts.get("guard")
    return (not best or _has(best, _BEST)) and (guard is None or _has(guard, {"empty": is_count}))


def is_count(value: Any) -> bool:
    """Returns True for a whole number of at least 0."""
    return type(value) is int and value >= 0


def is_named(value: Any) -> bool:
    """Returns True for a dictionary whose keys are texts."""
    return _is_dict(value, lambda _: True)


def _is(*kinds: type[Any]) -> Check:
    """Returns a check for exactly one of these types. So True is not a number."""
    return lambda value: type(value) in kinds


def _is_dict(value: Any, check: Check) -> bool:
    """Returns True for a dictionary with text keys whose values all pass the check."""
    return isinstance(value, dict) and all(type(key) is str and check(each) for key, each in value.items())


def _is_list(value: Any, check: Check) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _has(value: Any, parts: Mapping[str, Check]) -> bool:
    return is_named(value) and all(name in value and check(value[name]) for name, check in parts.items())


def _is_group(value: Any) -> bool:
    return _has(value, {"params": lambda names: _is_list(names, _is(str))})


def _is_optimizer(value: Any) -> bool:
    return (
        _has(value, _OPTIMIZER) and value["state"].keys() <= parameters_of(value)  # others are unused
    )


def _is_identity(value: Any) -> bool:
    try:
        Identity.from_plain(value)
    except (KeyError, TypeError, ValueError):
        return False
    return True


_PROGRESS: dict[str, Check] = {
    **dict.fromkeys(("epoch", "position", "steps", "samples"), is_count),
    "seed": _is(int),
    "batch_size": _is(int),
    "length": _is(int, type(None)),
    "parts": _is(list, type(None)),
}
_OPTIMIZER: dict[str, Check] = {
    "class": _is(str),
    "state": lambda state: _is_dict(state, _is(dict)),
    "groups": lambda groups: _is_list(groups, _is_group),
}
_BEST: dict[str, Check] = {
    "metric": _is(str),
    "lowest": _is(bool),
    "value": _is(int, float),
    "steps": is_count,
}
_SAID: dict[str, Check] = {
    "options": lambda groups: _is_list(groups, lambda group: _is_dict(group, _is(str))),
    "scheduler": lambda facts: _is_dict(facts, _is(str)),
    "losses": lambda facts: _is_dict(facts, _is(str)),
    "trained": lambda names: _is_dict(names, _is(bool)),
}
_PARTS: dict[str, Check] = {
    "format": _is(int),
    "ranks": is_count,
    "progress": lambda value: _has(value, _PROGRESS),
    "optimizer": _is_optimizer,
    "model": is_named,
    "data": _is(dict),
    "settings": is_named,
    "identity": _is_identity,
    "kept": is_kept,
    "said": lambda value: _has(value, _SAID) and _is_dict(value.get("modules", {}), _is(str)),
}
_FURTHER: dict[str, Check] = {
    "averaged": lambda value: _has(value, {"updates": is_count, "number": is_count}),
    **dict.fromkeys(("balancer", "scheduler", "loss_scale", "stream"), is_named),
}
"""Parts that not each run has."""
