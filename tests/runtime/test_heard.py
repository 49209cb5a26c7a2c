from __future__ import annotations

from evener.runtime.channel import LocalChannel, Pending
from evener.runtime.heard import heard


class Three:
    """Ranks 0, 1 and 2, which say their number and what this one says."""

    def exchange(self, values: object) -> Pending:
        return Rows()


class Rows(Pending):
    def wait(self) -> list[list[float]]:
        return [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]


def test_only_the_chosen_ranks_are_heard_in_their_order() -> None:
    assert heard(Three(), (0,), 3).exchange([1]).wait() == [[0.0, 1.0]]
    assert heard(Three(), (2, 1), 3).exchange([1]).wait() == [[2.0, 1.0], [1.0, 1.0]]


def test_a_channel_of_which_all_are_heard_stays_as_it_is() -> None:
    channel = LocalChannel()
    assert heard(channel, range(1), 1) is channel
