"""The replicas that a rank carries: their weights, buffers, optimizer state and place in the schedule.

The model and the optimizer hold the *current* replica. The others are stored beside them, and take their place when it
is their turn. Between two rounds the model holds the merged weights.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from evener.components.sharded_tensor.local import local
from evener.components.state_dict import OF_REPLICAS, Cut, HeldState, optimizer_state_from, taker
from evener.data.rounds import Rounds
from evener.errors import ConfigurationError
from evener.strategies.interfaces import StoredReplicas
from evener.strategies.learner import Learner
from evener.strategies.running_moments import HeldBuffers, NormalizedElements, held_buffers

OptimizerState = dict[Any, Any]
"""State by parameter, as ``optimizer.state`` has it."""


_GROUP = "group."
"""The beginning of the keys under which a replica's options of a group are saved, with the group's first parameter."""


@dataclass
class LocalReplica:
    """One replica. What it has while it is not the current one is None if it is as in the model."""

    index: int
    weights: list[Tensor] | None = None
    buffers: list[Tensor] | None = None
    state: OptimizerState = field(default_factory=dict)
    place: Any = None
    """Options of the optimizer's groups, and the scheduler's state."""
    batches: int = 0
    """The number of the round's batches to which its schedule has come."""
    samples: int = 0
    """The number of samples in this round."""
    terms: float = 0.0
    """The number of the loss's terms so far."""
    sent: list[float] = field(default_factory=list)
    """For each fragment, :attr:`terms` when it was last sent."""
    normalized: dict[nn.Module, list[int]] = field(default_factory=dict)
    """For each BatchNorm, the numbers of elements for each channel and of passes in this round."""


class ReplicaSet(StoredReplicas):
    """The replicas of this rank. If the ranks of a replica divide its state, these are this rank's parts of it.

    Args:
        weighs: True if this rank's differences count in a merge. Of ranks that hold the same, one counts.
        keeps_own: True if a replica keeps weights of its own beyond a merge: if fragments merge in turn, or are mixed.
        outer: The optimizer that applies merged differences to the model.
        fragments: The parameters of each fragment.
        words: A description of the merge.
    """

    def __init__(
        self,
        learner: Learner,
        weighs: bool,
        rounds: Rounds,
        keeps_own: bool,
        outer: torch.optim.Optimizer,
        fragments: list[list[nn.Parameter]],
        words: str,
    ) -> None:
        self.words = words
        self._learner, self._keeps_own, self._outer = learner, keeps_own, outer
        self._leads, self._weighs = rounds.leads, weighs
        self._fragments = fragments
        self.parameters = [p for fragment in fragments for p in fragment]
        self.merged: dict[nn.Parameter, Tensor] = {}
        """The merged weights while the replicas train."""
        self.all = [LocalReplica(index, sent=[0.0] * len(fragments)) for index in rounds.carried]
        self.current = self.all[0]
        for other in self.all[1:]:
            state = {p: _copied(entries) for p, entries in learner.optimizer.state.items()}
            other.state = defaultdict(dict, state)  # some optimizers make their state at the start
        self._scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self._positions = {parameter: place for place, parameter in enumerate(self.parameters)}
        self._to_check = len(self.all) > 1
        self._own_options: set[str] = set()
        """The options of its groups that the optimizer's steps change, which each replica has for itself."""
        self._normalized = NormalizedElements(learner.model)
        self._normalized.counts = self.current.normalized

    def owned_buffers(self) -> HeldBuffers:
        """Returns the model's buffers as they are now."""
        return held_buffers(self._learner.model)

    # A round

    @torch.no_grad()
    def begin(self, scheduler: torch.optim.lr_scheduler.LRScheduler | None) -> None:
        """Begins a round: the replicas start from the merged weights, or from weights of their own.

        Args:
            scheduler: The scheduler that follows the batches of a round.
        """
        self._scheduler = scheduler
        self.keep_as_merged()
        place = self._place()
        for replica in self.all:
            replica.batches, replica.samples, replica.place = 0, 0, place
            replica.normalized.clear()
            replica.buffers = None
            if not self._keeps_own:
                replica.weights = None
        for replica in self.all[1:]:
            replica.buffers = [buffer.clone() for _, _, buffer in self.owned_buffers()]
        if self.current.weights is not None:
            self._write(self.current.weights)

    @torch.no_grad()
    def keep_as_merged(self) -> None:
        """Keeps the weights that the model has now as the merged ones."""
        for parameter in self.parameters:
            kept, own = self.merged.get(parameter), local(parameter.detach())
            if kept is None:
                self.merged[parameter] = own.clone()
            else:
                kept.copy_(own)

    @torch.no_grad()
    def enter(self, index: int) -> LocalReplica:
        """Makes a replica the current one, and returns it."""
        replica = self.all[index - self.all[0].index]
        if replica is self.current:
            return replica
        optimizer, left = self._learner.optimizer, self.current
        left.weights = self._stored(left.weights)
        left.buffers = [buffer.clone() for _, _, buffer in self.owned_buffers()]
        left.state, left.place = optimizer.state, self._place()
        self._write(replica.weights or [self.merged[p] for p in self.parameters])
        for (held, name, _), value in zip(self.owned_buffers(), replica.buffers or (), strict=True):
            held[name] = value.clone()
        optimizer.state = replica.state  # type: ignore[assignment]
        self._go_to(replica.place)
        self.current = replica
        self._normalized.counts = replica.normalized
        return replica

    @torch.no_grad()
    def end(self) -> None:
        """Ends a round: the model gets the merged weights. Replicas keep their own where they differ."""
        if self._keeps_own:
            self.current.weights = self._stored(self.current.weights)
            self._write([self.merged[p] for p in self.parameters])
        optimizer = self._learner.optimizer
        self.current.state, self.current = optimizer.state, self.all[0]
        self._normalized.counts = self.current.normalized
        optimizer.state = self.current.state  # type: ignore[assignment]

    def take_step(self, step: Callable[[], None]) -> None:
        """Takes an optimizer step of the current replica.

        Raises:
            ConfigurationError: If the optimizer keeps in its groups what each replica must have for itself.
        """
        before = self._options() if self._to_check else []
        groups = [(group, dict(group)) for group in self._learner.optimizer.param_groups]
        step()
        for group, old in groups:
            self._own_options.update(key for key, value in group.items() if value is not old.get(key))
        if self._to_check and self._options() != before:
            raise ConfigurationError(
                f"{type(self._learner.optimizer).__name__} changes the options of its groups in a step, and this rank "
                f"carries {len(self.all)} replicas, which share them: use as many processes as replicas"
            )
        self._to_check = False

    def stepped(self, replica: LocalReplica, batches: int) -> None:
        """Lets the scheduler follow a replica, which has come to a number of the round's batches."""
        if replica.batches < batches:
            self.enter(replica.index)
        while replica.batches < batches:
            replica.batches += 1
            if self._scheduler is not None:
                self._scheduler.step()

    def weights_of(self, replica: LocalReplica, parameter: nn.Parameter) -> Tensor:
        """Returns the weights of a replica now."""
        if replica is self.current:
            return local(parameter.detach())
        if replica.weights is None:
            return self.merged[parameter]
        return replica.weights[self._positions[parameter]]

    def _stored(self, room: list[Tensor] | None) -> list[Tensor]:
        if room is None:
            return [local(parameter.detach()).clone() for parameter in self.parameters]
        for kept, parameter in zip(room, self.parameters, strict=True):
            kept.copy_(local(parameter.detach()))
        return room

    def _write(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, weights, strict=True):
            local(parameter).copy_(value)

    def _options(self) -> list[dict[str, Any]]:
        groups = self._learner.optimizer.param_groups
        return [_copied({key: group[key] for key in group if key != "params"}) for group in groups]

    def _groups(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns the groups of the optimizer, each with the name of its first parameter, which stands for it."""
        names: Mapping[Any, str] = self._learner.names
        listed = [
            (each, group) for group in self._learner.optimizer.param_groups for each in group["params"][:1]
        ]
        return [(names[parameter], group) for parameter, group in listed if parameter in names]

    def _place(self) -> Any:
        if len(self.all) == 1:
            return None
        return self._options(), copy.deepcopy(self._scheduler.state_dict()) if self._scheduler else None

    def _go_to(self, place: Any) -> None:
        options, schedule = place
        for group, kept in zip(self._learner.optimizer.param_groups, options, strict=True):
            # Replicas share it, and a scheduler writes into a rate that is a tensor.
            group.update(_copied(kept))
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copy.deepcopy(schedule))

    # State

    def held(self, held: HeldState) -> HeldState:
        state: dict[str, dict[str, Any]] = {}
        names: dict[Any, str] = {**self._learner.names}
        for replica in self.all:
            own = self._learner.optimizer.state if replica is self.current else replica.state
            prefix = f"replica.{replica.index}." if replica.index else ""
            for parameter, entries in own.items():
                of_name = state.setdefault(names[parameter], {})
                of_name |= {prefix + key: _as_tensor(value, prefix) for key, value in entries.items()}
            for name, group in self._groups() if replica.index else ():
                options = {key: group[key] for key in self._own_options if _is_number(group.get(key))}
                of_name = state.setdefault(name, {})
                of_name |= {
                    f"{prefix}{_GROUP}{key}": _as_tensor(value, prefix) for key, value in options.items()
                }
            for fragment, sent in zip(self._fragments, replica.sent, strict=True):
                for parameter in fragment if self._keeps_own else ():
                    of_name = state.setdefault(self._learner.names[parameter], {})
                    if self._leads:
                        terms = _as_tensor(replica.terms - sent, "replica")
                        of_name[f"replica.{replica.index}.terms"] = terms
                    if replica.weights is not None:
                        own_weights = replica.weights[self._positions[parameter]]
                        of_name[f"replica.{replica.index}.weights"] = own_weights
        for parameter, entries in self._outer.state.items() if not self.all[0].index else ():
            of_name = state.setdefault(names[parameter], {})
            tensors = {key: local(value) for key, value in entries.items() if isinstance(value, Tensor)}
            of_name |= {f"outer.{key}": value for key, value in tensors.items()}
        return replace(held, optimizer={**held.optimizer, "state": state})

    def gathered(self, whole: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, dict[str, Any]] = {}
        for row in self._learner.session.control.gather_objects(whole["optimizer"]["state"]):
            for name, entries in row.items():
                state.setdefault(name, {}).update(entries)
        return {**whole, "optimizer": {**whole["optimizer"], "state": state}}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Any]], cut: Cut | None) -> None:
        """Takes over the state of the replicas. If ``n`` replicas were saved, and another number is here, replica ``i``
        begins with the state of replica ``i % n``."""
        learner = self._learner
        taken = taker(learner.model, learner.optimizer, cut)
        state = {
            name: {key: taken(name, value) for key, value in entries.items()}
            for name, entries in state.items()
        }
        numbers = {
            int(key.split(".")[1]) for entries in state.values() for key in entries if _is_of_replica(key)
        }
        saved = 1 + max(numbers, default=0)
        for replica in self.all:
            replica.state = optimizer_state_from(
                learner.model, learner.optimizer, _entries_of(state, replica.index % saved)
            )
            self._load_own(replica, replica.index % saved, state)
        self.current = self.all[0]
        self._normalized.counts = self.current.normalized
        learner.optimizer.state = self.current.state  # type: ignore[assignment]
        self._outer.state.clear()
        for parameter in self.parameters:
            entries = state.get(learner.names[parameter], {})
            outer = {
                key.removeprefix("outer."): value
                for key, value in entries.items()
                if key.startswith("outer.")
            }
            if outer:
                moved = {key: value.to(parameter.device, copy=True) for key, value in outer.items()}
                self._outer.state[parameter] = moved

    def _load_own(self, replica: LocalReplica, source: int, state: Mapping[str, Mapping[str, Any]]) -> None:
        def entry(parameter: nn.Parameter, key: str) -> Any:
            return state.get(self._learner.names[parameter], {}).get(f"replica.{source}.{key}")

        prefix = f"replica.{source}.{_GROUP}"
        for name, group in self._groups() if len(self.all) == 1 else ():
            saved = {
                key.removeprefix(prefix): value
                for key, value in state.get(name, {}).items()
                if key.startswith(prefix)
            }
            for key in saved.keys() & group.keys():
                like, value = group[key], saved[key]
                group[key] = torch.full_like(like, value) if isinstance(like, Tensor) else type(like)(value)
                self._own_options.add(key)
        replica.weights, replica.terms = None, 0.0
        replica.sent = [0.0] * len(self._fragments)
        if not self._keeps_own:
            return
        weights = [entry(parameter, "weights") for parameter in self.parameters]
        if all(value is not None for value in weights):
            pairs = zip(weights, self.parameters, strict=True)
            replica.weights = [local(value).to(p.device, p.dtype, copy=True) for value, p in pairs]
        terms = [entry(fragment[0], "terms") if self._weighs else None for fragment in self._fragments]
        replica.sent = [0.0 if value is None else -float(value) for value in terms]


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of options of a group, or of a parameter's state."""
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.copy(value)
        for key, value in entries.items()
    }


def _as_tensor(value: Any, prefix: str) -> Any:
    """Returns a number of another replica than 0 as a tensor, which each rank can write for itself."""
    if prefix and isinstance(value, int | float):
        return torch.tensor(float(value), dtype=torch.float64)
    return local(value) if isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_of_replica(key: str) -> bool:
    parts = key.split(".")
    return parts[0] == "replica" and len(parts) > 2 and parts[1].isdecimal()


def _entries_of(state: Mapping[str, Mapping[str, Any]], replica: int) -> dict[str, dict[str, Any]]:
    """Returns the optimizer state of one replica, under the keys of the optimizer."""
    prefix, found = f"replica.{replica}.", dict[str, dict[str, Any]]()
    for name, entries in state.items():
        plain = {key: value for key, value in entries.items() if not key.startswith(OF_REPLICAS)}
        own = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
        own = {
            key: value
            for key, value in own.items()
            if key not in ("weights", "terms") and not key.startswith(_GROUP)
        }
        for key, value in own.items():
            if isinstance(plain.get(key), int | float) and isinstance(value, Tensor):
                own[key] = type(plain[key])(value.item())
        chosen = own if replica else plain
        if chosen:
            found[name] = chosen
    return found
