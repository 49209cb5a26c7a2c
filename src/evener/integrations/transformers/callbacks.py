"""State, callbacks and logging of a trainer, with the interface of ``transformers``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback
from transformers.trainer_pt_utils import log_metrics, save_metrics, save_state

from evener.distributed.environment import detect
from evener.distributed.launch.launch import is_launched
from evener.errors import ConfigurationError
from evener.training.engine import Engine

_NEVER_CALLED = (
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_prediction_step",
    "on_push_begin",
)
"""Events of ``TrainerCallback`` that Evener's Trainer never fires, for they fall inside of Evener's own operations."""


class TrainerEvents(ABC):
    """The part of a trainer that does not train: state, callbacks, logs.
    :class:`~evener.integrations.transformers.trainer_state.Following` uses it during a run.
    """

    model: Any
    train_dataset: Any
    engine: Engine | None = None
    """The engine of the current run, on each of its ranks. None outside of a run."""
    ignore_keys: list[str] | None = None

    log_metrics, save_metrics, save_state = log_metrics, save_metrics, save_state

    def __init__(self, args: TrainingArguments, model: Any, processing_class: Any, given: list[Any]) -> None:
        self.args = args
        shown = [PrinterCallback] if args.disable_tqdm else []
        reports = get_reporting_integration_callbacks(args.report_to)
        self.callback_handler: Any = CallbackHandler(
            [DefaultFlowCallback], model, processing_class, None, None
        )
        for callback in (*reports, *given, *shown):
            self.add_callback(callback)
        self.control: Any = TrainerControl()
        self.state: Any = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
        )
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, given as an object or a class.

        Raises:
            ConfigurationError: If it handles an event that Evener's Trainer never fires.
        """
        kind = callback if isinstance(callback, type) else type(callback)
        silent = [
            name
            for name in _NEVER_CALLED
            if not kind.__module__.startswith("transformers.")
            and getattr(kind, name, None) is not getattr(TrainerCallback, name, None)
        ]
        if silent:
            raise ConfigurationError(
                f"the callback {kind.__name__} has {', '.join(silent)}, which Evener's Trainer never calls; use "
                "on_step_end"
            )
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes and returns a callback, or the first one of a class."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, or the first one of a class."""
        self.callback_handler.remove_callback(callback)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds a row to ``state.log_history`` and tells the callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def is_world_process_zero(self) -> bool:
        """Returns True on rank 0, and in the process of the script outside of a run."""
        return not is_launched() or detect().rank == 0

    def is_local_process_zero(self) -> bool:
        """Returns True on the first rank of a host, and in the process of the script outside of a run."""
        return not is_launched() or detect().local_rank == 0

    @abstractmethod
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Returns the metrics over a dataset."""

    @abstractmethod
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model."""

    def let_go(self) -> None:
        """Drops all references to the engine, optimizer and scheduler of a run that is over."""
        self.engine = None
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, None, None
