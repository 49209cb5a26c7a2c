"""What the arguments of a loss are: rows, lists of one entry per sample, or constants as long as a rank's samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import evener
from evener.errors import LossError
from evener.training.prepare.loss_arguments import Arguments, OfRank, Told
from tests.training.prepare.running import divided, with_settings

NEGATIVES = torch.randn(3, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


class Scene:
    """Numbers, and boxes of another count for each sample."""

    def __init__(self, count: int = 16, most: int = 4) -> None:
        drawn = torch.Generator().manual_seed(2)
        counts = torch.randint(0, most, (count,), generator=drawn).tolist()
        options: Any = {"generator": drawn, "dtype": torch.float64}
        self.samples = [(torch.randn(4, **options), {"boxes": torch.randn(n, 3, **options)}) for n in counts]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def together(samples: Any) -> Any:
    return torch.stack([x for x, _ in samples]), [target for _, target in samples]


class Heads(nn.Module):
    """As many heads as a rank has samples of six."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        return [{"boxes": head(x)} for head in self.heads]


def of_boxes(o: Tensor, targets: Any) -> Tensor:
    """The mean over all boxes of the batch, as losses of detection are."""
    found = [((own - target["boxes"]) ** 2).sum() for own, target in zip(o, targets, strict=True)]
    return torch.stack(found).sum() / max(1, sum(len(target["boxes"]) for target in targets))


def of_heads(heads: Any, targets: Any) -> Tensor:
    assert len(heads) == 3
    return torch.stack([of_boxes(head["boxes"], targets) for head in heads]).sum()


def of_pieces(pieces: Any, targets: Any) -> Tensor:
    """Of outputs of another length for each sample."""
    found = [piece.logsumexp(0) * len(own["boxes"]) for piece, own in zip(pieces, targets, strict=True)]
    return torch.stack(found).mean() + torch.cat(list(pieces)).abs().max()


def of_anchors(o: Tensor, targets: Any, anchors: Any) -> Tensor:
    """Entries that are the same for all samples, of which there must be as many."""
    moved = [{"boxes": each["boxes"] - own} for each, own in zip(targets, anchors, strict=False)]
    return of_boxes(o[: len(moved)], moved)


def of_ones(o: Tensor, y: Tensor) -> Tensor:
    """Rows of samples that are the same on all ranks."""
    return F.binary_cross_entropy_with_logits(o[:, :1], y) + (o @ o.T).logsumexp(1).mean()


def against(o: Tensor, _: Any, negatives: Tensor) -> Tensor:
    return (o @ negatives.T).logsumexp(1).mean()


def times_a_sum(o: Tensor, _: Any, weights: Any) -> Tensor:
    return (o @ o.T).logsumexp(1).mean() * sum(weights.values() if isinstance(weights, dict) else weights)


Call = Callable[[nn.Module, Any, Tensor, Any], Tensor]


def plainly(model: nn.Module, loss: Any, x: Tensor, targets: Any) -> Tensor:
    found: Tensor = loss(model(x), targets)
    return found


def in_pieces(model: nn.Module, loss: Any, x: Tensor, targets: Any) -> Tensor:
    pieces = [each[: len(own["boxes"]) or 1] for each, own in zip(model(x), targets, strict=True)]
    found: Tensor = loss(tuple(pieces), targets)
    return found


def with_anchors(model: nn.Module, loss: Any, x: Tensor, targets: Any) -> Tensor:
    found: Tensor = loss(model(x), targets, [torch.ones(3)] * len(x))
    return found


def with_ones(model: nn.Module, loss: Any, x: Tensor, _: Any) -> Tensor:
    found: Tensor = loss(model(x), x.new_ones(len(x), 1))
    return found


def with_a_constant(constant: Any, model: nn.Module, loss: Any, x: Tensor, targets: Any) -> Tensor:
    found: Tensor = loss(model(x), targets, constant)
    return found


def steps(loss: Any, call: Call, size: int, is_prepared: bool) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(2)
    model = (Heads() if loss is of_heads else nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).double()
    loader = DataLoader(Scene(), size, collate_fn=together)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_prepared:
        model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss)
    told = []
    for x, targets in loader:
        optimizer.zero_grad()
        value = call(model, loss, x, targets)
        value.backward()
        optimizer.step()
        told.append(value.item())
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, told


def on_ranks(loss: Any, call: Call, size: int, balance: str) -> Any:
    with with_settings(balance=balance):
        return steps(loss, call, size, True)


CASES: tuple[tuple[Any, Call, int], ...] = (
    (of_boxes, plainly, 6),
    (of_boxes, plainly, 2),
    (of_heads, plainly, 6),
    (of_pieces, in_pieces, 6),
    (of_anchors, with_anchors, 6),
    (of_ones, with_ones, 6),
    (against, partial(with_a_constant, NEGATIVES), 8),
    (times_a_sum, partial(with_a_constant, {"a": 1.0, "b": 2.0, "c": 4.0}), 6),
)


@pytest.mark.parametrize(
    ("loss", "call", "size", "balance"),
    divided(((f"{n}-{case[0].__name__}", case) for n, case in enumerate(CASES)), ("3,1", "equal", "0,1")),
)
def test_arguments_are_those_of_one_device(
    ranks: Any, loss: Any, call: Call, size: int, balance: str
) -> None:
    weights, told = steps(loss, call, size, False)
    for own, own_told in ranks(2).run(on_ranks, loss, call, size, balance):
        assert own_told == pytest.approx(told, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-11, msg=name)


def refusal(loss: Any, call: Call) -> str:
    try:
        on_ranks(loss, call, 6, "equal")
    except LossError as error:
        return str(error)
    return "nothing"


def counted(o: Tensor, _: Any, weights: Tensor) -> Tensor:
    """Sums, which ranks with equal shares would add up once each."""
    return o.square().mean() * weights.abs().sum()


@pytest.mark.parametrize(
    ("loss", "constant"), [(against, NEGATIVES), (counted, NEGATIVES), (times_a_sum, [1.0, 2.0, 4.0])]
)
def test_a_constant_as_long_as_the_samples_of_a_rank_is_refused(ranks: Any, loss: Any, constant: Any) -> None:
    for told in ranks(2).run(refusal, loss, partial(with_a_constant, constant)):
        assert "same on all ranks" in told, told
        assert "argument 3" in told, told
        assert "closure" in told, told


# What ranks find out together


def told_of(arguments: Arguments, *of_ranks: Any) -> Told:
    said = []
    for given, samples in of_ranks:
        rows, seen = arguments.seen_by(given, samples, set(), [each[1] for each in of_ranks], lambda _: False)
        said.append(OfRank(1.0, rows, samples, 1, True, seen))
    return arguments.told(said, said)


def called(*args: Any) -> Any:
    return args, {}


def test_a_place_stays_what_it_was_found_to_be() -> None:
    arguments, constant = Arguments(), torch.arange(2.0)
    one, other = torch.randn(3, 2), torch.randn(3, 2)
    assert len(told_of(arguments, (called(one, constant), 3), (called(other, constant), 3)).ways) == 1
    again = told_of(arguments, (called(one[:2], constant), 2), (called(other[:2], constant), 2))
    assert [ways.rows for ways in again.ways] == [{(0, 0)}]


def test_a_tensor_that_is_alike_on_all_ranks_may_be_either() -> None:
    outputs = torch.randn(4, 2).split(2)
    found = told_of(Arguments(), *((called(each, torch.arange(2.0)), 2) for each in outputs))
    assert [ways.rows for ways in found.ways] == [{(0, 0), (0, 1)}, {(0, 0)}]


def test_a_list_of_other_lengths_has_an_entry_for_each_sample() -> None:
    found = told_of(Arguments(), (called([torch.ones(3)] * 3), 3), (called([torch.ones(3)] * 2), 2))
    assert [ways.entries for ways in found.ways] == [{(0, 0)}]
    assert found.shares == [3, 2]
