"""State and callbacks of a trainer, and what is told of them, as ``transformers`` has them."""

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
"""Events inside of what Evener does in one piece."""


class Told(ABC):
    """What of a trainer does not train, and what follows its training asks of it."""

    model: Any
    train_dataset: Any
    engine: Engine | None = None
    """While the trainer is in a run, on each of its ranks."""
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
        """One more, or a class of one.

        Raises:
            ConfigurationError: If it waits for an event that does not come.
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
        """Takes one out, or the first of a class, and returns it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Takes one out, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds a row to ``state.log_history`` and tells the callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0, or the process of the script."""
        return not is_launched() or detect().rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine, or the process of the script."""
        return not is_launched() or detect().local_rank == 0

    @abstractmethod
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The metrics over a dataset."""

    @abstractmethod
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model."""

    def let_go(self) -> None:
        """The run is over: nothing of it is kept here."""
        self.engine = None
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, None, None
