"""Layers divided over ranks, one by one, against the plain layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.sharded_tensor.shard_spec import shard_spec
from evener.distributed.mesh import Layout
from evener.distributed.session import Session
from evener.errors import ConfigurationError, TaskError
from evener.nn.context import scope
from evener.nn.dropout import Dropout, Dropout1d
from evener.nn.head_parallel_attention import DividedAttention
from evener.nn.rng import drawing_apart
from evener.nn.tensor_parallel import COLUMNS, LengthDivision, divide_layer
from evener.strategies.interfaces import StrategySettings
from evener.strategies.tensor.tensor import TensorParallel


class Several(nn.Module):
    """Layers, and what is computed with them."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def found(
    build: Callable[[], Several], plan: str, x: Tensor, weights: list[float] | None = None
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """The output, the gradient of the input, and the whole gradients of all parameters."""
    torch.manual_seed(0)
    model = build().double()
    with Session("cpu", 60) as session:
        mesh = session.lay(Layout({"tensor": session.world_size}))
        model = TensorParallel(plan).parallelize(model, mesh, StrategySettings(weights=weights))  # type: ignore[assignment]
        given = x.clone().requires_grad_(x.is_floating_point())
        output = model(given)
        output.sin().sum().backward()
        of_model = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            gradient, piece = parameter.grad.to_dense(), shard_spec(parameter)
            of_model[name] = piece.gather(gradient, mesh) if piece else gradient
        return output.detach(), given.grad, of_model


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def attention(batched: bool = True, **options: Any) -> Callable[[], Several]:
    """With another mask for each head and sample, and weights that are used."""

    def compute(model: Any, x: Tensor) -> Tensor:
        memory = model.memory(x).flip(-2)
        length = x.shape[0 if not batched or not model.heads.batch_first else 1]
        heads = 3 * (x.shape[0 if model.heads.batch_first else 1] if batched else 1)
        mask = torch.linspace(-1, 1, heads * length * length, dtype=x.dtype).view(heads, length, length)
        output, each = model.heads(x, memory, memory * 2, attn_mask=mask, average_attn_weights=False)
        again, mean = model.heads(x, x, x, attn_mask=mask.sin())
        plain, _ = model.heads(output, x, x, need_weights=False)
        made: Tensor = output.sum() + again.sum() * each.square().sum() + mean.sin().sum() + plain
        return made

    return lambda: Several(compute, heads=nn.MultiheadAttention(6, 3, **options), memory=nn.Linear(6, 6))


def bags() -> dict[str, tuple[Callable[[], Several], str, Tensor]]:
    """Of two dimensions, or with offsets, of which one bag is empty and one has words of one rank alone."""
    words = torch.tensor([[3, 0, 0, 6], [6, 1, 6, 2], [0, 1, 0, 1]])
    start, stop = torch.tensor([0, 4, 4]), torch.tensor([0, 4, 4, 12])

    def weighed(model: Any, x: Tensor) -> Tensor:
        factors = torch.sigmoid(model.weights(x)[..., 0])
        made: Tensor = model.bag(x, per_sample_weights=factors)
        return made + model.bag(x.flatten(), start, factors.flatten())

    def several(compute: Callable[[Any, Tensor], Tensor], **options: Any) -> Callable[[], Several]:
        beside = {"weights": lambda: nn.Embedding(7, 1)} if compute is weighed else {}
        return lambda: Several(
            compute, bag=nn.EmbeddingBag(7, 4, **options), **{name: make() for name, make in beside.items()}
        )

    plain = lambda model, x: model.bag(x) + model.bag(x.flatten(), start)  # noqa: E731
    last = lambda model, x: model.bag(x.flatten(), stop)  # noqa: E731
    options: dict[str, dict[str, Any]] = {
        "sum": {"mode": "sum"},
        "mean": {"mode": "mean", "padding_idx": 0},
        "sparse sum": {"mode": "sum", "sparse": True, "padding_idx": -1},
        "sparse mean": {"mode": "mean", "sparse": True},
    }
    found = {name: (several(plain, **each), "bag=vocabulary", words) for name, each in options.items()}
    found["last offset"] = several(last, mode="mean", include_last_offset=True), "bag=vocabulary", words
    for sparse in (False, True):
        given = {"mode": "sum", "sparse": sparse, "padding_idx": 3}
        found[f"weighed, sparse={sparse}"] = several(weighed, **given), "bag=vocabulary", words
    return found


CASES: dict[str, tuple[Callable[[], Several], str, Tensor]] = {
    "a row alone": (lambda: Several(lambda m, x: m.down(x), down=nn.Linear(5, 3)), "down=rowwise", draws(4, 2, 5)),
    "scores alone": (lambda: Several(lambda m, x: m.head(x), head=nn.Linear(5, 7)), "head=vocabulary", draws(4, 5)),
    "3-d convolutions": (
        lambda: Several(
            lambda m, x: m.down(m.norm(m.up(x)).relu()),
            up=nn.Conv3d(2, 5, 2), norm=nn.BatchNorm3d(5), down=nn.Conv3d(5, 3, 1, stride=2),
        ),
        "up=colwise,norm=between,down=rowwise",
        draws(3, 2, 4, 4, 4),
    ),
    "a convolution without samples": (
        lambda: Several(lambda m, x: m.down(m.up(x)), up=nn.Conv1d(2, 5, 2), down=nn.Conv1d(5, 3, 1)),
        "up=colwise,down=rowwise",
        draws(2, 6),
    ),
    "sparse words": (
        lambda: Several(lambda m, x: m.embed(x), embed=nn.Embedding(7, 4, padding_idx=3, sparse=True)),
        "embed=vocabulary",
        torch.tensor([[3, 0, 0], [6, 1, 6]]),
    ),
    "words of one rank": (
        lambda: Several(lambda m, x: m.embed(x), embed=nn.Embedding(7, 4, sparse=True)),
        "embed=vocabulary",
        torch.tensor([0, 1, 0]),
    ),
    "words of which the last is padding": (
        lambda: Several(lambda m, x: m.embed(x), embed=nn.Embedding(7, 4, padding_idx=-1)),
        "embed=vocabulary",
        torch.tensor([[3, 0, 0], [6, 1, 6]]),
    ),
    **{f"bags, {name}": case for name, case in bags().items()},
    "attention": (attention(batch_first=True), "heads=heads", draws(2, 4, 6)),
    "attention, length first": (attention(), "heads=heads", draws(4, 2, 6)),
    "attention with learned keys": (
        attention(add_bias_kv=True, bias=False), "heads=heads", draws(4, 2, 6),
    ),
    "attention of one sample": (attention(batched=False, batch_first=True), "heads=heads", draws(4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_divided_layer_is_the_plain_one(ranks: Any, case: str) -> None:
    build, plan, x = CASES[case]
    ((output, gradient, of_model),) = ranks(1).run(found, build, plan, x)
    for divided in ranks(3).run(found, build, plan, x, [2, 1, 1] if "head" not in plan else None):
        torch.testing.assert_close(divided, (output, gradient, of_model), rtol=1e-11, atol=1e-12)


def test_other_widths_for_keys_and_values(ranks: Any) -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        made: Tensor = model.heads(x, model.k(x), model.v(x))[0]
        return made

    def build() -> Several:
        heads = nn.MultiheadAttention(6, 3, kdim=4, vdim=5, batch_first=True)
        return Several(compute, heads=heads, k=nn.Linear(6, 4), v=nn.Linear(6, 5))

    ((output, gradient, of_model),) = ranks(1).run(found, build, "heads=heads", draws(2, 4, 6))
    for divided in ranks(2).run(found, build, "heads=heads", draws(2, 4, 6)):
        torch.testing.assert_close(divided, (output, gradient, of_model), rtol=1e-11, atol=1e-12)


def held() -> tuple[str, dict[str, str]]:
    """What a divided layer says of itself, and of what it refuses."""
    with Session("cpu", 60) as session:
        mesh = session.lay(Layout({"tensor": 2}))
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.MultiheadAttention(4, 2))
        TensorParallel("0=colwise,1=rowwise,2=heads").parallelize(model, mesh, StrategySettings())
        refused = {}
        with pytest.raises(TaskError) as caught, scope(torch.arange(2), 0, 0):
            model[0].weight.sum()
        refused["read"] = str(caught.value)
        with scope(torch.arange(2), 0, 0):
            check_seen(model[0].weight, model[1].weight)
        with pytest.raises(TaskError) as caught:
            model[1](torch.zeros(2, 7))
        refused["width"] = str(caught.value)
        bag = nn.Sequential(nn.EmbeddingBag(5, 2))
        TensorParallel("0=vocabulary").parallelize(bag, mesh, StrategySettings())
        for given in (
            {"per_sample_weights": torch.ones(2, 2)},
            {"offsets": torch.zeros(1, dtype=torch.int64)},
        ):
            with pytest.raises(TaskError) as caught:
                bag[0](torch.zeros(2, 2, dtype=torch.int64), **given)
            refused[next(iter(given))] = str(caught.value)
        with pytest.raises(ConfigurationError) as elsewhere:
            pickle.loads(pickle.dumps(model))(torch.zeros(2, 4))
        refused["pickled"] = str(elsewhere.value)
        with pytest.raises(ConfigurationError) as attention:
            pickle.loads(pickle.dumps(model[2]))(*[torch.zeros(2, 1, 4)] * 3)
        refused["attention"] = str(attention.value)
        with pytest.raises(ValueError, match="is_causal is a hint about attn_mask"):
            model[2](*[torch.zeros(2, 1, 4)] * 3, is_causal=True)
        twin = copy.deepcopy(model[:2])
        assert torch.equal(twin(torch.ones(2, 4)), model[:2](torch.ones(2, 4)))
        assert isinstance(model[2], DividedAttention)
        group = mesh.group("tensor")
        assert group is not None
        with pytest.raises(ConfigurationError, match="norm, a LayerNorm, cannot be divided so"):
            divide_layer(nn.LayerNorm(3), COLUMNS, LengthDivision(group, (range(1), range(1, 3)), 0), "norm")
        return repr(model[0]), refused


def check_seen(columns: Tensor, rows: Tensor) -> None:
    """The form of the whole weight is answered, its numbers are refused, whatever asks for them."""
    assert (columns.shape, rows.shape) == ((5, 4), (4, 5))
    assert (columns.dtype, columns.device.type, columns.dim(), len(rows)) == (torch.float32, "cpu", 2, 4)
    assert columns.requires_grad
    assert columns.is_floating_point()
    assert torch.ones(3, dtype=torch.float64).to(columns).dtype == torch.float32
    assert torch.ones(3, dtype=torch.int64).type_as(columns).dtype == torch.float32
    for made in (torch.zeros_like(columns), columns.new_zeros(5, 4)):
        assert type(made) is Tensor
        assert torch.equal(made, torch.zeros(5, 4))
    for use in (
        lambda: torch.nn.functional.linear(torch.ones(2, 4), columns),
        lambda: columns * 2,
        lambda: columns[0],
        lambda: columns.t(),
        lambda: columns.to(torch.float64),
        lambda: float(columns.norm()),
        lambda: torch.cat([columns, columns]),
        lambda: columns.detach(),
        lambda: columns.data,
    ):
        with pytest.raises(TaskError, match="its weight is read from outside of it"):
            use()


def test_what_a_part_says_and_refuses(ranks: Any) -> None:
    for rank, (words, refused) in enumerate(ranks(2).run(held)):
        part = ("0:3", "3:5")[rank]
        assert words == f"ColumnLinear(in_features=4, out_features=5, bias=True, part={part})"
        assert "0 is divided over ranks, and its weight is read from outside" in refused["read"]
        assert f"1 reads {3 - rank} of 5 features on this rank and got 7" in refused["width"]
        assert "they are one for each word, and go with 'sum'" in refused["per_sample_weights"]
        assert "give words (bags, words of each), or (words) with the offsets" in refused["offsets"]
        assert "copied to another process" in refused["pickled"]
        assert "copied to another process" in refused["attention"]


@pytest.mark.parametrize("kind", [Dropout, Dropout1d])
def test_the_mask_of_a_part_is_that_part_of_the_mask(kind: type[Dropout]) -> None:
    whole, part = kind(0.5), kind(0.5)
    whole.layer = part.layer = "drop"
    part.part = (-2, 7, range(2, 5))
    with scope(torch.tensor([3, 1]), 4, 0):
        expected = whole(torch.ones(2, 7, 6))
    with scope(torch.tensor([3, 1]), 4, 0):
        assert torch.equal(part(torch.ones(2, 3, 6)), expected[:, 2:5])
    assert 0 < int((expected == 0).sum()) < expected.numel()


def test_what_is_drawn_apart_leaves_the_common_generator_alike() -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    drawn, after = [], []
    for index, count in ((0, 3), (1, 8)):
        torch.random.set_rng_state(state)
        with drawing_apart(index, torch.device("cpu")):
            drawn.append(torch.rand(count))
        after.append(torch.rand(2))
    assert torch.equal(*after)
    assert not torch.equal(drawn[0], drawn[1][:3])


def unknown_word(word: int, sparse: bool) -> list[str]:
    """What an embedding and a bag of 7 words say of another word."""
    said = []
    with Session("cpu", 60) as session:
        mesh = session.lay(Layout({"tensor": session.world_size}))
        for kind in (nn.Embedding, nn.EmbeddingBag):
            options = {} if kind is nn.Embedding else {"mode": "sum"}
            model: nn.Module = nn.Sequential(kind(7, 4, sparse=sparse, **options))
            model = TensorParallel("0=vocabulary").parallelize(model, mesh, StrategySettings())
            try:
                model(torch.tensor([[1, word]]))
            except (IndexError, RuntimeError) as error:
                said.append(type(error).__name__)
    return said


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("word", [7, -1])
def test_a_word_that_no_rank_has_is_refused_on_all(ranks: Any, word: int, sparse: bool) -> None:
    plain = []
    for layer in (nn.Embedding(7, 4, sparse=sparse), nn.EmbeddingBag(7, 4, mode="sum", sparse=sparse)):
        with pytest.raises((IndexError, RuntimeError)) as caught:
            layer(torch.tensor([[1, word]]))
        plain.append(caught.type.__name__)
    assert ranks(2).run(unknown_word, word, sparse) == [plain, plain]
