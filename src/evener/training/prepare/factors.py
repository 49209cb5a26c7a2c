"""Finds the number by which a line of the loop multiplies or divides a Python number.

``loss.item()`` is a plain float, which cannot tell what is done with it, and ``total += loss.item() * len(x)`` would be
wrong in silence on ranks that have equally many samples. So the line is read while it calls ``item()``::

    total += loss.item() * inputs.size(0)      the call, by its position  ─▶  times inputs.size(0)  ─▶  6
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice, pairwise
from types import CodeType, FrameType
from typing import Any, Literal

from torch import Tensor

Operation = Literal["mul", "div"]
Position = tuple[int | None, int | None, int | None, int | None]


def factors_at(frame: FrameType, dim: int = 0) -> list[tuple[Operation, int]]:
    """Returns the numbers of samples by which the loop multiplies or divides the result of the call that a frame is in.

    Only numbers that can be read without running anything of the loop's are found: ``len(x)``, ``x.size(0)`` and
    ``x.shape[0]`` of a tensor, and a variable to which the loop assigns one of these.

    Args:
        dim: The dimension of the samples. Where they are not along the first one, ``len(x)`` is no number of them.
    """
    found: list[tuple[Operation, int]] = []
    for operation, operand in _operands(frame.f_code, frame.f_lasti, dim):
        number = _rows_in(operand, frame, dim)
        if number is not None:
            found.append((operation, number))
    return found


def is_by_literal(frame: FrameType) -> bool:
    """Returns True if the frame is at a product or quotient by a number that stands in the code, as in ``6 * loss``."""
    match next(iter(_chain_at(frame.f_code, frame.f_lasti)), None):
        case ast.BinOp(left=ast.Constant()) | ast.BinOp(right=ast.Constant()):
            return True
        case ast.AugAssign(value=ast.Constant()):
            return True
    return False


@lru_cache(maxsize=256)
def _operands(code: CodeType, instruction: int, dim: int) -> list[tuple[Operation, ast.expr]]:
    """Returns what a call's result is multiplied or divided by; nothing if the source is not at hand."""
    chain = _chain_at(code, instruction)
    if not chain:
        return []
    assigned = (node for node in ast.walk(chain[-1]) if isinstance(node, ast.Assign))
    counts = {name for node in assigned for name in _counts_of(node, dim)}
    return [
        (operation, operand)
        for operation, operand in _around(chain)
        if not isinstance(operand, ast.Name) or operand.id in counts
    ]


@lru_cache(maxsize=256)
def _chain_at(code: CodeType, instruction: int) -> list[ast.AST]:
    """Returns the nodes from that of an instruction to the whole tree; none if the source is not at hand."""
    with suppress(Exception):
        position: Position = next(islice(code.co_positions(), instruction // 2, None))
        if None not in position:  # or Python was told to forget columns
            return _chain_to(ast.parse("".join(linecache.getlines(code.co_filename))), position)
    return []


def _counts_of(node: ast.Assign, dim: int) -> Iterator[str]:
    """Yields the variables that are assigned a number of samples, as in ``n = len(x)`` and ``n, c = x.shape``."""
    for target in node.targets:
        if isinstance(target, ast.Name) and _tensor_of(node.value, dim):
            yield target.id
        for name in target.elts[dim : dim + 1] if isinstance(target, ast.Tuple) else ():
            match name, node.value:
                case (
                    ast.Name(),
                    ast.Attribute(attr="shape") | ast.Call(func=ast.Attribute(attr="size"), args=[]),
                ):
                    yield name.id


def _around(chain: list[ast.AST]) -> list[tuple[Operation, ast.expr]]:
    """Returns the operands of the products and quotients around the first node of a chain, from inside to outside.

    A meter multiplies what it is given by the number beside it, as in ``meter.update(loss.item(), len(x))``.
    """
    found: list[tuple[Operation, ast.expr]] = []
    for inner, outer in pairwise(chain):
        match outer:
            case ast.BinOp(op=ast.Mult()):
                found.append(("mul", outer.right if outer.left is inner else outer.left))
            case ast.BinOp(op=ast.Div()) if outer.left is inner:
                found.append(("div", outer.right))
            case ast.Call(func=ast.Attribute(attr="update" | "add"), args=[first, *more]) if first is inner:
                return [
                    *found,
                    *(("mul", each) for each in [*more, *(named.value for named in outer.keywords)]),
                ]
            case _:
                break
    return found


def _chain_to(tree: ast.AST, position: Position) -> list[ast.AST]:
    """Returns the nodes from the one at a position to the whole tree."""
    chain: list[ast.AST] = [tree]
    while True:
        inside = [node for node in ast.iter_child_nodes(chain[-1]) if _holds(node, position)]
        if not inside:
            break
        chain.append(inside[0])
    exact = [n for n, node in enumerate(chain) if _position_of(node) == position]
    return chain[exact[0] :: -1] if exact else []


def _position_of(node: ast.AST) -> Position:
    return (
        getattr(node, "lineno", None),
        getattr(node, "end_lineno", None),
        getattr(node, "col_offset", None),
        getattr(node, "end_col_offset", None),
    )


def _holds(node: ast.AST, position: Position) -> bool:
    first, last, begin, end = _position_of(node)
    if None in (first, last, begin, end):
        return any(_holds(inner, position) for inner in ast.iter_child_nodes(node))
    return (first, begin) <= (position[0], position[2]) and (position[1], position[3]) <= (last, end)


def _rows_in(operand: ast.expr, frame: FrameType, dim: int) -> int | None:
    """Returns the number of samples that an operand is; None for anything else."""
    if isinstance(operand, ast.Name):
        number = _variable(operand, frame)
        return number if type(number) is int else None
    name = _tensor_of(operand, dim)
    tensor = None if name is None else _variable(name, frame)
    return tensor.shape[dim] if isinstance(tensor, Tensor) and tensor.dim() > dim else None


def _tensor_of(node: ast.expr, dim: int) -> ast.Name | None:
    """Returns the variable whose number of samples an expression is; None for others."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name() as name], keywords=[]) if not dim:
            return name
        case ast.Call(
            func=ast.Attribute(value=ast.Name() as name, attr="size"), args=[ast.Constant(value=at)]
        ) if at == dim:
            return name
        case ast.Subscript(
            value=ast.Attribute(value=ast.Name() as name, attr="shape"), slice=ast.Constant(value=at)
        ) if at == dim:
            return name
    return None


def _variable(name: ast.Name, frame: FrameType) -> Any:
    return frame.f_locals.get(name.id, frame.f_globals.get(name.id))
