"""Models whose code cannot be read: what a trial finds, what it refuses, and what a stage does when it runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evener
from evener.core.task.task import call_model
from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.nn.context import scope
from evener.strategies.pipeline.costs import measure
from evener.strategies.pipeline.module_calls import leaves_of
from evener.strategies.pipeline.remote_weights import Away, whole_forms
from evener.strategies.pipeline.stage_forward import StagedForward
from evener.strategies.pipeline.stages import Stages, layers_of, parts_checkpoint
from evener.strategies.pipeline.traced_run import Rehearsal, try_both
from evener.strategies.pipeline.tracing import opened_in

CPU = torch.device("cpu")
SIZE = 4
Way = Callable[["Model", Tensor], Any]


class Block(nn.Module):
    """Keeps what it made, and can be told to write into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(SIZE, SIZE), torch.zeros(())

    def forward(self, x: Tensor, *others: Tensor, into: bool = False) -> Tensor:
        found = torch.tanh(self.linear(x + sum(others)))
        self.kept = found.mean()
        return x.add_(found) if into else found.clone()


class Model(nn.Module):
    """Goes the way that it is given, which nobody can read: it is asserted that there is something to go through."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = [way]
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.place = nn.Parameter(torch.linspace(-1, 1, SIZE))
        self.drop = evener.nn.Dropout(0.5)
        self.drop.layer = "drop"
        self.register_buffer("offset", torch.linspace(0, 1, SIZE))

    def forward(self, x: Tensor) -> Any:
        assert len(x)
        return self.way[0](self, x)


def in_turn(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def around(model: Model, x: Tensor) -> Tensor:
    """A weight that is read, writing in place, a value that skips blocks, and a buffer."""
    x = first = model.blocks[0](x)
    x += model.place
    x = model.blocks[1](x) * 2
    x = model.blocks[2](x, first)
    x[:, 0] += first[:, 1]
    return torch.cat((model.blocks[3](x) + model.offset, first), 1)


def by_number(model: Model, x: Tensor) -> Tensor:
    """The number that decides is known after the first block, and asked for after the third."""
    first = model.blocks[0](x)
    x = model.blocks[2](model.blocks[1](first))
    x = x + 1 if float(first.detach().sum()) > -1e9 else x - 1
    found: Tensor = model.blocks[3](x)
    return found


def several(model: Model, x: Tensor) -> dict[str, Any]:
    """One module called again, dropout on several stages, and outputs in a tree."""
    x = model.drop(model.blocks[0](x))
    y = model.drop(model.blocks[1](x))
    return {"both": (model.drop(model.blocks[2](y)), y), "none": None}


def tried(model: nn.Module, x: Tensor) -> Any:
    found = Rehearsal(model, leaves_of(model, opened_in(model, ())), {"x": x}, CPU, None)
    return try_both(found)


def staged(way: Way, cut: str, seed: int = 0) -> tuple[Model, StagedForward]:
    torch.manual_seed(seed)
    model = Model(way)
    stages = Stages(model, cut, cut.count(",") + 2, None, tried(model, torch.randn(3, SIZE)))
    forward = StagedForward(stages, {})
    return model, forward


def through(model: Model, forward: StagedForward, x: Tensor) -> Any:
    """One stage after the other, each as on a rank of its own."""
    received: Any = ()
    model.forward = forward  # type: ignore[method-assign]
    for number in range(len(forward.stages)):
        with scope(torch.arange(len(x)), 0, 0):
            received = forward.run(number, received, call_model, x.clone())
    return received


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cut", ["blocks.1", "blocks.2", "blocks.1,blocks.2", "blocks.1,-,blocks.2"])
@pytest.mark.parametrize("way", [in_turn, around, by_number, several])
def test_stages_one_after_the_other_are_the_model(way: Way, cut: str, training: bool) -> None:
    model, forward = staged(way, cut)
    model.train(training)
    x = torch.randn(5, SIZE)
    with scope(torch.arange(5), 0, 0):
        expected = model(x)
    found = through(model, forward, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradients_are_those_of_the_model() -> None:
    model, forward = staged(around, "blocks.1,blocks.3")
    x = torch.randn(5, SIZE)
    model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    through(model, forward, x).square().sum().backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


def test_a_weight_belongs_to_the_stages_that_run_the_code_that_reads_it() -> None:
    _, forward = staged(around, "blocks.1,blocks.3")
    users = forward.stages.users()
    assert users["place"] == {0, 1, 2}
    assert users["blocks.1.linear.weight"] == {1}
    assert users["offset"] == {2}


def test_only_what_is_needed_crosses() -> None:
    _, forward = staged(around, "blocks.1,blocks.2,blocks.3")
    handed = [[str(n.target) for n in forward.stages.stage(k, True).handed_on] for k in range(3)]
    assert handed == [["blocks.0"], ["blocks.0", "blocks.1"], ["blocks.0", "blocks.2"]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_trial_leaves_the_model_as_it_was(device: str) -> None:
    with torch.device(device):
        model = Model(around)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    kept, x = model.blocks[0].kept, torch.randn(3, SIZE)
    drawn = torch.get_rng_state()
    graph = tried(model, x)[True]
    costs = measure(model, graph, {"x": x}, CPU, None)
    assert layers_of(graph) == [f"blocks.{number}" for number in range(4)] == list(costs.seconds)
    assert costs.crossing == tuple(values * 3 * SIZE * 4 for values in (1, 2, 2))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0], name
        assert device == "meta" or torch.equal(tensor, before[name][1])
        assert tensor.grad is None
    assert model.blocks[0].kept is kept
    assert "forward" not in vars(model.blocks[0])
    assert torch.equal(drawn, torch.get_rng_state()), "the weights of the run are drawn as without it"


def each_again(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def two_again(model: Model, x: Tensor) -> Tensor:
    def two(x: Tensor, first: int) -> Tensor:
        found: Tensor = model.blocks[first + 1](model.blocks[first](x))
        return found

    for first in (0, 2):
        x = checkpoint(two, x, first, use_reentrant=False)
    return x


def with_code_again(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = checkpoint(lambda x, block=block: F.gelu(block(x)), x, use_reentrant=False)
    return x


def added_again(model: Model, x: Tensor) -> Tensor:
    """What is saved of ``x + block(x)`` is saved by the block."""
    for block in model.blocks:
        x = checkpoint(lambda x, block=block: x + block(x), x, use_reentrant=False)
    return x


def nested_again(model: Model, x: Tensor) -> Tensor:
    def two(x: Tensor, first: int) -> Tensor:
        for block in list(model.blocks)[first : first + 2]:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    for first in (0, 2):
        x = checkpoint(two, x, first, use_reentrant=False)
    return x


@pytest.mark.parametrize(
    ("way", "places"),
    [
        (each_again, [1, 2, 3]),
        (two_again, [2]),
        (with_code_again, []),
        (added_again, [1, 2, 3]),
        (nested_again, [2]),
    ],
)
def test_no_stage_begins_where_a_checkpoint_would_call_modules_of_earlier_ones(
    way: Way, places: list[int]
) -> None:
    model, x = Model(way), torch.randn(3, SIZE)
    graphs = tried(model, x)
    layers = layers_of(graphs[True])
    allowed = [
        layer for layer, parts in zip(layers[1:], parts_checkpoint(graphs[True]), strict=True) if not parts
    ]
    assert allowed == [f"blocks.{place}" for place in places]
    assert measure(model, graphs[True], {"x": x}, CPU, None).seconds.keys() == set(layers)
    model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for layer in layers[1:]:
        stages = Stages(model, layer, 2, None, graphs)
        if layer not in allowed:
            with pytest.raises(TaskError, match="begins within an activation checkpoint"):
                stages.check_apart([0, 1])
            continue
        stages.check_apart([0, 1])
        model.zero_grad()
        through(model, StagedForward(stages, {}), x).square().sum().backward()
        del model.forward
        torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


def test_hooks_of_a_module_run_where_it_is_called() -> None:
    model, forward = staged(in_turn, "blocks.2")
    ran: list[int] = []
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
        block.register_forward_hook(lambda module, given, found: found * 2)
        block.register_full_backward_hook(lambda module, to, came: tuple(each * 0.5 for each in to))
    x = torch.randn(5, SIZE, requires_grad=True)
    model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    ran.clear()
    through(model, forward, x).square().sum().backward()
    assert ran == [0, 1, 2, 3]
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


# What is refused


def hidden(model: Model, x: Tensor) -> Tensor:
    x = in_turn(model, x)
    return x + sum(block.kept for block in model.blocks if isinstance(block, Block))


def overwritten(model: Model, x: Tensor) -> Tensor:
    first = model.blocks[0](x)
    return in_turn(model, model.blocks[1](first, into=True)) + first


def drawn(model: Model, x: Tensor) -> Tensor:
    return in_turn(model, F.dropout(x, 0.5))


def drawn_number(model: Model, x: Tensor) -> Tensor:
    return in_turn(model, x) * float(torch.rand(()))


def counted(model: Model, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return in_turn(model, x)


def for_each(model: Model, x: Tensor) -> Tensor:
    return torch.stack([in_turn(model, row) for row in x])


def checkpointed(model: Model, x: Tensor) -> Tensor:
    x = x + model.place
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


class Found:
    """A class of the user's own."""


class Telling(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Found()


def opaque(model: Model, x: Tensor) -> Any:
    return Telling.forward(model.blocks[0], x)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (hidden, r"the code around the blocks uses a tensor that blocks.0 made and did not return"),
        (
            overwritten,
            r"blocks.1 writes into a tensor that it was given, and the code around the blocks uses it",
        ),
        (drawn, "the code around the blocks draws random numbers"),
        (drawn_number, "the code around the blocks draws random numbers"),
        (counted, "Model.forward changes its attribute 'calls'"),
        (for_each, "Model.forward calls 12 modules for some samples and 4, or others, for half"),
        (
            checkpointed,
            r"calls blocks.0 within CheckpointFunction.forward, .*checkpoint\(\.\.\., use_reentrant=False",
        ),
        (opaque, "Model.forward calls none of its modules"),
    ],
)
def test_what_stages_would_miss_is_refused(way: Way, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        tried(Model(way), torch.randn(3, SIZE))


def test_an_object_that_cannot_be_sent_is_refused() -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Telling())
    found = Rehearsal(model, ("0", "1"), {"input": torch.randn(3, SIZE)}, CPU, None)
    with pytest.raises(TaskError, match="1 returns an object of Found, which cannot go to another rank"):
        try_both(found)


def test_random_numbers_that_decide_nothing_are_no_harm() -> None:
    """For example where each block is left out with a probability of zero."""

    def leaving_out(model: Model, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = x if torch.rand(()) < 0.0 else block(x)
        return x

    assert len(layers_of(tried(Model(leaving_out), torch.randn(3, SIZE))[True])) == 4


# What is not as it was in the trial


def depending(model: Model, x: Tensor) -> Tensor:
    first = model.blocks[0](x)
    y = model.blocks[1](first)
    if len(x) == 7:
        y = model.blocks[3](y)
    if len(x) == 8:
        return y
    if len(x) == 9:
        y = y + first
    found: Tensor = model.blocks[3](model.blocks[2](y, *((first,) if len(x) == 6 else ())))
    return found


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (6, "blocks.2 is given what a module of an earlier stage returned, and was not when"),
        (7, "the model calls blocks.3, and called blocks.2 there when it was tried"),
        (8, "Model.forward ended before it called blocks.2"),
    ],
)
def test_another_way_than_in_the_trial_is_refused(samples: int, words: str) -> None:
    model, forward = staged(depending, "blocks.2")
    with pytest.raises(ConfigurationError, match=words):
        through(model, forward, torch.randn(samples, SIZE))


def test_what_was_not_handed_on_is_never_a_number() -> None:
    model, forward = staged(depending, "blocks.2")
    assert through(model, forward, torch.randn(5, SIZE)).isfinite().all()
    assert through(model, forward, torch.randn(9, SIZE)).isnan().all()


def test_numbers_of_a_weight_of_another_stage_are_refused_and_its_form_is_not() -> None:
    model = nn.Sequential(nn.Linear(SIZE, 3), nn.Linear(3, SIZE))
    own = model[0].weight = nn.Parameter(torch.empty(0, SIZE))
    with whole_forms([Away(model[0], "weight", "0.weight", (3, SIZE))]):
        assert model[0].weight.shape == (3, SIZE)
        assert model[0].weight.numel() == 3 * SIZE
        with pytest.raises(TaskError, match=r"uses numbers of 0.weight in sum, a weight of another stage"):
            model[0].weight.sum()
        with pytest.raises(TaskError, match=r"uses numbers of 0.weight in linear"):
            F.linear(torch.ones(1, SIZE), model[0].weight)
    assert model[0].weight is own


def test_errors_of_the_model_are_told() -> None:
    def failing(model: Model, x: Tensor) -> Tensor:
        raise ValueError("no such thing")

    with pytest.raises(EvenerError, match="could not be run on the first samples: no such thing"):
        tried(Model(failing), torch.randn(3, SIZE))
