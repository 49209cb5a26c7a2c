"""Which arguments an operator writes into: ``OpOverload._schema``, for which there is no public name.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those of the arguments that the call writes into; none of an operator that has functions for arguments."""
    schema = getattr(function, "_schema", None)
    arguments = () if schema is None else schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    return [given[argument.name] for argument in arguments if argument.is_write and argument.name in given]
