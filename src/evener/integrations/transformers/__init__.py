"""A ``Trainer`` with the arguments of ``transformers.Trainer``, which trains on all devices, each at its own speed.

``arguments``: checks ``TrainingArguments`` and turns them into settings; ``batches``, ``losses``, ``optimizers``,
``sampler``: the parts of a task; ``evaluation``: evaluates as ``transformers`` does; ``callbacks``, ``trainer_state``:
state, callbacks and checkpoints during a run; ``trainer``: the public class.
"""

from evener.integrations.transformers.trainer import Trainer

__all__ = ["Trainer"]
