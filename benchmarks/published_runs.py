"""Predicts published runs of Llama 3 on H100s, and says how far off it is.

    python -m benchmarks.published_runs

- torchtitan's table (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md): machines of 8 H100 with 96 GB at
  2.4 TB/s, 400 Gbit/s for each GPU between machines, sequences of 8192 words, 2 for each GPU.
- The degrees of tensor parallelism of the Ultra-Scale Playbook (nanotron/ultrascale-playbook on Hugging Face): 3e9
  parameters, sequences of 4096 words, as many of them as fit (its second chart), and between machines EFA, which has
  3,200 Gbit/s on machines of this kind (AWS, P5). The model's sizes are not published; one of 3 billion stands for it.

The efficiency of the cards is fitted to one row. All other rows are predicted with it, by the same code that
``evener plan --cluster`` runs. Nothing is run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import evener
from benchmarks.llama import SIZES, Llama, llama_task
from benchmarks.results import Cell, Table, Value, cell, record
from evener.core.config.run_config import RunConfig
from evener.tools.plan.analytic import costs_of_work
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.catalogue import find_entry, parse_bandwidth, parse_latency
from evener.tools.plan.cluster import Cluster, Machine, PlannedCard, PlannedLink
from evener.tools.plan.costs import step_time
from evener.tools.plan.trials import quiet
from evener.tools.plan.work import RankWork, StepWork, work_of

GIB, LENGTH, EACH = 1 << 30, 8192, 2
"""Words of a sequence, and sequences for each GPU."""
BILLIONS = {"8B": 8.03, "70B": 70.6, "405B": 405.9}
"""Published numbers of parameters."""
FSDP = [
    ("8 GPUs, compiled (fitted)", 8, 6667, 77.0),
    ("8 GPUs, eager", 8, 5762, 82.4),
    ("128 GPUs, compiled", 128, 6514, 62.0),
    ("128 GPUs, eager", 128, 5605, 67.0),
]
"""Words a second for each GPU, and GiB."""
TENSOR = {2: (13_923, 3), 4: (12_421, 8), 8: (10_903, 12), 16: (6_246, 16), 32: (2_146, 20)}
"""By the degree, words a second for each GPU, and sequences of a batch."""
SUMS_OF_LAYER, HALF = 4, 2
"""Messages of a layer in Megatron-LM and nanotron, which send bfloat16, as a part of the bytes that Evener sends."""
NOT_PREDICTED = {
    "8B with float8, 8 and 128 GPUs (8,532; 8,380)": "products in float8 are not counted apart",
    "8B with context parallelism, 32k to 256k words (3,890; 2,540; 1,071; 548)": "float8, and another ring",
    "70B, FSDP 32 x TP 8 (829; 876)": "float8; asynchronous tensor parallelism in the second",
    "405B, FSDP 8 x TP 8 x PP 8 (100; 128)": "float8 and asynchronous tensor parallelism",
    "405B with context parallelism (76; 47; 31; 16)": "float8 and asynchronous tensor parallelism",
}


def cluster(machines: int, memory: float = 2.4e12) -> Cluster:
    """Returns machines of 8 H100, as torchtitan's table describes them.

    Args:
        memory: Bytes that a card reads and writes in a second.
    """
    entry, nvlink = find_entry("cards", "H100 SXM")[1], find_entry("links", "NVLink 4")[1]
    inside = PlannedLink(parse_latency(nvlink["latency"]), parse_bandwidth(nvlink["bandwidth"]))
    network = PlannedLink(10e-6, 8 * 50e9)
    card = PlannedCard("H100", "cuda", entry["flops"], 96 * GIB, memory, 0, None, False)
    return Cluster((Machine("8 x H100", (card,) * 8, inside, 0),) * machines, network)


def of_published_kind(plain: StepWork, again: StepWork) -> StepWork:
    """Returns the work with selective checkpointing, which computes about every second product again, and with weights
    that are gathered in bfloat16. Evener computes all of a block again or nothing, and gathers float32."""

    def between(one: RankWork, other: RankWork) -> RankWork:
        flops = {dtype: (done + other.flops[dtype]) // 2 for dtype, done in one.flops.items()}
        moved = (one.moved + other.moved) // 2
        messages = tuple(
            replace(each, nbytes=each.nbytes // 2) if each.kind == "all_gather" else each
            for each in one.messages
        )
        return replace(one, flops=flops, moved=moved, messages=messages)

    return replace(plain, ranks=tuple(map(between, plain.ranks, again.ranks)))


def words_a_second(
    work: StepWork, batch: int, length: int, efficiency: float, memory: float = 2.4e12
) -> float:
    """Returns words a second for each GPU."""
    ranks = work.layout.world_size
    costs = costs_of_work(work, cluster(-(-ranks // 8), memory), "bf16", efficiency)
    return batch * length / step_time(costs, batch).seconds / ranks


def fitted(seconds: Callable[[float], float], wanted: float) -> float:
    """Returns the efficiency with which a prediction is what was published, by bisection."""
    low, high = 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return low


def sharded(ranks: int, recompute: str | None) -> StepWork:
    candidate = Candidate(ranks, "sharded", ("zero=3",), recompute=recompute)
    with quiet():
        return work_of(llama_task("8B", LENGTH), candidate, RunConfig(precision="bf16"), EACH * ranks, "cuda")


def with_fewer_sums(work: StepWork, layers: int) -> StepWork:
    """Returns the work with 4 messages a layer, in bfloat16. Evener sums gradients at each divided layer by itself, and
    in float32, to which it converts and back: 6 bytes of a number are moved each time."""
    own = work.ranks[0]
    large = max(own.messages, key=lambda each: each.nbytes)
    copies = sum(each == large for each in own.messages) * large.nbytes // 4 * 12
    kept = (replace(large, nbytes=large.nbytes // HALF),) * (SUMS_OF_LAYER * layers)
    return replace(work, ranks=(replace(own, messages=kept, moved=own.moved - copies),))


def predicted(rate: float, published: float) -> Cell:
    return cell(rate, "words/s", ratio=rate / published)


def tensor_parallel(efficiency: float) -> Iterator[list[Value]]:
    """The degrees of tensor parallelism, with the messages of Evener and with those of the published runs."""
    size = "3B of alike heads"
    task = llama_task(size, 4096, evener.nn.VocabularyParallelCrossEntropy())
    memory = parse_bandwidth(find_entry("cards", "H100 SXM")[1]["memory_bandwidth"])
    for degree, (published, batch) in TENSOR.items():
        candidate = Candidate(degree, "tensor", ("plan=auto,head=vocabulary",))
        with quiet():
            work = work_of(task, candidate, RunConfig(precision="bf16-true"), batch, "cuda")
        kinds = with_fewer_sums(work, SIZES[size].layers), work
        rates = [words_a_second(each, batch, 4096, efficiency, memory) for each in kinds]
        yield [str(degree), cell(published, "words/s"), *(predicted(rate, published) for rate in rates)]


def main() -> None:
    for name, billions in BILLIONS.items():
        with torch.device("meta"):
            found = sum(each.numel() for each in Llama(SIZES[name]).parameters())
        print(f"{name}: {found / 1e9:.2f} billion parameters, published {billions}")
    works = {ranks: (sharded(ranks, None), sharded(ranks, "blocks")) for ranks in (8, 128)}
    first = of_published_kind(*works[8])
    efficiency = fitted(lambda part: words_a_second(first, EACH * 8, LENGTH, part), FSDP[0][2])
    print(f"efficiency, fitted to the first row: {efficiency:.3f}\n")
    rows: list[list[Value]] = []
    for name, ranks, per_second, gib in FSDP:
        plain, again = works[ranks]
        rate = words_a_second(of_published_kind(plain, again), EACH * ranks, LENGTH, efficiency)
        memory = [cell(each.ranks[0].needed / GIB, "GiB") for each in (again, plain)]
        published = cell(per_second, "words/s"), predicted(rate, per_second), cell(gib, "GiB")
        rows.append([name, *published, *memory])
    columns = [
        "8B, FSDP",
        "published",
        "predicted",
        "memory, published",
        "all blocks again",
        "no block again",
    ]
    ratio = "predicted over published"
    record("published_runs", "torchtitan, Llama 3 8B, each GPU", Table(columns, rows, ratio))
    columns = ["tensor, degree", "published", "predicted with their sums", "as Evener sums"]
    table = Table(columns, tensor_parallel(efficiency), ratio)
    record("published_runs", "the Ultra-Scale Playbook, each GPU", table)
    for name, why in NOT_PREDICTED.items():
        print(f"not predicted: {name}: {why}")


if __name__ == "__main__":
    main()
