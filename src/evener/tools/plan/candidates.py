"""The ways to train a task that a plan compares: a strategy with its options over a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError


@dataclass(frozen=True)
class Candidate:
    """One way to train."""

    ranks: int
    strategy: str
    """As ``--strategy`` takes it."""
    options: tuple[str, ...] = ()
    """As ``--strategy-option`` takes them."""
    mesh: str | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    allreduce: str | None = None
    """As ``--allreduce`` takes it. None for the default."""

    def config(self, base: RunConfig, batch_size: int) -> RunConfig:
        """Returns the settings of a run in this way that takes steps and leaves nothing on disk."""
        return base.replace(
            strategy=self.strategy,
            strategy_option=self.options,
            mesh=self.mesh,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            allreduce=self.allreduce or base.allreduce,
            processes=self.ranks,
            batch_size=batch_size,
            steps=2**31,
            epochs=None,
            check_replicas=0,
            run_dir=None,
            metrics_file=None,
            resume=None,
        )

    @property
    def words(self) -> str:
        """The options of ``evener train`` that ask for it."""
        parts = [self.strategy, *(f"--strategy-option {each}" for each in self.options)]
        parts += [f"--mesh {self.mesh}"] if self.mesh else []
        parts += [f"--micro-batch {self.micro_batch}"] if self.micro_batch else []
        parts += [f"--recompute {self.recompute}"] if self.recompute else []
        parts += [f"--allreduce {self.allreduce}"] if self.allreduce else []
        return " ".join([*parts, f"--processes {self.ranks}"])


def numbers_of_ranks(most: int) -> list[int]:
    """Returns the numbers of ranks that are tried: all up to 4, then powers of two, and the largest."""
    return sorted(
        {*range(1, min(most, 4) + 1), *(2**k for k in range(most.bit_length()) if 2**k <= most), most}
    )


def candidates_of(ranks: int, config: RunConfig) -> list[Candidate]:
    """Returns the ways to train on a number of ranks that the settings leave open, the most usual first.

    Raises:
        ConfigurationError: If the strategy is an object, which a plan cannot name.
    """
    found = candidates_for(ranks, strategy_named(config), config.strategy_option, config.mesh)
    return [replace(each, micro_batch=config.samples_at_once, recompute=config.recompute) for each in found]


def strategy_named(config: RunConfig) -> str:
    """Returns the name of the strategy of the settings.

    Raises:
        ConfigurationError: If it is an object.
    """
    if not isinstance(config.strategy, str):
        raise ConfigurationError(
            f"strategy is {config.strategy}, and a plan is made of names: give the name, and strategy_option"
        )
    return config.strategy


def candidates_for(
    ranks: int, strategy: str = "auto", options: tuple[str, ...] = (), mesh: str | None = None
) -> list[Candidate]:
    """Returns the ways to train on a number of ranks, the most usual first.

    Args:
        strategy: ``auto`` for all, or the one that the user wants, with its options and mesh.
    """
    if ranks == 1:
        return [
            Candidate(
                1,
                "single" if strategy == "auto" or mesh else strategy,
                options if strategy != "auto" and not mesh else (),
            )
        ]
    if strategy != "auto" or mesh:
        return [Candidate(ranks, strategy, options, mesh)]
    return list(_all_ways(ranks))


def _all_ways(ranks: int) -> Iterator[Candidate]:
    yield Candidate(ranks, "ddp")
    for zero in (1, 2, 3):
        yield Candidate(ranks, "sharded", (f"zero={zero}",))
    yield Candidate(ranks, "tensor")
    yield Candidate(ranks, "pipeline")
    if ranks % 2 == 0 and ranks > 2:
        half = ranks // 2
        yield Candidate(ranks, "sharded", ("zero=3",), f"data=2,shard={half}")
        yield Candidate(ranks, "tensor", (), f"data={half},tensor=2")
        yield Candidate(ranks, "pipeline", (), f"pipeline=2,data={half}")
    for name in SPECIAL:
        yield Candidate(ranks, name)


def in_less_memory(usual: Candidate, batch_size: int) -> Iterator[Candidate]:
    """Yields the way with small micro-batches, and with recomputed blocks, for a model that fits in no usual way."""
    micro_batch = max(usual.ranks, batch_size // 8)
    yield replace(usual, micro_batch=micro_batch)
    yield replace(usual, recompute="blocks")
    yield replace(usual, micro_batch=micro_batch, recompute="blocks")


SPECIAL = ("context", "experts", "dimension")
"""Strategies for models of some kinds. One that refuses the task is not tried again with other numbers of ranks."""
LOCAL_STEPS = "local_sgd, diloco"
NEVER_TRIED = {
    "layers, data_parallel": "one process that waits for each of its devices in turn; ranks are faster",
    LOCAL_STEPS: "another algorithm than the training of one device",
    "asynchronous": "another algorithm, whose speed is that of all ranks together if they stall at random",
    "offload, optimizer_state=8bit": "they save memory and cost time: for a model that fits no other way",
}
"""What a plan does not compare, with the reason."""
