"""``transformers.Trainer`` on all devices, by their speed, as if they were one: the same arguments, the same training.

``arguments``: what of ``TrainingArguments`` is honoured; ``batches``, ``losses``, ``optimizing``: of these a task;
``assessing``: an evaluation as ``transformers`` tells of it; ``following``: its state, callbacks and checkpoints beside
a run; ``trainer``: the door.
"""

from evener.integrations.transformers.trainer import Trainer

__all__ = ["Trainer"]
