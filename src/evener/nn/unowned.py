"""References from a module to something that it does not own, such as a process group."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from evener.errors import ConfigurationError

T = TypeVar("T")


class Shared(Generic[T]):
    """Holds a reference that copies of the module share and that pickling leaves out."""

    def __init__(self, value: T | None = None) -> None:
        self.value = value

    def value_for(self, owner: object) -> T:
        """Returns the value; ``owner`` names the module in the error.

        Raises:
            ConfigurationError: If there is no value, as in a module that was pickled into another process.
        """
        if self.value is None:
            raise ConfigurationError(f"{owner} was copied to another process; only its state_dict can be")
        return self.value

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared[T]:
        return self

    def __reduce__(self) -> tuple[type[Shared[Any]], tuple[()]]:
        return Shared, ()
