"""Private names of process groups, DistributedDataParallel, torchrun and checkpoints, exercised."""

from __future__ import annotations

import gc
import importlib
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.nn.parallel import DistributedDataParallel

from evener.distributed.loopback import OneMachine
from tests.torch_internals.borrowing import borrowed

STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = dist.group.WORLD
    assert found is not None
    yield found
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts back the handlers of signals that an agent replaces."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("group")
def test_the_default_store_is_that_of_the_group() -> None:
    with borrowed("process_groups") as names:
        names.default_store().set("key", "value")
        assert names.default_store().get("key") == b"value"


@pytest.mark.usefixtures("group")
def test_a_group_is_made_under_a_given_name() -> None:
    with borrowed("process_groups") as names:
        import torch.testing._internal.distributed.fake_pg  # as parts of torch do; it registers a backend

        made = names.named_group("a_name_of_our_own", [0], "cpu:gloo,cuda:gloo", timedelta(seconds=10))
        assert dist.get_backend(made) == "gloo"
        assert made.group_name == "a_name_of_our_own"
        assert dist.get_process_group_ranks(made) == [0]
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=made)
        before = names.groups_open()
        dist.destroy_process_group(made)
        assert names.groups_open() == before - 1


def test_a_group_with_a_given_name_is_not_split_off_the_default_group(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would wait for the ranks that are no members, which do not call it."""
    asked: list[Any] = []
    with borrowed("process_groups") as names:
        group.bound_device_id = torch.device("cpu", 0)
        monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", asked.append)
        made = names.named_group("a_name", [0], "gloo", timedelta(seconds=10))
        dist.destroy_process_group(made)
        assert not asked
        assert group.bound_device_id == torch.device("cpu", 0)


def test_the_backends_of_groups_are_known(group: dist.ProcessGroup) -> None:
    with borrowed("process_groups") as names:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers a backend
        other = dist.new_group([0], backend="cpu:gloo,cuda:fake")
        assert isinstance(other, dist.ProcessGroup)
        assert (names.backends_of(group), names.backends_of(other)) == ({"gloo"}, {"gloo", "fake"})
        assert names.backends_of(None) == {"gloo", "fake"}
        dist.destroy_process_group(other)
        assert names.backends_of(None) == {"gloo"}


@pytest.mark.usefixtures("group")
def test_ddp_logs_its_buckets() -> None:
    with borrowed("ddp") as names:
        logged = names.logged(DistributedDataParallel(nn.Linear(3, 2)))
        assert [int(size) for size in logged["bucket_sizes"].split(",")] == [32]


@pytest.mark.usefixtures("group")
def test_ddp_broadcasts_buffers_through_one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    with borrowed("ddp") as names:
        told: list[int] = []
        original = getattr(DistributedDataParallel, names.BROADCAST_BUFFERS)

        def counted(model: Any, tensors: Any, *rest: Any) -> Any:
            told.append(len(tensors))
            return original(model, tensors, *rest)

        monkeypatch.setattr(DistributedDataParallel, names.BROADCAST_BUFFERS, counted)
        DistributedDataParallel(nn.BatchNorm1d(3))(torch.ones(2, 3))
        assert told == [3]
        DistributedDataParallel(nn.BatchNorm1d(3), **names.no_buffer_broadcast())(torch.ones(2, 3))
        assert told == [3]


@pytest.mark.usefixtures("group")
def test_ddp_leaves_parameters_alone() -> None:
    with borrowed("ddp") as names:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        names.leave_out(model, ["1.weight", "1.bias"])
        assert names.logged(DistributedDataParallel(model))["num_parameter_tensors"] == 2


def test_the_agent_tells_of_its_workers(tmp_path: Path) -> None:
    """Of which one ends with status 3."""
    with borrowed("elastic") as names:
        parameters = RendezvousParameters(
            "c10d", "localhost:0", "test", 1, 1, is_host=True, read_timeout=30, join_timeout=30
        )
        handler = get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            "test", 1, handler, entrypoint=sys.executable, args=("-c", "exit(3)"), max_restarts=0
        )
        contexts: list[Any] = []
        agent = type("Told", (names.ElasticAgent,), {"started": lambda _, context: contexts.append(context)})(
            spec, DefaultLogsSpecs(log_dir=str(tmp_path))
        )
        result = agent.run()
        assert result.failures[0].exitcode == 3
        assert agent.context is contexts[0]
        assert names.failed(contexts[0]) == {0}
        handler.shutdown()


def test_the_agent_changes_the_number_of_its_workers_while_one_stays(tmp_path: Path) -> None:
    """Of two workers the first one ends; the other one becomes rank 0 of three."""
    with borrowed("elastic") as names:
        tells = "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}-{os.environ[\"WORLD_SIZE\"]}', 'w')"
        ends = "os.environ['RANK'] == '0' and os.environ['WORLD_SIZE'] == '2'"
        args = ("-c", f"import os, sys, time\n{tells}\n({ends}) or time.sleep(1.5)", str(tmp_path))
        spec = WorkerSpec("test", 2, OneMachine(10), entrypoint=sys.executable, args=args, max_restarts=0)
        kept: list[dict[int, int]] = []

        def look(agent: Any) -> None:
            running = names.running(agent.context)
            if not kept and running.keys() == {1}:
                kept.append(running)
                agent.renumber([1], 3)
                kept.append(agent.context.pids())

        agent = type("Changes", (names.ElasticAgent,), {"follow_changes": look})(
            spec, DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
        )
        result = agent.run()
        assert not result.is_failed()
        assert sorted(result.return_values) == [0, 1, 2]
        assert kept[1][0] == kept[0][1]
        told = {path.name for path in tmp_path.iterdir() if path.is_file()}
        assert told == {"0-2", "1-2", "1-3", "2-3"}


def test_the_agent_meets_again_when_a_machine_of_the_round_is_silent(tmp_path: Path) -> None:
    class Silent(OneMachine):
        def next_rendezvous(self) -> Any:
            info = super().next_rendezvous()
            info._world_size = 2 if self._rounds == 1 else 1
            return info

    with borrowed("elastic") as names:
        for again in (True, False):
            spec = WorkerSpec(
                "test", 1, Silent(0.5), entrypoint=sys.executable, args=("-c", "pass"), max_restarts=0
            )
            agent = type("Meets", (names.ElasticAgent,), {"meets_again": lambda _, again=again: again})(
                spec, DefaultLogsSpecs(log_dir=str(tmp_path / str(again)))
            )
            if again:
                assert not agent.run().is_failed()
            else:
                with pytest.raises(dist.DistError):
                    agent.run()


def test_the_agent_starts_one_worker_in_place_of_another(tmp_path: Path) -> None:
    """That ends with status 1 the first time; the other one is left as it is."""
    with borrowed("elastic") as names:
        parameters = RendezvousParameters(
            "c10d", "localhost:0", "test", 1, 1, is_host=True, read_timeout=30, join_timeout=30
        )
        handler = get_rendezvous_handler(parameters)
        fails = "os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
        args = ("-c", f"import os, time\nassert not ({fails})\ntime.sleep(1)")
        spec = WorkerSpec("test", 2, handler, entrypoint=sys.executable, args=args, max_restarts=2)
        contexts: list[Any] = []
        seen: list[tuple[set[int], dict[int, int]]] = []

        def replaces(agent: Any, failures: dict[int, Any]) -> bool:
            seen.append((set(failures), names.running(agent.context)))
            return True

        acts = {"started": lambda _, context: contexts.append(context), "replaces": replaces}
        agent = type("Replaces", (names.ElasticAgent,), acts)(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))
        result = agent.run()
        assert not result.is_failed()
        assert agent.restarts_done == 1
        assert agent.is_alone
        (failed, running), *rest = seen
        assert (failed, set(running), rest) == ({1}, {0}, [])
        assert len(contexts) == 1
        handler.shutdown()


ENDING = """
import atexit, os, threading, time
from evener.torch_internals import interpreter
atexit.register(print, "exit function", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
interpreter.join_threads()
interpreter.run_exit_functions()
os._exit(0)
"""


def test_an_interpreter_is_started_and_ended_as_python_does() -> None:
    with borrowed("interpreter") as names:
        command = [sys.executable, *names.flags(), "-W", "error", "-X", "utf8", "-c", ENDING]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "thread\nexit function\n"
        flags = "from evener.torch_internals.interpreter import flags; print(*flags())"
        command = [sys.executable, "-W", "error", "-X", "utf8", "-c", flags]
        assert "-Werror" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_ask_an_object_for_its_pieces(tmp_path: Path) -> None:
    """``__create_write_items__`` and ``__create_chunk_list__``, and the planners that look an object up."""
    with borrowed("dcp_planner", "checkpoint") as names:
        slices = importlib.import_module("evener.components.sharded_tensor.shard_spec")
        pieces = (range(0, 1), range(1, 4))
        for index in (0, 1):
            own = torch.arange(4.0)[pieces[index].start : pieces[index].stop]
            state = {"model/a": names.ShardPiece(own, slices.ShardSpec("tensor", 0, pieces, index))}
            writer = checkpoint.FileSystemWriter(tmp_path / str(index))
            checkpoint.save(state, storage_writer=writer, planner=names.PieceSaver(), no_dist=True)
            metadata = checkpoint.FileSystemReader(tmp_path / str(index)).read_metadata()
            entry: Any = metadata.state_dict_metadata["model/a"]
            assert entry.size == torch.Size([4])
            assert [tuple(chunk.offsets) for chunk in entry.chunks] == [(pieces[index].start,)]
        whole = {"model/a": torch.arange(4.0)}
        writer = checkpoint.FileSystemWriter(tmp_path / "whole")
        checkpoint.save(whole, storage_writer=writer, planner=names.PieceSaver(), no_dist=True)
        room = names.ShardPiece(torch.zeros(3), slices.ShardSpec("tensor", 0, pieces, 1))
        reader = checkpoint.FileSystemReader(tmp_path / "whole")
        checkpoint.load({"model/a": room}, storage_reader=reader, planner=names.PieceLoader(), no_dist=True)
        assert room.held.tolist() == [1, 2, 3]


def test_machines_that_came_to_a_rendezvous_are_counted() -> None:
    parameters = RendezvousParameters("c10d", "localhost:0", "names", 1, 1, local_addr="127.0.0.1")
    handler = get_rendezvous_handler(parameters)
    with borrowed("elastic") as module:
        assert module.participants(None) is None
        assert module.participants(handler) == 0
        handler.next_rendezvous()
        assert module.participants(handler) == 1
    handler.shutdown()


def test_a_rendezvous_agrees_on_a_state_of_these_fields() -> None:
    with borrowed("elastic") as names:
        names_of_fields = {"round", "complete", "deadline", "closed"}
        names_of_fields |= {"participants", "wait_list", "redundancy_list", "last_heartbeats"}
        assert vars(names.RendezvousState()).keys() == names_of_fields
        node = names.NodeDesc("host", 1, 2)
        assert (node.addr, node.pid, node.local_id) == ("host", 1, 2)


def test_a_store_can_be_cloned() -> None:
    """Documented, but torch's types do not know it."""
    with borrowed("watchdog", "distributed.watchdog"):
        store: Any = dist.HashStore()
        dist.PrefixStore("a", store.clone()).set("key", "value")
        assert store.get("a/key") == b"value"


def test_a_group_has_nobody_at_the_other_end() -> None:
    with borrowed("process_groups") as names:
        names.open_fake_group(3, 100)
        try:
            assert (dist.get_rank(), dist.get_world_size()) == (3, 100)
            assert dist.get_backend() == names.FAKE_BACKEND
            dist.all_reduce(torch.ones(2))
        finally:
            dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ddp_can_be_kept_from_making_its_buckets_anew() -> None:
    with borrowed("ddp") as names:
        model = DistributedDataParallel(nn.Linear(2, 2))
        with names.buckets_kept():
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
        assert not model._get_ddp_logging_data().get("has_rebuilt_buckets")  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("group")
def test_a_process_group_is_freed_after_the_reducer_of_its_model() -> None:
    with borrowed("ddp") as names:
        freed: list[str] = []
        whole = dist.new_group([0])
        with names.groups_freed_last():
            model = DistributedDataParallel(nn.Linear(2, 2), process_group=whole)
        for thing, name in ((model.reducer, "reducer"), (model.logger, "logger"), (whole, "group")):
            weakref.finalize(thing, freed.append, name)
        model(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group(whole)
        del thing, whole, model
        gc.collect()
        assert sorted(freed[:2]) == ["logger", "reducer"]
        assert freed[2:] == ["group"]


@pytest.mark.usefixtures("group")
def test_a_model_that_holds_its_process_group_can_be_pickled() -> None:
    with borrowed("ddp") as names:
        with names.groups_freed_last():
            model = DistributedDataParallel(nn.Linear(2, 2))
            saved = pickle.dumps(model)
            again = pickle.loads(saved)
        assert b"evener." not in saved, "it can be loaded without Evener"
        again(torch.ones(1, 2)).sum().backward()
        for each in (model, again):
            names_of = list(vars(each))
            (held,) = (name for name, value in vars(each).items() if getattr(value, "group", None))
            assert names_of.index(held) > max(map(names_of.index, ("reducer", "logger")))
