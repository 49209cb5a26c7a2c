"""The offload settings: what a run keeps outside of its devices' memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evener.errors import ConfigurationError

OPTIMIZER, ACTIVATIONS = "optimizer", "activations"
KINDS = (OPTIMIZER, ACTIVATIONS)


@dataclass(frozen=True)
class Offload:
    """The settings ``offload`` and ``offload_to``, parsed."""

    kinds: frozenset[str] = frozenset()
    """What is offloaded: elements of :data:`KINDS`."""
    directory: Path | None = None
    """The directory of the files; None to offload to host memory."""

    @classmethod
    def from_settings(cls, kinds: str | None, directory: Path | None) -> Offload:
        """Parses the settings.

        Raises:
            ConfigurationError: If a kind is unknown, or ``offload_to`` is set without ``offload``.
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
        """True if the optimizer state is offloaded."""
        return OPTIMIZER in self.kinds

    @property
    def activations(self) -> bool:
        """True if the tensors that forward saves for backward are offloaded."""
        return ACTIVATIONS in self.kinds

    @property
    def words(self) -> str:
        """The setting ``offload`` as text, for messages."""
        return ",".join(kind for kind in KINDS if kind in self.kinds)
