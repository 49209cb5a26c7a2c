"""Stores the rendezvous state of a run as JSON instead of pickle.

torch stores the state as a pickle. The store has no password, so whoever reaches its port could write a pickle that
runs code on every machine. Here a pickle never leaves the process: the state that torch has pickled is converted to
JSON, and JSON from the store is checked field by field before torch gets it.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from evener.files import parsed
from evener.torch_internals.elastic import NodeDesc, RendezvousState


class JsonBackend(RendezvousBackend):
    """Wraps the backend ``inner``: torch passes and receives pickles, ``inner`` stores JSON.

    Args:
        by_arrival: True to number machines in the order in which they came to the run, and not by their addresses. Then
            machines that join later do not become rank 0, which has the records.
    """

    def __init__(self, inner: RendezvousBackend, by_arrival: bool = False) -> None:
        self._inner, self._by_arrival = inner, by_arrival
        self._arrivals: list[NodeDesc] = []

    @property
    def name(self) -> str:
        return self._inner.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._inner.get_state()
        return None if found is None else (self._pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        own: RendezvousState = pickle.loads(state)  # safe: torch has just pickled it in this process
        if self._by_arrival:
            self._arrivals += [node for node in own.participants if node not in self._arrivals]
            if own.complete:
                own.participants = _numbered(own.participants, self._arrivals)
        found = self._inner.set_state(as_json(own, self._arrivals), token)
        return None if found is None else (self._pickled(found[0]), found[1], found[2])

    def _pickled(self, text: bytes) -> bytes:
        state = from_json(text)
        self._arrivals = arrivals(text)
        return pickle.dumps(state)


def _numbered(participants: dict[NodeDesc, int], arrivals: list[NodeDesc]) -> dict[NodeDesc, int]:
    ordered = sorted(participants, key=arrivals.index)
    return {node: rank for rank, node in enumerate(ordered)}


def as_json(state: RendezvousState, arrivals: Sequence[NodeDesc] = ()) -> bytes:
    """Converts the state, and the machines in the order of their arrival, to JSON."""
    fields = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": state.deadline.isoformat() if state.deadline else None,
        "participants": [[*_node(node), rank] for node, rank in state.participants.items()],
        "last_heartbeats": [[*_node(node), time.isoformat()] for node, time in state.last_heartbeats.items()],
        "wait_list": sorted(map(_node, state.wait_list)),
        "redundancy_list": sorted(map(_node, state.redundancy_list)),
        "arrivals": [_node(node) for node in arrivals],
    }
    return json.dumps(fields).encode()


def from_json(text: bytes) -> RendezvousState:
    """Parses what :func:`as_json` wrote.

    Raises:
        RendezvousStateError: If ``text`` is anything else.
    """
    try:
        fields, state = _exactly(parsed(text.decode()), dict), RendezvousState()
        state.round = _exactly(fields["round"], int)
        state.complete, state.closed = _exactly(fields["complete"], bool), _exactly(fields["closed"], bool)
        state.deadline = None if fields["deadline"] is None else _time(fields["deadline"])
        state.participants = _by_node(fields["participants"], lambda rank: _exactly(rank, int))
        state.last_heartbeats = _by_node(fields["last_heartbeats"], _time)
        state.wait_list = {_desc(*row) for row in _exactly(fields["wait_list"], list)}
        state.redundancy_list = {_desc(*row) for row in _exactly(fields["redundancy_list"], list)}
    except (ValueError, TypeError, KeyError) as error:
        raise RendezvousStateError(
            "the store of the run holds something else than what its machines have agreed on, as another version of "
            f"Evener or a stranger writes it: {error}"
        ) from error
    return state


def arrivals(text: bytes) -> list[NodeDesc]:
    """Returns the machines in the order of their arrival, of what :func:`as_json` wrote and `from_json` accepts."""
    try:
        return [_desc(*row) for row in _exactly(parsed(text.decode()).get("arrivals", []), list)]
    except (ValueError, TypeError) as error:
        raise RendezvousStateError(f"the store of the run holds a wrong list of machines: {error}") from error


def _node(node: NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _desc(address: Any, pid: Any, local_id: Any) -> NodeDesc:
    return NodeDesc(_exactly(address, str), _exactly(pid, int), _exactly(local_id, int))


def _by_node(rows: Any, value: Callable[[Any], Any]) -> dict[NodeDesc, Any]:
    return {_desc(*node): value(last) for *node, last in _exactly(rows, list)}


def _time(text: Any) -> datetime:
    found = datetime.fromisoformat(_exactly(text, str))
    if found.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return found


def _exactly(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands for a {kind.__name__}")
    return value
