"""Reads a pickle as plain data: whatever it names is recorded, and never imported, called or changed.

PyTorch describes a checkpoint's tensors in a pickle, ``.metadata``. Python's unpickler calls what a pickle names, and a
list of allowed names does not help: an opcode may change an allowed class, and PyTorch's code would run what was put
there. Here the opcodes that such a description needs work on plain values and on `PickledName` and `Made`, which do
nothing. Every other opcode is refused. Checkpoints that Evener writes today are read without it (`tensor_index`).
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PickledName:
    """The name of an object in a module, as text."""

    module: str
    name: str


class Made:
    """An object that the pickle would have made: its class, the arguments, and the state."""

    def __init__(self, kind: PickledName, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None


def read(content: bytes) -> Any:
    """Returns the content of the pickle: dictionaries, lists, tuples, numbers, texts, `PickledName` and `Made`.

    Raises:
        pickle.UnpicklingError: If it is damaged, or not such a description.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            act = _ACTS.get(opcode.name)
            if act is None:
                raise pickle.UnpicklingError(
                    f"its opcode {opcode.name} is none that it needs: it may run code"
                )
            act(machine, argument)
        (found,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise pickle.UnpicklingError(f"it is torn: {error}") from error
    return found


_DEEPEST = 4
"""Maximum depth of nested tuples.

Python hashes, compares and prints tuples by recursion, and visits one that is named twice twice. So a few bytes could
use up all of the stack, or take years.
"""
_KEYS = (str, int, Made)


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self._levels: dict[int, tuple[int, Any]] = {}
        """Depth of each tuple, by its id. The tuples are kept here, so that ids stay unique."""

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def above_mark(self) -> list[Any]:
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def last(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise ValueError("its stack is too short")
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return found

    def top(self, kind: type[Any]) -> Any:
        """Returns the value on top of the stack, which must be of exactly this type."""
        if type(self.stack[-1]) is not kind:
            raise pickle.UnpicklingError(
                f"it changes a {_name_of(self.stack[-1])}, which none needs: it may run code"
            )
        return self.stack[-1]

    def push_tuple(self, items: tuple[Any, ...]) -> None:
        level = 1 + max((self._levels[id(item)][0] for item in items if type(item) is tuple), default=0)
        if level > _DEEPEST:
            raise pickle.UnpicklingError(f"it nests tuples {level} deep, which none needs")
        self._levels[id(items)] = level, items
        self.push(items)

    def name(self) -> None:
        module, name = self.last(2)
        self.push(_named(module, name))

    def make(self) -> None:
        kind, arguments = self.last(2)
        if type(kind) is not PickledName or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"it calls a {_name_of(kind)}, which none needs: it may run code")
        self.push(Made(kind, arguments))

    def build(self) -> None:
        (state,) = self.last(1)
        self.top(Made).state = state

    def set_items(self, items: list[Any]) -> None:
        strange = next((key for key in items[::2] if type(key) not in _KEYS), "")
        if type(strange) not in _KEYS:
            raise pickle.UnpicklingError(f"it has a {_name_of(strange)} as a key, which none needs")
        self.top(dict).update(zip(items[::2], items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def set_memo(self, key: int) -> None:
        self.memo[key] = self.stack[-1]


def _named(module: Any, name: Any) -> PickledName:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("its names are no texts")
    return PickledName(module, name)


def _name_of(value: Any) -> str:
    return f"{value.module}.{value.name}" if isinstance(value, PickledName) else type(value).__name__


_Act = Callable[[_Machine, Any], object]
_ACTS: dict[str, _Act] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
        lambda machine, argument: machine.push(argument),
    ),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push_tuple(()),
    "TUPLE1": lambda machine, _: machine.push_tuple(machine.last(1)),
    "TUPLE2": lambda machine, _: machine.push_tuple(machine.last(2)),
    "TUPLE3": lambda machine, _: machine.push_tuple(machine.last(3)),
    "TUPLE": lambda machine, _: machine.push_tuple(tuple(machine.above_mark())),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "MEMOIZE": lambda machine, _: machine.set_memo(len(machine.memo)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda machine, argument: machine.set_memo(argument)),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET"), lambda machine, argument: machine.push(machine.memo[argument])
    ),
    "SETITEM": lambda machine, _: machine.set_items(list(machine.last(2))),
    "SETITEMS": lambda machine, _: machine.set_items(machine.above_mark()),
    "APPEND": lambda machine, _: machine.extend(list(machine.last(1))),
    "APPENDS": lambda machine, _: machine.extend(machine.above_mark()),
    "GLOBAL": lambda machine, argument: machine.push(_named(*argument.split(" ", 1))),
    "STACK_GLOBAL": lambda machine, _: machine.name(),
    "NEWOBJ": lambda machine, _: machine.make(),
    "REDUCE": lambda machine, _: machine.make(),
    "BUILD": lambda machine, _: machine.build(),
}
