"""One device: the reference that every division of the work must match."""

from __future__ import annotations

from evener.errors import ConfigurationError
from evener.hardware.readout import Readout, read
from evener.runtime.mesh import Layout
from evener.strategies import gradients
from evener.strategies.base import Strategy
from evener.strategies.learner import Learner
from evener.strategies.parts import Settings, Stepper, Synchronizer
from evener.strategies.plain import Plain


class Alone(Synchronizer):
    """There is no other rank."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def complete(self) -> tuple[str, ...]:
        self._learner.pace.work_done()
        return ()

    def soundness(self) -> tuple[Readout, ...]:
        return (read(gradients.soundness(self._learner.names)),)


class Single(Strategy):
    """The whole batch on one device, in micro-batches where asked."""

    def layout(self, world_size: int, settings: Settings) -> Layout:
        if world_size > 1:
            raise ConfigurationError(
                f"strategy 'single' runs on one rank, not on {world_size}; use 'ddp' or --processes 1"
            )
        return Layout({"data": 1})

    def synchronizer(self, learner: Learner) -> Synchronizer:
        return Alone(learner)

    def stepper(self, learner: Learner) -> Stepper:
        return Plain(learner)
