"""Losses of every kind, on uneven shares: that of one device, or a refusal in words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evener
from evener.training.prepare.loss_arguments import Entries, SameForAll
from evener.training.prepare.loss_kind import LossKind, way_of
from tests.training.prepare.running import divided, with_settings

WORDS, LENGTH, CLASSES = 5, 4, 3
Step = Callable[[nn.Module, Any, Any], Tensor]
"""From the model, the prepared loss and a batch to what is back-propagated."""


class Model(nn.Module):
    """A representation of rows of numbers, in pieces of a sequence, with BatchNorm as a wait in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(LENGTH, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, LENGTH * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.norm(self.first(x)).tanh())
        return made.view(len(x), LENGTH, CLASSES)


def data() -> TensorDataset:
    """Rows of numbers, words of which later batches are padded, and weights."""
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(20, LENGTH, generator=drawn, dtype=torch.float64)
    y = torch.randint(CLASSES, (20, LENGTH), generator=drawn)
    padded = torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (20, 1), generator=drawn)
    padded[:6] = False
    return TensorDataset(x, y.masked_fill(padded, -100), torch.rand(20, generator=drawn, dtype=torch.float64))


# Functions, each as people write it


def words(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-100)


def masked(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).flatten()
    each = F.cross_entropy(o.reshape(-1, CLASSES), y.reshape(-1), ignore_index=-100, reduction="none")
    return (each * mask).sum() / mask.sum()


def selected(o: Tensor, y: Tensor) -> Tensor:
    each = o.logsumexp(-1) - o.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    return each[y != -100].mean()


def over_half_the_words(o: Tensor, y: Tensor) -> Tensor:
    """Of all ranks as many as one rank has in all, where it has half of the samples."""
    first = torch.zeros_like(o[..., 0])
    first[:, : LENGTH // 2] = 1
    each = o.logsumexp(-1) - o.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    return (each * first).sum() / first.sum().clamp(min=1) + (each * first).sum() / first.sum().item()


def over_the_batch(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.transpose(1, 2), y, reduction="sum") / len(o)


def over_the_words(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.transpose(1, 2), y, reduction="sum") / int((y != -100).nonzero().shape[0])


def over_the_shape(o: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(o.transpose(1, 2), y, reduction="none")
    return each.sum() / y.numel()


def two_terms(o: Tensor, y: Tensor) -> Tensor:
    return words(o, y) + 0.1 * F.kl_div(o.log_softmax(-1), torch.full_like(o, 1 / 3), reduction="batchmean")


def root(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o[..., 0], y.clamp(min=0).double()).sqrt()


def plainly(o: Tensor, y: Tensor) -> Tensor:
    return ((o[..., 0] - y.clamp(min=0)) ** 2).mean()


def smoothed(o: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), weight=weight, label_smoothing=0.2)


def overlap(o: Tensor, y: Tensor) -> Tensor:
    chances, own = o.sigmoid()[..., 0], (y == 1).double()
    return 1 - (2 * (chances * own).sum() + 1) / (chances.sum() + own.sum() + 1)


def contrastive(o: Tensor, y: Tensor) -> Tensor:
    features = F.normalize(o.flatten(1), dim=1)
    return F.cross_entropy(features @ features.T / 0.2, torch.arange(len(o)))


def hardest(o: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(o.transpose(1, 2), y, reduction="none").sum(1)
    return each.topk(max(1, len(each) // 2))[0].mean()


def scaled_by_the_largest(o: Tensor, y: Tensor) -> Tensor:
    return words(o / o.abs().max(), y)


def variance(o: Tensor, y: Tensor) -> Tensor:
    return words(o, y) + ((o - o.mean()) ** 2).mean() + o.std()


def sample_by_sample(o: Tensor, y: Tensor) -> Tensor:
    found = [words(each[None], own[None]) for each, own in zip(o, y, strict=True)]
    return sum(found, torch.zeros((), dtype=o.dtype)) / len(found)


def if_any(o: Tensor, y: Tensor) -> Tensor:
    """Takes another course in the batches that are padded."""
    if (y == -100).any():
        return words(o, y) * 2
    return F.cross_entropy(o.transpose(1, 2), y)


def if_long(o: Tensor, y: Tensor) -> Tensor:
    """A look at a number of this rank's."""
    return words(o, y) if float(o.detach().flatten()[0]) > 0 else contrastive(o, y)


class Centred(nn.Module):
    """A loss with a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(LENGTH, CLASSES, dtype=torch.float64))
        self.center: Tensor

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        found = words(o - self.center, y)
        self.center = 0.5 * self.center + 0.5 * o.detach().mean(0)
        return found


FUNCTIONS: tuple[Any, ...] = (
    *(
        words,
        masked,
        selected,
        over_half_the_words,
        over_the_batch,
        over_the_words,
        over_the_shape,
        two_terms,
        root,
        plainly,
        smoothed,
    ),
    *(
        overlap,
        contrastive,
        hardest,
        scaled_by_the_largest,
        variance,
        sample_by_sample,
        if_any,
        if_long,
        Centred,
    ),
)


def steps(loss: Any, step: Step, is_prepared: bool) -> tuple[dict[str, Tensor], list[float]]:
    """The weights and losses of an epoch."""
    torch.manual_seed(2)
    model, loader = Model().double(), DataLoader(data(), batch_size=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if is_prepared:
        model, optimizer, loader, loss = evener.prepare(model, optimizer, loader, loss)
    told = []
    for batch in loader:
        optimizer.zero_grad()
        value = step(model, loss, batch)
        value.backward()
        optimizer.step()
        told.append(value.item())
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, told


def together(loss: Any, step: Step, balance: str) -> Any:
    with with_settings(balance=balance):
        return steps(loss, step, True)


DIVISIONS = ("3,1", "0,1", "equal")


def check(ranks: Any, loss: Any, step: Step, *shares: str) -> None:
    weights, told = steps(loss() if isinstance(loss, type) else loss, step, False)
    for balance in shares or DIVISIONS:
        made = loss() if isinstance(loss, type) else loss
        for own, own_told in ranks(2).run(together, made, step, balance):
            assert own_told == pytest.approx(told, rel=1e-9), balance
            for name, value in weights.items():
                torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-11, msg=f"{balance} {name}")


def of_words(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = loss(model(batch[0]), batch[1])
    return found


@pytest.mark.parametrize(
    ("function", "balance"), divided(((each.__name__, (each,)) for each in FUNCTIONS), DIVISIONS)
)
def test_a_function_is_that_of_one_device(ranks: Any, function: Any, balance: str) -> None:
    check(ranks, function, of_words, balance)


# What a loop makes of a loss


def weighted(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """Losses of the samples, times their weights."""
    x, y, weight = batch
    each = loss(model(x).transpose(1, 2), y)
    found: Tensor = (each * weight[:, None]).mean() + 0.1 * each[y == 1].sum() + each.sum(1).pow(2).mean()
    return found


def by_mask(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    x, y, _ = batch
    each = loss(model(x).transpose(1, 2), y).view(-1)
    found: Tensor = each[(y != -100).view(-1)].mean()
    return found


def by_name(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = loss(input=model(batch[0]).flatten(0, 1), target=batch[1].flatten())
    return found


def of_three(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    first, second, third = model(batch[0]).unbind(2)
    found: Tensor = loss(first, second, third)
    return found


def of_pairs(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    first, second, _ = model(batch[0]).unbind(2)
    found: Tensor = loss(first, second, (batch[1][:, 0] == 1).double() * 2 - 1)
    return found


def of_ranks(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    made = model(batch[0])
    found: Tensor = loss(made[:, 0, 0], made[:, 1, 0], target=(batch[1][:, 0] == 1).double() * 2 - 1)
    return found


def of_variances(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    made = model(batch[0])
    found: Tensor = loss(made[..., 0], batch[1].clamp(min=0).double(), made[..., 1].exp())
    return found


def of_sequences(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """Samples along the second dimension."""
    x, y, _ = batch
    chances = model(x).transpose(0, 1).log_softmax(-1)
    lengths = (y != -100).sum(1).clamp(max=2)
    labels = torch.tensor([[1, 2]]).expand(len(x), 2)
    found: Tensor = loss(chances, labels, torch.full((len(x),), LENGTH), lengths)
    return found


def with_a_constant(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found: Tensor = loss(model(batch[0]).flatten(0, 1), batch[1].flatten()) / 40
    return found


def beside(o: Tensor, weights: Tensor) -> Tensor:
    return contrastive(o, weights) + torch.cdist(o.flatten(1)[:, :LENGTH], weights).sum(1).max()


def of_weights(model: Any, loss: Any, batch: Any) -> Tensor:
    """As many rows of a weight as a rank of equal shares has samples."""
    found: Tensor = loss(model(batch[0]), model.first.weight[:3])
    return found


def of_several(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    found = loss({"logits": model(batch[0])}, batch[1])
    total: Tensor = found["words"] + 0.1 * found["root"]
    return total


def several(o: Any, y: Tensor) -> dict[str, Tensor]:
    return {"words": words(o["logits"], y), "root": root(o["logits"], y), "rows": o["logits"].detach()}


def several_of_no_sums(o: Any, y: Tensor) -> dict[str, Tensor]:
    return several(o, y) | {"words": contrastive(o["logits"], y)}


def focal(o: Tensor, y: Tensor) -> Tensor:
    """A row for each sample."""
    each = F.cross_entropy(o.transpose(1, 2), y, reduction="none")
    weight = each.detach()
    return ((1 - torch.exp(-each)) ** 2 * each * (weight / weight.mean())).sum(1)


def by_mean_of_rows(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    each = loss(model(batch[0]), batch[1])
    found: Tensor = each.mean() + each.square().sum() / (
        evener.batch_size() if evener.world_size() > 1 else len(each)
    )
    return found


def by_global_mean(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    each = loss(model(batch[0]), batch[1])
    return evener.global_mean(each) if evener.world_size() > 1 else each.mean()


def by_global_mean_of_words(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    each = loss(model(batch[0]).flatten(0, 1), batch[1].flatten())
    return evener.global_mean(each) if evener.world_size() > 1 else each.mean()


def of_weighted_elements(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    x, y, weights = batch
    made = model(x)[..., 0]
    found: Tensor = loss(made, y.double(), weight=weights[:, None].expand_as(made))
    return found


KINDS: tuple[tuple[Any, Step], ...] = (
    (nn.CrossEntropyLoss(reduction="none"), weighted),
    (nn.CrossEntropyLoss(reduction="none"), by_mask),
    (nn.CrossEntropyLoss(ignore_index=-100), by_name),
    (nn.TripletMarginLoss(), of_three),
    (F.triplet_margin_loss, of_three),
    (nn.TripletMarginWithDistanceLoss(), of_three),
    (nn.CosineEmbeddingLoss(margin=0.1), of_pairs),
    (nn.MarginRankingLoss(0.2), of_ranks),
    (nn.GaussianNLLLoss(full=True), of_variances),
    (lambda a, b, c: F.gaussian_nll_loss(a, b, c).sqrt(), of_variances),
    *((loss, of_weighted_elements) for loss in (F.mse_loss, F.l1_loss, F.huber_loss)),
    (nn.CTCLoss(zero_infinity=True), of_sequences),
    (nn.CrossEntropyLoss(reduction="sum"), with_a_constant),
    (several, of_several),
    (several_of_no_sums, of_several),
    (focal, by_mean_of_rows),
    (focal, by_global_mean),
    (nn.CrossEntropyLoss(reduction="none"), by_global_mean_of_words),
)


@pytest.mark.parametrize(
    ("loss", "step", "balance"),
    divided(((f"{n}-{kind[1].__name__}", kind) for n, kind in enumerate(KINDS)), DIVISIONS),
)
def test_a_loss_is_used_as_on_one_device(ranks: Any, loss: Any, step: Step, balance: str) -> None:
    check(ranks, loss, step, balance)


def test_a_weight_is_no_row_of_samples(ranks: Any) -> None:
    check(ranks, beside, of_weights, "equal")


def test_a_function_of_sums_is_not_computed_from_the_rows_of_all() -> None:
    """Which would be right, and take the memory of all ranks' outputs on each."""
    x, y, _ = data()[:6]
    outputs = Model().double()(x)
    found = {
        function: way_of(function, (outputs, y), {}) for function in FUNCTIONS if function is not Centred
    }
    of_sums = {
        words,
        masked,
        selected,
        over_half_the_words,
        two_terms,
        root,
        plainly,
        smoothed,
        overlap,
        if_any,
    }
    assert {function for function, way in found.items() if way is LossKind.SUMS} == of_sums
    assert {over_the_batch, over_the_shape} <= {f for f, way in found.items() if way is LossKind.PER_ROW}
    assert found[contrastive] is LossKind.WHOLE
    assert way_of(words, (outputs.detach().float(), y), {}) is LossKind.SUMS
    assert way_of(words, (outputs[:1], y[:1]), {}) is LossKind.SUMS


def covariance(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - outputs.mean(0)) * (targets - targets.mean(0))).mean()


@pytest.mark.parametrize("samples", [1, 2, 20])
def test_a_few_samples_do_not_hide_that_a_function_looks_at_their_mean(samples: int) -> None:
    """Of one sample there is no covariance, nor of a rank's part of it."""
    outputs, targets = torch.rand(samples, 3, dtype=torch.float64), torch.rand(samples, 3)
    assert way_of(covariance, (outputs.requires_grad_(), targets), {}) is LossKind.WHOLE
    assert way_of(F.mse_loss, (outputs, targets.double()), {}) is LossKind.SUMS


@pytest.mark.parametrize("classes", [5, 12])
def test_a_constant_with_as_many_rows_as_are_tried_is_not_cut(classes: int) -> None:
    """Four rows are tried as twelve."""
    outputs = torch.randn(4, classes, dtype=torch.float64).requires_grad_()
    weights = SameForAll(torch.rand(classes, dtype=torch.float64))
    targets = torch.randint(classes, (4,))
    assert way_of(lambda o, y, w: F.cross_entropy(o, y, w), (outputs, targets, weights), {}) is LossKind.SUMS


@pytest.mark.parametrize(
    "length", [len, Tensor.numel, lambda label: label.size(0), lambda label: label.shape[0]]
)
def test_lengths_of_the_entries_may_be_asked_for_one_by_one(length: Callable[[Tensor], int]) -> None:
    """Of lists, as labels of a connectionist temporal classification are."""

    def spoken(o: Tensor, labels: list[Tensor]) -> Tensor:
        lengths = torch.tensor([length(label) for label in labels])
        frames = torch.full((len(o),), o.shape[1])
        return F.ctc_loss(o.transpose(0, 1), torch.cat(list(labels)), frames, lengths)

    outputs = torch.randn(6, 9, 5).log_softmax(-1).requires_grad_()
    labels = [torch.randint(1, 5, (n,)) for n in (1, 3, 2, 4, 1, 2)]
    assert way_of(spoken, (outputs, Entries(labels)), {}) is LossKind.SUMS


def test_trying_a_function_leaves_generators_and_its_own_numbers_alone() -> None:
    loss, (x, y, _) = Centred(), data()[:6]
    outputs = Model().double()(x)
    before = torch.get_rng_state()
    way_of(lambda o, y: loss(F.dropout(o), y), (outputs, y), {})
    assert torch.equal(torch.get_rng_state(), before)
    center = loss.center.clone()
    assert way_of(loss, (outputs, y), {}) is LossKind.WHOLE
    assert torch.equal(loss.center, center)


# Refusals


calls_of_module: list[int] = []
steps_of_module = 0


def test_trying_a_function_leaves_its_variables_alone() -> None:
    calls, steps = [0], 0

    def counting(o: Any, y: Tensor) -> Any:
        global steps_of_module
        nonlocal steps
        steps, steps_of_module = steps + 1, steps_of_module + 1
        calls[0] += 1
        calls_of_module.append(steps)
        return F.cross_entropy(o, y)

    class Counting:
        calls = 0

        def __call__(self, o: Any, y: Tensor) -> Any:
            self.calls += 1
            return counting(o, y)

    of_object = Counting()
    given = (torch.randn(6, 3, requires_grad=True), torch.arange(6) % 3)
    for function in (counting, functools.partial(counting)):
        assert way_of(function, given, {}) is LossKind.SUMS
        assert (calls, calls_of_module, steps, steps_of_module) == ([0], [], 0, 0)
    way_of(of_object, given, {})
    way_of(lambda o, y: of_object(o, y), given, {})
    assert not of_object.calls
    loss = Centred()
    center = loss.center.clone()
    way_of(lambda o, y: loss(o, y), (Model().double()(data()[:6][0]), data()[:6][1]), {})
    assert torch.equal(loss.center, center)
