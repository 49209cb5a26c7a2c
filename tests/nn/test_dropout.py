from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.errors import ConfigurationError
from evener.nn import Dropout, Dropout1d, Dropout2d, name_dropouts
from evener.nn.scope import scope


def named(layer: Dropout, name: str = "layer") -> Dropout:
    layer.layer = name
    return layer


def mask(
    samples: Tensor,
    *shape: int,
    p: float = 0.3,
    step: int = 0,
    seed: int = 0,
    name: str = "layer",
    calls: int = 1,
) -> Tensor:
    """What remains of ones, as booleans, in the last of some calls."""
    layer = named(Dropout(p), name)
    with scope(samples, step, seed):
        for _ in range(calls):
            kept = layer(torch.ones(len(samples), *shape)) > 0
    return kept


@settings(deadline=None, max_examples=30)
@given(
    samples=st.lists(st.integers(0, 2**40), min_size=1, max_size=12, unique=True),
    cut=st.integers(0, 12),
    width=st.integers(0, 9),
    shuffled=st.randoms(),
)
def test_masks_do_not_depend_on_the_division(
    samples: list[int], cut: int, width: int, shuffled: object
) -> None:
    whole = mask(torch.tensor(samples), 3, width)
    order = list(range(len(samples)))
    shuffled.shuffle(order)
    for part in (order[:cut], order[cut:]):
        ids = torch.tensor([samples[i] for i in part], dtype=torch.int64)
        assert torch.equal(mask(ids, 3, width), whole[part])


def test_masks_stay_those_of_earlier_versions() -> None:
    kept = mask(torch.tensor([0, 7, 2**40]), 16, p=0.5, step=5, seed=6, name="blocks.0.drop")
    assert [int("".join(str(int(bit)) for bit in row), 2) for row in kept] == [
        61363,
        51820,
        9144,
    ]


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_is_p_and_the_expectation_is_kept(p: float) -> None:
    layer, n = named(Dropout(p)), 2_000_000
    with scope(torch.arange(200), 1, 2):
        kept = layer(torch.ones(200, n // 200))
    dropped = (kept == 0).double().mean().item()
    assert abs(dropped - p) < 5 * (p * (1 - p) / n) ** 0.5 + 2**-17
    assert kept.double().mean().item() == pytest.approx(1, abs=6 * (p / (1 - p) / n) ** 0.5)


def test_draws_are_independent_between_elements_samples_steps_seeds_layers_and_calls() -> None:
    samples, width = torch.arange(300), 301
    masks = [
        mask(samples, width, p=0.5),
        mask(samples + 1, width, p=0.5),
        mask(samples, width, p=0.5, step=1),
        mask(samples, width, p=0.5, seed=1),
        mask(samples, width, p=0.5, name="other"),
        mask(samples, width, p=0.5, calls=2),
    ]
    signs = [2 * m.double() - 1 for m in masks]
    bound = 4.5 / (300 * 301) ** 0.5
    for one, other in itertools.combinations(signs, 2):
        assert abs((one * other).mean().item()) < bound
    first = signs[0]
    for distance in (1, 2, 3, 4, 16, 64, 256):
        assert (
            abs((first[:, distance:] * first[:, :-distance]).mean().item())
            < 4.5 / (300 * (301 - distance)) ** 0.5
        )
        assert (
            abs((first[distance:] * first[:-distance]).mean().item()) < 4.5 / (301 * (300 - distance)) ** 0.5
        )


def test_each_sample_and_element_is_dropped_as_often_as_chance_has_it() -> None:
    kept = mask(torch.arange(1000), 1000, p=0.5).double()
    for dim in (0, 1):
        chi_square = ((kept.sum(dim) - 500) ** 2 / 250).sum().item()
        assert abs(chi_square - 1000) < 5 * 2000**0.5


def test_runs_of_words_fill_their_space() -> None:
    """Every pattern of 12 neighbours occurs as often as any other."""
    kept = mask(torch.arange(500), 12 * 500, p=0.5).view(-1, 12).int()
    patterns = torch.bincount((kept << torch.arange(12)).sum(1), minlength=4096).double()
    expected = kept.shape[0] / 4096
    chi_square = ((patterns - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 4095) < 5 * (2 * 4095) ** 0.5


def test_rows_of_one_sample_are_grouped_and_the_dimension_can_be_named() -> None:
    samples = torch.tensor([5, 3])
    by_sample = mask(samples, 4, 6)
    with scope(samples, 0, 0):
        flat = named(Dropout(0.3))(torch.ones(8, 6)) > 0
    with scope(samples, 0, 0):
        second = named(Dropout(0.3, batch_dim=1))(torch.ones(4, 2, 6)) > 0
    assert torch.equal(flat, by_sample.view(8, 6))
    assert torch.equal(second, by_sample.movedim(0, 1))


def test_a_batch_that_cannot_be_matched_is_refused_with_both_sizes() -> None:
    with (
        scope(torch.arange(3), 0, 0),
        pytest.raises(ConfigurationError, match="no multiple of the 3 "),
    ):
        Dropout()(torch.ones(4, 2))
    with scope(torch.arange(0), 0, 0), pytest.raises(ConfigurationError, match="of the 0 samples"):
        Dropout()(torch.ones(1, 2))
    with scope(torch.arange(0), 0, 0):
        assert Dropout()(torch.ones(0, 2)).shape == (0, 2)


@pytest.mark.parametrize(
    ("make", "plain", "shape"),
    [
        (Dropout, nn.Dropout, (4, 50)),
        (Dropout1d, nn.Dropout1d, (4, 5, 3)),
        (Dropout2d, nn.Dropout2d, (4, 5, 3, 2)),
    ],
)
def test_outside_of_a_step_it_is_torchs(
    make: Callable[[float], nn.Module], plain: Callable[[float], nn.Module], shape: tuple[int, ...]
) -> None:
    results = []
    for layer in (make(0.5), plain(0.5)):
        torch.manual_seed(3)
        results.append(layer(torch.ones(shape)))
        assert torch.equal(layer.eval()(torch.ones(shape)), torch.ones(shape))
    assert torch.equal(*results)
    with scope(torch.arange(4), 0, 0):
        assert torch.equal(make(0.5).eval()(torch.ones(shape)), torch.ones(shape))


@pytest.mark.parametrize(("layer", "shape"), [(Dropout1d(0.5), (40, 7, 3)), (Dropout2d(0.5), (40, 7, 3, 2))])
def test_whole_channels_are_dropped(layer: Dropout, shape: tuple[int, ...]) -> None:
    with scope(torch.arange(40), 0, 0):
        channels = layer(torch.ones(shape)).flatten(2)
    assert torch.equal(channels.amin(2), channels.amax(2))
    assert set(channels.unique().tolist()) == {0.0, 2.0}
    with scope(torch.arange(40), 0, 0), pytest.raises(ConfigurationError, match="-dimensional inputs"):
        layer(torch.ones(40, 7))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything_can_be_dropped(p: float) -> None:
    with scope(torch.arange(2), 0, 0):
        assert torch.equal(Dropout(p)(torch.ones(2, 9)), torch.full((2, 9), 1 - p))


def test_gradients_pass_where_values_do_and_inplace_writes_over_the_input() -> None:
    samples, x = torch.arange(6), torch.randn(6, 7, requires_grad=True)
    with scope(samples, 0, 0):
        y = named(Dropout(0.5))(x)
    y.sum().backward()
    assert torch.equal(y, x * x.grad)
    base = x.detach().clone()
    with scope(samples, 0, 0):
        assert named(Dropout(0.5, inplace=True))(base) is not None
    assert torch.equal(base, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_masks_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    with scope(torch.arange(5), 0, 0):
        y = named(Dropout(0.3))(torch.ones(5, 8, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y > 0, mask(torch.arange(5), 8))


def test_names_and_not_the_order_of_construction_tell_layers_apart() -> None:
    def model(*names: str) -> nn.ModuleDict:
        layers = {name: Dropout(0.5) for name in names}
        return name_dropouts(nn.ModuleDict({name: layers[name] for name in sorted(names)}))

    results = []
    for names in (("a", "b"), ("b", "a")):
        with scope(torch.arange(4), 0, 0):
            built = model(*names)
            results.append([built[name](torch.ones(4, 30)) for name in reversed(names)])
    assert torch.equal(results[0][0], results[1][1])
    assert torch.equal(results[0][1], results[1][0])
    assert not torch.equal(results[0][0], results[0][1])


def test_layers_without_a_name_differ_too_and_repeat() -> None:
    def masks() -> list[Tensor]:
        layers = [Dropout(0.5), Dropout(0.5)]
        with scope(torch.arange(4), 0, 0):
            return [layer(torch.ones(4, 30)) for layer in layers]

    first, again = masks(), masks()
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_the_masks(reentrant: bool) -> None:
    torch.manual_seed(0)
    blocks = name_dropouts(nn.Sequential(Block(), Block(), Block()))
    x = torch.randn(6, 8, requires_grad=True)
    gradients = []
    for repeat in (False, True):
        with scope(torch.arange(6), 0, 0) as now:
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant) if repeat else block(y)
            now.rewind()
            y.sum().backward()
        gradients.append(x.grad)
        x.grad = None
    assert torch.equal(*gradients)


@pytest.mark.gpu
def test_masks_are_the_same_on_cuda() -> None:
    samples = torch.randint(2**40, (257,))
    with scope(samples, 3, 4):
        expected = named(Dropout(0.3))(torch.ones(257, 1031))
    with scope(samples, 3, 4):
        actual = named(Dropout(0.3))(torch.ones(257, 1031, device="cuda"))
    assert torch.equal(actual.cpu(), expected)
