"""The processes that read for this rank: as many as the settings say, or as are chosen by the times of its steps."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from evener.core.config.run_config import AUTO, RunConfig
from evener.core.stdio import unheard
from evener.data.worker_tuning import WAITING, Choice, cores_of, most_workers, with_workers
from evener.distributed.session import Session
from evener.hardware.cgroups import cpu_quota
from evener.hardware.survey.host import cores_allowed


class Readers:
    """The workers of one run on this rank. All ranks make theirs together.

    Args:
        config: Its ``workers`` are a number, or ``auto``.
    """

    def __init__(self, config: RunConfig, session: Session) -> None:
        self._rank, self._said = session.rank, config.workers
        self.beside = session.environment.local_world_size
        """Ranks of this machine."""
        told = session.control.gather_objects((session.environment.host, cores_allowed()))
        self._most = most_workers(cores_of(session.rank, told, cpu_quota()))
        self._training: Choice | None = None
        self._evaluation: tuple[Any, int | Choice] | None = None
        self._words, self._refused = list[str](), set[str]()

    def of_training(self, dataset: Any) -> int | Choice:
        """For a pass over the training set; another pass, as after a return, begins with what the last one had."""
        if self._training is not None:
            return self._training
        chosen = self._of(dataset, f"rank {self._rank}", "training set")
        self._training = chosen if isinstance(chosen, Choice) else None
        return chosen

    def of_evaluation(self, dataset: Any) -> int | Choice:
        """For a pass over another one; the next pass over the same begins with what this one ends with."""
        if self._evaluation is None or self._evaluation[0] is not dataset:
            self._take_words()
            chosen = self._of(dataset, f"rank {self._rank}, which evaluates,", "evaluation set")
            self._evaluation = dataset, chosen
        return self._evaluation[1]

    def _of(self, dataset: Any, who: str, what: str) -> int | Choice:
        if self._said != AUTO:
            return int(self._said)
        why = why_not(dataset)
        if not why:
            return Choice(self._most, who)
        words = f"rank {self._rank} reads the {what} without workers: {why}"
        self._words += [] if words in self._refused else [words]
        self._refused.add(words)
        return 0

    @property
    def count(self) -> int:
        """Those that read the training set now."""
        if self._training is not None:
            return self._training.workers
        return 0 if self._said == AUTO else int(self._said)

    @property
    def why_waits(self) -> str:
        """Why this rank still waits for batches, if it does, or what may be done about it."""
        if self._training is not None:
            return self._training.why_not
        if self._said == AUTO:
            return "their number is not chosen for this data set"
        if self._said:
            return ""
        return "workers=auto (--workers auto) has processes read meanwhile, where cores are free"

    def new_words(self) -> list[str]:
        """What has been decided since the last call, for rank 0's observers; other ranks tell it on standard error."""
        self._take_words()
        words, self._words = self._words, []
        if self._rank:
            for line in words:
                print(f"evener: {line}", file=unheard(sys.stderr), flush=True)
            return []
        return words

    def _take_words(self) -> None:
        for choice in (self._training, self._evaluation and self._evaluation[1]):
            self._words += choice.new_words() if isinstance(choice, Choice) else []


def waiting_words(parts: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """Of the rank that waited for its batches longest, in ``seconds`` of training; empty if none did for long.

    Args:
        parts: Of each rank its ``times``, its ``workers``, and ``why_waits``.
    """
    waited = [part["times"]["input_seconds"] for part in parts]
    rank = waited.index(max(waited))
    if not waited[rank] > WAITING * seconds > 0:
        return ""
    share, using = waited[rank] / seconds, with_workers(parts[rank]["workers"])
    why = f": {parts[rank]['why_waits']}" if parts[rank]["why_waits"] else ""
    return f"rank {rank} waited for batches {share:.0%} of the time, {using}{why}"


def why_not(dataset: Any) -> str:
    """Why workers cannot be chosen for a data set, in words; empty if they can."""
    if isinstance(dataset, IterableDataset):
        return "the data set is iterable, and their number decides about its order: give workers as a number"
    if multiprocessing.current_process().daemon:
        return "this process is daemonic and may have none: start ranks with evener, torchrun or srun"
    return ""
