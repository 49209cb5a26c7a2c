"""What the arguments of a loss are to the ranks: rows of samples, lists of one entry per sample, or the same for all.

A loss that every rank computes from the samples of all must be given those of all. Nothing tells what an argument is,
so ranks compare what each of them has at the same *place*, a path into the arguments::

    rank 0                rank 1                is
    outputs  (3, 5)       (2, 5)                rows: as many as the rank's samples, other ones on each rank
    boxes    3 dicts      2 dicts               entries: one for each sample
    weights  (4,)         the same (4,)         the same for all

What a place was found to be once, it stays. It may be either where a tensor is the same on all ranks and has as many
rows as each has samples. Then the loss is computed both ways, and is refused if both work and differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evener.data.batch import has_to, leaves_of, like_mapping, like_sequence, map_leaves
from evener.data.fingerprint import digest_if_any
from evener.training.prepare.batch_tensors import is_of_a_batch
from evener.training.prepare.sample_tensor import plain_of

Path = tuple[Any, ...]
GO_ON: Any = object()
"""Returned by a visitor that wants to see the parts of what it was given."""


def map_parts(visit: Callable[[Path, Any], Any], tree: Any, path: Path = ()) -> Any:
    """Replaces ``tree`` by ``visit(path, tree)``, or if that is :data:`GO_ON` its parts, as `map_leaves` knows them."""
    made = visit(path, tree)
    if made is not GO_ON or isinstance(tree, Tensor) or has_to(tree):
        return tree if made is GO_ON else made
    if isinstance(tree, Mapping):
        return like_mapping(tree, {key: map_parts(visit, each, (*path, key)) for key, each in tree.items()})
    if isinstance(tree, tuple | list):
        return like_sequence(tree, [map_parts(visit, each, (*path, n)) for n, each in enumerate(tree)])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        changed = {name: map_parts(visit, getattr(tree, name), (*path, name)) for name in names}
        return dataclasses.replace(tree, **changed)
    return tree


class Entries:
    """A list with one entry for each sample, as a leaf of `map_leaves`."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def at(self, index: Sequence[int]) -> Entries:
        """Returns the entries at these places."""
        return Entries(like_sequence(self.given, [self.given[each] for each in index]))

    def map(self, function: Callable[[Any], Any]) -> Entries:
        """Returns the entries with ``function`` applied to all leaves."""
        return Entries(map_leaves(function, self.given))

    def to(self, *_: Any) -> Entries:
        """Stops `map_leaves`."""
        return self


class SameForAll(Entries):
    """A tensor of no sample, as a leaf that has no rows."""


def unwrapped(tree: Any) -> Any:
    """Returns ``tree`` with what :class:`Entries` hold."""
    return map_leaves(lambda leaf: leaf.given if isinstance(leaf, Entries) else leaf, tree)


class SeenPlace(NamedTuple):
    """What a rank has at a place."""

    length: int
    """The number of entries of a list; -1 for a leaf."""
    kind: str = ""
    """The type of a tensor's rows."""
    is_row: bool = False
    """True for a tensor with as many rows as the rank's first tensor."""
    may_be_same: bool = False
    """False for a tensor of a prepared loader, or with a graph."""
    digest: str = ""
    """Of the contents; empty if nobody needs it."""
    is_alike: bool = False
    """True for a list whose entries are all the same, as that of the anchors of each image."""
    floats: str = ""
    """The type and shape of floating-point numbers; empty for anything else."""


class OfRank(NamedTuple):
    """What a rank says of a loss's arguments."""

    mark: float
    """Identifies the batch."""
    rows: int
    samples: int
    weight: int
    fits: bool
    """True if there are rows, equally many for each sample."""
    seen: dict[Path, SeenPlace]


class Ways(NamedTuple):
    """One way to take the arguments: the places of entries, and of rows."""

    entries: frozenset[Path]
    rows: frozenset[Path]

    def wrapped(self, given: Any) -> Any:
        """Returns the arguments with lists of entries as :class:`Entries`, and other tensors without rows."""

        def visit(path: Path, part: Any) -> Any:
            if path in self.entries:
                return Entries(part)
            of_none = isinstance(part, Tensor) and part.dim() and path not in self.rows
            return SameForAll(part) if of_none else GO_ON

        return map_parts(visit, given)


class Arguments:
    """What is known of the arguments of one loss."""

    def __init__(self) -> None:
        self._known: dict[Path, str] = {}

    def seen_by(
        self,
        given: Any,
        samples: int,
        held: Collection[int],
        shares: Sequence[int],
        is_late: Callable[[Any], bool],
    ) -> tuple[int, dict[Path, SeenPlace]]:
        """Returns the number of this rank's rows, and what it has at each place.

        Args:
            samples: The number of samples, at least one.
            held: Addresses of the model's own tensors, which are the same on all ranks.
            shares: The samples of all parts. If they differ, a tensor of rows cannot be the same on all ranks.
            is_late: Returns True for a tensor whose numbers the host should not wait for.
        """
        lists: list[Path] = []
        leaves: list[tuple[Path, Any, bool]] = []
        found: dict[Path, SeenPlace] = {}
        alike = len(set(shares)) == 1

        def visit(path: Path, part: Any) -> Any:
            if not isinstance(part, Tensor) and _is_list(part) and len(path) > 1:
                known = self._known.get(path)
                may_be = len(part) == samples and known != _FIXED
                unlike = may_be and alike and known is None and samples > 1
                found[path] = SeenPlace(len(part), is_alike=unlike and len(set(map(_digest_of, part))) == 1)
                if may_be:
                    lists.append(path)
                if may_be and known == _ENTRIES:
                    return part
            elif isinstance(part, Tensor) or not _is_container(part):
                leaves.append((path, plain_of(part), any(path[: len(each)] == each for each in lists)))
            return GO_ON

        map_parts(visit, given)
        tensors = [(leaf, inside) for _, leaf, inside in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        tensors = [(leaf, inside) for leaf, inside in tensors if address(leaf) not in held]
        outside = [len(leaf) for leaf, inside in tensors if not inside]
        within = [len(leaf) for leaf, _ in tensors if len(leaf) and not len(leaf) % samples]
        rows = next(iter(outside or within), samples if lists else 0)
        for path, leaf, inside in leaves:
            is_tensor = isinstance(leaf, Tensor)
            is_row = is_tensor and leaf.dim() > 0 and len(leaf) == rows and address(leaf) not in held
            free = not (is_tensor and (leaf.requires_grad or is_of_a_batch(leaf)))
            asked = not is_row or (free and self._known.get(path) != _ROWS)
            text = f"{leaf.dtype} {leaf.shape}" if asked and is_late(leaf) and not (is_row or inside) else ""
            digest = text or (_digest_of(leaf) if asked else "")
            kind = f"{leaf.dtype} {tuple(leaf.shape[1:])}" if is_row else ""
            found[path] = SeenPlace(-1, kind, is_row, free, digest, floats=_floats_of(leaf))
        return rows, found

    def told(self, said: Sequence[OfRank], samples: Sequence[OfRank]) -> Told:
        """Returns what the arguments are, from what all ranks have seen. All ranks come to the same.

        Args:
            samples: Those of the ranks that have samples of the batch.
        """
        entries, lists, leaves = set[Path](), list[Path](), dict[Path, list[SeenPlace | None]]()
        places = dict.fromkeys(path for each in said for path in each.seen)
        for path in sorted(places, key=len):
            if _is_below(path, entries):
                continue
            seen = [each.seen.get(path) for each in said]
            if any(each is not None and each.length < 0 for each in seen):
                leaves[path] = seen
            elif any(
                each is None or each.length != rank.samples for each, rank in zip(seen, said, strict=True)
            ):
                self._known[path] = _FIXED
            elif (self._known.get(path) or self._possible(path, seen, said)) == _ENTRIES:
                self._known[path] = _ENTRIES
                entries.add(path)
            elif self._known.get(path) is None:
                lists.append(path)
        unsure, rows = list[Path](), set[Path]()
        for path, seen in leaves.items():
            is_row, is_same = _are_rows(seen), _are_same(seen)
            if (
                is_row
                and is_same
                and path not in self._known
                and all(each and each.may_be_same for each in seen)
            ):
                unsure.append(path)
            elif is_row and is_same is False:
                self._known[path] = _ROWS
            elif is_same and not is_row:
                self._known[path] = _SAME
            # Each rank may have filled up its rows to a length of its own. A function of sums takes them as they are.
            if all(each and each.is_row for each in seen) and self._known.get(path) != _SAME:
                rows.add(path)
        return Told(self, said, samples, leaves, entries, lists, frozenset(rows), unsure)

    def _possible(self, path: Path, seen: Sequence[SeenPlace | None], said: Sequence[OfRank]) -> str:
        """Returns what a list with as many entries as samples on each rank is; empty if it may be either."""
        below = dict.fromkeys(
            at for each in said for at in each.seen if at[: len(path)] == path and at != path
        )
        leaves = [[each.seen.get(at) for each in said] for at in below]
        leaves = [each for each in leaves if not any(one is not None and one.length >= 0 for one in each)]
        may_be_fixed = len({each.samples for each in said}) == 1
        may_be_fixed &= all(_are_rows(each) or _are_same(each) for each in leaves)
        are_rows = bool(leaves) and all(map(_are_rows, leaves))
        is_alike = all(each is not None and each.is_alike for each in seen)
        are_copies = is_alike and (not are_rows or all(map(_are_same, leaves)))
        return "" if may_be_fixed and not are_copies else _ENTRIES

    def learn(self, told: Told, ways: Ways, failed: Sequence[Ways]) -> None:
        """Takes over that the arguments are to be taken in this way, because all others failed."""
        if len(failed) < len(told.ways) - 1:
            return
        self._known.update({path: _ENTRIES if path in ways.entries else _FIXED for path in told.lists})
        self._known.update({path: _ROWS if path in ways.rows else _SAME for path in told.unsure})

    def remembered(self, given: Any) -> Ways:
        """Returns how to take arguments by what is known alone. What is unknown has rows."""
        entries, rows = set[Path](), set[Path]()

        def visit(path: Path, part: Any) -> Any:
            known = self._known.get(path)
            if known == _ENTRIES:
                entries.add(path)
                return part
            if isinstance(part, Tensor) and known != _SAME:
                rows.add(path)
            return GO_ON

        map_parts(visit, given)
        return Ways(frozenset(entries), frozenset(rows))


_ROWS, _SAME, _ENTRIES, _FIXED = "rows", "same", "entries", "fixed"


class Told:
    """What the arguments of a call are, on all ranks alike.

    Attributes:
        lists: Places of lists that are either fixed, or have one entry per sample.
        unsure: Places of tensors that are either rows or the same for all.
        ways: The ways to take the arguments, the likeliest first.
    """

    def __init__(
        self,
        arguments: Arguments,
        said: Sequence[OfRank],
        samples: Sequence[OfRank],
        leaves: Mapping[Path, Sequence[SeenPlace | None]],
        entries: Collection[Path],
        lists: Sequence[Path],
        rows: frozenset[Path],
        unsure: Sequence[Path],
    ) -> None:
        self.arguments, self.said, self.samples = arguments, said, samples
        self.lists, self.unsure = lists, [path for path in unsure if path in rows]
        self._leaves = leaves
        as_entries = [path for path in lists if not self._has_only_rows(path)]
        first = Ways(frozenset([*entries, *as_entries]), rows)
        flips = [set(lists), set(self.unsure), *({path} for path in [*lists, *self.unsure])]
        others = [Ways(first.entries ^ (flip & set(lists)), rows - (flip & set(unsure))) for flip in flips]
        self.ways: list[Ways] = list(dict.fromkeys([first, *others]))

    @property
    def shares(self) -> list[int]:
        """The number of rows of each part that count."""
        return [each.rows * each.weight for each in self.samples]

    def _has_only_rows(self, path: Path) -> bool:
        below = [seen for at, seen in self._leaves.items() if at[: len(path)] == path]
        return bool(below) and all(map(_are_rows, below))

    def unlike(self) -> Iterator[tuple[Path, bool]]:
        """Yields the places, outside of entries, where ranks have what makes no batch, and whether those are rows."""
        for path, seen in self._leaves.items():
            if not (_is_below(path, self.ways[0].entries) or _are_rows(seen) or _are_same(seen)):
                yield path, all(each is not None and each.is_row for each in seen)

    def numbers(self) -> Iterator[tuple[Path, bool]]:
        """Yields the places of floating-point numbers of no sample, of one shape on all ranks, and whether they differ.

        What else is of no sample may differ, as the length to which each rank pads.
        """
        for path, seen in self._leaves.items():
            shapes = {each and each.floats for each in seen}
            if path not in self.ways[0].rows and len(shapes) == 1 and any(shapes):
                yield path, _are_same(seen) is False

    def of_no_sample(self, given: Any) -> dict[Path, Any]:
        """Returns the leaves that are no rows and in no list of entries, by their places."""
        found = dict[Path, Any]()

        def visit(path: Path, part: Any) -> Any:
            if path in self.ways[0].entries:
                return part
            if path in self._leaves and path not in self.ways[0].rows:
                found[path] = plain_of(part)
            return GO_ON

        map_parts(visit, given)
        return found


def _floats_of(leaf: Any) -> str:
    if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    return "float" if type(leaf) is float else ""


def _digest_of(part: Any) -> str:
    return digest_if_any(part) or str(type(part))


def _is_below(path: Path, places: Collection[Path]) -> bool:
    return any(path[: len(each)] == each for each in places)


def _are_rows(seen: Sequence[SeenPlace | None]) -> bool:
    return (
        all(each is not None and each.is_row for each in seen)
        and len({each.kind for each in seen if each}) == 1
    )


def _are_same(seen: Sequence[SeenPlace | None]) -> bool | None:
    """Returns whether all ranks have the same; None if they did not look."""
    if any(each is not None and not each.digest for each in seen):
        return None if all(each is not None for each in seen) else False
    return len({each and each.digest for each in seen}) == 1


def _is_list(part: Any) -> bool:
    return isinstance(part, list | tuple) and not hasattr(part, "_fields") and not has_to(part)


def _is_container(part: Any) -> bool:
    if has_to(part):
        return False
    is_record = dataclasses.is_dataclass(part) and not isinstance(part, type)
    return is_record or isinstance(part, Mapping | tuple | list)


def address(leaf: Any) -> int:
    """Returns where the memory of a tensor begins; 0 if that is unknown."""
    plain = plain_of(leaf) if isinstance(leaf, Tensor) else None
    if plain is None or plain.layout is not torch.strided:
        return 0
    try:
        return int(plain.untyped_storage().data_ptr())
    except RuntimeError:  # a DTensor, a fake tensor
        return 0


def rows_in(tree: Any) -> int:
    """Returns the number of rows of the first tensor that has any, or of entries; 0 if there is none."""
    leaves = leaves_of(tree)
    found = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    entries = [len(leaf) for leaf in leaves if type(leaf) is Entries]
    return next(iter([*found, *entries]), 0)
