"""What modules around divided layers are told, where a trial showed that they compute a part then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from evener.nn.tensor_parallel import ColumnLayer, Parts, RowLayer
from evener.nn.tensor_region import Apart, StandIn
from evener.strategies.tensor.candidates import TriedRegion


def arrange(
    regions: Iterable[TriedRegion], modules: Mapping[str, nn.Module], read: Mapping[str, Parts], index: int
) -> None:
    """Changes modules in place, after their layers were divided.

    Args:
        regions: All of whose layers are.
        modules: Of the model, by name.
        read: How what the last layers of regions read is divided.
        index: This rank's.
    """
    for region in regions:
        guess = region.guess
        runs = len(read[guess.row].own) // guess.unit
        for (name, key), value in region.numbers:
            vars(modules[name])[key] = value * runs // guess.runs
        columns, row = [modules[column.name] for column in guess.columns], modules[guess.row]
        assert isinstance(row, RowLayer)
        assert isinstance(columns[0], ColumnLayer)
        if region.stand_in is not None:
            argument, features = region.stand_in
            hook = StandIn(argument, features * runs // guess.runs, columns)
            modules[region.module].register_forward_pre_hook(hook, with_kwargs=True)
        if region.draws:
            columns[0].apart = row.apart = Apart(index)
        row.between = tuple((modules[name], key) for name, key in region.terms)
