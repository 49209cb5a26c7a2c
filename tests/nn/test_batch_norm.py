from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.errors import ConfigurationError
from evener.nn import BatchNorm, exact_batch_norm
from evener.nn.batch_norm import local_batch_norm
from evener.nn.context import scope

SHAPES = {
    nn.BatchNorm1d: (6,),
    nn.BatchNorm2d: (6, 3, 2),
    nn.BatchNorm3d: (6, 2, 1, 3),
    nn.SyncBatchNorm: (6, 4),
}


def build(kind: type[nn.Module], **options: Any) -> nn.Module:
    if "bias" in options and "bias" not in inspect.signature(nn.BatchNorm1d).parameters:
        pytest.skip("this torch has no BatchNorm without a bias")
    torch.manual_seed(0)
    module = kind(6, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def batches(kind: type[nn.Module], size: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (steps, 2, size, *SHAPES[kind])
    return [(3 + 2 * x, dy) for x, dy in torch.randn(shape, generator=generator, dtype=torch.float64)]


def run(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input; gradients of the parameters add up."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def train_share(kind: type[nn.Module], shares: list[int], steps: int, options: dict[str, Any]) -> Any:
    """On each rank: its share of each batch, or a placeholder of weight 0 if that is empty."""
    rank = dist.get_rank()
    module = exact_batch_norm(build(kind, **options), dist.group.WORLD)
    results = []
    for x, dy in batches(kind, sum(shares), steps):
        mine, my_dy = x.split(shares)[rank], dy.split(shares)[rank]
        if shares[rank]:
            results.append(run(module, mine, my_dy))
            continue
        with scope(torch.arange(2), 0, 0, weight=0):
            _, dx = run(module, x[:2] + 100, torch.zeros_like(x[:2]))
        assert not dx.any(), "a placeholder is no part of the statistics"
        results.append((mine, mine))
    gradients = [p.grad for p in module.parameters()]
    module.eval()
    output = module(batches(kind, sum(shares), 1)[0][0])
    return results, gradients, dict(module.named_buffers()), output


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"momentum": 0.3, "bias": False}], ids=str
)
@pytest.mark.parametrize("kind", SHAPES)
def test_any_division_is_one_device(ranks: Any, kind: type[nn.Module], options: dict[str, Any]) -> None:
    shares, steps = [5, 0, 2], 12
    reference = build(nn.BatchNorm1d if kind is nn.SyncBatchNorm else kind, **options)
    expected = [run(reference, x, dy) for x, dy in batches(kind, sum(shares), steps)]
    answers = ranks(3).run(train_share, kind, shares, steps, options)
    for step, (y, dx) in enumerate(expected):
        close(torch.cat([answer[0][step][0] for answer in answers]), y)
        close(torch.cat([answer[0][step][1] for answer in answers]), dx)
    for index, parameter in enumerate(reference.parameters()):
        close(sum(answer[1][index] for answer in answers), parameter.grad)
    for answer in answers:
        close(answer[2], dict(reference.named_buffers()))
        assert all(torch.equal(answer[2][name], answers[0][2][name]) for name in answer[2])
        close(answer[3], reference.eval()(batches(kind, sum(shares), 1)[0][0]))


def penalize(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the input of a function of gradients, and the first gradient."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((module(x) * dy).sum(), x, create_graph=True)
    (gradient.pow(3) * dy).sum().backward()
    assert x.grad is not None
    return x.grad, gradient.detach()


def penalize_share(shares: list[int], options: dict[str, Any]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    rank = dist.get_rank()
    module = exact_batch_norm(build(nn.BatchNorm1d, **options), dist.group.WORLD)
    ((x, dy),) = batches(nn.BatchNorm1d, sum(shares), 1)
    mine, my_dy = x.split(shares)[rank], dy.split(shares)[rank]
    hooked: list[Tensor] = []
    for parameter in module.parameters():
        parameter.register_hook(hooked.append)
    if shares[rank]:
        found = penalize(module, mine, my_dy)
        assert len(hooked) == (module.weight is not None), "hooks see the gradient of the whole, once"
    else:
        with scope(torch.arange(2), 0, 0, weight=0):
            found = penalize(module, x[:2] + 100, dy[:2])
        assert not any(each.any() for each in found), "a placeholder is no part of the statistics"
        found = (mine, mine)
    return *found, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}], ids=str)
def test_gradients_of_gradients_are_those_of_one_device(ranks: Any, options: dict[str, Any]) -> None:
    shares = [5, 0, 2]
    reference = build(nn.BatchNorm1d, **options)
    expected = penalize(reference, *batches(nn.BatchNorm1d, sum(shares), 1)[0])
    answers = ranks(3).run(penalize_share, shares, options)
    for index in range(2):
        close(torch.cat([answer[index] for answer in answers]), expected[index])
    for index, parameter in enumerate(reference.parameters()):
        found = [answer[2][index] for answer in answers if answer[2][index] is not None]
        close(sum(found) if found else None, parameter.grad)


def compiled_and_plain() -> tuple[list[Any], int]:
    torch.compiler.reset()
    x, dy = (part.split([5, 2])[dist.get_rank()] for part in batches(nn.BatchNorm1d, 7, 1)[0])
    graphs, results = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for compiled in (False, True):
        module: Any = exact_batch_norm(nn.Sequential(build(nn.BatchNorm1d)), dist.group.WORLD)
        results.append(run(torch.compile(module, backend=backend) if compiled else module, x, dy))
    return results, len(graphs)


def test_a_compiled_model_waits_for_other_ranks_outside_of_its_graphs(ranks: Any) -> None:
    for (plain, compiled), graphs in ranks(2).run(compiled_and_plain):
        close(compiled, plain)
        assert graphs == 0


def test_local_statistics_in_a_compiled_model_know_a_placeholder() -> None:
    torch.compiler.reset()
    module = build(nn.BatchNorm1d)
    local_batch_norm(module)
    compiled = torch.compile(module, backend="eager")
    (x, dy), *_ = batches(nn.BatchNorm1d, 7, 1)
    expected = run(build(nn.BatchNorm1d), x, dy)
    close(run(compiled, x, dy), expected)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with scope(torch.arange(1), 0, 0, weight=0):
        y, _ = run(compiled, x[:1], 0 * dy[:1])
    close(y, copy.deepcopy(module).eval()(x[:1]).detach())
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_a_local_placeholder_without_running_statistics() -> None:
    module = build(nn.BatchNorm1d, track_running_stats=False)
    local_batch_norm(module)
    with scope(torch.arange(1), 0, 0, weight=0):
        assert module(torch.ones(1, 6, dtype=torch.float64)).isfinite().all()


def evaluate_without_running_statistics(shares: list[int]) -> Tensor:
    module = exact_batch_norm(build(nn.BatchNorm1d, track_running_stats=False), dist.group.WORLD).eval()
    (x, _), *_ = batches(nn.BatchNorm1d, sum(shares), 1)
    with torch.no_grad():
        output: Tensor = module(x.split(shares)[dist.get_rank()])
    return output


def test_batch_statistics_in_evaluation_are_exact_too(ranks: Any) -> None:
    (x, _), *_ = batches(nn.BatchNorm1d, 9, 1)
    expected = build(nn.BatchNorm1d, track_running_stats=False).eval()(x).detach()
    close(torch.cat(ranks(2).run(evaluate_without_running_statistics, [2, 7])), expected)


def normalize_empty_and_large_means(shares: list[int]) -> tuple[Tensor, Tensor]:
    module = exact_batch_norm(build(nn.BatchNorm2d), dist.group.WORLD)
    (x, dy), *_ = batches(nn.BatchNorm2d, sum(shares), 1)
    rank = dist.get_rank()
    return run(module, (x + 1e6).split(shares)[rank], dy.split(shares)[rank])


def test_an_empty_input_joins_and_a_large_mean_costs_no_digits_of_the_variance(ranks: Any) -> None:
    (x, dy), *_ = batches(nn.BatchNorm2d, 8, 1)
    expected = run(build(nn.BatchNorm2d), x + 1e6, dy)
    answers = ranks(2).run(normalize_empty_and_large_means, [0, 8])
    for index in (0, 1):
        actual = torch.cat([answer[index] for answer in answers])
        torch.testing.assert_close(actual, expected[index], rtol=1e-8, atol=1e-8)


def normalize_layout(dtype: torch.dtype, parameters: torch.dtype) -> tuple[Any, ...]:
    module = exact_batch_norm(nn.BatchNorm2d(4).to(parameters), dist.group.WORLD)
    x = torch.randn(3, 4, 5, 5).to(dtype, memory_format=torch.channels_last).requires_grad_()
    y = module(x)
    y.sum().backward()
    last = [t.is_contiguous(memory_format=torch.channels_last) for t in (y, x.grad)]
    return y.dtype, x.grad.dtype, module.weight.grad.dtype, module.running_mean.dtype, all(last)


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_dtypes_and_memory_format_stay(ranks: Any, dtype: torch.dtype, parameters: torch.dtype) -> None:
    for answer in ranks(2).run(normalize_layout, dtype, parameters):
        assert answer == (dtype, dtype, parameters, parameters, True)


def normalize_one_value() -> str:
    module = exact_batch_norm(nn.BatchNorm1d(3), dist.group.WORLD)
    with pytest.raises(
        ValueError, match="more than 1 value per channel when training, got 1 over 2"
    ) as caught:
        module(torch.ones(1 - dist.get_rank(), 3))
    assert module(torch.ones(1, 3)).shape == (1, 3)
    return str(caught.value)


def test_one_value_in_all_is_refused_everywhere_but_one_a_rank_is_not(ranks: Any) -> None:
    first, second = ranks(2).run(normalize_one_value)
    assert "(1, 3)" in first
    assert "(0, 3)" in second


def normalize_late() -> list[tuple[bool, bool]]:
    """Whether output and statistics are numbers, of one value in all and of one a rank."""
    found = []
    with (
        mock.patch("evener.nn.batch_norm.is_late", return_value=True),
        mock.patch("evener.nn.batch_norm.light", lambda of_channels: of_channels),
        mock.patch("evener.nn.batch_norm_kernels.light", lambda of_channels: of_channels),
    ):
        for size in (1 - dist.get_rank(), 1):
            module = exact_batch_norm(nn.BatchNorm1d(3), dist.group.WORLD)
            output = module(torch.arange(3.0).expand(size, 3) * (1 + dist.get_rank()))
            found.append((bool(output.isfinite().all()), bool(module.running_var.isfinite().all())))
    return found


def test_where_the_host_cannot_wait_one_value_in_all_is_not_a_number(ranks: Any) -> None:
    (alone, both), (empty, both_too) = ranks(2).run(normalize_late)
    assert alone == (False, False)
    assert empty == (True, False), "no output, and statistics as everywhere"
    assert both == both_too == (True, True)


def messages_in_evaluation() -> bool:
    module = exact_batch_norm(build(nn.BatchNorm1d), dist.group.WORLD).eval()
    if dist.get_rank() == 0:
        module(torch.ones(2, 6, dtype=torch.float64))
    return True


def test_evaluation_with_running_statistics_sends_nothing(ranks: Any) -> None:
    assert ranks(2).run(messages_in_evaluation, timeout=20) == [True, True]


def model() -> nn.Sequential:
    tied = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(6, 6), tied, nn.Sequential(tied, nn.BatchNorm1d(6)))


def test_conversion_keeps_names_parameters_hooks_and_tied_modules() -> None:
    plain = model()
    names, parameters = list(plain.state_dict()), list(plain.parameters())
    called = []
    plain[1].register_forward_hook(lambda *_: called.append(1))
    converted = exact_batch_norm(plain, None)
    assert converted is plain
    assert list(converted.state_dict()) == names
    assert all(one is other for one, other in zip(converted.parameters(), parameters, strict=True))
    assert converted[1] is converted[2][0]
    assert isinstance(converted[1], BatchNorm)
    assert isinstance(converted[1], nn.BatchNorm1d)
    converted(torch.randn(4, 6))
    assert called == [1, 1]


def test_without_a_group_it_is_torchs() -> None:
    (x, dy), *_ = batches(nn.BatchNorm1d, 5, 1)
    one, other = build(nn.BatchNorm1d), exact_batch_norm(build(nn.BatchNorm1d), None)
    assert all(torch.equal(*pair) for pair in zip(run(one, x, dy), run(other, x, dy), strict=True))
    sync = exact_batch_norm(build(nn.SyncBatchNorm), None)
    assert torch.equal(sync(x), other(x))
    with pytest.raises(ValueError, match="at least 2D"):
        sync(x[0, 0])


def copied_and_pickled() -> tuple[float, float]:
    module = exact_batch_norm(nn.BatchNorm1d(3), dist.group.WORLD)
    twin, restored = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    twin(torch.ones(2, 3) * dist.get_rank())
    restored(torch.ones(2, 3) * dist.get_rank())
    return float(twin.running_mean[0]), float(restored.running_mean[0])


def test_a_copy_shares_the_group_and_a_pickle_leaves_it(ranks: Any) -> None:
    first, second = ranks(2).run(copied_and_pickled)
    assert first == pytest.approx((0.05, 0.0))
    assert second == pytest.approx((0.05, 0.1))


class Own(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def test_what_cannot_be_converted_is_said() -> None:
    with pytest.warns(UserWarning, match="0 is a Own.*its statistics stay"):
        kept = exact_batch_norm(nn.Sequential(Own(3)), None)
    assert type(kept[0]) is Own
    with pytest.raises(ConfigurationError, match="1 is a LazyBatchNorm2d that has seen no input yet"):
        exact_batch_norm(nn.Sequential(nn.ReLU(), nn.LazyBatchNorm2d()), None)


def frozen_input() -> list[Tensor | None]:
    module = exact_batch_norm(build(nn.BatchNorm1d), dist.group.WORLD)
    (x, dy), *_ = batches(nn.BatchNorm1d, 6, 1)
    module(x.chunk(2)[dist.get_rank()]).backward(dy.chunk(2)[dist.get_rank()])
    return [p.grad for p in module.parameters()]


def test_parameters_of_a_first_layer_get_their_gradients(ranks: Any) -> None:
    reference = build(nn.BatchNorm1d)
    (x, dy), *_ = batches(nn.BatchNorm1d, 6, 1)
    reference(x).backward(dy)
    for parameter, parts in zip(
        reference.parameters(), zip(*ranks(2).run(frozen_input), strict=True), strict=True
    ):
        close(sum(parts), parameter.grad)


def normalize_on_cuda(shares: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    module = exact_batch_norm(build(nn.BatchNorm2d), dist.group.WORLD).cuda()
    (x, dy), *_ = batches(nn.BatchNorm2d, sum(shares), 1)
    rank = dist.get_rank()
    if dtype != torch.float64:
        module = module.float()
    y, dx = run(module, x.split(shares)[rank].to("cuda", dtype), dy.split(shares)[rank].to("cuda", dtype))
    return y.double().cpu(), dx.double().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.float16, 2e-2)]
)
def test_cuda_does_as_one_cpu(ranks: Any, dtype: torch.dtype, tolerance: float) -> None:
    shares = [3, 0, 4]
    (x, dy), *_ = batches(nn.BatchNorm2d, sum(shares), 1)
    expected = run(build(nn.BatchNorm2d), x, dy)
    answers = ranks(3).run(normalize_on_cuda, shares, dtype)
    for index in (0, 1):
        actual = torch.cat([answer[index] for answer in answers])
        torch.testing.assert_close(actual, expected[index], rtol=tolerance, atol=tolerance)
