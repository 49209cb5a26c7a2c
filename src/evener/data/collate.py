"""Many items of a data set made one pair ``(inputs, targets)``, or an error that a person can act upon.

PyTorch's own ``default_collate`` does the work. Two of its habits are changed: a tuple stays a tuple (it
would become a list, and a model's positional arguments could no longer be told from a list that is one
argument), and ``None`` stays ``None``. An item is a pair, or a dict with ``labels``. A collate
function of the user replaces it and receives the list of items, whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.data.batch import like_sequence
from evener.errors import DataError
from evener.torch_internals.modules import collate, default_collate_fn_map

Collate = Callable[[list[Any]], Any]

_SEQUENCES = (tuple, list)


def collate_pairs(items: list[Any], samples: Sequence[int], name: str) -> tuple[Any, Any]:
    """Stack items that are pairs ``(inputs, targets)``, the samples along a new dimension 0.

    An item that is a mapping with ``labels`` or ``label``, as Hugging Face's are, is the pair of what else it holds and
    these.

    Args:
        items: What the data set gave, ``n`` items.
        samples: Their ids, for the error.
        name: What the data set is called in the error, as "training set".

    Raises:
        DataError: If an item is not a pair, or the items do not stack.
    """
    if len(items) != len(samples):
        raise DataError(f"the {name} gave {len(items)} items for {len(samples)} samples; give one for each")
    pairs = [pair_of(item) for item in items]
    for place, (item, pair) in enumerate(zip(items, pairs, strict=True)):
        if pair is None:
            raise DataError(
                f"sample {samples[place]} of the {name} is {describe(item)}, not a pair (inputs, targets); "
                "let the data set return (inputs, targets), or a dict with 'labels', or give the task a collate "
                "function that makes such a pair of a list of items"
            )
    inputs, targets = zip(*(pair for pair in pairs if pair is not None), strict=True)
    try:
        return _stack(inputs), _stack(targets)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"samples {preview(samples)} of the {name} do not stack into one batch: {error}; "
            "let all items have one shape, or give the task a collate function (one that pads, say)"
        ) from error


def collate_with(function: Collate, items: list[Any], samples: Sequence[int], name: str) -> tuple[Any, Any]:
    """What the user's ``function`` makes of ``items``.

    Raises:
        DataError: If that is not a pair.
    """
    result = function(items)
    pair = pair_of(result)
    if pair is None:
        raise DataError(
            f"the collate function made {describe(result)} of samples {preview(samples)} of the {name}, "
            "not a pair (inputs, targets); let it return (inputs, targets), or a dict with 'labels'"
        )
    return pair


def pair_of(item: Any) -> tuple[Any, Any] | None:
    """``(inputs, targets)``; None if it is no such pair.

    A mapping with ``labels`` or ``label`` is one: the rest of it, as a dict, are the inputs.
    """
    if isinstance(item, _SEQUENCES) and len(item) == 2:
        return item[0], item[1]
    key = labels_key(item)
    if key is None:
        return None
    return {name: value for name, value in item.items() if name != key}, item[key]


def labels_key(item: Any) -> str | None:
    """Under what a mapping holds its targets, besides other things; None if it does not, or is no mapping."""
    if not isinstance(item, Mapping) or len(item) < 2:
        return None
    return next((key for key in ("labels", "label") if key in item), None)


def describe(item: Any) -> str:
    """The type of ``item``, with an article and what tells it from a pair."""
    kind = type(item).__name__
    if isinstance(item, Mapping):
        return f"a {kind} with {', '.join(map(str, list(item)[:8])) or 'nothing'}"
    if isinstance(item, _SEQUENCES):
        return f"a {kind} of length {len(item)}"
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def preview(samples: Sequence[int]) -> str:
    """The first few ids, for an error message."""
    shown = ", ".join(str(sample) for sample in samples[:4])
    return shown if len(samples) <= 4 else f"{shown}, ... ({len(samples)} in all)"


def _stack(values: tuple[Any, ...]) -> Any:
    return collate(values, collate_fn_map=_MAP)


def _stack_tuples(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    columns = [collate(list(column), collate_fn_map=collate_fn_map) for column in zip(*batch, strict=True)]
    return like_sequence(batch[0], columns)


def _keep_none(batch: list[Any], *, collate_fn_map: Any = None) -> None:
    if any(value is not None for value in batch):
        raise TypeError("some are None and some are not")


_MAP = {**default_collate_fn_map, tuple: _stack_tuples, type(None): _keep_none}
