"""No pickle of a store is ever read."""

from __future__ import annotations

import json
import os
import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from evener.distributed.launch.rendezvous_state import JsonBackend, as_json, from_json
from evener.torch_internals.elastic import NodeDesc, RendezvousState


def state() -> RendezvousState:
    found, nodes = RendezvousState(), [NodeDesc(f"host{n}", 10 + n, n) for n in range(4)]
    now = datetime.now(UTC)
    found.round, found.complete, found.closed, found.deadline = 3, True, False, now
    found.participants = {nodes[0]: 1, nodes[1]: 0}
    found.wait_list, found.redundancy_list = {nodes[2]}, {nodes[3]}
    found.last_heartbeats = dict.fromkeys(nodes, now)
    return found


def test_a_state_comes_back_as_it_was() -> None:
    for each in (state(), RendezvousState()):
        assert vars(from_json(as_json(each))) == vars(each)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_the_store_is_refused_and_not_run(tmp_path: Path) -> None:
    store = dist.HashStore()
    backend = C10dRendezvousBackend(store, "id")
    parameters = RendezvousParameters("c10d", "nowhere:0", "id", 1, 1, local_addr="127.0.0.1")
    handler = create_handler(store, JsonBackend(backend), parameters)
    found = backend.set_state(pickle.dumps(Malicious(tmp_path / "ran")))
    assert found is not None
    with pytest.raises(RendezvousStateError, match="a stranger"):
        handler.next_rendezvous()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"round": "3"},
        {"complete": 1},
        {"deadline": "2026-01-01"},
        {"deadline": 5},
        {"participants": {}},
        {"participants": [["host", 1, 1]]},
        {"participants": [["host", 1, [], 1]]},
        {"participants": [["host", 1, 1, True]]},
        {"last_heartbeats": [["host", 1, 1, "now"]]},
        {"wait_list": [[1, 2, 3]]},
        {"wait_list": [["host", 2]]},
        {"redundancy_list": 3},
    ],
    ids=str,
)
def test_a_state_of_another_form_is_refused(change: dict[str, Any]) -> None:
    text = json.dumps(json.loads(as_json(state())) | change).encode()
    with pytest.raises(RendezvousStateError):
        from_json(text)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, pickle.dumps(1)])
def test_what_is_no_state_is_refused(text: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        from_json(text)
