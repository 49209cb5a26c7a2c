"""Ranks that are started once and run many tests: a spawn costs seconds, a call to a running rank does not."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import chdir, suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import cloudpickle

_START_SECONDS = 240
"""Eight ranks on two cores, where another process starts as many, are long in coming up."""

_IMPORTED_ONCE = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "evener.training.engine",
    "evener.tools.verify",
    "pytest",
    "hypothesis",
    "tests.tasks",
    "tests.set_apart",
]
"""What every rank needs. One process imports it, and the ranks are forks of that process: each has it at once."""


_OFTEN = 20
"""Tests, or calls of a rank."""


class Modules:
    """What modules hold, kept away from the garbage collector, which is asked to collect with every engine that ends:
    half of the time of a small run would go into looking at PyTorch."""

    def __init__(self) -> None:
        self._known = self._calls = 0

    def set_apart(self) -> None:
        """If there are more of them than at the last call, and often for what PyTorch and pytest have kept since: each
        estimate of a step collects six times."""
        self._calls += 1
        if len(sys.modules) != self._known or not self._calls % _OFTEN:
            self._known = len(sys.modules)
            gc.collect()
            gc.freeze()


_CACHES_OF_MESHES = [
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    (
        "torch.distributed.tensor",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
    ),
    ("torch._C", "_clear_DTensor_sharding_propagator_cache"),
]
"""Functions that clear them, by module. Not every version of PyTorch has all of them."""


def forget_meshes() -> None:
    """Clears PyTorch's caches of meshes, which keep the meshes' process groups for good.

    Each group has threads that wake a hundred times a second, also while other tests run.
    """
    for module, name in _CACHES_OF_MESHES:
        if module in sys.modules:
            with suppress(AttributeError):
                attrgetter(name)(sys.modules[module])()


def _check_closed(function: Callable[..., Any]) -> None:
    """A session that is left open would speak in the tests that follow."""
    marks = sys.modules.get("evener.core.phase_marks")
    if marks and marks.process_watchdogs:
        marks.process_watchdogs.clear()
        raise AssertionError(f"{function.__qualname__} left a session open")


def _serve(rank: int, world_size: int, store: str, path: list[str], connection: Connection) -> None:
    sys.path[:] = path
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = dist.FileStore(store, world_size)
    place.set(f"up {rank}", "")
    place.wait([f"up {other}" for other in range(world_size)], timedelta(seconds=_START_SECONDS))
    dist.init_process_group(
        "gloo",
        store=place,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    modules = Modules()
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        try:
            function, args, kwargs = cloudpickle.loads(message)
            answer = (True, function(*args, **kwargs))
            _check_closed(function)
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(cloudpickle.dumps(answer))
        forget_meshes()
        modules.set_apart()
    os._exit(0)


def fork_of_imports(function: Callable[..., None], *args: Any, daemon: bool = False) -> BaseProcess:
    """Starts a process that calls the function: a fork of one process that has imported what every rank needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with chdir(Path(__file__).parents[1]):  # where that process finds ``tests``
        forkserver.ensure_running()
    process = context.Process(target=function, args=args, daemon=daemon)
    with patch.dict(sys.modules, __main__=ModuleType("__main__")):  # or it would import that program
        process.start()
    return process


class RankPool:
    """``world_size`` processes with one thread each and a gloo process group; ``run`` calls a function on all."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="evener-ranks-", ignore_cleanup_errors=True)
        store = str(Path(self._directory.name) / "store")
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            served = (rank, self.world_size, store, list(sys.path), theirs)
            process = fork_of_imports(_serve, *served, daemon=True)
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 90, **kwargs: Any) -> list[Any]:
        """What ``function(*args, **kwargs)`` returned on every rank, in order of rank.

        Raises:
            AssertionError: With the rank's traceback, if it failed on any; the ranks are then started afresh.
        """
        patience = timeout
        if not self._processes:
            self._start()
            patience += _START_SECONDS
        message = cloudpickle.dumps((function, args, kwargs))
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(message)
            except OSError:
                self.close()
                raise AssertionError(f"rank {rank} died after it had answered") from None
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(patience):
                self.close()
                raise AssertionError(f"rank {rank} did not answer within {patience} s")
            try:
                answers.append(cloudpickle.loads(connection.recv_bytes()))
            except EOFError:
                self.close()
                raise AssertionError(f"rank {rank} died") from None
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        if self._directory is not None:
            self._directory.cleanup()
        self._processes, self._connections = [], []
