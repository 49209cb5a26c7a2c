"""The default of ``timeout_seconds``, told from a limit that a user gives."""

from __future__ import annotations


class DefaultLimit(float):
    """A time limit in seconds that nobody has given, so that it gives way to the limit of a launcher.

    It is equal to a given limit of as many seconds. Its type also survives being sent to other ranks.
    """


TIMEOUT_SECONDS = DefaultLimit(300.0)
"""The longest wait for other ranks, where nobody has given one."""
