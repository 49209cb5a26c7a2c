"""The sections of a report's page in which ranks differ: shares, times, memory, collectives, single steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest

from evener.tools.report import schema
from evener.tools.report.charts import GREATEST, Bar, BarPart, Figure, Spot, Trace, bars, lines
from evener.tools.report.numbers import value_text
from evener.tools.report.schema import MemoryOfRank, RankTotals, Report, Series, Span
from evener.tools.report.tables import TEXT, WHOLE, Column, Table, tabulated

Named = tuple[str, Report]
"""A run and its name on the page."""
PartsOfRun = Callable[[str, Report, list[Named]], Iterator[Figure | Table | None]]
"""Yields the parts of a section that show one run. The other runs decide about titles and axes."""
_LINES = 8
"""So many ranks have lines of their own. If there are more, a band shows all of them, and lines the slowest few."""
_SLOWEST = 3
_BARS = 12
_STEPS = 8
_BY_RANK = {
    schema.FORWARD: "Forward pass of a step",
    schema.BACKWARD: "Backward pass of a step",
    schema.COMPUTE: "Compute of a step",
    schema.WAITING: "Waiting for slower ranks, in a step",
    schema.COMMUNICATION: "Communication of a step",
    schema.INPUT: "Waiting for samples, before a step",
}
_OTHER_COMPUTE = "other compute"
_WITH_WAITING = (
    "Times are of rank 0, from the start of a call until the sum is there: they contain waiting for slower ranks and "
    "for earlier calls, which cannot be told from the transfer. The shortest call has waited least."
)
_PURPOSES = ("parameters", "gradients", "optimizer", "activations", "buckets", "inputs", "buffers", "other")


def title_of(name: str, title: str, named: Sequence[Named]) -> str:
    """Returns the title of a part of one run, with the name of the run if there are several."""
    return title if len(named) == 1 else f"{name}: {title[:1].lower()}{title[1:]}"


def side_by_side(parts: PartsOfRun) -> Callable[[list[Named]], Iterator[Figure | Table | None]]:
    """Returns a function that yields the first part of each run, then the second one of each, and so on."""
    return lambda named: chain.from_iterable(zip_longest(*(parts(*each, named) for each in named)))


def share_parts(name: str, run: Report, named: list[Named]) -> Iterator[Figure | Table | None]:
    """Yields the shares of the ranks over time, and why they changed."""
    changes = [event for event in run.events if event.kind == "shares"]
    marks = [(event.step, event.reason or event.words) for event in changes]
    caption = "A dashed line marks a change of the shares." if marks else ""
    title = title_of(name, "Share of each batch", named)
    alike = [each for each in named if each[1].identity.world_size == run.identity.world_size]
    reach = _reach(alike, schema.SHARE)
    yield lines(title, "1", _of_ranks(run, schema.SHARE), caption, marks, reach=reach)
    columns: list[Column] = [
        ("step", WHOLE, lambda each: each.step),
        ("shares", TEXT, lambda each: _shares_text(each.shares)),
        ("reason", TEXT, lambda each: each.reason or each.words),
    ]
    title = title_of(name, "Changes of the shares", named)
    yield tabulated(title, changes, columns) if changes else None


def _shares_text(shares: Sequence[float]) -> str:
    return " + ".join(
        [value_text(share, "1") for share in shares[:_LINES]] + ["..."] * (len(shares) > _LINES)
    )


def rank_parts(name: str, run: Report, named: list[Named]) -> Iterator[Figure | Table | None]:
    """Yields how long each rank computed and waited: in the whole run, and over the steps."""
    reach = max((sum(_times(each).values()) for _, run in named for each in run.ranks), default=0.0)
    shown = _few_ranks(run)
    few = len(shown) < len(run.ranks)
    caption = f"The slowest and the fastest of {len(run.ranks):,} ranks." if few else ""
    rows = [Bar(f"rank {each.rank}", _stacked(_times(each))) for each in shown]
    title = title_of(name, "Time of each rank in the whole run", named)
    columns: list[Column] = [
        ("rank", WHOLE, lambda each: each.rank),
        ("device", TEXT, lambda each: each.device),
        ("share", "1", lambda each: each.share),
        *(
            (part, "s", lambda each, part=part: getattr(each, part))
            for part in ("compute", "forward", "backward", "waiting", "communication", "input")
        ),
        ("time of a sample", "s", lambda each: each.sample_seconds),
        ("host", TEXT, lambda each: each.host),
        ("cores", WHOLE, lambda each: each.cores),
        ("threads", WHOLE, lambda each: each.threads),
        ("queued for a core", "1", lambda each: each.queued),
        ("message to the next rank", "s", lambda each: each.link_seconds),
        ("workers", WHOLE, lambda each: each.workers),
    ]
    ranks = sorted(run.ranks, key=lambda each: -each.compute) if few else run.ranks
    yield bars(title, "s", rows, tabulated(title, ranks, columns), caption, reach=reach)
    for part, words in _BY_RANK.items():
        title = title_of(name, words, named)
        yield lines(title, "s", _of_ranks(run, part), reach=_reach(named, part))


def _times(each: RankTotals) -> dict[str, float]:
    """Returns the seconds of a rank by part, in the order of a step."""
    forward, backward = each.forward or 0.0, each.backward or 0.0
    compute = _OTHER_COMPUTE if forward + backward else schema.COMPUTE
    return {
        schema.INPUT: each.input,
        schema.FORWARD: forward,
        schema.BACKWARD: backward,
        compute: max(0.0, each.compute - forward - backward),
        schema.COMMUNICATION: each.communication,
        schema.WAITING: each.waiting,
    }


def _few_ranks(run: Report) -> list[RankTotals]:
    """Returns all ranks, or if they are many the slowest ones and the fastest one."""
    if len(run.ranks) <= _BARS:
        return list(run.ranks)
    ordered = sorted(run.ranks, key=lambda each: -each.compute)
    return [*ordered[: _BARS - 1], ordered[-1]]


def memory_parts(name: str, run: Report, named: list[Named]) -> Iterator[Figure | Table | None]:
    """Yields the peak memory of ranks by purpose, beside the limit unless that is far away, and over the steps."""
    ordered = sorted(run.memory, key=lambda each: -each.peak)
    shown = sorted(ordered[:_BARS], key=lambda each: each.rank)
    far = 3 * ordered[0].peak if ordered else 0
    rows = [
        Bar(
            f"rank {each.rank}",
            _stacked(_purposes(each)),
            each.limit if (each.limit or 0) <= far else None,
        )
        for each in shown
    ]
    few = len(shown) < len(ordered)
    caption = f"The {len(shown)} largest of {len(ordered):,} ranks. " if few else ""
    caption += "The red line is the limit of the rank." if any(row.limit for row in rows) else ""
    title = title_of(name, "Peak memory by purpose", named)
    columns: list[Column] = [
        ("rank", WHOLE, lambda each: each.rank),
        ("peak", "B", lambda each: each.peak),
        ("limit", "B", lambda each: each.limit),
        ("of the limit", "1", lambda each: each.peak / each.limit if each.limit else None),
        ("growth a step", "B", lambda each: each.growth),
        *((part, "B", lambda each, part=part: each.parts.get(part)) for part in _PURPOSES),
    ]
    yield bars(title, "B", rows, tabulated(title, ordered if few else run.memory, columns), caption)
    title = title_of(name, "Peak memory of a step", named)
    yield lines(title, "B", _of_ranks(run, schema.MEMORY), reach=_reach(named, schema.MEMORY))


def _purposes(each: MemoryOfRank) -> dict[str, float]:
    """Returns the bytes of a rank's peak by purpose. What no purpose is known of is ``other``."""
    parts: dict[str, float] = dict.fromkeys(_PURPOSES, 0.0)
    for name, nbytes in each.parts.items():
        parts[name if name in parts else "other"] += nbytes
    parts["other"] += max(0.0, each.peak - sum(parts.values()))
    return parts


def collective_parts(name: str, run: Report, named: list[Named]) -> Iterator[Figure | Table | None]:
    """Yields the collectives of a step by algorithm and size."""
    found = sorted(run.collectives, key=lambda each: -(each.seconds_per_step or 0.0))
    title = title_of(name, "Collectives of a step", named)
    columns: list[Column] = [
        ("collective", TEXT, lambda each: each.name),
        ("algorithm", TEXT, lambda each: each.algorithm),
        ("size", "B", lambda each: each.nbytes),
        ("calls a step", "", lambda each: each.calls_per_step),
        ("time a step", "s", lambda each: each.seconds_per_step),
        ("shortest call", "s", lambda each: each.least_seconds),
        ("bytes a step", "B", lambda each: each.nbytes * each.calls_per_step),
    ]
    rows = [
        Bar(
            " ".join(filter(None, (each.name, each.algorithm, value_text(each.nbytes, "B")))),
            _stacked({schema.COMMUNICATION: each.seconds_per_step or 0.0}),
        )
        for each in found[:_BARS]
    ]
    table = tabulated(title, found, columns)
    caption = f"The {len(rows)} longest of {len(found):,}. " if len(rows) < len(found) else ""
    yield bars(title, "s", rows, table, caption + _WITH_WAITING) or (table if found else None)


def timeline_parts(name: str, run: Report, named: list[Named]) -> Iterator[Figure | Table | None]:
    """Yields single steps: what each rank did when."""
    for step in run.timeline[:_STEPS]:
        of_rank: dict[int, list[Span]] = defaultdict(list)
        for span in step.spans:
            of_rank[span.rank].append(span)
        known = [each.rank for each in _few_ranks(run) if each.rank in of_rank]
        rows = [
            Bar(f"rank {rank}", tuple(map(_segment, spans)))
            for rank, spans in sorted(of_rank.items())
            if rank in (known or list(of_rank)[:_BARS])
        ]
        title = title_of(name, f"Step {step.step:,}, {step.why}", named)
        columns: list[Column] = [
            ("rank", WHOLE, lambda each: each.rank),
            ("part", TEXT, lambda each: each.name),
            ("begin", "s", lambda each: each.begin),
            ("duration", "s", lambda each: each.seconds),
        ]
        few = f" {len(rows)} of {len(of_rank):,} ranks are drawn." if len(rows) < len(of_rank) else ""
        caption = (
            f"{value_text(step.seconds, 's')}. The parts of a step follow each other in their order.{few}"
        )
        yield bars(title, "s", rows, tabulated(title, step.spans, columns), caption)


def _segment(span: Span) -> BarPart:
    """Returns a part of a step as a part of a bar. Its name may come from a stranger's file, and its class may not."""
    return BarPart(span.name, span.name if span.name in _BY_RANK else "other", span.begin, span.seconds)


def _stacked(parts: Mapping[str, float]) -> tuple[BarPart, ...]:
    begin, found = 0.0, []
    for name, length in parts.items():
        found.append(BarPart(name, "other" if name == _OTHER_COMPUTE else name, begin, length))
        begin += length
    return tuple(found)


def _of_ranks(run: Report, name: str) -> list[Trace]:
    """Returns the lines of the ranks; if they are many, a band of all ranks and the lines of the slowest few."""
    own = {each.rank: each for each in run.series if each.name == name and each.rank is not None}
    overall = next((each for each in run.series if each.name == name and each.rank is None), None)
    if overall is None or (own and run.identity.world_size <= _LINES):
        few = list(own.items())[:_LINES]
        return [Trace(f"rank {rank}", f"k{rank % 8}", spots_of(run, each)) for rank, each in few]
    ordered = [each.rank for each in sorted(run.ranks, key=lambda each: -each.compute) if each.rank in own]
    slowest = [
        Trace(f"rank {rank}", f"k{place}", spots_of(run, own[rank]))
        for place, rank in enumerate(ordered[:_SLOWEST])
    ]
    return [Trace("all ranks", "all", spots_of(run, overall)), *slowest]


def _reach(named: list[Named], name: str) -> float:
    """Returns the greatest number of a quantity in all runs, so that charts side by side have the same axis."""
    values = (value for _, run in named for each in run.series if each.name == name for value in each.maximum)
    return max((value for value in values if value is not None and abs(value) < GREATEST), default=0.0)


def spots_of(run: Report, series: Series) -> tuple[Spot | None, ...]:
    """Returns the columns of a series as points of a line."""
    columns = zip(
        run.columns.first, run.columns.last, series.minimum, series.mean, series.maximum, strict=False
    )
    return tuple(spot_of(*column) for column in columns)


def spot_of(first: int, last: int, low: float | None, mean: float | None, high: float | None) -> Spot | None:
    """Returns the point of a column, or None if its numbers are not known or no measurements."""
    if low is None or mean is None or high is None:
        return None
    if not all(abs(value) < GREATEST for value in (low, mean, high)):
        return None
    return Spot((first + last) / 2, low, mean, high, max(1, last - first + 1))
