"""The settings of ``exact="bits"``: the division of a batch into grains and blocks, and what does not go with it.

A run that is exact in bits ends with the same weights, to the last bit, on any number of devices of one kind. For that
the division of the work must not depend on the ranks. So a global batch is cut by position::

    samples     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13        grains of 4, the last one smaller
    blocks      block 0             block 1                  of 2 grains

A grain goes through the model by itself. A block is computed by one rank, grain after grain. Shares are whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from evener.core.config.validation import at_least
from evener.errors import ConfigurationError

LARGEST_GRAIN = 16
"""Most samples in a grain by default."""
GRAINS = 16
"""A batch has at least this many grains by default, if it has as many samples: four blocks on each of four ranks."""
BLOCKS = 32
"""With more grains than this, blocks of several grains are the default: four blocks on each of eight ranks."""


@dataclass(frozen=True)
class ExactBits:
    """How a batch is cut by position. Part of the training: another division rounds otherwise."""

    grain: int
    """The number of samples that go through the model together."""
    grains_per_block: int = 1
    """The number of consecutive grains that are always computed by one rank."""

    @classmethod
    def chosen(cls, batch_size: int, grain: int | None = None, block: int | None = None) -> ExactBits:
        """Returns the division of batches of ``batch_size`` samples, with defaults for what is None.

        The defaults depend on nothing but the batch size, because the number of ranks must not matter.

        Raises:
            ConfigurationError: If a grain is larger than the batch.
        """
        if grain is not None and grain > batch_size:
            raise ConfigurationError(
                f"grain is {grain}, and a batch has {batch_size} samples: make grain at most a quarter of what "
                "a rank computes, or leave it out"
            )
        size = grain or min(LARGEST_GRAIN, max(1, batch_size // GRAINS))
        return cls(size, block or max(1, -(-batch_size // size) // BLOCKS))

    @property
    def block(self) -> int:
        """The number of samples in a block."""
        return self.grain * self.grains_per_block

    def blocks(self, size: int) -> int:
        """Returns the number of blocks of a batch of ``size`` samples. The last one may be smaller."""
        return -(-size // self.block)

    @property
    def words(self) -> str:
        """The division as a text."""
        grains = "1 grain" if self.grains_per_block == 1 else f"{self.grains_per_block} grains"
        samples = "1 sample" if self.grain == 1 else f"{self.grain} samples"
        return f"grains of {samples}, blocks of {grains}"


_SMALLER = (
    "a rank that repeats samples in smaller pieces rounds otherwise; if memory runs out, make grain smaller"
)
REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("micro_batch", None, "a grain takes the place of a micro-batch; give its size as grain"),
    ("share_multiple_of", 1, "shares are whole blocks; give their size by grain and block"),
    ("memory_limit", None, _SMALLER),
    ("memory_limit_at", (), _SMALLER),
    ("compress", None, "what compression leaves out depends on the ranks; leave it out"),
    (
        "update_in_backward",
        False,
        "an update must wait until the sum over all blocks is complete; leave it out",
    ),
    ("optimizer_state", None, "8 bits are scaled by what a rank holds; leave it out"),
    (
        "compile",
        None,
        "a compiled graph may use other kernels on another rank, or after a restart; leave it out",
    ),
    ("devices", None, "a process with several devices divides batches by its own rules; use ddp"),
)
"""For each setting that does not go with bits: its name, the value that leaves it out, and why it is refused."""
REFUSED_VALUES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("device", ("mixed",), "devices of different kinds round differently; use hosts with one kind of device"),
    (
        "batch_norm",
        ("local",),
        "the samples of a rank depend on the division; use batch_norm grain, the statistics of each grain",
    ),
    *(
        (name, values, "16 bits are too few for weights that must add up exactly; use precision bf16")
        for name, values in (
            ("dtype", ("bfloat16", "float16")),
            ("precision", ("bf16-true", "fp16-true")),
        )
    ),
    (
        "precision",
        ("fp16",),
        "steps whose scaled gradients overflow are left out, and those overflow by rank; use bf16",
    ),
)
"""For each setting of which some values do not go with bits: its name, these values, and why they are refused."""


def check_exact_bits(settings: Any) -> None:
    """Checks ``exact``, ``grain`` and ``block`` of a ``RunConfig``, alone and with its other settings.

    The type of ``settings`` is not named, because its module imports this one.

    Raises:
        ConfigurationError: If a setting would do nothing, or cannot give the same bits on every division.
    """
    at_least("grain", settings.grain, 1)
    at_least("block", settings.block, 1)
    if not 0 <= settings.audit <= 1:
        raise ConfigurationError(f"audit is {settings.audit!r}; it must be a part of all blocks, from 0 to 1")
    if settings.exact != "bits":
        idle = [name for name in ("grain", "block") if getattr(settings, name) is not None]
        idle += ["audit"] if settings.audit else []
        idle += ["batch_norm=grain"] if settings.batch_norm == "grain" else []
        if idle:
            raise ConfigurationError(
                f"{' and '.join(idle)} would do nothing: a batch is cut into grains with exact=bits alone; say that "
                "too, or leave it out"
            )
        return
    for problem in _problems(settings):
        raise ConfigurationError(f"exact=bits does not go with {problem}")
    if settings.batch_size is not None:
        ExactBits.chosen(settings.batch_size, settings.grain)


def _problems(settings: Any) -> Iterator[str]:
    for name, usual, why in REFUSED:
        if (value := getattr(settings, name)) != usual:
            shown = ", ".join(value) if isinstance(value, tuple) else value
            yield f"{name}={shown}: {why}"
    for name, values, why in REFUSED_VALUES:
        if (value := getattr(settings, name)) in values:
            yield f"{name}={value}: {why}"
