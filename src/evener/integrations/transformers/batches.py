"""Turns items of a dataset into inputs and labels of a model, with the columns that ``transformers`` would choose."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from evener.errors import DataError

_ANSWERED = "prepare_decoder_input_ids_from_labels"
"""The method by which collators of ``transformers`` make inputs of a decoder."""
_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")


class Collation:
    """Wraps a collator: passes on the entries of its batch that the model's ``forward`` takes.

    Args:
        collate: Makes a batch from a list of items.
        model: The model whose ``forward`` signature says which entries it takes.
        removes: True to give the collator only the labels and the columns that the model takes.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], model: nn.Module, removes: bool) -> None:
        self._collate, self._removes = collate, removes
        of_peft: Any = getattr(model, "get_base_model", None)
        base = model if of_peft is None else of_peft()
        parameters = inspect.signature(base.forward).parameters
        self._taken = set(parameters)
        self._takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._columns = self._taken | {"label", "label_ids", "labels"}
        self._answers = _without_weights(base) if hasattr(base, _ANSWERED) else None

    def __call__(self, items: list[Any]) -> tuple[dict[str, Any], Any]:
        """Returns inputs and labels of a batch. For items of :class:`Unlabelled`, the labels are zeros, one per item.

        Raises:
            DataError: If the collator made no labels and the items are not from :class:`Unlabelled`.
        """
        if isinstance(items[0], _Unlabelled):
            return self._inputs(self.batch([item.item for item in items])), torch.zeros(len(items))
        batch = self.batch(items)
        if "labels" not in batch:
            raise DataError(
                f"a batch of the collator has {', '.join(batch)}, and no labels; let it make some"
            )
        return self._answered(self._inputs(batch), batch["labels"]), batch["labels"]

    def _answered(self, inputs: dict[str, Any], labels: Any) -> dict[str, Any]:
        """Returns the inputs with those of the decoder, which a model that writes an answer makes of the labels that it
        is given. Here it gets none."""
        if self._answers is None or not inputs.keys().isdisjoint(_OF_DECODER):
            return inputs
        return inputs | {"decoder_input_ids": getattr(self._answers, _ANSWERED)(labels)}

    def batch(self, items: list[Any]) -> Mapping[str, Any]:
        """Returns the collator's batch of these items."""
        if self._removes and all(isinstance(item, Mapping) for item in items):
            items = [{name: item[name] for name in item if name in self._columns} for item in items]
            if not items[0]:
                raise DataError(
                    f"no column of the dataset is an argument of the model: it takes {', '.join(sorted(self._taken))}; "
                    "rename columns, or give TrainingArguments(remove_unused_columns=False) with a collator"
                )
        made: Mapping[str, Any] = self._collate(items)
        return made

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        taken = batch if self._takes_any else self._taken
        return {name: value for name, value in batch.items() if name in taken and name != "labels"}

    def labelled(self, dataset: Any) -> bool:
        """Returns True if the first sample of the dataset has labels."""
        return "labels" in self.batch([dataset[0]])


def _without_weights(model: nn.Module) -> nn.Module:
    """Returns a copy that knows the model's config alone, for workers that collate."""
    made = copy.copy(model)
    vars(made).update(_parameters={}, _buffers={}, _modules={})
    return made


class _Unlabelled:
    def __init__(self, item: Any) -> None:
        self.item = item


class Unlabelled(Dataset[Any]):
    """Wraps a dataset whose samples have no labels."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return _Unlabelled(self._dataset[index])
