"""Training progress, and the check that a saved position belongs to the same order of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from evener.data.batch import Batch
from evener.errors import ConfigurationError


@dataclass
class Progress:
    """Training progress: epoch, position in the epoch, steps and samples.

    Counts all ranks together, and includes the runs that this one resumed from.
    """

    epoch: int = 0
    """Number of complete passes over the data."""
    position: int = 0
    """Number of samples of the current epoch that were trained on."""
    steps: int = 0
    samples: int = 0

    @property
    def epochs_begun(self) -> int:
        """Number of epochs that were trained on, the current one included if it has begun."""
        return self.epoch + (self.position > 0)

    def advance(self, batch: Batch) -> None:
        """Adds a step that was taken with ``batch``."""
        self.steps += 1
        self.samples += batch.size
        self.epoch, self.position = (
            (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.position + batch.size)
        )


@dataclass(frozen=True)
class SampleOrder:
    """The settings that decide which samples a step has, on any number of ranks."""

    seed: int
    batch_size: int
    length: int | None
    """Number of samples of the training set; None if unknown."""
    parts: list[int] | None = None
    """Number of samples of each rank, if ranks own samples of their own."""
    listed: int | None = None
    """Checksum of the order that the task gives, if it gives one."""
    arranged: int | None = None
    """Checksum of what decides the order of a data set that has an order of its own."""

    def saved(self, progress: Progress) -> dict[str, Any]:
        """Returns the progress and this order as plain values."""
        return asdict(progress) | asdict(self)

    def resumed(self, saved: Mapping[str, Any]) -> Progress:
        """Returns the progress from the result of :meth:`saved`.

        Raises:
            ConfigurationError: If the order of samples differs here.
        """
        for name, ours in (("seed", self.seed), ("batch_size", self.batch_size)):
            if saved[name] != ours:
                raise ConfigurationError(
                    f"the checkpoint was made with {name} {saved[name]}, this run has {ours}: samples would be "
                    f"repeated or lost; set {name} to {saved[name]}"
                )
        self._check_parts(saved)
        if saved.get("listed") != self.listed:
            raise ConfigurationError(
                "the checkpoint was made with another Task.order: samples would be repeated or lost; go on with the "
                "same order, or begin a new run"
            )
        if saved["position"] and saved.get("arranged", self.arranged) != self.arranged:
            raise ConfigurationError(
                "the checkpoint was made in the middle of an epoch of shards with other lengths, or another together "
                "or window: samples would be repeated or lost; go on with the same, or from the end of an epoch"
            )
        if saved["length"] != self.length and self.parts is None:
            raise ConfigurationError(
                f"the checkpoint was made with a training set of {saved['length']} samples, this one has "
                f"{self.length}: samples would be repeated or lost; go on with the same data, or begin a new run"
            )
        return Progress(saved["epoch"], saved["position"], saved["steps"], saved["samples"])

    def _check_parts(self, saved: Mapping[str, Any]) -> None:
        if saved["parts"] != self.parts and saved["position"]:
            raise ConfigurationError(
                f"the checkpoint was made in the middle of an epoch of parts of {saved['parts']} samples, this run has "
                f"{self.parts} (None: not partitioned by sample): samples would be repeated or lost; go on with the "
                "same parts, or from the end of an epoch"
            )
