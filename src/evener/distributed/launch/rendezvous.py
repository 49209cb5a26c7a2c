"""Rendezvous options: how the machines of a run find each other, with torchrun's options and names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous import RendezvousParameters

from evener.errors import ConfigurationError

_BACKENDS = ("static", "c10d")
_LIMITS = ("timeout", "join_timeout", "read_timeout")
"""Timeout options: for all machines to join with static and with c10d, and for c10d to reach the store."""

LAST_CALL_SECONDS = 5
"""How long an elastic run waits for more machines once the least number is there. Later ones join between steps."""
_DEFAULT_ENDPOINT = "localhost:29400"
"""torchrun's default endpoint."""


@dataclass(frozen=True)
class Rendezvous:
    """torchrun's rendezvous options. The default is one machine and a free port."""

    nnodes: str = "1"
    """Number of machines, or ``MIN:MAX`` for an elastic run."""
    node_rank: int = 0
    """Index of this machine, for the static backend."""
    rdzv_backend: str = "static"
    """``static`` (machine 0 has a known address) or ``c10d`` (all machines get the same endpoint)."""
    rdzv_endpoint: str = ""
    """``HOST:PORT``; ``master_addr:master_port`` by default for the static backend."""
    rdzv_id: str = "none"
    """Id of the run. Runs at the same endpoint need different ids."""
    rdzv_conf: str = ""
    """More options of the backend, ``key=value,key=value``."""
    master_addr: str = "127.0.0.1"
    """Address of machine 0, for the static backend."""
    master_port: int = 29500
    """Port of machine 0, for the static backend."""
    max_restarts: int | None = None
    """Most restarts. None: the run chooses, which is 0 unless it may go on with fewer ranks."""
    standalone: bool = False
    """True for one machine on a free port. Implied if neither several machines nor an endpoint are given."""

    @staticmethod
    def check(given: object) -> None:
        """Raises ConfigurationError if ``given``, the argument ``rendezvous`` of a function, is no rendezvous."""
        if given is not None and not isinstance(given, Rendezvous):
            raise ConfigurationError(
                f"rendezvous is {given!r}; give an evener.Rendezvous(nnodes=..., rdzv_backend=..., rdzv_endpoint=...), "
                "or leave it out for one machine"
            )

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
    def is_elastic(self) -> bool:
        """True if the number of machines may change during the run."""
        return self.nodes[0] < self.nodes[1] and self.rdzv_backend == "c10d"

    @property
    def endpoint(self) -> str:
        fixed = f"{self.master_addr}:{self.master_port}" if self.rdzv_backend == "static" else ""
        return self.rdzv_endpoint or fixed or _DEFAULT_ENDPOINT

    def within(self, timeout_seconds: float) -> RendezvousParameters:
        """Returns the parameters for torchrun's agent, with this timeout for other machines to join."""
        backend = self.rdzv_backend
        least, most = self.nodes
        limits = dict.fromkeys(_LIMITS, math.ceil(timeout_seconds))
        limits |= {"last_call_timeout": LAST_CALL_SECONDS} if self.is_elastic else {}
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
