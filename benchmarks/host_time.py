"""What the processor does in a step besides what a plain loop does, by part.

    python -m benchmarks.host_time [--turns 15] [--steps 20] [--parts 30]

The model has many small parameters and reads them in one operation. On a CPU rank, in turns: a loop that picks its
samples itself, runs forward and backward and steps a foreach SGD, and Evener's engine with the same. Told is the time
of the thread that trains, which other programs disturb less than they do the time that passes.

On the stand-in for a GPU that tests use, the host does what it would do for a GPU, and no operation computes. Many of
its operations are written in Python, and slower than a GPU's. So the time inside of the operations that Evener adds to
a plain loop's, the look at the gradients and what brings its numbers together, is taken off. One rank of two is told
beside the same loop, and beside one with DistributedDataParallel. Its sums end at once; the other rank is not there.

What each module of Evener takes by itself is told as well, with what it calls of what is built into Python and PyTorch,
from a profile. A profile makes calls slower than they are: the parts are scaled to the time of a step without it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import linear_regression, median
from typing import Any
from unittest import mock

import torch
from tests.standin import Operations, StandIn, sum_at_once
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import evener
from benchmarks.drawn import rand, randint
from benchmarks.results import Table, Value, cell, record
from evener.components import gradients, late_norms
from evener.core.task.task import Task
from evener.distributed.session import Session
from evener.training.engine import Engine
from evener.training.step import late_results

NUMBERS = 10, 100, 1000, 3000
SHOWN = 100
"""The number of parameters of the model whose parts are shown."""
SAMPLES, BATCH_SIZE, FEATURES, CLASSES = 4096, 16, 8, 4
ADDED = (gradients, "largest"), (late_norms, "are_finite"), (late_results, "_together")
"""The functions that do what Evener adds to the operations of a plain loop."""
SETTLED = 4
"""Steps after which buckets stay as they are."""
ROOT = str(Path(evener.__file__).parent)
PLAIN = "forward, backward, optimizer"
Source = Iterator[None]


class Many(nn.Module):
    """A linear model whose weight is the mean of ``number`` parameters of as many elements."""

    def __init__(self, number: int) -> None:
        super().__init__()
        made = (nn.Parameter(torch.zeros(FEATURES * CLASSES)) for _ in range(number))
        self.pieces = nn.ParameterList(made)

    def forward(self, x: Tensor) -> Tensor:
        pieces = torch.cat(list(self.pieces)).view(-1, FEATURES, CLASSES)
        return x @ pieces.mean(0)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


def data() -> TensorDataset:
    return TensorDataset(rand(SAMPLES, FEATURES), randint(CLASSES, (SAMPLES,)))


def plain(
    number: int, session: Session, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> Source:
    """The leanest loop there is: it picks the rows itself, on the host, and copies them."""
    device, model = session.device, Many(number).to(session.device)
    replica, loss = wrap(model), nn.CrossEntropyLoss()
    optimizer, (inputs, targets) = sgd(model.parameters()), data().tensors
    while True:
        for samples in torch.randperm(SAMPLES).split(BATCH_SIZE // session.world_size):  # type: ignore[no-untyped-call]
            x, y = inputs[samples].to(device), targets[samples].to(device)
            loss(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def ours(number: int, session: Session, tick: Callable[[], None]) -> Source:
    """Evener's engine, which watches, records and tells as ever."""
    task = Task(
        model=partial(Many, number), loss=nn.CrossEntropyLoss(), optimizer=sgd, train=data(), name="many"
    )
    with Engine(task, session=session, batch_size=BATCH_SIZE, epochs=10**6, allreduce="native") as engine:
        for batch in engine.batches():
            tick()
            engine.step(batch)
            yield


class Added:
    """Measures the time of the thread inside of the operations that Evener adds to those of a plain loop."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, name in ADDED:
                function = self._timed(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, function))
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            found = function(*args)
            self.seconds += time.thread_time() - began
            return found

        return timed


@contextmanager
def opened(kind: str, ranks: int = 1) -> Iterator[tuple[Session, Callable[[], None]]]:
    """A session on that device, and what is called before each step: the stand-in counts them."""
    if kind == "cpu":
        with Session(device="cpu") as session:
            torch.set_num_threads(1)  # on cores that others use too, threads would wait for each other
            yield session, lambda: None
        return
    device = StandIn()

    def tick() -> None:
        device.now += 1

    sum_at_once()
    with device.session(world_size=ranks) as session:
        torch.set_num_threads(1)
        yield session, tick


def thread_seconds(source: Source, steps: int) -> float:
    began = time.thread_time()
    for _ in range(steps):
        next(source)
    return (time.thread_time() - began) / steps


def in_turns(sources: Mapping[str, Source], turns: int, steps: int, added: Added) -> dict[str, float]:
    """The median seconds of a step of each, without those inside of added operations."""
    for source in sources.values():
        thread_seconds(source, steps)
    found: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(turns):
        for name, source in sources.items():
            added.seconds = 0.0
            whole = thread_seconds(source, steps)
            found[name].append(whole - added.seconds / steps)
    return {name: median(times) for name, times in found.items()}


def own_parts(profile: cProfile.Profile, steps: int) -> dict[str, tuple[float, float]]:
    """For each module of Evener, and for all else together, its calls and its seconds in a step."""
    calls, seconds = Counter[str](), Counter[str]()
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (path, _, _), (_, count, own, _, callers) in stats.items():
        if path.startswith(ROOT):
            calls[path] += count
            seconds[path] += own
        elif path == "~":  # built into Python or torch: part of what calls it
            for (caller, _, _), (_, times, taken, _) in callers.items():
                name = caller if caller.startswith(ROOT) else PLAIN
                calls[name] += times
                seconds[name] += taken
        else:
            calls[PLAIN] += count
            seconds[PLAIN] += own
    names = {path: path.removeprefix(f"{ROOT}/").removesuffix(".py") for path in seconds}
    return {names[path]: (calls[path] / steps, seconds[path] / steps) for path in seconds}


def parts(kind: str, number: int, steps: int) -> dict[str, tuple[float, float]]:
    """The calls and seconds of each module in a step, scaled to the time of a step that nobody watches."""
    with opened(kind) as (session, tick):
        source = ours(number, session, tick)
        thread_seconds(source, steps)
        whole = median(thread_seconds(source, steps) for _ in range(5))
        profile = cProfile.Profile()
        profile.enable()
        thread_seconds(source, 5 * steps)
        profile.disable()
        source.close()  # type: ignore[attr-defined]
    found = own_parts(profile, 5 * steps)
    scale = whole / sum(seconds for _, seconds in found.values())
    return {name: (calls, scale * seconds) for name, (calls, seconds) in found.items()}


def table_of_parts(found: Mapping[str, tuple[float, float]], most: int) -> Table:
    """The modules that take the most by themselves, and the others together."""
    own = sorted(found.items(), key=lambda item: item[1][1], reverse=True)
    rows: list[list[Value]] = [
        [name, cell(round(calls)), cell(1e6 * seconds, "us")] for name, (calls, seconds) in own
    ]
    others = [each for _, each in own[most:]]
    rest: list[Value] = [f"{len(others)} others", cell(round(sum(calls for calls, _ in others)))]
    rows[most:] = [[*rest, cell(1e6 * sum(seconds for _, seconds in others), "us")]]
    return Table(["module", "calls", "of a step"], rows)


def besides_plain(kind: str, turns: int, steps: int, ranks: int = 1) -> Table:
    """What a step takes besides a plain loop's, for each number of parameters, and how it grows."""
    rows, besides, names = list[list[Value]](), list[float](), list[str]()
    for number in NUMBERS:
        added = Added()
        with opened(kind, ranks) as (session, tick), added.measured():
            sources = {"a plain loop": plain(number, session)}
            if ranks > 1:
                sources["DDP"] = plain(number, session, partial(DistributedDataParallel, init_sync=False))
            sources["Evener"] = ours(number, session, tick)
            settle(sources)
            found = in_turns(sources, turns, steps, added)
            for source in sources.values():
                source.close()  # type: ignore[attr-defined]
        names = list(found)
        besides.append(1e6 * (found["Evener"] - found["a plain loop"]))
        times = [cell(1e6 * seconds, "us") for seconds in found.values()]
        rows.append([f"{number} parameters", *times, cell(besides[-1], "us")])
    slope = linear_regression(NUMBERS, besides).slope
    rows.append(["each further parameter", *[None for _ in names], cell(slope, "us")])
    return Table(["model", *names, "more than a plain loop"], rows)


def settle(sources: Mapping[str, Source]) -> None:
    """Takes the steps in which DistributedDataParallel puts its buckets in order, and reads the device for that."""
    with Operations(StandIn()):
        for source in sources.values():
            for _ in range(SETTLED):
                next(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--parts", type=int, default=25, help="modules that get a row of their own")
    arguments = parser.parse_args()
    for kind, place in (("cpu", "a CPU rank"), ("stand-in", "the stand-in for a GPU")):
        record("host_time", f"a step on {place}", besides_plain(kind, arguments.turns, arguments.steps))
    two = besides_plain("stand-in", arguments.turns, arguments.steps, ranks=2)
    record("host_time", "a step of one of two ranks on the stand-in for a GPU", two)
    on_cpu = parts("cpu", SHOWN, arguments.steps)
    for kind, found in (("a CPU rank", on_cpu), ("the stand-in", parts("stand-in", SHOWN, arguments.steps))):
        title = f"parts of a step with {SHOWN} parameters on {kind}"
        record("host_time", title, table_of_parts(found, arguments.parts))


if __name__ == "__main__":
    main()
