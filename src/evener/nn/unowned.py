"""What a module uses and does not own, such as a process group."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from evener.errors import ConfigurationError

T = TypeVar("T")


class Shared(Generic[T]):
    """A copy of the module shares it, and a pickled one comes back without."""

    def __init__(self, value: T | None = None) -> None:
        self.value = value

    def of(self, owner: object) -> T:
        """The value.

        Raises:
            ConfigurationError: In another process, where what ``owner`` uses is not.
        """
        if self.value is None:
            raise ConfigurationError(f"{owner} was copied to another process; only its state_dict can be")
        return self.value

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared[T]:
        return self

    def __reduce__(self) -> tuple[type[Shared[Any]], tuple[()]]:
        return Shared, ()
