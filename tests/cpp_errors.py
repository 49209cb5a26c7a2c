"""Errors as C++ raises them, for tests of what is made of a collective's."""


def throw(error: BaseException) -> None:
    """Raises ``error`` without a ``raise`` statement of Python."""
    (nothing for nothing in ()).throw(error)
