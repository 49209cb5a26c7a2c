"""Everything that a run resumes from: model, optimizer, random generators, scheduler, balancer, and progress."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from evener import checkpoint
from evener.checkpoint import evaluation as evaluated
from evener.checkpoint.rng_state import draw_on
from evener.checkpoint.run_mark import Identity
from evener.components import state_dict as state
from evener.core.config.run_config import RunConfig
from evener.core.config.validation import at_least
from evener.core.elsewhere import place_of, shown, url_of
from evener.core.plain_values import serialized
from evener.data.fingerprint import Fingerprint, difference, fingerprint
from evener.data.stream_state import StreamState
from evener.distributed import signals
from evener.errors import CheckpointError, ConfigurationError
from evener.strategies.exact_bits import words_of
from evener.strategies.learner import Learner
from evener.training.batches.feed import BatchFeed
from evener.training.batches.progress import Progress
from evener.training.state.overrides import TaskTerms
from evener.training.state.remote_run import fetched_on_all_hosts

_SAID = (
    *("dtype", "precision", "precision_of", "optimizer_state", "fused_optimizer", "batch_norm"),
    *("clip_norm", "compress", "micro_batch", "exact"),
)
"""Settings that may change when a run resumes, although the training is then not the same."""


def _tell_nobody(message: str) -> None:
    """Ignores a message. Used on all ranks but rank 0."""


class RememberedValue(Protocol):
    """An object with state that checkpoints keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    """The state of one run, kept in memory or in checkpoints.

    Args:
        scheduler: The learning rate scheduler, or None.
        observers: Their state is kept, too.
    """

    def __init__(
        self,
        learner: Learner,
        feed: BatchFeed,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        config: RunConfig,
        observers: RememberedValue,
    ) -> None:
        self._learner, self._feed, self._scheduler, self._config = learner, feed, scheduler, config
        self._terms = TaskTerms(learner.task, learner.model, learner.optimizer, scheduler, config.override)
        self.progress = Progress()
        self.saver = checkpoint.Saver(learner.session, learner.mesh)
        self.kept: dict[str, RememberedValue] = {"observers": observers}
        """Other objects whose state is kept: observers, the best evaluation."""
        self._known_data: list[Fingerprint] = []
        self.identity = Identity()
        """The run that the checkpoints belong to, on rank 0; on all ranks after :meth:`agree_on_identity`."""
        self._continues: tuple[Path, int] | None = None
        """The directory whose run is continued, and the step at which it is continued."""

    # In memory

    def whole(self) -> dict[str, Any]:
        """Returns the state of all ranks together, copied to the CPU. All ranks must call this together."""
        self._learner.check_weights(self.progress.steps)
        return self.local_state()

    def local_state(self) -> dict[str, Any]:
        """Returns this rank's state. Equals :meth:`whole`, without communication, if each rank holds everything."""
        self._check_between_steps()
        return {**self._learner.state_dict(), **self._rest()}

    def _check_between_steps(self) -> None:
        learner, steps = self._learner, self.progress.steps
        if learner.updated_early and learner.updating == steps:
            raise CheckpointError(
                f"step {steps} ended in the midst of its backward pass, in which {len(learner.updated_early)} "
                "parameters were updated, and others were not: this is no state to go on from. Load the last checkpoint"
            )

    def load_state(self, found: Mapping[str, Any]) -> None:
        """Resumes from the result of :meth:`whole`."""
        state.check_form(found)
        progress = self._feed.sample_order().resumed(found["progress"])
        self._check_bits(found.get("bits"), warnings.warn)
        state.check_kind(self._learner.optimizer, found["optimizer"])
        over = self._terms.chosen(found["said"], warnings.warn)
        self._learner.load_state_dict(
            {**found, "optimizer": self._terms.overridden(found["optimizer"], over)}
        )
        self._go_on(progress, found, over)

    def _rest(self) -> dict[str, Any]:
        return {
            "balancer": self._feed.state_dict(),
            "stream": self._feed.stream_at(self.progress),
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
            "progress": self._feed.sample_order().saved(self.progress),
            "identity": self.identity.as_plain(),
            "kept": self.kept_text(),
            "said": self._terms.said,
            "averaged": self._learner.average.state_dict(),
            "bits": self._bits(),
            "exact": self._learner.exact.state_dict() if self._learner.exact else None,
            "loss_scale": self._learner.scale.state_dict() if self._learner.scale else None,
        }

    def _bits(self) -> dict[str, Any] | None:
        """Returns what the bits of the weights depend on; None if the run is not exact in bits."""
        bits, device = self._learner.settings.bits, self._learner.session.device
        return None if bits is None else {**asdict(bits), "words": words_of(bits, device)}

    def _check_bits(self, saved: Mapping[str, Any] | None, tell: Callable[[str], object]) -> None:
        """Compares what the bits depend on with what a checkpoint says.

        Raises:
            ConfigurationError: If batches would be cut in another way than before.
        """
        here = self._bits()
        if saved is None or here is None:  # settings that differ are told
            return
        if any(saved[name] != here[name] for name in ("grain", "grains_per_block")):
            raise ConfigurationError(
                f"the checkpoint is of a run with grain {saved['grain']} and block {saved['grains_per_block']}, and "
                f"this one has {here['grain']} and {here['grains_per_block']}, so that its weights would have other "
                f"bits: give grain={saved['grain']} and block={saved['grains_per_block']} (--grain, --block)"
            )
        if saved["words"] != here["words"]:
            tell(
                f"the run goes on {here['words']}, and was begun {saved['words']}, which may round otherwise"
            )

    def kept_text(self) -> str:
        """Returns the state of the objects in ``kept``, as JSON.

        Raises:
            ConfigurationError: If a part of it is not JSON-serializable.
        """
        found = {name: kept.state_dict() for name, kept in self.kept.items()}
        try:
            return json.dumps(found)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the state_dict of an observer or callback must hold numbers, text, lists and dictionaries: {error}"
            ) from error

    def _take_kept(self, text: str) -> None:
        found = json.loads(text)
        for name, kept in self.kept.items():
            if name in found:
                kept.load_state_dict(found[name])

    def _go_on(self, progress: Progress, rest: Mapping[str, Any], over: Collection[str]) -> None:
        if "scheduler" in over:
            by_step = self._learner.task.scheduler_interval == "step"
            self._terms.replay(progress.steps if by_step else progress.epoch)
        elif self._scheduler is not None and rest["scheduler"] is not None:
            self._scheduler.load_state_dict(state.rates_as_in(self._learner.optimizer, rest["scheduler"]))
        if self._learner.exact is not None:
            self._learner.exact.load_state_dict(rest.get("exact") or {"units": {}})
        if self._learner.scale is not None and rest.get("loss_scale") is not None:
            self._learner.scale.load_state_dict(rest["loss_scale"])
        self._learner.average.load_state_dict(rest.get("averaged"), progress.steps)
        self.progress = progress
        self._take_kept(rest["kept"])
        self.identity = Identity.from_plain(rest["identity"])
        self._learner.updated_early.clear()
        self._feed.balancer_state, self._feed.first_step = rest.get("balancer", {}), progress.steps
        stream = rest.get("stream")
        self._feed.stream_state = None if stream is None else StreamState.from_plain(stream)

    # In checkpoints

    def check_savable(self) -> None:
        """Raises ConfigurationError if a checkpoint cannot hold what a run is known to have before it trains."""
        try:
            found = {**self._rest(), **self._learner.held_state().leftovers(lambda own: [own])}
        except Exception:  # of a part of the user's, which need not have a state before the first step
            signals.check()
            return
        serialized(found)

    def save(self, directory: Path, keep: checkpoint.Keep, wait: bool) -> Path:
        """Writes a checkpoint. A collective call."""
        at_least("keep", keep.last, 1)
        directory = place_of("run_dir", directory)
        if url_of(directory) is not None and self.saver.upload is None:
            raise ConfigurationError(
                f"{shown(directory)} is no local directory: a run whose run_dir is a URL uploads its checkpoints, "
                "Engine.save does not"
            )
        learner, steps = self._learner, self.progress.steps
        self._check_between_steps()
        learner.check_weights(steps)
        held = learner.held_state()
        more = {"data": self._data(), "settings": self._config.as_dict()}
        if self._continues is not None and self._continues[0] != directory.resolve():
            self.branch()
        return self.saver.save(held, self._rest() | more, steps, directory, keep, wait, self.identity)

    def branch(self) -> None:
        """Makes later checkpoints belong to a new run, which continues the run that this one resumed from."""
        if self._continues is not None:
            self.identity, self._continues = self.identity.branch(self._continues[1]), None

    def agree_on_identity(self) -> None:
        """Gives all ranks the identity of rank 0, so that a rank that replaces it can use it. A collective call."""
        self.identity = self._learner.session.control.broadcast_object(self.identity)

    def load(self, path: Path, tell: Callable[[str], object]) -> None:
        """Resumes from a checkpoint. A collective call."""
        self.saver.finish()
        path = place_of("resume", path)
        session, learner = self._learner.session, self._learner
        fetched_on_all_hosts(path, session)
        found = checkpoint.agreed(path, session.control, session.rank, session.world_size, tell)
        progress = self._feed.sample_order().resumed(found.rest["progress"])
        self._check_bits(found.rest.get("bits"), tell if session.rank == 0 else _tell_nobody)
        self._check_data(found)
        pieces = found.read(learner.held_state())
        state.check_kind(learner.optimizer, pieces["optimizer"])
        over = self._terms.chosen(found.rest["said"], tell if session.rank == 0 else _tell_nobody)
        pieces["optimizer"] = self._terms.overridden(pieces["optimizer"], over)
        learner.load_held(pieces)
        self._go_on(progress, {**found.rest, **self._after(found)}, over)
        self.identity, self._continues = found.identity, (found.path.parent.resolve(), progress.steps)
        if not found.newest or not found.identity.run:
            self.branch()
        if self._feed.rewind():
            learner.start_afresh()
        drawn = found.random(session.rank) if found.rest["ranks"] == session.world_size else None
        if drawn is not None:
            draw_on(drawn, session.device)
        if session.rank == 0:
            self._tell_of_settings(found.rest["settings"], tell)
            self._tell_of_average(found.rest.get("averaged"), tell)

    def _after(self, found: checkpoint.StoredCheckpoint) -> dict[str, Any]:
        """Returns the state kept after the evaluation of a checkpoint's weights; empty if there was none."""
        control, first = self._learner.session.control, self._learner.session.rank == 0
        kept = control.broadcast_object(evaluated.evaluation_of(found.path) if first else None)
        return {} if kept is None else {"kept": kept}

    def _data(self) -> Fingerprint:
        """Returns the fingerprint of the training set on rank 0, computed once; empty on other ranks."""
        if not self._known_data and self._learner.session.rank == 0:
            task = self._learner.task
            self._known_data.append({} if task.partition == "sample" else fingerprint(task.train))
        return self._known_data[0] if self._known_data else {}

    def _check_data(self, found: checkpoint.StoredCheckpoint) -> None:
        """Compares the training set with that of the checkpoint, on rank 0, unless each rank has its own data."""
        message = difference(found.rest["data"], self._data()) if self._learner.session.rank == 0 else ""
        message = self._learner.session.control.broadcast_object(message)
        if message:
            raise ConfigurationError(
                f"the checkpoint {found.path} was made with other data: {message}. Go on with the same data, or begin "
                "a new run"
            )

    def load_average(self, path: Path) -> None:
        """Takes over the average of a checkpoint, if both it and the task have one. A collective call."""
        average, control = self._learner.average, self._learner.session.control
        if average.how is not None:
            found = checkpoint.agreed(
                path, control, self._learner.session.rank, self._learner.session.world_size
            )
            average.load(found.average(self._learner.held_state()), None)
            average.load_state_dict(found.rest.get("averaged"), 0)

    def _tell_of_average(self, saved: Mapping[str, Any] | None, tell: Callable[[str], object]) -> None:
        how = self._learner.average.how
        if how is not None and saved is None:
            tell("the checkpoint has no average of the weights: it begins here")
        if saved is not None and how is None:
            tell("the checkpoint's average of the weights is left out: the task has none")
        if saved is not None and how is not None and saved.get("how", how.words) != how.words:
            tell(f"the average of the weights goes on as {how.words}, and was begun as {saved['how']}")

    def _tell_of_settings(self, saved: Mapping[str, Any], tell: Callable[[str], object]) -> None:
        here = self._config.as_dict()
        for name in _SAID:
            before = saved.get(name, getattr(RunConfig, name))
            if before != here[name]:
                tell(f"the run goes on with {name} {here[name]}, and was begun with {before}")
