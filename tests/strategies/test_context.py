"""Sequences divided over ranks against one device, in float64."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import evener
from evener.config import RunConfig
from evener.data.batch import MicroBatch
from evener.engine import Engine
from evener.errors import ConfigurationError, EvenerError, TaskError
from evener.runtime.environment import Environment
from evener.strategies.context import ContextParallel
from evener.strategies.sequences.cutting import Cutting
from evener.strategies.sequences.likeness import _undisturbed
from evener.task import Task
from evener.verification import Trajectory, record, relative_error
from tests.comparing import handed_on, trained_by_hand, worst

WORDS, WIDTH, HEADS, SAMPLES, LONGEST = 11, 6, 3, 21, 15
PADDING = -100


class Block(nn.Module):
    """Attention by Evener's function, with fewer heads of keys, of which those of padding are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // HEADS)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.norm(x)
        k, v = self.kv(y)[:, None].chunk(2, -1)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed = evener.nn.attention(q, k, v, causal=True, key_padding=hidden)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """The embedding is the head too."""

    def __init__(self, block: Any = Block) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LONGEST, WIDTH))
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = words < 0
        x = self.embed(words.clamp(min=0)) + self.place[evener.nn.positions(words.shape[1])]
        for block in self.blocks:
            x = block(x, hidden)
        return self.head(x)


class Ordinary(nn.Module):
    """As models that know nothing of Evener do it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.mixed = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mixed(mixed.transpose(1, 2).flatten(2))


class Layered(nn.Module):
    """A layer of torch, under masks of the piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        output: Tensor = self.layer(x, causal, hidden)
        return output


class Multi(nn.Module):
    """Attention of torch to both sides, sequence first, repeated in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, kdim=WIDTH, vdim=WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        normal: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = checkpoint(self._mixed, normal, hidden, use_reentrant=False)
        return x + mixed

    def _mixed(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attend(x, x, x, key_padding_mask=hidden)[0].transpose(0, 1)


class Dropping(Ordinary):
    """By sample and position: before positions are run together, and after."""

    def __init__(self) -> None:
        super().__init__()
        self.apart, self.together = evener.nn.Dropout(0.3), evener.nn.Dropout(0.4)
        self.channels = evener.nn.Dropout1d(0.2)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = super().forward(self.apart(x), hidden)
        x = x + self.together(x.flatten(0, 1)).view_as(x)
        return self.channels(x.transpose(1, 2)).transpose(1, 2)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")


def count(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def whole_right(outputs: Tensor, targets: Tensor) -> evener.Sum:
    """A metric of whole sequences, that pieces could not have."""
    best = (outputs.argmax(-1) == targets) | (targets == PADDING)
    return evener.Sum(best.double().mean(1).square().sum(), len(targets))


def pad(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*items, strict=True)
    return (
        pad_sequence(list(inputs), batch_first=True, padding_value=-1),
        pad_sequence(list(targets), batch_first=True, padding_value=PADDING),
    )


def task(model: Any = Model, shortest: int = 2, **changed: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(WORDS, (1 + shortest + n * 5 % 9,), generator=generator) for n in range(SAMPLES)]
    data = [(text[:-1], text[1:]) for text in texts]
    usual: dict[str, Any] = {
        "model": model,
        "loss": evener.loss(total=total, count=count),
        # The true gradient of a bias of keys is zero, which AdamW would divide by its own size.
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "train": data,
        "evaluate": data[:11],
        "metrics": {"whole": whole_right},
        "collate": pad,
        "batch_size": 5,
        "epochs": 3,
        "name": "context",
    }
    return Task(**(usual | changed))


def ordinary() -> Task:
    return task(lambda: Model(Ordinary))


def layered() -> Task:
    return task(lambda: Model(Layered), shortest=6)  # one position a rank would not tell a mask


def dropping() -> Task:
    return task(lambda: Model(Dropping))


def multi() -> Task:
    return task(lambda: Model(Multi), collate=pad_all)  # BatchNorm counts padding too


def penalised() -> Task:
    return task(
        penalty=lambda model: 0.1 * sum((p.norm() for p in model.parameters()), start=torch.zeros(()))
    )


@dataclass(frozen=True)
class Ulysses(ContextParallel):
    method: str = "ulysses"
    order: str = "contiguous"


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Trajectory:
    usual: dict[str, Any] = {"dtype": "float64", "device": "cpu", "steps": 5, "strategy": "context"}
    return record(f"{__name__}:{name}", None, RunConfig(**(usual | settings)), environment)


@pytest.mark.parametrize(
    ("size", "name", "settings"),
    [
        (2, "task", {"clip_norm": 0.05}),
        (3, "task", {"micro_batch": 2}),
        (2, "ordinary", {"strategy": Ulysses()}),
        (3, "ordinary", {"strategy": ContextParallel(order="contiguous")}),
        (2, "layered", {}),
        (3, "layered", {"strategy": Ulysses()}),
        (2, "multi", {"micro_batch": 2}),
        (3, "multi", {"bucket_mb": 1e-5}),
        (2, "dropping", {"micro_batch": 3}),
        (3, "dropping", {}),
        (3, "penalised", {"clip_norm": 0.1}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_device(ranks: Any, size: int, name: str, settings: dict[str, Any]) -> None:
    reference = trajectory(name, Environment(), **(settings | {"strategy": "single"}))
    divided = ranks(size).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


def over_two_axes(name: str, **settings: Any) -> Trajectory:
    return trajectory(name, mesh="data=2,context=2", **settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("task", {"balance": "2,1", "clip_norm": 0.1}),
        ("dropping", {"balance": "1,0", "micro_batch": 2}),
        ("multi", {"balance": "3,1"}),
    ],
    ids=str,
)
def test_samples_and_positions_are_divided_together(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    reference = trajectory(name, Environment(), **(settings | {"strategy": "single", "balance": "equal"}))
    divided = ranks(4).run(over_two_axes, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert all(one.losses == pytest.approx(reference.losses, rel=1e-11) for one in divided)
    assert len({one.digest for one in divided}) == 1, "replicas differ"


def evaluated(**settings: Any) -> tuple[dict[str, float], Any]:
    usual: dict[str, Any] = {"strategy": "context", "device": "cpu", "dtype": "float64", "steps": 2}
    whole = task(collate=pad_all)
    with Engine(whole, RunConfig(**(usual | settings))) as engine:
        for batch in engine.batches():
            engine.step(batch)
        metrics = engine.evaluate()
        data: Any = engine.task.train
        everywhere: Any = engine.predict(data, everywhere=True)
        inputs: Any = [words for words, _ in data]
        assert torch.equal(everywhere, engine.predict(inputs, targets=False, everywhere=True))  # type: ignore[arg-type]
        return metrics, everywhere


def pad_all(items: Any) -> Any:
    """To one length, as predictions must be; items of inputs alone have a number for a target."""
    words, targets = zip(*items, strict=True)
    full = [F.pad(text, (0, LONGEST - len(text)), value=-1) for text in words]
    if not isinstance(targets[0], Tensor):
        return torch.stack(full), torch.tensor(targets)
    return torch.stack(full), torch.stack([F.pad(t, (0, LONGEST - len(t)), value=PADDING) for t in targets])


def test_evaluation_sees_whole_sequences_and_predictions_are_in_order(ranks: Any) -> None:
    ((metrics, outputs),) = ranks(1).run(evaluated)
    for size, settings in ((3, {}), (4, {"mesh": "data=2,context=2", "balance": "2,1"})):
        for found, predicted in ranks(size).run(evaluated, **settings):
            assert found == pytest.approx(metrics, rel=1e-12)
            assert relative_error(outputs, predicted) <= 1e-12


def test_a_checkpoint_is_taken_into_every_other_strategy(ranks: Any) -> None:
    reference = trajectory("multi", Environment(), strategy="single", steps=8)
    places = (("context", 3), ("single", 1), ("context", 2), ("ddp", 3))
    legs = [(size, {"strategy": name}, 2 * leg) for leg, (name, size) in enumerate(places, start=1)]
    found = handed_on(ranks, multi, legs)
    for state in found:
        assert worst(reference.weights, state["model"]) <= 1e-11


def test_a_loop_of_the_users_own(ranks: Any) -> None:
    (weights,) = ranks(1).run(trained_by_hand, ordinary, total, count, strategy="single")
    for found in ranks(2).run(trained_by_hand, ordinary, total, count, strategy="context"):
        assert worst(weights, found) <= 1e-11


# What is refused


class Counting(Model):
    """Positions counted from the start of the piece, for an embedding that begins as zeros."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words.clamp(min=0)) + self.place[: words.shape[1]]
        for block in self.blocks:
            x = block(x, words < 0)
        return self.head(x)


class Mixing(nn.Module):
    """Positions brought together by a module, between two layers."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, WIDTH), mix(), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(words.clamp(min=0))))


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Convolving(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Fixed(nn.Module):
    """Of a length that it was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(LONGEST, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.place


class Pooling(nn.Module):
    """A second output, of the piece."""

    def forward(self, x: Tensor) -> Any:
        return x.mean(1)


class PooledToo(Mixing):
    def forward(self, words: Tensor) -> Any:
        x = self.embed(words.clamp(min=0))
        return self.head(x), self.mix(x)


def counting() -> Task:
    return task(Counting)


def mixing(mix: Any) -> Task:
    return task(lambda: Mixing(mix), collate=pad_all)


def recurrent() -> Task:
    return mixing(lambda: Recurrent(WIDTH, WIDTH, batch_first=True))


def convolving() -> Task:
    return mixing(lambda: Convolving(WIDTH, WIDTH, 3, padding=1))


def attending_by_hand() -> Task:
    return mixing(ByHand)


def fixed() -> Task:
    return mixing(Fixed)


def pooling() -> Task:
    return task(lambda: PooledToo(Pooling))


def of_samples() -> Task:
    """A loss that counts samples, and not their positions."""
    return task(lambda: Mixing(nn.Identity), loss=evener.loss(total=total))


def with_features() -> Task:
    """Inputs of which one is no sequence."""
    data = [((words, torch.ones(4)), targets) for words, targets in task().train]  # type: ignore[attr-defined]
    return task(lambda: Mixing(nn.Identity), train=data, evaluate=None, collate=None, batch_size=1)


def of_numbers() -> Task:
    data = [(torch.ones(()), torch.ones(())) for _ in range(4)]
    return task(lambda: Mixing(nn.Identity), train=data, evaluate=None, collate=None)


def channels() -> Task:
    return task(lambda: Mixing(lambda: Transposed()))


class Transposed(nn.Module):
    """Dropout of a tensor whose positions come last."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = evener.nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x.transpose(1, 2)).transpose(1, 2)


def refused(name: str, **settings: Any) -> tuple[type[BaseException], str]:
    said = caught(name, **settings)
    gc.collect()  # the step that was broken off ends here, and with it its scope
    return said


def caught(name: str, **settings: Any) -> tuple[type[BaseException], str]:
    with pytest.raises(EvenerError) as found:
        trajectory(name, **settings)
    return found.type, str(found.value)


DIFFERS = "does not compute from pieces of sequences what it computes from whole ones"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("counting", {}, DIFFERS + ".*evener.nn.positions"),
        ("recurrent", {}, DIFFERS + ".*mix .Recurrent"),
        ("convolving", {}, DIFFERS + ".*mix .Convolving"),
        ("attending_by_hand", {}, DIFFERS),
        ("fixed", {}, "cannot run on a piece of the first sequences: RuntimeError"),
        ("pooling", {}, "outputs.1, of shape .5, 6., has no dimension for positions"),
        ("of_samples", {}, "have 5 terms, and their pieces 5 . 5"),
        ("with_features", {}, "inputs.0 has .*, inputs.1 has 4.*cut="),
        ("with_features", {"cut": "inputs.words"}, "cut names inputs.words.*inputs are inputs.0, inputs.1"),
        ("of_numbers", {}, "no tensor of the inputs has one"),
        ("channels", {}, "dropout mix.drop: .*dimension 1 must be"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    ranks: Any, name: str, options: dict[str, Any], words: str
) -> None:
    for kind, message in ranks(2).run(refused, name, strategy=ContextParallel(**options)):
        assert issubclass(kind, TaskError | ConfigurationError), message
        assert re.search(words, message), message


@pytest.mark.parametrize(
    "options",
    [{"method": "star"}, {"order": "random"}, {"dim": 0}, {"output_dim": 0}, {"trial": -1}],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ContextParallel(**options)


# What is cut


def test_the_trial_leaves_all_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[2].eval()
    nn.init.zeros_(model[0].bias)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with _undisturbed(model):
        assert not model[1].training
        assert model[0].bias.detach().abs().min() > 0, "what is zero hides what it multiplies"
        model[1].running_mean.add_(1)
        model[1].num_batches_tracked = torch.tensor(7)
    assert [module.training for module in model] == [True, True, False]
    assert worst(before, model.state_dict()) == 0


@dataclass
class Item:
    words: Tensor
    weight: Tensor


def test_tensors_are_named_by_their_place() -> None:
    words, weight = torch.arange(12).view(2, 6), torch.ones(2)
    micro = MicroBatch({"a": words, "b": [Item(words, weight), "x"]}, words, torch.arange(2))
    cutting = Cutting(1, None)
    assert cutting.length(micro) == 6
    cut = cutting.part(micro.inputs, "inputs", lambda leaf: leaf[:, :2])
    assert (cut["a"].shape, cut["b"][0].words.shape, cut["b"][0].weight.shape) == ((2, 2), (2, 2), (2,))
    only = Cutting(1, frozenset({"inputs.b.0.words", "targets"}))
    cut = only.part(micro.inputs, "inputs", lambda leaf: leaf[:, :2])
    assert (cut["a"].shape, cut["b"][0].words.shape) == ((2, 6), (2, 2))


def test_an_object_with_tensors_inside_is_refused() -> None:
    class Sparse(dict[str, Tensor]):
        def to(self, device: Any) -> Any:
            return self

    with pytest.raises(TaskError, match="cannot cut inputs, which is of type Sparse"):
        Cutting(1, None).length(MicroBatch(Sparse(), torch.ones(1, 2), torch.arange(1)))
