"""Adjusts modules around divided layers, in regions found by a trial, to compute with a part of the features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from evener.nn.tensor_parallel import ColumnLayer, LengthDivision, RowLayer
from evener.nn.tensor_region import RegionRng, StandIn
from evener.strategies.tensor.candidates import TriedRegion


def arrange(
    regions: Iterable[TriedRegion],
    modules: Mapping[str, nn.Module],
    read: Mapping[str, LengthDivision],
    index: int,
) -> None:
    """Changes modules in place, after their layers were divided.

    Args:
        regions: Regions whose layers are all divided.
        modules: Modules of the model, by name.
        read: For the last layer of each region, the division of its input.
        index: Index of this rank.
    """
    for region in regions:
        guess = region.guess
        runs = len(read[guess.row].local_length) // guess.unit
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
            columns[0].apart = row.apart = RegionRng(index)
        row.between = tuple((modules[name], key) for name, key in region.terms)
