"""Waits until all machines of a run have joined: prints the progress to standard error, and limits the wait.

The machines of a run are started by separate commands, or by a scheduler that has only some machines free. A machine
that waits says so every few seconds, and ends after the same timeout as every other wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from evener.core.stdio import to_stderr
from evener.distributed.file_descriptors import shortage_message
from evener.distributed.launch.membership import check_terms, common_name, keeps_store
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.launch.rendezvous_state import JsonBackend
from evener.distributed.loopback import OneMachine
from evener.errors import ConfigurationError, RankError, RankTimeoutError
from evener.torch_internals.elastic import forget_store, participants

_PERIOD_SECONDS = 10.0
_ENDED = "the other machines ended the run before this one had joined it"


class RendezvousWait:
    """Creates the rendezvous handler of a run, whose waits are reported and limited.

    Args:
        rendezvous: How the machines find each other.
        timeout_seconds: How long a machine waits for the others.
        terms: What must be equal on machines that join a run later.
    """

    def __init__(
        self, rendezvous: Rendezvous, timeout_seconds: float, terms: Mapping[str, Any] | None = None
    ) -> None:
        self._rendezvous, self._timeout_seconds, self._terms = rendezvous, timeout_seconds, terms
        self.keeps_store = False
        """True if this process hosts the store of a run whose number of machines may change."""
        self.launch = ""
        """The name of such a run's launch, the same on all machines."""
        self._machines = rendezvous.nodes[0]
        self._handler: RendezvousHandler | None = None
        self._came: int | None = None

    def handler(self) -> RendezvousHandler:
        """Creates the rendezvous handler for torchrun's agent.

        Raises:
            ConfigurationError: If the rendezvous options are invalid.
            RankTimeoutError: If the machine that hosts the store cannot be reached in time.
        """
        with self._waiting():
            handler = self._made()
        self._handler, meet = handler, handler.next_rendezvous

        def next_rendezvous() -> RendezvousInfo:
            with self._waiting():
                forget_store(handler)
                return meet()

        handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
        return handler

    def _made(self) -> RendezvousHandler:
        if self._rendezvous.is_standalone:
            return OneMachine(self._timeout_seconds)
        parameters = self._rendezvous.within(self._timeout_seconds)
        if parameters.backend == "static":
            return get_rendezvous_handler(parameters)
        backend, store = create_backend(parameters)
        if self._rendezvous.is_elastic:
            self.keeps_store = keeps_store(store)
            check_terms(store, parameters.run_id, self._terms or {})
            self.launch = common_name(store, parameters.run_id)
        return create_handler(store, JsonBackend(backend, self._rendezvous.is_elastic), parameters)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._tell, args=(over,), name="evener-meeting", daemon=True)
        if self._machines > 1 or self._rendezvous.is_elastic:
            thread.start()
        try:
            yield
        except ValueError as error:
            raise _refused(self._rendezvous, error) from error
        except RendezvousClosedError as error:
            raise RankError(_ENDED) from error
        except (RendezvousTimeoutError, RendezvousConnectionError, dist.DistError) as error:
            raise RankTimeoutError(self.message(error)) from error
        finally:
            over.set()
            if thread.is_alive():
                thread.join()

    def _tell(self, over: threading.Event) -> None:
        began = time.monotonic()
        period = min(_PERIOD_SECONDS, self._timeout_seconds / 3)
        while not over.wait(period):
            came = participants(self._handler)
            self._came = None if came is None else max(1, came)  # counts this machine also while it leaves
            missing = "the other" if self._came is None else self._machines - self._came
            what = f"{missing} of {self._machines} machines at"
            if self._rendezvous.is_elastic and (self._came or 0) >= self._machines:
                what = "the other machines to agree on a step at"
            to_stderr(
                f"evener: waiting for {what} {self._rendezvous.endpoint} for {time.monotonic() - began:.0f} s"
            )

    def message(self, error: BaseException) -> str:
        """Returns the message for a wait that ended with ``error``."""
        came = "" if self._came is None else f", {self._came} of {self._machines} came"
        said = f" ({_first_line(error)})" if _first_line(error) else ""
        if self._rendezvous.is_elastic and (self._came or 0) >= self._machines:
            return (
                f"the run at {self._rendezvous.endpoint} has not taken this machine in within "
                f"{self._timeout_seconds:g} s{said}: it has {self._came} machines, and takes in others between two "
                "steps if it has a run directory"
            )
        return (
            f"the machines of the run did not find each other within {self._timeout_seconds:g} s at "
            f"{self._rendezvous.endpoint}{came}{said}; is the command running on all of them, with the same endpoint "
            f"and id, and can the endpoint be reached from there?{shortage_message()}"
        )


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or of the inner error to which torch refers."""
    inner = error.__cause__ or error.__context__
    if inner is not None and "See inner exception" in str(error):
        return _first_line(inner)
    return next(iter(str(error).strip().splitlines()), "")


def _refused(rendezvous: Rendezvous, error: ValueError) -> ConfigurationError:
    """Creates the error for options that torch rejects. It lists the rendezvous options."""
    if isinstance(error, ConfigurationError):
        return error
    given = {
        "rdzv_backend": rendezvous.rdzv_backend,
        "rdzv_endpoint": rendezvous.endpoint,
        "rdzv_conf": rendezvous.rdzv_conf,
    }
    message = ", ".join(f"{name} is {value!r}" for name, value in given.items() if value)
    return ConfigurationError(
        f"the machines of the run cannot meet: {error} Here {message}; an endpoint is HOST:PORT, "
        "a backend c10d or static"
    )
