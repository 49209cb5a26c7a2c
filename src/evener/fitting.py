"""A whole run: launch the ranks, train, evaluate, and leave a directory that tells what happened."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener import checkpoint
from evener.balance.emulate import Throttle
from evener.balance.registry import make_balancer
from evener.balance.shares import parse_caps
from evener.config import RunConfig
from evener.engine import Engine
from evener.errors import InterruptedRunError
from evener.records import EvaluationRecord, RecordFile, RunSummary, as_json, write_json
from evener.report.terminal import Terminal
from evener.runtime.environment import check_processes, default_device, default_processes, detect
from evener.runtime.launch import is_launched, launch
from evener.runtime.rendezvous import Rendezvous
from evener.runtime.session import Session
from evener.step import Step
from evener.strategies.base import named_tensors
from evener.task import Task, TaskLike, resolve
from evener.tasks import BUILT_IN


@dataclass(frozen=True)
class Trained:
    """What :func:`fit` gives: the summary of the run, and the weights as ``model.load_state_dict`` takes them."""

    summary: RunSummary
    weights: dict[str, Tensor]
    rank: int = 0
    """The rank that it comes from: 0, and on further machines that of their first process."""


def fit(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    rendezvous: Rendezvous | None = None,
    show: bool = True,
    **settings: Any,
) -> Trained:
    """Trains a task on all ranks.

    Args:
        task: A :class:`Task`, a function that builds one, its name ``package.module:function``, or ``digits``,
            ``mnist``, ``shakespeare``.
        config: The settings; ``settings`` change single ones, as in ``fit("digits", processes=2)``.
        options: Keyword arguments for the task's function.
        rendezvous: How several machines meet, in torchrun's words.
        show: Whether rank 0 shows progress on standard error.

    Raises:
        EvenerError: Whatever ended the run; the class says what it was.
    """
    config = (config or RunConfig()).replace(**settings)
    resolve(task, BUILT_IN, options)
    processes = check_plan(config, rendezvous)
    results = launch(
        _fit_on_rank,
        task,
        dict(options or {}),
        config,
        show,
        processes=processes,
        timeout_seconds=config.timeout_seconds,
        rendezvous=rendezvous,
        device=config.device,
    )
    trained: Trained = results[0]
    return trained


def check_plan(config: RunConfig, rendezvous: Rendezvous | None = None) -> int:
    """The number of ranks on this machine, after finding what cannot work before anything is started.

    Raises:
        ConfigurationError: For more processes than GPUs, or shares that do not fit the ranks.
    """
    device = config.device or default_device()
    launched = detect()
    processes = launched.local_world_size if is_launched() else config.processes or default_processes(device)
    check_processes(processes, device)
    if rendezvous is None:
        world_size = launched.world_size if is_launched() else processes
        caps = parse_caps(config.caps, world_size)
        make_balancer(config.balance, world_size, caps=caps, quantum=config.quantum)
        Throttle.parse(config.throttle, config.throttle_at, world_size)
    return processes


def _fit_on_rank(task: TaskLike, options: Mapping[str, Any], config: RunConfig, show: bool) -> Trained:
    with Session(device=config.device, timeout_seconds=config.timeout_seconds) as session:
        return Run(resolve(task, BUILT_IN, options)(), config, session, show).execute()


class Run:
    """One run of one task, on one of its ranks."""

    def __init__(self, task: Task, config: RunConfig, session: Session, show: bool) -> None:
        self._task, self._config, self._session = task, config, session
        self._engine = Engine(task, config, session=session, on_step=self._on_step)
        if config.resume is not None:
            self._engine.load_state_dict(checkpoint.load(config.resume))
        self._leads = session.rank == 0
        self._taken = [0] * len(self._engine.strategy.data_ranks)
        self._last: Step | None = None
        self._metrics: dict[str, float] = {}
        self._evaluated_at = -1
        self._epochs = self._engine.epochs_done
        self._seconds = 0.0
        self._decisions = 0
        self._records = self._open_directory()
        total = self._engine.total_steps
        self._terminal = (
            Terminal(total, self._engine.batch_size, self._engine.steps_done)
            if show and self._leads
            else None
        )
        throttle = self._engine.strategy.settings.throttle
        self._emulation = throttle.words if throttle else ""
        if self._terminal is not None and throttle:
            self._terminal.note(self._emulation)

    def _open_directory(self) -> RecordFile | None:
        directory = self._config.run_dir
        if directory is None or not self._leads:
            return None
        resolved = {"task": self._task.name, **self._config.as_dict()}
        resolved |= {"batch_size": self._engine.batch_size, "world_size": self._session.world_size}
        write_json(directory / "config.json", resolved)
        return RecordFile(directory / "records.jsonl", self._engine.steps_done)

    def execute(self) -> Trained:
        """Trains to the end.

        Raises:
            InterruptedRunError: If a signal ends the run, after the records of what was done are written.
        """
        try:
            self._train()
            tensors = self._engine.strategy.tensors()
            summary = self._summary(self._session.control.gather_objects(self._own_part()), tensors)
            self._write_summary(summary)
            return Trained(summary, self._saved(tensors), self._session.rank)
        except (InterruptedRunError, KeyboardInterrupt):
            self._write_summary(
                self._summary(
                    [self._own_part()] * self._session.world_size,
                    named_tensors(self._engine.model),
                    interrupted=True,
                )
            )
            raise
        finally:
            self._close()

    def _train(self) -> None:
        began = time.perf_counter()
        for batch in self._engine.batches():
            self._engine.step(batch)
            if batch.last:
                self._engine.settle()
                self._seconds += time.perf_counter() - began
                self._end_epoch(batch.epoch)
                began = time.perf_counter()
        self._seconds += time.perf_counter() - began
        if self._last is not None and not self._last.batch.last:
            self._save()
        if self._task.evaluate is not None and self._evaluated_at != self._engine.steps_done:
            self._evaluate(self._last.batch.epoch if self._last else 0)

    def _end_epoch(self, epoch: int) -> None:
        self._epochs = epoch + 1
        self._save()
        every = self._config.evaluate_every
        if self._task.evaluate is not None and every and (epoch + 1) % every == 0:
            self._evaluate(epoch)

    def _save(self) -> None:
        if self._config.run_dir is not None:
            state = self._engine.state_dict()
            if self._leads:
                checkpoint.save(state, self._config.run_dir / "checkpoints")

    def _evaluate(self, epoch: int) -> None:
        began = time.perf_counter()
        with self._session.watchdog.phase("evaluation", step=self._engine.steps_done):
            self._metrics = self._engine.evaluate()
        self._evaluated_at = self._engine.steps_done
        record = EvaluationRecord(
            step=self._engine.steps_done,
            epoch=epoch,
            metrics=self._metrics,
            samples=self._evaluation_samples(),
            seconds=time.perf_counter() - began,
        )
        if self._records is not None:
            self._records.write(record)
        if self._terminal is not None:
            self._terminal.evaluation(record)

    def _evaluation_samples(self) -> int:
        own = _length(self._task.evaluate)
        return sum(self._session.control.gather_objects(own)) if self._task.partition == "sample" else own

    def _on_step(self, step: Step) -> None:
        self._last = step
        self._taken = [total + share for total, share in zip(self._taken, step.batch.shares, strict=True)]
        if not self._leads:
            return
        record = step.record()
        if self._records is not None:
            self._records.write(record)
        if self._terminal is not None:
            self._terminal.step(record)
            self._session.watchdog.progress(self._terminal.where(record))
        self._show_decisions()

    def _show_decisions(self) -> None:
        decisions = self._engine.balancer.decisions if self._engine.balancer else ()
        for decision in decisions[self._decisions :]:
            if self._records is not None:
                self._records.write(decision)
            if self._terminal is not None:
                self._terminal.note(decision.words)
        self._decisions = len(decisions)

    def _own_part(self) -> dict[str, Any]:
        times = self._engine.times
        device = self._session.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        return {
            "device": f"{device} {name}".strip(),
            "times": {
                "compute_seconds": times.compute,
                "wait_seconds": times.wait,
                "input_seconds": times.input,
            },
        }

    def _summary(
        self, parts: list[dict[str, Any]], weights: Mapping[str, Tensor], interrupted: bool = False
    ) -> RunSummary:
        engine, taken = self._engine, sum(self._taken)
        return RunSummary(
            task=self._task.name,
            strategy=type(engine.strategy).__name__.lower(),
            world_size=self._session.world_size,
            devices=[part["device"] for part in parts],
            steps=engine.steps_done,
            epochs=self._epochs,
            samples=engine.samples_done,
            seconds=self._seconds,
            samples_per_second=taken / self._seconds if self._seconds else 0.0,
            final_loss=self._last.loss if self._last and self._last.total is not None else float("nan"),
            metrics=self._metrics,
            shares=self._shares(),
            weights_digest=checkpoint.weights_digest(weights),
            versions=versions(),
            batch_size=engine.batch_size,
            seed=self._config.seed,
            ranks=[part["times"] for part in parts],
            interrupted=interrupted,
            run_dir=str(self._config.run_dir) if self._config.run_dir else None,
            emulation=self._emulation,
        )

    def _shares(self) -> list[float]:
        """The part of all samples that each rank computed; of ranks that compute the same ones, each had them all."""
        taken = sum(self._taken)
        parts = [count / taken if taken else 0.0 for count in self._taken]
        return parts * (self._session.world_size // len(parts))

    def _write_summary(self, summary: RunSummary) -> None:
        if self._config.run_dir is not None and self._leads:
            write_json(self._config.run_dir / "summary.json", as_json(summary))

    def _saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the tensors that ``model.load_state_dict`` takes, on the CPU."""
        return {
            name: tensors.get(name, value).detach().cpu()
            for name, value in self._engine.model.state_dict().items()
            if isinstance(value, Tensor)
        }

    def _close(self) -> None:
        if self._terminal is not None:
            self._terminal.close()
        if self._records is not None:
            self._records.close()
        self._engine.close()


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {
        "evener": version("evener"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
    }


def default_run_dir(task_name: str, now: float) -> Path:
    """Where a run of the command leaves its directory."""
    label = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in task_name)
    return Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        return 0
