"""What a run keeps outside of its devices' memory, as its settings say it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evener.errors import ConfigurationError

OPTIMIZER, ACTIVATIONS = "optimizer", "activations"
KINDS = (OPTIMIZER, ACTIVATIONS)


@dataclass(frozen=True)
class Offload:
    """The settings ``offload`` and ``offload_to``."""

    kinds: frozenset[str] = frozenset()
    """Of :data:`KINDS`."""
    directory: Path | None = None
    """Where files are; None for the memory of the host."""

    @classmethod
    def from_settings(cls, kinds: str | None, directory: Path | None) -> Offload:
        """From the settings.

        Raises:
            ConfigurationError: For a kind that there is not, or a directory that nothing would go to.
        """
        if kinds is None:
            if directory is not None:
                raise ConfigurationError(
                    f"offload_to {directory} would do nothing: say with offload what is kept there, "
                    f"{' or '.join(KINDS)}, or leave it out"
                )
            return cls()
        found = [kind.strip() for kind in kinds.split(",")]
        strange = [kind for kind in found if kind not in KINDS]
        if strange:
            raise ConfigurationError(
                f"offload is {kinds!r}; it must be {', '.join(KINDS)}, or both with a comma"
            )
        return cls(frozenset(found), directory)

    @property
    def optimizer(self) -> bool:
        """Whether the state of the optimizer is."""
        return OPTIMIZER in self.kinds

    @property
    def activations(self) -> bool:
        """Whether what forward passes save for backward is."""
        return ACTIVATIONS in self.kinds

    @property
    def words(self) -> str:
        """For messages: the setting as it may be given."""
        return ",".join(kind for kind in KINDS if kind in self.kinds)
