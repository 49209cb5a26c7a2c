"""How the machines of a run find each other, in torchrun's options under torchrun's names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous import RendezvousParameters

from evener.errors import ConfigurationError

_BACKENDS = ("static", "c10d")
_LIMITS = ("timeout", "join_timeout", "read_timeout")
"""For the other machines to come: of the static backend, of c10d, and of c10d to reach the first machine's store."""

_DEFAULT_ENDPOINT = "localhost:29400"
"""torchrun's own, where none is given."""


@dataclass(frozen=True)
class Rendezvous:
    """torchrun's options. The default is one machine and a free port of its own."""

    nnodes: str = "1"
    """Machines, or ``MIN:MAX`` for an elastic run."""
    node_rank: int = 0
    """Number of this machine, for the static backend."""
    rdzv_backend: str = "static"
    """``static``, where machine 0 is named, or ``c10d``, where all are given one endpoint."""
    rdzv_endpoint: str = ""
    """``HOST:PORT``; ``master_addr:master_port`` by default for the static backend."""
    rdzv_id: str = "none"
    """Tells runs apart that meet at one endpoint."""
    rdzv_conf: str = ""
    """More options of the backend, ``key=value,key=value``."""
    master_addr: str = "127.0.0.1"
    """Machine 0, as the others reach it; of the static backend."""
    master_port: int = 29500
    """Of machine 0, for the static backend."""
    max_restarts: int | None = None
    """None: as many as the run needs by itself, which is none unless it may go on with fewer ranks."""
    standalone: bool = False
    """One machine, on a free port. Implied where neither machines nor an endpoint are named."""

    def __post_init__(self) -> None:
        least, most = self.nodes
        if not 0 < least <= most:
            raise ConfigurationError(
                f"nnodes is {self.nnodes!r}; expected a number, or MIN:MAX with 1 <= MIN <= MAX"
            )
        if self.rdzv_backend not in _BACKENDS:
            raise ConfigurationError(
                f"rdzv_backend is {self.rdzv_backend!r}; it must be {' or '.join(_BACKENDS)}, for torch reads "
                "pickles of the others, which may run code"
            )
        if self.rdzv_backend == "static" and not 0 <= self.node_rank < most:
            raise ConfigurationError(
                f"node_rank is {self.node_rank} of {most} nodes; they are numbered from 0"
            )
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts is {self.max_restarts}; it cannot be negative")
        if self.is_standalone and most != 1:
            raise ConfigurationError(f"standalone means one node, nnodes is {self.nnodes!r}; leave one out")

    @property
    def nodes(self) -> tuple[int, int]:
        """The least and the greatest number of machines."""
        least, _, most = self.nnodes.partition(":")
        try:
            return int(least), int(most or least)
        except ValueError:
            raise ConfigurationError(f"nnodes is {self.nnodes!r}; expected a number, or MIN:MAX") from None

    @property
    def is_standalone(self) -> bool:
        alone = self.nodes == (1, 1) and self.rdzv_backend == "static" and not self.rdzv_endpoint
        return self.standalone or (alone and (self.master_addr, self.master_port) == ("127.0.0.1", 29500))

    @property
    def endpoint(self) -> str:
        fixed = f"{self.master_addr}:{self.master_port}" if self.rdzv_backend == "static" else ""
        return self.rdzv_endpoint or fixed or _DEFAULT_ENDPOINT

    def within(self, timeout_seconds: float) -> RendezvousParameters:
        """What torchrun's agent needs, to wait for other machines for so long."""
        backend = self.rdzv_backend
        least, most = self.nodes
        limits = dict.fromkeys(_LIMITS, math.ceil(timeout_seconds))
        options: dict[str, str | int] = {**limits, **self._options()}
        if backend == "static":
            options["rank"] = self.node_rank
        return RendezvousParameters(
            backend=backend,
            endpoint=self.endpoint,
            run_id=self.rdzv_id,
            min_nodes=least,
            max_nodes=most,
            local_addr=None,
            **options,
        )

    def _options(self) -> dict[str, str]:
        pairs = [part.partition("=") for part in self.rdzv_conf.split(",") if part.strip()]
        wrong = [key for key, equals, _ in pairs if not equals or not key.strip()]
        if wrong:
            raise ConfigurationError(f"rdzv_conf is {self.rdzv_conf!r}; expected key=value,key=value")
        return {key.strip(): value.strip() for key, _, value in pairs}
