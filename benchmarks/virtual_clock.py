"""Workers of an asynchronous section on a virtual clock: they stall, die and join at random, by a seed."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from evener.strategies.asynchronous.ledger import Begun, Ledger, Over, Revoked


@dataclass
class VirtualWorkers:
    """Runs a ledger to its end.

    Args:
        rates: Each worker's seconds for a sample.
        ahead: The number of ranges that a worker leases before it computes them.
        stalls: The probability that computing a range takes 30 times as long.
        deaths: The probability that a worker dies while it computes a range. One of them, worker 0, never does.
        joins: The probability that dead workers are replaced when another one pushes.
    """

    ledger: Ledger
    rates: list[float]
    seed: int = 0
    ahead: int = 0
    stalls: float = 0.0
    deaths: float = 0.0
    joins: float = 0.0
    now: float = 0.0
    over: float = 0.0
    """The time of the last merge."""
    died: int = 0
    wasted: int = 0
    """Samples computed in vain before the last replacement."""
    held: dict[int, list[int]] = field(default_factory=dict)

    def run(self, most_events: int = 100_000) -> float:
        """Returns the time at which all samples have merged.

        Raises:
            AssertionError: If nobody can go on.
        """
        draw = random.Random(self.seed)
        events: list[tuple[float, int, int | None]] = [
            (0.0, worker, None) for worker in range(len(self.rates))
        ]
        self.held = {worker: [] for worker in range(len(self.rates))}
        dead: list[int] = []
        heapq.heapify(events)
        for _ in range(most_events):
            if not events:
                break
            self.now, worker, done = heapq.heappop(events)
            if done is not None:
                if worker and draw.random() < self.deaths:
                    self.ledger.lose(worker)
                    self.held[worker].clear()
                    dead.append(worker)
                    self.died += 1
                    continue
                self.ledger.push(done, self.now)
                while self.ledger.is_due():
                    self.ledger.merge()
                    self.over = self.now
                if dead and not self.ledger.is_over and draw.random() < self.joins:
                    events = self._restarted()
                    dead.clear()
                    continue
            self._begin(worker, draw, events)
        assert self.ledger.is_over, f"nobody goes on at {self.now}: {self.ledger}"
        return self.now

    def _restarted(self) -> list[tuple[float, int, int | None]]:
        """All workers go on together from the last merge, as they do when a rank is replaced."""
        old = self.ledger
        self.wasted += old.wasted
        self.ledger = Ledger(old.size, old.terms, range(len(self.rates)), old.speeds, old.merges)
        self.held = {worker: [] for worker in range(len(self.rates))}
        return [(self.now, worker, None) for worker in range(len(self.rates))]

    def _begin(self, worker: int, draw: random.Random, events: list[tuple[float, int, int | None]]) -> None:
        mine = self.held[worker]
        while True:
            answer = self.ledger.begin(worker, mine[0] if mine else None, self.now)
            if isinstance(answer, Over):
                return
            if not isinstance(answer, Revoked):
                break
            mine.pop(0)
        if isinstance(answer, Begun):
            if mine:
                mine.pop(0)
            while len(mine) < self.ahead and (ahead := self.ledger.draw(worker)):
                mine.append(ahead.number)
            seconds = answer.lease.size * self.rates[worker] * draw.uniform(0.8, 1.2)
            if draw.random() < self.stalls:
                seconds *= 30
            heapq.heappush(events, (self.now + seconds, worker, answer.lease.number))
        else:
            heapq.heappush(events, (self.now + 0.05, worker, None))
