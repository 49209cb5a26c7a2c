"""What strategies compute and send in a step, by hand: no strategy's code is read for it but its own."""

from __future__ import annotations

import gc
import resource
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError
from evener.tools.estimate.traffic import CONVOLUTIONS, Message, OperatorCalls, Traffic
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.work import RankWork, StepWork, knowable, work_of
from tests.tools.plan.models import adam, classes_task, language_task, mlp

WEIGHTS = 4 * 1732
"""Bytes of the MLP."""
BATCH = 16
PRODUCTS = 16 * 32 + 32 * 32 + 32 * 4
"""Weights of its products, without biases."""


def work(
    strategy: str, ranks: int, *options: str, mesh: str | None = None, kind: str = "cuda", **settings: Any
) -> StepWork:
    candidate = Candidate(ranks, strategy, options, mesh)
    return work_of(classes_task(mlp, 16), candidate, RunConfig(**settings), BATCH, kind)


def of_first(found: StepWork) -> list[Message]:
    return list(found.ranks[0].messages)


def flops(samples: int, ranks: int = 1) -> dict[str, int]:
    """A product in forward and two in backward, of which the first layer's input needs none."""
    return {"float32": (6 * PRODUCTS - 2 * 16 * 32) * samples // ranks}


def test_one_rank_computes_all_and_sends_nothing() -> None:
    (rank,) = work("single", 1).ranks
    assert (rank.samples, rank.flops, rank.messages) == (BATCH, flops(BATCH), ())
    assert WEIGHTS <= rank.parameters <= WEIGHTS + 6 * 512, "the allocator rounds each of six tensors up"
    assert rank.optimizer == 0
    assert rank.needed > 2 * WEIGHTS
    assert rank.moved > 3 * WEIGHTS, "products read the weights twice, and write their gradients"


def test_ddp_sums_all_gradients() -> None:
    found = work("ddp", 2)
    assert of_first(found) == [Message("all_reduce", (0, 1), WEIGHTS)]
    assert (found.ranks[0].samples, found.ranks[0].flops) == (BATCH // 2, flops(BATCH // 2))


def test_ddp_sums_in_buckets_that_follow_the_gradients() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(512, 512, bias=False) for _ in range(5)), nn.Linear(512, 4, bias=False)
        )

    found = work_of(classes_task(make, 512), Candidate(2, "ddp"), RunConfig(bucket_mb=2.0), BATCH, "cuda")
    layer, last = 4 * 512 * 512, 4 * 512 * 4
    assert [each.nbytes for each in of_first(found)] == [last + 2 * layer, 2 * layer, layer]


@pytest.mark.parametrize("zero", [1, 2])
def test_owners_sum_and_send_their_weights(zero: int) -> None:
    flat = WEIGHTS + 2 * 4  # one more number for each owner
    summed = Message("all_reduce" if zero == 1 else "all_to_all", (0, 1), flat)
    gathered = Message("broadcast", (0, 1), flat // 2)
    assert of_first(work("sharded", 2, f"zero={zero}")) == [summed, gathered, gathered]


def test_on_a_host_owners_sum_in_shared_memory() -> None:
    flat = WEIGHTS + 2 * 4
    found = of_first(work("sharded", 2, "zero=2", kind="cpu"))
    assert found == [Message("reduce_scatter", (0, 1), flat), Message("all_gather", (0, 1), flat)]


def test_rows_are_gathered_for_each_pass_and_counted_once() -> None:
    """They are DTensors, whose operators run again below on the parts."""
    found = work("sharded", 2, "zero=3")
    gathered, scattered = (Message(kind, (0, 1), WEIGHTS) for kind in ("all_gather", "reduce_scatter"))
    assert of_first(found) == [gathered, gathered, scattered]
    assert found.ranks[0].flops == flops(BATCH // 2)
    assert found.ranks[0].parameters < WEIGHTS


def test_rows_on_a_mesh_are_summed_over_replicas() -> None:
    found = work("sharded", 4, "zero=3", mesh="data=2,shard=2")
    assert Message("all_reduce", (0, 2), WEIGHTS // 2) in of_first(found)
    assert Message("all_gather", (0, 1), WEIGHTS) in of_first(found)
    assert len(of_first(found)) == 4


def test_features_are_summed_where_a_region_ends() -> None:
    """The first layer is divided by columns and the second by rows. What is whole gets the first rank's gradients."""
    found = work("tensor", 2)
    whole = 4 * (32 + 132)  # the second layer's bias, and the third layer
    assert of_first(found) == [
        Message("all_reduce", (0, 1), 4 * BATCH * 32),
        Message("broadcast", (0, 1), whole),
    ]
    divided = 6 * (512 + 1024) // 2 - 2 * 512 // 2
    assert found.ranks[0].flops == {"float32": (divided + 6 * 128) * BATCH}


def test_samples_and_features_are_divided_together() -> None:
    found = of_first(work("tensor", 4, mesh="data=2,tensor=2"))
    own = 4 * (544 // 2 + 1024 // 2 + 32 + 132)
    assert found == [
        Message("all_reduce", (0, 1), 4 * (BATCH // 2) * 32),
        Message("all_reduce", (0, 2), own),
        Message("broadcast", (0, 1), 4 * (32 + 132)),
    ]


def normed(norm: nn.Module, kind: str) -> RankWork:
    """The work of a norm between two products."""
    task = classes_task(lambda: nn.Sequential(nn.Linear(16, 256), norm, nn.Linear(256, 4)), 16)
    return work_of(task, Candidate(1, "single"), RunConfig(), BATCH, kind).ranks[0]


def test_a_norm_is_one_operator_on_an_accelerator() -> None:
    """It reads its input and writes its output; in backward it reads input and gradient and writes one. Less than a
    tenth of that are weights and the numbers of each row."""
    cards, none = normed(nn.RMSNorm(256), "cuda"), normed(nn.Identity(), "cuda")
    once = 4 * BATCH * 256
    assert 5 * once < cards.moved - none.moved < 5.5 * once
    own = normed(nn.RMSNorm(256), "cpu")
    assert own.moved - none.moved > 10 * once, "there it is many operators"
    assert own.operators > cards.operators + 5


def test_what_is_overwritten_is_not_read() -> None:
    traffic, one, other = Traffic(), torch.zeros(8), torch.zeros(8)
    with OperatorCalls(traffic):
        one.copy_(other)
    assert traffic.moved == 2 * 32
    with OperatorCalls(traffic):
        one.add_(other)
    assert traffic.moved == 2 * 32 + 3 * 32


def test_stages_send_each_micro_batch_on_and_back() -> None:
    first, last = work("pipeline", 2).ranks
    at_once = 4 * (BATCH // 4) * 32
    assert first.messages == (Message("send", (0, 1), at_once),) * 4
    assert last.messages == (Message("send", (1, 0), at_once),) * 4
    assert Counter(first.flops) + Counter(last.flops) == flops(BATCH)


def test_stages_of_replicas_sum_their_gradients() -> None:
    first, last = work("pipeline", 4, mesh="pipeline=2,data=2").ranks
    sums = [each for each in (*first.messages, *last.messages) if each.kind == "all_reduce"]
    assert [each.ranks for each in sums] == [(0, 1), (2, 3)]
    assert sum(each.nbytes for each in sums) == WEIGHTS


def test_clipping_sums_a_norm() -> None:
    plain, clipped = (of_first(work("sharded", 2, "zero=3", clip_norm=norm)) for norm in (None, 1.0))
    assert clipped == [*plain, Message("all_reduce", (0, 1), 8)]


def test_attention_counts() -> None:
    """Of causal attention, kernels compute half the scores: in forward twice, and in backward five times."""
    words, width, length, samples = 50, 64, 32, 2
    task = language_task(words, width, 1, length, samples)
    (rank,) = work_of(task, Candidate(1, "single"), RunConfig(), samples, "cuda").ranks
    products = 6 * (12 * width * width + words * width) * length * samples
    scores = (2 + 5) * samples * length * length * 2 * width // 2
    assert rank.flops == {"float32": products + scores}


@pytest.mark.parametrize("precision", ["bf16", "bf16-true", "fp16"])
def test_products_count_by_the_type_in_which_they_are_computed(precision: str) -> None:
    name = "float16" if precision == "fp16" else "bfloat16"
    assert work("ddp", 2, precision=precision).ranks[0].flops == {name: flops(BATCH // 2)["float32"]}


def test_a_model_of_other_types_counts_in_these() -> None:
    """Convolutions in float32 count by themselves, and a product of complex numbers has four of real ones."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(32, 4, dtype=torch.float64)
            self.turn = nn.Parameter(torch.eye(32, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.unsqueeze(1)).flatten(1).to(torch.complex64) @ self.turn
            return self.last(x.real.to(torch.float64))

    (rank,) = work_of(classes_task(Mixed, 16), Candidate(1, "single"), RunConfig(), BATCH, "cuda").ranks
    product, convolution = 2 * BATCH * 32, 2 * BATCH * 2 * 16 * 3
    assert rank.flops == {
        CONVOLUTIONS: 2 * convolution,
        "float32": 3 * 4 * product * 32,
        "float64": 3 * product * 4,
    }


def test_guesses_of_tensor_parallelism_are_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    """It tries divisions, of which fake tensors log the errors."""
    task = language_task(50, 64 * 3, 1, 32, 2)
    found = work_of(task, Candidate(2, "tensor"), RunConfig(), 2, "cuda")
    assert found.ranks[0].messages
    assert "failed while attempting" not in capfd.readouterr().err


def test_a_rank_without_samples_computes_one() -> None:
    found = work_of(classes_task(mlp, 16), Candidate(2, "ddp"), RunConfig(), 1, "cuda")
    assert found.ranks[0].flops == flops(1)


def test_weights_of_gigabytes_take_no_memory() -> None:
    wide = classes_task(lambda: nn.Linear(40_000, 40_000, bias=False), 40_000, 2)
    before, frozen = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, gc.get_freeze_count()
    for strategy, options in (("ddp", ()), ("sharded", ("zero=3",))):
        (rank,) = work_of(wide, Candidate(2, strategy, options), RunConfig(), 2, "cuda").ranks
        assert rank.needed > 6.4e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kilobytes"
    # What others have set apart stays so, but for objects that end by themselves, and nothing is added.
    assert frozen - 1000 <= gc.get_freeze_count() <= frozen


def test_long_pipelines_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a pipeline of 17 stages: at most 16 are planned"):
        work("pipeline", 17)


def test_a_pipeline_is_cut_without_times() -> None:
    assert knowable(Candidate(2, "pipeline")).options == ("balance=equal",)
    with pytest.raises(ConfigurationError, match="several devices in one process"):
        work("data_parallel", 2)


def test_a_rank_tells_its_optimizer_state() -> None:
    task = classes_task(mlp, 16, optimizer=adam)
    (rank,) = work_of(task, Candidate(1, "single"), RunConfig(), BATCH, "cuda").ranks
    assert rank.optimizer >= 2 * WEIGHTS
