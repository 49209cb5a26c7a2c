"""Reads a stream from the state in which it was: the state of an object with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from evener.core.plain_values import as_plain, unreadable
from evener.data.fetch import failure
from evener.errors import ConfigurationError, DataError

_BETWEEN = 64
"""Items between two states. A resumed stream reads at most about as many again."""
_BATCHES_AHEAD = 8
"""More batches than can be made and not trained on yet, so that a state is kept for the oldest of them."""


@dataclass(frozen=True)
class StreamState:
    """The state of a stream between two items."""

    epoch: int
    read: int
    """The number of items of the epoch before."""
    state: Any
    following: str
    """The digest of the next item."""

    def as_plain(self) -> dict[str, Any]:
        """Returns the values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> StreamState:
        """Returns the state from the result of :meth:`as_plain`.

        Raises:
            ConfigurationError: If it has another form.
        """
        kinds = {"epoch": int, "read": int, "following": str}
        if any(type(found.get(name)) is not kind for name, kind in kinds.items()) or "state" not in found:
            raise ConfigurationError("the checkpoint's state of the data stream is of another form")
        return cls(found["epoch"], found["read"], found["state"], found["following"])


class RecentStates:
    """The states that a checkpoint may need: batches are made ahead of the training."""

    def __init__(self) -> None:
        self._states: deque[StreamState] = deque()
        self._made: deque[tuple[int, int]] = deque(maxlen=_BATCHES_AHEAD)

    def keep(self, state: StreamState) -> None:
        """Keeps a state. The states of a stream that can be told apart from no other item are of no use."""
        if state.following:
            self._states.append(state)

    def made(self, place: tuple[int, int]) -> None:
        """Notes the epoch and position of a batch. Forgets the states that only earlier batches need."""
        self._made.append(place)
        while len(self._states) > 1 and (self._states[1].epoch, self._states[1].read) <= self._made[0]:
            self._states.popleft()

    def before(self, epoch: int, position: int) -> StreamState | None:
        """Returns the last state at or before a position. None if the position is nearer to the epoch's beginning."""
        found = [each for each in self._states if each.epoch == epoch and each.read <= position]
        return found[-1] if found else None


class WholeStream(IterableDataset[Any]):
    """A stream from a state on, in lists of up to ``chunk`` items, each with the state after it or None.

    Yields a failure as a value.
    """

    def __init__(self, dataset: Any, chunk: int, name: str, rank: int, state: Any) -> None:
        self._dataset, self._chunk, self._state = dataset, chunk, state
        self._doing = f"reading the {name} on rank {rank}"

    def __iter__(self) -> Iterator[Any]:
        unseen = 0
        try:
            items, holder = self._begun()
            while chunk := list(islice(items, self._chunk)):
                unseen, state = unseen + len(chunk), None
                if holder is not None and unseen >= _BETWEEN:
                    unseen, state = 0, deepcopy(holder.state_dict())
                    check_plain(state)
                yield chunk, state
        except Exception as error:
            yield failure(error, self._doing)

    def _begun(self) -> tuple[Iterator[Any], Any]:
        """Returns the items, and the object that has their state or None."""
        dataset, state = self._dataset, self._state
        if has_state(dataset):
            if state is not None:
                dataset.load_state_dict(deepcopy(state))
            return iter(dataset), dataset
        items = iter(dataset)
        if not has_state(items):
            return items, None
        if state is not None:
            items.load_state_dict(deepcopy(state))
        return items, items


def copied(dataset: Any) -> Any:
    """Returns a copy that can load a state while the data set stays at its beginning. Returns None if it has none."""
    try:
        return deepcopy(dataset)
    except Exception:  # any kind of error: of a lock, a connection, an open file
        return None


def has_state(thing: Any) -> bool:
    """Returns True for an object with ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def check_plain(state: Any) -> None:
    """Raises:
    DataError: If a checkpoint cannot hold the state, because reading it might run code of a stranger.
    """
    if strange := unreadable(as_plain(state), "the state_dict of the data stream"):
        raise DataError(strange)
