"""Loops without a DataLoader: a batch that the loop makes is divided, and goes on from a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evener
from evener.errors import EvenerError
from evener.training.prepare import prepare as preparing
from tests.training.prepare.running import model_of, sgd, with_settings

LENGTH = 5


class Recurrent(nn.Module):
    """Time comes first, samples second, as ``bptt`` slices a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.last = nn.Embedding(9, 4), nn.GRU(4, 6), nn.Linear(6, 9)

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        made, hidden = self.layer(self.words(x), hidden)
        return self.last(made), hidden.detach()


def of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def slices(is_prepared: bool) -> tuple[dict[str, Tensor], list[float]]:
    """A hidden state goes over from slice to slice."""
    torch.manual_seed(3)
    model, loss, told = Recurrent().double(), of_words, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    text = torch.randint(9, (4 * LENGTH + 1, 4), generator=torch.Generator().manual_seed(2))
    if is_prepared:
        model, optimizer, loss = evener.prepare(model, optimizer, loss)
    hidden = None

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal hidden
        made, hidden = model(x, hidden)
        optimizer.zero_grad()
        value = loss(made, y)
        value.backward()
        optimizer.step()
        told.append(value.item())

    for begin in range(0, len(text) - 1, LENGTH):
        pair = text[begin : begin + LENGTH], text[begin + 1 : begin + 1 + LENGTH]
        if is_prepared:
            with evener.batch(*pair, dim=1) as (x, y):
                step(x, y)
        else:
            step(*pair)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, told


def slices_together(balance: str) -> Any:
    with with_settings(balance=balance):
        return slices(True)


def test_samples_along_the_second_dimension_are_divided(ranks: Any) -> None:
    weights, told = slices(False)
    for balance in ("3,1", "equal"):
        for own, own_told in ranks(2).run(slices_together, balance):
            assert own_told == pytest.approx(told, rel=1e-10)
            for name, value in weights.items():
                torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-11, msg=name)


def drawn(count: int) -> dict[str, Tensor]:
    x = torch.rand(count, 4, dtype=torch.float64)
    return {"x": x, "y": torch.randint(3, (count,))}


def halves(path: str, begin: int, end: int) -> tuple[list[float], Tensor, int]:
    """Steps from ``begin`` to ``end``, from a file and into it."""
    with with_settings(balance="2,1"):
        torch.manual_seed(4 + begin)
        model = model_of()
        model, optimizer, loss = evener.prepare(model, sgd(model), F.cross_entropy)
        if begin:
            evener.load(path, model=model, optimizer=optimizer)
        told, shares, noise = [], 0, torch.zeros(())
        for _ in range(begin, end):
            with evener.batch(drawn, 5) as batch:
                noise = evener.gather(evener.draw(torch.rand, 2))
                assert evener.batch_size() == 5
                assert len(evener.gather(batch["x"])) == 5
                shares += len(batch["y"])
                optimizer.zero_grad()
                value = loss(model(batch["x"]), batch["y"])
                value.backward()
                optimizer.step()
                told.append(value.item())
        evener.save(path, model=model, optimizer=optimizer)
        return told, noise, shares


def test_it_goes_on_from_a_file(ranks: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "whole.pt")
    whole = ranks(2).run(halves, file, 0, 6)
    first = ranks(2).run(halves, file, 0, 3)
    second = ranks(2).run(halves, file, 3, 6)
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == pytest.approx(whole[rank][0], rel=1e-13)
        assert torch.equal(second[rank][1], whole[rank][1])
        assert whole[rank][2] == 6 * (3, 2)[rank]


# Refusals


def drawn_apart() -> None:
    torch.manual_seed(evener.rank())
    with evener.batch(drawn(6)):
        pass


def drawn_apart_beside_a_function() -> None:
    torch.manual_seed(evener.rank())
    with evener.batch(torch.rand(6), lambda: None):
        pass


def drawn_apart_by_a_function() -> None:
    own = torch.Generator().manual_seed(evener.rank())
    with evener.batch(lambda: torch.rand(6, generator=own)):
        pass


def a_graph() -> None:
    with evener.batch(torch.rand(10, 4), torch.zeros(2, 30).long(), torch.zeros(10).long()):
        pass


def flattened() -> None:
    with evener.batch(torch.rand(5, 4), torch.zeros(20).long(), dim=1):
        pass


def on_one_rank() -> None:
    if evener.is_main():
        with evener.batch(torch.ones(4)):
            pass
    evener.barrier()


def a_function_of_no_sums() -> None:
    """Along the second dimension there are no rows to be gathered."""
    loss = evener.prepare(lambda o: (o @ o.T).logsumexp(1).mean())
    with evener.batch(torch.arange(24.0).view(3, 8), dim=1) as x:
        loss(x)


def refusal(loop: Callable[[], None]) -> str:
    try:
        with with_settings(balance="equal"):
            evener.prepare(model_of())
            loop()
    except EvenerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (
            drawn_apart,
            "other tensors on rank 1 than on rank 0: each rank drew its own. .* evener.batch\\(get_batch",
        ),
        (drawn_apart_beside_a_function, "other tensors on rank 1 than on rank 0"),
        (drawn_apart_by_a_function, "other tensors on rank 1 than on rank 0"),
        (
            a_graph,
            r"DataError: .*got \(10, 4\), \(2, 30\), \(10,\).* A graph as a whole is one sample, .*cannot be divided",
        ),
        (flattened, "DataError: .* along dimension 1, and got .* Divide before they are flattened"),
        (on_one_rank, "different places of the loop: rank 0 in a batch, rank 1 in a barrier"),
        (a_function_of_no_sums, "LossError: .* has no row for each of a rank's samples"),
    ],
)
def test_what_cannot_be_divided_is_refused(ranks: Any, loop: Callable[[], None], words: str) -> None:
    for message in ranks(2).run(refusal, loop):
        assert re.search(words, message), message


def test_alone_it_is_the_whole_batch() -> None:
    with with_settings():
        torch.manual_seed(1)
        evener.prepare(model_of())
        state = torch.get_rng_state()
        with evener.batch(drawn, 5) as batch:
            assert preparing.current("").current_batch("").samples == len(batch["x"]) == 5
        torch.set_rng_state(state)
        assert torch.equal(batch["x"], drawn(5)["x"])
