"""Exchanges BatchNorm statistics between the ranks of one host through a mailbox in shared memory.

A model has tens of BatchNorm layers, and each exchanges a few numbers twice a step. Through sockets an exchange takes
0.2 ms and wakes up threads while the computation needs the cores. In a mailbox
(:mod:`evener.distributed.shm.mailbox`) it is one store and a few loads.

A message begins with a title, which names the layer, the direction and the length of the message, so that ranks that
reach different layers get an error. Numbers that do not fit into one message are sent in several parts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from evener.distributed.shm.mailbox import MESSAGES, Mailbox
from evener.errors import ConfigurationError, EvenerError, RankError
from evener.hardware.timers import waiting
from evener.nn.batch_norm_peers import Later, Peers

WHAT = "exchange of BatchNorm"
_TITLE_NBYTES = 256
_NUMBERS_NBYTES = 64 * 1024


class Neighbors(Peers):
    """The ranks of ``group``, all on one host, which exchange CPU tensors through shared memory.

    Args:
        timeout_seconds: How long to wait for a rank. If a watchdog runs, it waits a little longer, because the
            watchdog's message says more.

    Raises:
        ConfigurationError: If the ranks are on several hosts, or the machine does not support this. Raised on all
            ranks.
    """

    what = "ranks"

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._names = dist.get_process_group_ranks(group)
        box = Mailbox(group, _TITLE_NBYTES + _NUMBERS_NBYTES, timeout_seconds, WHAT)
        self._box: Mailbox | None = box
        self.held_nbytes = self._ranks * MESSAGES * (_TITLE_NBYTES + _NUMBERS_NBYTES)  # all are mapped
        titles = box.views(torch.uint8, 0, _TITLE_NBYTES)
        self._titles = [[memoryview(view.numpy()) for view in of_ranks] for of_ranks in titles]  # type: ignore[arg-type]
        self._views: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}
        self._texts: dict[tuple[str, torch.dtype, int], bytes] = {}
        self._taken = 0
        self._failure: EvenerError | None = None

    def size(self) -> int:
        return self._ranks

    def all_gather_later(self, message: Tensor, of: str) -> Later:
        title = self._text(of, message)
        first, *rest = torch.split(message, _NUMBERS_NBYTES // message.itemsize)
        number = self._post(first, title)

        def later() -> Tensor:
            found = [self._take(number, first, title)]
            for part in rest:
                found.append(self._take(self._post(part, title), part, title))
            return torch.cat(found, dim=1) if rest else found[0]

        return later

    def close(self) -> None:
        """Frees the shared memory once no views of it are left."""
        self._box = None
        self._titles.clear()
        self._views.clear()

    def _post(self, part: Tensor, title: bytes) -> int:
        box = self._ready()
        number = box.posted
        if self._taken != number:
            raise RankError(f"an earlier {WHAT} was given up: {self._read(number - 1, self._rank)}")
        self._titles[number % MESSAGES][self._rank][:] = title
        self._of(box, part)[number % MESSAGES][self._rank].copy_(part)
        return box.post()

    def _take(self, number: int, part: Tensor, title: bytes) -> Tensor:
        box = self._ready()
        try:
            with waiting():
                box.wait(number)
            if any(other != title for other in self._titles[number % MESSAGES]):
                raise ConfigurationError(self._differ(number))
        except BaseException as error:
            self._failure = RankError(f"an earlier {WHAT} failed: {error}")
            raise
        found = torch.stack(self._of(box, part)[number % MESSAGES])
        self._taken = number + 1
        return found

    def _ready(self) -> Mailbox:
        if self._failure is not None:
            raise self._failure
        if self._box is None:
            raise ConfigurationError(
                f"the {WHAT} over the ranks has been closed with their run; in a model of one process use eval(), or "
                "evener.nn.exact_batch_norm(model, None)"
            )
        return self._box

    def _differ(self, number: int) -> str:
        seen = ", ".join(
            f"rank {self._names[rank]} to {self._read(number, rank)}" for rank in range(self._ranks)
        )
        return (
            f"the ranks came to different layers that look at all samples: {seen}. All must call the same BatchNorm "
            "modules in the same order, whatever their samples"
        )

    def _read(self, number: int, rank: int) -> str:
        return bytes(self._titles[number % MESSAGES][rank]).rstrip(b"\0").decode(errors="replace")

    def _text(self, of: str, message: Tensor) -> bytes:
        key = of, message.dtype, len(message)
        if key not in self._texts:
            words = f"{len(message)} numbers ({str(message.dtype).removeprefix('torch.')}) of {of}".encode()
            self._texts[key] = words[:_TITLE_NBYTES].ljust(_TITLE_NBYTES, b"\0")
        return self._texts[key]

    def _of(self, box: Mailbox, part: Tensor) -> list[list[Tensor]]:
        """Returns views of the numbers of all messages, each as long as ``part``."""
        key = part.dtype, len(part)
        if key not in self._views:
            self._views[key] = box.views(part.dtype, _TITLE_NBYTES // part.itemsize, len(part))
        return self._views[key]
