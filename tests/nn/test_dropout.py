from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.errors import ConfigurationError
from evener.nn import Dropout, Dropout1d, Dropout2d, exact_dropout, name_dropouts
from evener.nn.context import scope
from evener.nn.fqn import clean_name
from evener.training.engine import Engine
from tests import tasks
from tests.tiers import ALWAYS, NIGHTLY, spread


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


@settings(max_examples=30)
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


@pytest.mark.parametrize("p", [1e-9, 1 - 1e-9])
def test_a_rate_next_to_nothing_or_everything_is_rounded_to_neither(p: float) -> None:
    with scope(torch.arange(2), 0, 0):
        scales = Dropout(p)(torch.ones(2, 200_000)).unique()
    assert torch.equal(scales, torch.tensor([0.0, 65536 / 65535 if p < 0.5 else 65536]))


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


class Twice(nn.Module):
    """All kinds of dropout, one of them called twice on the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shared, self.rows = nn.Linear(6, 8), Dropout(0.5), Dropout(0.4, batch_dim=1)
        self.channels, self.inplace = Dropout1d(0.5), Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        x = self.shared(x) + 2 * self.shared(x)
        x = self.rows(x.t()).t()
        return self.inplace(self.channels(x[:, :, None]).squeeze(2) * 1.5)


def outputs_and_gradients(model: nn.Module, sizes: tuple[int, ...] = (5, 5, 7, 3)) -> list[Tensor]:
    found = []
    for step, size in enumerate(sizes):
        x = torch.randn(size, 6, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with scope(torch.arange(step, step + size), step, 0) as now:
            y = model(x)
            now.rewind()
            y.square().sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated"
)  # torch's own, importing the backend
@pytest.mark.parametrize("backend", spread(["eager", "aot_eager_decomp_partition"], ALWAYS, NIGHTLY))
def test_a_compiled_model_has_the_masks_of_the_plain_one_without_a_graph_break(backend: str) -> None:
    torch.compiler.reset()
    plain = outputs_and_gradients(name_dropouts(seeded(Twice)))
    compiled = torch.compile(seeded(Twice), backend=backend, fullgraph=True)
    assert any("_orig_mod" in name for name, _ in compiled.named_modules())
    found = outputs_and_gradients(name_dropouts(compiled))
    assert [layer.layer for layer in compiled.modules() if isinstance(layer, Dropout)] == [
        "shared",
        "rows",
        "channels",
        "inplace",
    ]
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(a == 0, b == 0) for a, b in zip(found, plain, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, at a graph break
def test_compiled_layers_without_a_name_have_the_masks_of_plain_ones() -> None:
    torch.compiler.reset()
    plain = outputs_and_gradients(seeded(Twice))
    found = outputs_and_gradients(torch.compile(seeded(Twice), backend="eager"))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("named", spread([False, True], NIGHTLY, ALWAYS))
def test_compiled_and_outside_of_a_step_there_is_chance(named: bool) -> None:
    torch.compiler.reset()
    layer = nn.Sequential(Dropout(0.5), Dropout1d(0.5))
    compiled = torch.compile(name_dropouts(layer) if named else layer, backend="eager")
    torch.manual_seed(0)
    first, second = compiled(torch.ones(4, 100, 2)), compiled(torch.ones(4, 100, 2))
    assert not torch.equal(first, second)
    assert first.mean().item() == pytest.approx(1, abs=0.3)
    assert torch.equal(compiled.eval()(torch.ones(4, 3, 2)), torch.ones(4, 3, 2))


@pytest.mark.parametrize("compiled_inside", [False, True])
def test_compiled_activation_checkpointing_repeats_the_masks(compiled_inside: bool) -> None:
    torch.compiler.reset()
    block = name_dropouts(seeded(Block))

    def model(x: Tensor) -> Tensor:
        inside = torch.compile(block, backend="aot_eager") if compiled_inside else block
        return checkpoint(inside, x, use_reentrant=False)  # type: ignore[no-any-return]

    outer = model if compiled_inside else torch.compile(model, backend="aot_eager")
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradients = []
    for call in (block, outer):
        with scope(torch.arange(6), 0, 0) as now:
            y = call(x)
            now.rewind()
            y.sum().backward()
        gradients.append(x.grad)
        x.grad = None
    torch.testing.assert_close(*gradients)


def test_a_models_dropouts_are_replaced_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Sequential(nn.Dropout1d(0.2), nn.Dropout2d()))
    model.append(Dropout(0.4))
    modules = list(model.modules())
    assert exact_dropout(model) is model
    assert list(model.modules()) == modules
    kinds = [(type(m), m.p, m.layer) for m in modules if isinstance(m, Dropout)]
    assert kinds == [
        (Dropout, 0.1, "1"),
        (Dropout1d, 0.2, "2.0"),
        (Dropout2d, 0.5, "2.1"),
        (Dropout, 0.4, "3"),
    ]
    with scope(torch.arange(5), 0, 0):
        replaced = modules[2](torch.ones(5, 20)) > 0
    assert torch.equal(replaced, mask(torch.arange(5), 20, p=0.1, name="1"))
    assert "batch_dim=0" in str(modules[2])


def test_replaced_dropouts_of_sequences_that_come_first() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5)
    layer.self_attn.dropout = 0.0
    exact_dropout(layer, batch_dim=1)
    layer(torch.ones(3, 2, 4))
    whole = layer.self_attn, layer.dropout
    with scope(torch.tensor([7, 8]), 0, 0):
        both = whole[1](torch.ones(3, 2, 4))
    with scope(torch.tensor([8]), 0, 0):
        assert torch.equal(whole[1](torch.ones(3, 1, 4)), both[:, 1:])


class OwnDropout(nn.Dropout):
    pass


def test_what_goes_on_drawing_is_named() -> None:
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.25),
            "lstm": nn.LSTM(4, 4, num_layers=2, dropout=0.5),
            "own": OwnDropout(0.125),
            "volume": nn.Dropout3d(0.5),
            "alpha": nn.AlphaDropout(0.5),
            "nothing": nn.AlphaDropout(0.0),
        }
    )
    with pytest.warns(UserWarning, match="^5 of the model's modules go on drawing") as caught:
        exact_dropout(model)
    for words in (
        "encoder.self_attn (MultiheadAttention, dropout=0.25)",
        "lstm (LSTM, dropout=0.5)",
        "own (OwnDropout, p=0.125)",
        "volume (Dropout3d, p=0.5)",
        "alpha (AlphaDropout, p=0.5)",
    ):
        assert words in str(caught[0].message)
    assert type(model["encoder"].dropout1) is Dropout  # type: ignore[union-attr]


def trained(name: str, alone: bool = False, **settings: Any) -> dict[str, Tensor]:
    """The weights after two epochs, by clean names."""
    config = RunConfig(device="cpu", dtype="float64", **settings)
    with (
        Session(device="cpu", environment=Environment() if alone else None) as session,
        Engine(getattr(tasks, name)(), config, session=session) as engine,
    ):
        for batch in engine.batches():
            engine.step(batch)
        return {clean_name(key): p.detach().clone() for key, p in engine.model.named_parameters()}


def test_a_task_of_a_compiled_model_trains_as_the_plain_one_on_any_division(ranks: Any) -> None:
    torch.compiler.reset()
    plain = trained("dropout", alone=True)
    for found in (trained("compiled", alone=True), *ranks(2).run(trained, "compiled", balance="3,1")):
        assert found.keys() == plain.keys()
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.gpu
def test_masks_are_the_same_on_cuda() -> None:
    samples = torch.randint(2**40, (257,))
    with scope(samples, 3, 4):
        expected = named(Dropout(0.3))(torch.ones(257, 1031))
    with scope(samples, 3, 4):
        actual = named(Dropout(0.3))(torch.ones(257, 1031, device="cuda"))
    assert torch.equal(actual.cpu(), expected)
