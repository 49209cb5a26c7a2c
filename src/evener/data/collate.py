"""Collates items of a data set into one pair ``(inputs, targets)``, with errors that say what to change.

PyTorch's ``default_collate`` does the work, with two changes. A tuple stays a tuple: ``default_collate`` makes it a
list, and then a model's positional arguments could not be told from one argument that is a list. ``None`` stays
``None``. An item is a pair, or a dict with ``labels``. A collate function of the user replaces all of this; it
receives the list of items as the data set returned them.
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
    """Stacks items that are pairs ``(inputs, targets)`` along a new dimension 0.

    An item may also be a mapping with ``labels`` or ``label``, as in Hugging Face data sets. These are its targets, and
    its other entries are its inputs.

    Args:
        items: ``n`` items of the data set.
        samples: Their sample ids, for the error message.
        name: The name of the data set in the error message, such as "training set".

    Raises:
        DataError: If there is not one item for each sample, an item is not a pair, or the items do not stack.
    """
    _check_number(items, samples, name)
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
        if "shared memory" in str(error):  # workers stack into it, for the main process
            raise DataError(
                f"a batch of samples {preview(samples)} of the {name} found no room in /dev/shm, through which workers "
                f"pass batches: {error}; make it larger (docker run --shm-size=8g, or --ipc=host), or use fewer workers"
            ) from error
        raise DataError(
            f"samples {preview(samples)} of the {name} do not stack into one batch: {error}; "
            "let all items have one shape, or give the task a collate function (one that pads, say)"
        ) from error


def collate_with(function: Collate, items: list[Any], samples: Sequence[int], name: str) -> tuple[Any, Any]:
    """Collates ``items`` with the user's ``function``.

    Raises:
        DataError: If there is not one item for each sample, or the result is neither a pair nor a mapping with labels.
    """
    _check_number(items, samples, name)
    result = function(items)
    pair = pair_of(result)
    if pair is None:
        raise DataError(
            f"the collate function made {describe(result)} of samples {preview(samples)} of the {name}, "
            "not a pair (inputs, targets); let it return (inputs, targets), or a dict with 'labels'"
        )
    return pair


def _check_number(items: Sequence[Any], samples: Sequence[int], name: str) -> None:
    """Raises DataError if a data set's ``__getitems__`` has left out samples, which nobody would compute."""
    if len(items) != len(samples):
        raise DataError(f"the {name} gave {len(items)} items for {len(samples)} samples; give one for each")


def pair_of(item: Any) -> tuple[Any, Any] | None:
    """Returns ``item`` as ``(inputs, targets)``. Returns None if it is neither a pair nor a mapping with labels.

    The targets of a mapping are its entry ``labels`` or ``label``; the inputs are a dict of its other entries.
    """
    if isinstance(item, _SEQUENCES) and len(item) == 2:
        return item[0], item[1]
    key = labels_key(item)
    if key is None:
        return None
    return {name: value for name, value in item.items() if name != key}, item[key]


def labels_key(item: Any) -> str | None:
    """Returns the key of the targets in a mapping: ``labels`` or ``label``.

    Returns None if ``item`` is no mapping, has no such key, or has no other entry.
    """
    if not isinstance(item, Mapping) or len(item) < 2:
        return None
    return next((key for key in ("labels", "label") if key in item), None)


def describe(item: Any) -> str:
    """Returns the type of ``item`` with an article, and its length or keys, for an error message."""
    kind = type(item).__name__
    if isinstance(item, Mapping):
        return f"a {kind} with {', '.join(map(str, list(item)[:8])) or 'nothing'}"
    if isinstance(item, _SEQUENCES):
        return f"a {kind} of length {len(item)}"
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def preview(samples: Sequence[int]) -> str:
    """Returns the first four ids as text, for an error message."""
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
