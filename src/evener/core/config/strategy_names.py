"""Short names of strategies, balancers and other parts. The command line reads them without importing PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

from evener.errors import ConfigurationError

STRATEGIES = {
    "single": "evener.strategies.single:Single",
    "ddp": "evener.strategies.ddp:Ddp",
    "dimension": "evener.strategies.features:FeatureParallel",
    "experts": "evener.strategies.experts:ExpertParallel",
    "tensor": "evener.strategies.tensor.tensor:TensorParallel",
    "sharded": "evener.strategies.sharded.sharded:Sharded",
    "pipeline": "evener.strategies.pipeline.pipeline:Pipeline",
    "context": "evener.strategies.context.context:ContextParallel",
    "local_sgd": "evener.strategies.local_steps.strategies:LocalSgd",
    "diloco": "evener.strategies.local_steps.strategies:DiLoCo",
    "asynchronous": "evener.strategies.asynchronous.strategies:Asynchronous",
    "data_parallel": "evener.strategies.single_process.data_parallel:DataParallel",
    "layers": "evener.strategies.single_process.model_parallel:Layers",
}
"""The classes of Evener's strategies by short name."""

MEANINGS = {
    "task": {
        "digits": "a small network on 8x8 images of handwritten digits, which come with Evener",
        "mnist": "a convolutional network on MNIST, which is downloaded or read from --data-dir",
        "shakespeare": "a small transformer over the characters of a text file, --data-dir FILE",
    },
    "strategy": {
        "auto": "what evener plan has found for this run, else ddp, or single for one rank",
        "single": "one device",
        "ddp": "a replica of the model on each rank, gradients summed while backward runs (DDP)",
        "sharded": "optimizer state, gradients or weights divided over the ranks (FSDP, ZeRO 1 to 3)",
        "tensor": "the weights of single layers divided (tensor parallelism)",
        "pipeline": "layers in stages, micro-batches pass through them (pipeline parallelism)",
        "context": "sequences divided over the ranks (context parallelism)",
        "experts": "the experts of a mixture divided over the ranks (expert parallelism)",
        "dimension": "the features of the input divided over the ranks",
        "local_sgd": "replicas take steps of their own, and their weights merge every so often (local SGD)",
        "diloco": "local steps with Nesterov's momentum on what merges (DiLoCo)",
        "asynchronous": "ranks compute at their own pace, gradients merge at a parameter server",
        "data_parallel": "one process, a replica on each of its devices (DataParallel)",
        "layers": "one process, layers on several devices (model parallelism)",
    },
    "all-reduce": {
        "native": "the backend's own: gloo, NCCL",
        "ring": "messages around a ring, the most bytes a second",
        "tree": "up and down a tree, for many ranks",
        "halving": "halving and doubling, few messages",
        "direct": "everything to everyone, for few ranks and small sums",
        "ring-tree": "rings inside of hosts, trees between them",
        "shared-memory": "common memory of one host, the default of CPU ranks",
        "two-level": "common memory inside of hosts, a ring between them",
        "auto": "the fastest, as measured",
    },
    "balancer": {
        "equal": "equal parts",
        "auto": "parts by the learned speed of each rank",
    },
}
"""One line of description for each part with a short name, by kind and name."""

AXES = ("pipeline", "data", "shard", "context", "tensor")
"""The axes of a mesh, from the one with the least communication to the one with the most."""
DEVICES = ("cpu", "cuda", "xpu", "mps", "mixed")
"""Kinds of device that Evener names. PyTorch may know more."""

SYNONYMS = {
    "strategy": {
        **dict.fromkeys(("fsdp", "fsdp2", "fully_shard", "zero", "zero1", "zero2", "zero3"), "sharded"),
        **dict.fromkeys(("deepspeed", "hsdp", "shard"), "sharded"),
        **dict.fromkeys(("distributed_data_parallel", "data", "replicate", "allreduce", "horovod"), "ddp"),
        "dataparallel": "data_parallel",
        "dp": "ddp, or in one process data_parallel",
        **dict.fromkeys(("tp", "tensor_parallel", "megatron"), "tensor"),
        **dict.fromkeys(("pp", "gpipe", "1f1b", "pipeline_parallel"), "pipeline"),
        **dict.fromkeys(("cp", "sp", "sequence", "context_parallel", "ulysses", "ring_attention"), "context"),
        **dict.fromkeys(("ep", "moe", "expert", "expert_parallel"), "experts"),
        **dict.fromkeys(("mp", "model_parallel", "device_map", "layer"), "layers"),
        **dict.fromkeys(("feature", "features", "feature_parallel"), "dimension"),
        **dict.fromkeys(("localsgd", "local_steps", "post_local_sgd", "federated", "fedavg"), "local_sgd"),
        **dict.fromkeys(("streaming_diloco", "open_diloco", "opendiloco", "lookahead", "snoo"), "diloco"),
        **dict.fromkeys(("none", "one", "no"), "single"),
    },
    "all-reduce": {
        **dict.fromkeys(("nccl", "gloo", "mpi", "rccl", "xccl"), "native"),
        **dict.fromkeys(("double-tree", "double_tree", "doubletree", "binary-tree"), "tree"),
        **dict.fromkeys(("hierarchical", "ringtree", "2d"), "ring-tree"),
        **dict.fromkeys(("recursive-halving", "rabenseifner", "halving-doubling"), "halving"),
        **dict.fromkeys(("shm", "shared_memory", "sharedmemory"), "shared-memory"),
        **dict.fromkeys(("two_level", "twolevel"), "two-level"),
    },
    "balancer": {
        **dict.fromkeys(("even", "none", "static", "off"), "equal"),
        **dict.fromkeys(("speed", "dynamic", "on", "by_speed"), "auto"),
    },
    "axis": {
        **dict.fromkeys(("dp", "ddp", "data_parallel", "replicate", "replica", "batch"), "data"),
        **dict.fromkeys(("fsdp", "fsdp2", "zero", "sharded", "dp_shard", "fully_shard"), "shard"),
        **dict.fromkeys(("tp", "tensor_parallel", "model", "mp", "model_parallel", "megatron"), "tensor"),
        **dict.fromkeys(("pp", "pipe", "stage", "stages", "pipeline_parallel", "gpipe"), "pipeline"),
        **dict.fromkeys(("cp", "sp", "sequence", "context_parallel", "ulysses", "ring"), "context"),
    },
    "device": {
        **dict.fromkeys(("gpu", "nvidia", "amd", "rocm", "hip"), "cuda"),
        **dict.fromkeys(("apple", "metal", "mac"), "mps"),
        "intel": "xpu",
    },
}
"""Other names from the field and from other libraries, by kind. The values are Evener's names."""


NAMES = {**{what: tuple(lines) for what, lines in MEANINGS.items()}, "axis": AXES, "device": DEVICES}
"""Evener's own names, by kind."""


def called_here(name: str, what: str) -> str:
    """Returns Evener's name for ``name``, which may be a synonym or another spelling. Returns "" if there is none.

    Args:
        what: ``task``, ``strategy``, ``all-reduce``, ``balancer``, ``axis`` or ``device``.
    """
    known = {_plain(own): own for own in NAMES.get(what, ())}
    known |= {_plain(other): here for other, here in SYNONYMS.get(what, {}).items()}
    return known.get(_plain(name), "")


def hint_of_local_name(name: str, what: str) -> str:
    """Returns the end of an error message for an unknown name: ``: it is called tensor here``, or ""."""
    here = called_here(name, what)
    return f": it is called {here} here" if here else ""


def check_axes(axes: Iterable[str]) -> None:
    """Raises ConfigurationError for an unknown axis."""
    for axis in axes:
        if axis not in AXES:
            ways = f"there are {', '.join(AXES)}"
            raise ConfigurationError(f"there is no axis {axis!r}{hint_of_local_name(axis, 'axis')}; {ways}")


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")
