from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import evener
from evener.core.losses import Loss, exact
from evener.errors import LossError
from tests.ids import placeless

N, C = 11, 5
Pair = tuple[Tensor, Tensor]


def classes(*shape: int, ignore: int | None = None) -> Callable[[], Pair]:
    def draw() -> Pair:
        targets = torch.randint(C, (N, *shape))
        if ignore is not None:
            targets[torch.rand(targets.shape) < 0.3] = ignore
        return torch.randn(N, C, *shape, dtype=torch.float64), targets

    return draw


def probabilities(*shape: int) -> Callable[[], Pair]:
    return lambda: (
        torch.randn(N, C, *shape, dtype=torch.float64),
        torch.randn(N, C, *shape, dtype=torch.float64).softmax(1),
    )


def alike(outputs: Callable[[Tensor], Tensor], targets: Callable[[Tensor], Tensor]) -> Callable[[], Pair]:
    return lambda: (
        outputs(torch.randn(N, C, dtype=torch.float64)),
        targets(torch.randn(N, C, dtype=torch.float64)),
    )


def signs(x: Tensor) -> Tensor:
    return x.sign()


def bits(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def same(x: Tensor) -> Tensor:
    return x


def margins() -> Pair:
    targets = torch.stack([torch.randperm(C) for _ in range(N)])
    return torch.randn(N, C, dtype=torch.float64), targets.where(torch.rand(N, C) < 0.6, -1)


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0], dtype=torch.float64)

CASES: dict[str, tuple[Callable[..., nn.Module], Callable[[], Pair]]] = {
    "cross entropy": (nn.CrossEntropyLoss, classes()),
    "cross entropy, ignored": (functools.partial(nn.CrossEntropyLoss, ignore_index=2), classes(ignore=2)),
    "cross entropy, ignored -100": (nn.CrossEntropyLoss, classes(3, ignore=-100)),
    "cross entropy, images": (nn.CrossEntropyLoss, classes(3, 2)),
    "cross entropy, weights": (functools.partial(nn.CrossEntropyLoss, weight=WEIGHT), classes(ignore=-100)),
    "cross entropy, smoothing": (functools.partial(nn.CrossEntropyLoss, label_smoothing=0.1), classes(4)),
    "cross entropy, all": (
        functools.partial(nn.CrossEntropyLoss, weight=WEIGHT, label_smoothing=0.2, ignore_index=1),
        classes(4, ignore=1),
    ),
    "cross entropy, soft": (nn.CrossEntropyLoss, probabilities()),
    "cross entropy, soft images": (
        functools.partial(nn.CrossEntropyLoss, weight=WEIGHT, label_smoothing=0.1),
        probabilities(2, 3),
    ),
    "nll": (nn.NLLLoss, classes()),
    "nll, all": (functools.partial(nn.NLLLoss, weight=WEIGHT, ignore_index=0), classes(3, 2, ignore=0)),
    "mse": (nn.MSELoss, alike(same, same)),
    "l1": (nn.L1Loss, alike(same, same)),
    "smooth l1": (functools.partial(nn.SmoothL1Loss, beta=0.3), alike(same, same)),
    "huber": (functools.partial(nn.HuberLoss, delta=0.4), alike(same, same)),
    "bce": (functools.partial(nn.BCELoss, weight=WEIGHT), alike(torch.sigmoid, bits)),
    "bce, logits": (
        functools.partial(nn.BCEWithLogitsLoss, weight=WEIGHT, pos_weight=2 * WEIGHT),
        alike(same, bits),
    ),
    "kl": (nn.KLDivLoss, alike(functools.partial(F.log_softmax, dim=1), functools.partial(F.softmax, dim=1))),
    "kl, log target": (
        functools.partial(nn.KLDivLoss, log_target=True),
        alike(functools.partial(F.log_softmax, dim=1), functools.partial(F.log_softmax, dim=1)),
    ),
    "poisson": (functools.partial(nn.PoissonNLLLoss, full=True), alike(same, torch.abs)),
    "soft margin": (nn.SoftMarginLoss, alike(same, signs)),
    "hinge embedding": (functools.partial(nn.HingeEmbeddingLoss, margin=0.7), alike(torch.abs, signs)),
    "multi-label soft margin": (
        functools.partial(nn.MultiLabelSoftMarginLoss, weight=WEIGHT),
        alike(same, bits),
    ),
    "multi-label margin": (nn.MultiLabelMarginLoss, margins),
    "multi margin": (functools.partial(nn.MultiMarginLoss, p=2, margin=0.6, weight=WEIGHT), classes()),
}
REDUCTIONS = ["mean", "sum", "none"]


def value_and_gradient(function: Callable[[Tensor], Tensor], outputs: Tensor) -> tuple[Tensor, Tensor]:
    outputs = outputs.clone().requires_grad_()
    value = function(outputs)
    (gradient,) = torch.autograd.grad(value, outputs)
    return value.detach(), gradient


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_value_is_torchs_and_does_not_depend_on_the_division(name: str, reduction: str) -> None:
    torch.manual_seed(len(name))
    make, draw = CASES[name]
    loss = make(reduction=reduction)
    ours = exact(loss)
    for _ in range(3):
        outputs, targets = draw()

        def reference(x: Tensor, targets: Tensor = targets) -> Tensor:
            value: Tensor = loss(x, targets)
            return value.mean() if reduction == "none" else value

        value, gradient = value_and_gradient(reference, outputs)
        divisor = ours.divisor(float(ours.count(targets)))
        whole = value_and_gradient(lambda x, t=targets, d=divisor: ours.total(x, t) / d, outputs)
        close(whole, (value, gradient))

        parts = list(zip(outputs.split([1, 7, 0, 3]), targets.split([1, 7, 0, 3]), strict=True))
        divisor = ours.divisor(sum(float(ours.count(t)) for _, t in parts if len(t)))
        divided = [
            value_and_gradient(lambda x, t=t, d=divisor: ours.total(x, t) / d, o) for o, t in parts if len(t)
        ]
        close(sum(v for v, _ in divided), value)
        close(torch.cat([g for _, g in divided]), gradient)


def test_batchmean_divides_by_samples() -> None:
    _, draw = CASES["kl"]
    outputs, targets = draw()
    loss = nn.KLDivLoss(reduction="batchmean")
    ours = exact(loss)
    assert ours.count(targets) == N
    close(ours.total(outputs, targets) / N, loss(outputs, targets))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.CrossEntropyLoss(weight=WEIGHT)])
def test_an_empty_part_counts_nothing(loss: nn.Module) -> None:
    outputs = torch.randn(0, C, dtype=torch.float64, requires_grad=True)
    targets = (
        torch.empty(0, C, dtype=torch.float64) if isinstance(loss, nn.MSELoss) else torch.empty(0).long()
    )
    total = exact(loss).total(outputs, targets)
    total.backward()
    assert float(exact(loss).count(targets)) == 0
    assert total.item() == 0


def test_functions_and_partials_are_their_modules() -> None:
    outputs, targets = classes(ignore=3)()
    partial = functools.partial(F.cross_entropy, ignore_index=3, weight=WEIGHT)
    ours = exact(partial)
    close(ours.total(outputs, targets) / ours.count(targets), partial(outputs, targets))
    close(exact(F.cross_entropy).total(outputs, targets), F.cross_entropy(outputs, targets, reduction="sum"))
    assert exact(functools.partial(F.mse_loss, reduction="sum")).divisor(8.0) == 1.0
    assert exact(F.mse_loss).divisor(8.0) == 8.0


def written_rows(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Scores (N, C, ...) whose classes lie together in memory, as a language model has them."""
    n, classes, *more = shape
    made = torch.randn(n, *more, classes, dtype=dtype, generator=torch.Generator().manual_seed(5))
    return made.movedim(-1, 1).requires_grad_()


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 5, 3, 2), (3, 5, 0), (0, 5, 4), (3, 1, 4)])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(weight=torch.arange(1.0, 6), label_smoothing=0.1),
        nn.NLLLoss(),
    ],
    ids=["ignored", "weights", "nll"],
)
def test_scores_in_rows_have_the_sum_and_the_gradient_of_others(
    loss: nn.Module, shape: tuple[int, ...]
) -> None:
    if shape[1] == 1:
        loss = type(loss)()
    targets = torch.randint(shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(6))
    rows, others = written_rows(shape), written_rows(shape).detach().contiguous().requires_grad_()
    found = []
    for outputs in (rows, others):
        total = exact(loss).total(outputs, targets)
        total.backward()
        found.append((total, outputs.grad))
    torch.testing.assert_close(*found)


def test_scores_in_rows_are_summed_by_the_kernels_for_rows() -> None:
    loss, called = nn.CrossEntropyLoss(), list[torch.Size]()

    class Shapes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.cross_entropy:
                called.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    targets, images = torch.zeros(3, 4, dtype=torch.long), torch.randn(3, 5, 4)
    with Shapes():
        exact(loss).total(written_rows((3, 5, 4), torch.bfloat16), targets)
        exact(loss).total(images, targets)
        exact(loss).total(images.softmax(1), images.softmax(1))
        meta = images.to("meta")
        exact(loss).total(meta, targets.to("meta"))
        with deterministic():
            exact(loss).total(meta, targets.to("meta"))
            exact(loss).total(images, targets)
    rows, whole = torch.Size([12, 5]), torch.Size([3, 5, 4])
    assert called == [rows, whole, whole, whole, rows, whole], (
        "on a device, images have no deterministic kernel"
    )
    with pytest.raises(RuntimeError, match="target size"):
        exact(loss).total(written_rows((3, 5, 4)), targets[:, :3])


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_weights_follow_the_precision_of_the_outputs_and_changes_in_place() -> None:
    outputs, targets = classes()()
    weight = WEIGHT.float()
    ours = exact(nn.CrossEntropyLoss(weight=weight))
    close(ours.total(outputs, targets), F.cross_entropy(outputs, targets, weight.double(), reduction="sum"))
    weight.mul_(2)
    close(ours.total(outputs, targets), F.cross_entropy(outputs, targets, weight.double(), reduction="sum"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_totals_of_half_precision_neither_overflow_nor_drown(dtype: torch.dtype) -> None:
    outputs, targets = torch.full((2, 100_000), 3.0, dtype=dtype), torch.zeros(100_000, dtype=dtype)
    total = exact(nn.MSELoss()).total(outputs, targets.expand(2, -1))
    assert total.dtype == torch.float32
    assert float(total) == 1_800_000


@pytest.mark.parametrize("shapes", list(itertools.permutations([(N, 1), (N,)], 2)))
def test_shapes_that_torch_would_broadcast_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    outputs, targets = (torch.ones(shape) for shape in shapes)
    with pytest.raises(LossError, match=r"outputs of shape \(11.*targets of shape \(11"):
        exact(nn.MSELoss()).total(outputs, targets)


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_a_weight_for_each_sample_is_refused(shape: tuple[int, ...]) -> None:
    loss = exact(nn.BCEWithLogitsLoss(weight=torch.ones(shape)))
    with pytest.raises(LossError, match="varies along the batch"):
        loss.count(torch.ones(shape))


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) ** 2


REFUSED: list[Any] = [
    lambda outputs, targets: outputs.mean(),
    Focal(),
    nn.Linear(2, 2),
    nn.CTCLoss(),
    nn.TripletMarginLoss(),
    nn.CosineEmbeddingLoss(),
    nn.GaussianNLLLoss(),
    functools.partial(F.cross_entropy, torch.ones(2, 2)),
    functools.partial(torch.add, alpha=2),
    "mse",
    None,
]


@pytest.mark.parametrize("loss", REFUSED, ids=placeless)
def test_a_loss_of_unknown_count_is_refused_with_the_lines_that_fix_it(loss: Any) -> None:
    with pytest.raises(LossError) as caught:
        exact(loss)
    assert "count=lambda targets: len(targets)," in str(caught.value)
    assert "total=lambda outputs, targets: len(targets) * loss(outputs, targets)," in str(caught.value)


def test_the_lines_shown_work() -> None:
    with pytest.raises(LossError) as caught:
        exact(Focal())
    as_mean, as_sum = (text.strip() for text in str(caught.value).split("\n\n")[1::2])
    outputs, targets = alike(same, same)()
    fixed = exact(eval(as_mean, {"evener": evener, "loss": nn.MSELoss()}))
    close(fixed.total(outputs, targets) / fixed.count(targets), F.mse_loss(outputs, targets))
    fixed = exact(eval(as_sum, {"evener": evener, "loss": lambda o, t: (o - t).square().sum()}))
    close(fixed.total(outputs, targets) / fixed.divisor(5.0), F.mse_loss(outputs, targets, reduction="sum"))


def test_options_that_cannot_be_divided_are_refused_by_name() -> None:
    with pytest.raises(LossError, match="size_average"):
        exact(functools.partial(F.mse_loss, size_average=False))
    with pytest.raises(LossError, match="'batchmean' is not one of mean, sum, none"):
        exact(functools.partial(F.mse_loss, reduction="batchmean"))
    with pytest.raises(LossError, match=r"MSELoss\(\)"):
        exact(nn.MSELoss)


def test_objects_with_count_and_total_are_losses() -> None:
    class Own:
        def count(self, targets: Tensor) -> int:
            return 2 * len(targets)

        def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.sum()

    loss = exact(Own())
    assert isinstance(loss, Loss)
    assert loss.count(torch.ones(3)) == 6
    assert loss.divisor(6.0) == 6.0
    assert exact(loss) is loss
