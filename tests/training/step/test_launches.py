"""On a GPU each operation is a launch: a step of Evener has a few more than a plain loop's, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from evener.core.task.task import Task
from evener.training.engine import Engine
from tests.standin import META, Operations, StandIn

STEPS, BATCH_SIZE, FEATURES, CLASSES = 4, 8, 6, 3
DATA = TensorDataset(torch.zeros(64, FEATURES), torch.zeros(64, dtype=torch.long))
MOST = {"single": 1, "ddp": 10}
"""The launches besides a plain loop's: on one rank one that looks at all gradients, and one that brings its numbers and
the loss together, which are then copied to the host. Of several ranks, one or two for each of the numbers they tell. A
plain loop has one for the gradient of its loss, which is kept from step to step here."""

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


def mlp(hidden: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(hidden)]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


class Launches(TorchDispatchMode):
    """Counts the operations on the device that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        aliases = (each.alias_info for each in function._schema.returns)
        is_view = any(each is not None and not each.is_write for each in aliases)
        leaves = tree_leaves((args, kwargs, made))
        name = str(function.overloadpacket)
        if (
            not is_view
            and "empty" not in name
            and any(isinstance(leaf, Tensor) and leaf.device == META for leaf in leaves)
        ):
            self.names.append(name)
        return made


def of_plain_loop(model: Callable[[], nn.Module]) -> list[str]:
    replica, loss = model().to(META), nn.CrossEntropyLoss()
    optimizer = sgd(replica.parameters())
    x, y = (tensor[:BATCH_SIZE].to(META) for tensor in DATA.tensors)
    for _ in range(STEPS):
        with Launches() as launches:
            loss(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return launches.names


def of_engine(model: Callable[[], nn.Module], strategy: str, **settings: Any) -> list[str]:
    device, ranks = StandIn(), 1 if strategy == "single" else 2
    task = Task(model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd, train=DATA)
    settings |= {"strategy": strategy, "batch_size": BATCH_SIZE, "steps": STEPS}
    settings |= {} if ranks == 1 else {"allreduce": "native"}
    with (
        device.session(world_size=ranks) as session,
        Engine(task, session=session, **settings) as engine,
    ):
        batches = engine.batches()
        for _ in range(STEPS):
            batch = next(batches)
            device.now += 1
            with Operations(device), Launches() as launches:
                engine.step(batch)
        batches.close()
    return launches.names


@pytest.mark.parametrize("strategy", MOST)
def test_a_step_has_few_launches_besides_a_plain_loops(strategy: str) -> None:
    more = []
    for hidden in (1, 9):
        model = partial(mlp, hidden)
        plain, ours = of_plain_loop(model), of_engine(model, strategy)
        copies = ours.count("aten.copy_") if strategy == "ddp" else 0  # of gradients, into DDP's buckets
        assert copies in (0, 2 * (hidden + 1))
        more.append(len(ours) - copies - len(plain))
    assert more[0] <= MOST[strategy], ours
    assert more[0] == more[1], "it depends on the number of parameters"


def test_a_lean_step_looks_at_no_gradient() -> None:
    model = partial(mlp, 3)
    usual, lean = of_engine(model, "single"), of_engine(model, "single", lean=True)
    assert sorted(set(usual) - set(lean)) == ["aten._foreach_norm", "aten.stack"]
    plain = of_plain_loop(model)
    assert len(lean) == len(plain) - 1, "the gradient of the loss is kept from step to step"
    assert "aten.ones_like" in plain
