"""Error messages of losses and metrics for outputs and targets that are not tensors: tuples, objects with logits,
strings.

A model may return such outputs; ``Task.forward`` then selects the tensor for the loss. The message shows the line that
does this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from evener.errors import DataError, LossError

_USUAL = ("logits", "out", "outputs", "output", "scores", "prediction", "predictions", "last_hidden_state")


def check_outputs(outputs: Any, who: str) -> None:
    """Raises:
    LossError: If the outputs are not a tensor. The message shows a ``Task.forward`` that selects one.
    """
    if isinstance(outputs, Tensor):
        return
    if outputs is None:
        raise LossError(f"{who}: the model returned None; let its forward() return the outputs")
    accessor = _accessor(outputs)
    which = "" if accessor else ", with what is the tensor in place of `.logits`"
    raise LossError(
        f"{who} needs one tensor, and the model's outputs are {_described(outputs)}. Say in the task which tensor the "
        f"loss is of{which}:\n\n"
        f"    forward=lambda model, inputs: evener.call_model(model, inputs){accessor or '.logits'}\n\n"
        "or give a loss that takes the outputs as they are, with evener.loss(total=..., count=...)"
    )


def check_targets(targets: Any, who: str) -> None:
    """Raises:
    DataError: If the targets are strings.
    LossError: If the targets are neither a tensor nor strings.
    """
    if isinstance(targets, Tensor):
        return
    if isinstance(targets, str) or (
        isinstance(targets, list | tuple) and targets and all(isinstance(target, str) for target in targets)
    ):
        first = targets if isinstance(targets, str) else targets[0]
        raise DataError(
            f"{who}: the targets are strings, such as {first!r}, and a loss needs numbers. Let the dataset return the "
            "index of the class: classes = sorted(set(labels)), then classes.index(label) as the target of an item"
        )
    raise LossError(
        f"{who} needs targets that are one tensor, and they are {_described(targets)}. Let the dataset return the one "
        "that the loss is of, or give a loss that takes them all, with evener.loss(total=..., count=...)"
    )


def _described(value: Any) -> str:
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    names = [name for name, _ in _members(value)]
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return f"{article} {kind} of {len(value)} ({', '.join(type(part).__name__ for part in value[:6])})"
    return f"{article} {kind} with {', '.join(names[:8])}" if names else f"{article} {kind}"


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Iterates over the names and values in a mapping, a named tuple or an object."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    else:
        yield from getattr(value, "__dict__", {}).items()


def _accessor(outputs: Any) -> str | None:
    """Returns the code suffix that selects the most likely tensor, such as ``.logits`` or ``[0]``. Returns None if
    there is no tensor.
    """
    if isinstance(outputs, tuple | list) and not hasattr(outputs, "_fields"):
        return next((f"[{i}]" for i, part in enumerate(outputs) if isinstance(part, Tensor)), None)
    tensors = [str(name) for name, part in _members(outputs) if isinstance(part, Tensor)]
    likely = [*(name for name in _USUAL if name in tensors), *(name for name in tensors if name != "loss")]
    if not likely:
        return None
    return f".{likely[0]}" if hasattr(outputs, likely[0]) else f"[{likely[0]!r}]"
