"""Where made-up runs of a script part, what they print, and the directory in which they may write."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evener.tools.verify_script.causes import cause, difference, line_of
from evener.tools.verify_script.comparison import Parting, ScriptRuns, before_failure, compare
from evener.tools.verify_script.events import Event, Printed, Record, ScriptLine, What
from evener.tools.verify_script.printed_output import Listening, OutputComparison
from evener.tools.verify_script.workplace import workplace

EPS = 2.0**-52
FILE = "/home/loop.py"


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(shift: float = 0.0) -> Record:
    """Two steps, all of whose numbers are off by a relative ``shift``."""
    by = 1 + shift
    events = []
    for step in range(2):
        events += [
            Event(What.BATCH, ScriptLine(FILE, 10), 7.0 + step),
            Event(What.LOSS, ScriptLine(FILE, 11), (1.0 - 0.1 * step) * by),
            Event(What.BACKWARD, ScriptLine(FILE, 12), (1.1 - 0.1 * step) * by),
            Event(
                What.STEP,
                ScriptLine(FILE, 13),
                gradients={"fc": vector(1.0, 2.0) * by},
                weights={"fc": vector(3.0, 4.0) * by},
            ),
        ]
    return Record(
        events,
        [Printed(f"loss {0.9 * by:.3f} after 1.{abs(round(shift / EPS))} s", ScriptLine(FILE, 14), 8)],
        {"fc": (2,)},
        {"fc": vector(1.0, 1.0)},
        {"fc": vector(3.0, 4.0) * by, "mean": vector(0.5) * by},
        "digest",
        EPS,
        prepared=True,
    )


def runs(*changes: Callable[[Record], object]) -> ScriptRuns:
    """Runs of which rank n has the n-th change; other ranks have none."""
    ranks = [run(2 * EPS), run(2 * EPS)]
    for rank, change in zip(ranks, changes, strict=False):
        change(rank)
    return ScriptRuns(run(), [run(EPS), run(-EPS), run(3 * EPS)], ranks)


def first(found: ScriptRuns) -> Parting:
    return compare(found).partings[0]


def test_runs_that_differ_by_rounding_do_not_part() -> None:
    found = compare(runs())
    assert found.partings == []
    assert 0 < found.times_floor < 3


def set_value(number: int, value: float) -> Callable[[Record], object]:
    return lambda record: setattr(record.events[number], "value", value)


def scaled(number: int, factor: float) -> Callable[[Record], object]:
    return lambda record: record.events[number].gradients["fc"].mul_(factor)


def both(change: Callable[[Record], object]) -> ScriptRuns:
    return runs(change, change)


def cut(record: Record) -> None:
    del record.events[4:]


def elsewhere(record: Record) -> None:
    record.events[5] = Event(What.LOSS, ScriptLine(FILE, 21), 1.0)


def dimensions(record: Record) -> None:
    record.events[1].dims = 1


@pytest.mark.parametrize(
    ("found", "kind", "event", "line", "rank", "sentence", "hint"),
    [
        (runs(set_value(5, 0.8)), "loss", 5, 11, 0, "the loss is 0.9 on one device, and 0.8 on rank 0", "padding"),
        (both(set_value(1, 0.8)), "loss", 1, 11, 0, "0.8 on all ranks", "a mean over all its terms"),
        (runs(lambda _: None, set_value(2, 1.2)), "backward", 2, 12, 1, "1.2 on rank 1", "global_mean(term)"),
        (both(set_value(2, math.nan)), "backward", 2, 12, 0, "nan", "prepared losses before it agree"),
        (runs(lambda _: None, scaled(3, 2)), "gradient", 3, 13, 1, "ranks have different ones", "not summed"),
        (both(scaled(7, 3.0)), "gradient", 7, 13, 0, "ranks agree", "they are 3 times those of one device"),
        (both(lambda r: r.events[3].weights["fc"].add_(1)), "weight", 3, 13, 0, "after the update", "learning rates"),
        (both(lambda r: r.end["mean"].add_(1)), "buffer", 8, 13, 0, "mean differs at the end", "what writes"),
        (both(set_value(4, 5.0)), "samples", 4, 10, 0, "batch 1 has other samples", "torch.manual_seed"),
        (both(dimensions), "shape", 1, 11, 0, "1 dimensions on ranks, and 0", "reduction='none'"),
        (runs(cut), "course", 4, 10, 0, "rank 0 comes to the end of the script", "a rank's own number"),
        (runs(lambda _: None, elsewhere), "course", 5, 21, 1, "loop.py:21", "a rank's own number"),
        (runs(lambda r: setattr(r, "digest", "other")), "replicas", 8, 13, 1, "bits of", "different weights"),
        (both(lambda r: setattr(r.printed[0], "text", "loss 0.800 after 1.9 s")), "printed", 8, 14, 0, "0.9", "own"),
        (both(lambda r: r.printed.clear()), "printed", 8, 14, 0, "rank 0 'nothing'", "own"),
    ],
)  # fmt: skip
def test_the_first_parting_is_named_with_its_cause(
    found: ScriptRuns, kind: str, event: int, line: int, rank: int, sentence: str, hint: str
) -> None:
    parting = first(found)
    assert (parting.kind, parting.event, line_of(found, parting).number) == (kind, event, line)
    assert parting.rank == rank
    assert sentence in difference(found, parting)
    assert hint in cause(found, parting)


def test_random_numbers_and_dropout_are_named() -> None:
    drawn = both(set_value(1, 0.8))
    drawn.reference.events[1].drew = True
    assert "evener.draw" in cause(drawn, first(drawn))
    dropping = both(set_value(1, 0.8))
    dropping.divided[0].dropouts = 2
    assert "the model has 2 modules with dropout" in cause(dropping, first(dropping))


@pytest.mark.parametrize("change", [set_value(2, 1.1003), scaled(3, 1.0003)])
def test_ranks_that_differ_from_each_other_part_in_half_precision(change: Callable[[Record], object]) -> None:
    found = runs(lambda _: None, change)
    for each in (found.reference, *found.disturbed, *found.divided):
        each.eps = 2.0**-8
    parting = first(found)
    assert (parting.rank, parting.between) == (1, True)
    assert "each rank's own samples" in cause(found, parting)


def test_gradients_of_no_backward_pass_are_those_of_grad() -> None:
    found = runs(lambda _: None, scaled(3, 2))
    for each in (found.reference, *found.disturbed, *found.divided):
        each.events[2] = Event(What.GRAD, ScriptLine(FILE, 12))
    parting = first(found)
    assert line_of(found, parting) == ScriptLine(FILE, 12)
    assert "torch.autograd.grad gives a gradient of this rank's samples" in cause(found, parting)


def test_what_came_before_a_failure_is_compared() -> None:
    def failed(record: Record) -> None:
        del record.events[6:]
        record.end, record.printed, record.digest = {}, [], ""

    assert before_failure(runs(failed, failed)) is None

    def failed_in_a_step(record: Record) -> None:
        failed(record)
        record.events[3].rates = (0.5,)
        record.events[3].weights["fc"].mul_(1 + 8 * EPS)
        record.events.append(Event(What.STEP, ScriptLine(FILE, 13)))

    found = runs(failed, failed_in_a_step)
    parting = before_failure(found)
    assert parting is not None
    assert (parting.kind, parting.event, parting.rank) == ("replicas", 3, 1)
    assert "the learning rate is" in cause(found, parting)


def test_a_model_that_was_not_prepared_is_named() -> None:
    found = both(set_value(1, 0.8))
    found.divided[0].norms = 3
    assert "3 BatchNorm layers of models that were not prepared" in cause(found, first(found))


def test_a_gradient_that_is_rounding_alone_is_judged_absolutely() -> None:
    def with_key(size: float) -> Callable[[Record], Record]:
        def changed(record: Record) -> Record:
            for event in record.events:
                if event.what is What.STEP:
                    event.gradients["key"] = vector(size)
                    event.weights["key"] = vector(math.copysign(0.1, size))
            record.shapes["key"] = (1,)
            record.start["key"], record.end["key"] = vector(0.0), vector(math.copysign(0.1, size))
            return record

        return changed

    found = ScriptRuns(
        with_key(1e-17)(run()),
        [with_key(size)(run(EPS)) for size in (-1e-17, 2e-17, -3e-17)],
        [with_key(-4e-17)(run(2 * EPS)) for _ in range(2)],
    )
    assert compare(found).noise == ["key"]
    assert compare(found).partings == []
    wrong = copy.deepcopy(found)
    for rank in wrong.divided:
        rank.events[3].gradients["key"] = vector(1e-3)
    assert first(wrong).names == ("key",)


@pytest.mark.parametrize(
    ("reference", "others", "text", "differs"),
    [
        ("loss 0.5000", ["loss 0.5000"], "loss 0.5001", False),
        ("loss 0.5000", ["loss 0.5000"], "loss 0.5012", True),
        ("right 17", ["right 17"], "right 18", True),
        ("took 1.2 s", ["took 1800.2 s"], "took 7.9 s", False),
        ("took 1.2 s", ["took 1.2 s"], "took 7.9 s", True),
        ("on 1 ranks", ["on 1 ranks"], "on 2 ranks", False),
        ("on 1 ranks", ["on 1 ranks"], "on 3 ranks", True),
        ("best", ["best"], "worse", True),
        ("in /tmp/a", ["in /tmp/b"], "in /tmp/c", False),
        ("1e-05 nan", ["1e-05 nan"], "1e-05 nan", False),
        ("x1 -0.25", ["x1 -0.25"], "x2 -0.25", True),
        ("[23:59:58] loss 0.5", ["[23:59:58] loss 0.5"], "[00:00:07] loss 0.5", False),
        ("2026-11-27 09:59:58,431 1.5", ["2026-11-27 09:59:58,432 1.5"], "2026-11-28 10:00:07,220 2.5", True),
        ("in runs/20261127_235958", ["in runs/20261127_235958"], "in runs/20261128_000007", False),
        ("step 3:12.5", ["step 3:12.5"], "step 3:17.5", True),
        (f"mean {1 + 2 * EPS}", [f"mean {1 + 2 * EPS}"], f"mean {1 + 8 * EPS}", False),
        (
            "(0.5, grad_fn=<AddBackward0>)",
            ["(0.5, grad_fn=<AddBackward0>)"],
            "(0.5, grad_fn=<Joined>)",
            False,
        ),
        ("right 1000000", ["right 1000000"], "right 1000001", True),
        ("tensor([ 0.5000, -0.0000])", ["tensor([ 0.5000, -0.0000])"], "tensor([0.5000, 0.0000])", False),
    ],
)
def test_numbers_that_are_printed(reference: str, others: list[str], text: str, differs: bool) -> None:
    assert OutputComparison(reference, others, EPS, ranks=2)(text) == differs


def test_lines_are_remembered_with_their_place() -> None:
    lines = iter([ScriptLine(FILE, 1), ScriptLine(FILE, 2), ScriptLine(FILE, 3), ScriptLine(FILE, 4)])
    output = Listening(lambda: next(lines), lambda: 5)
    print("one", 2, file=output)
    print("three", end="", file=output)
    print("\n\n", end="", file=output)
    output.reconfigure(line_buffering=True, encoding="utf-8")
    output.write("half")
    output.finish()
    assert [(each.text, each.line.number, each.event) for each in output.printed] == [
        ("one 2", 1, 5),
        ("three", 2, 5),
        ("half", 4, 5),
    ]


def test_what_the_script_logs_is_remembered() -> None:
    output = Listening(lambda: ScriptLine(FILE, 1), lambda: 5)
    logger = logging.Logger("of the script")
    with output.logged(lambda file: file == __file__):
        logger.info("right %d of %d", 17, 20)
        logger.info("right %d", "of no number")
    with output.logged(lambda file: file != __file__):
        logger.info("of a library")
    logger.info("afterwards")
    assert [(each.text, each.line.source[:12], each.event) for each in output.printed] == [
        ("right 17 of 20", "logger.info(", 5),
        ("right %d", "logger.info(", 5),
    ]


def test_a_run_writes_where_nobody_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "project" / "experiment"
    (here / "saved").mkdir(parents=True)
    (here / "saved" / "model.pt").write_text("mine")
    (here / "many").mkdir()
    for number in range(501):
        (here / "many" / str(number)).touch()
    (tmp_path / "project" / "data").mkdir()
    (tmp_path / "project" / "data" / "rows").write_text("1 2 3")
    monkeypatch.chdir(here)
    with workplace() as place:
        monkeypatch.chdir(place)
        assert Path("saved/model.pt").read_text() == "mine"
        Path("saved/model.pt").write_text("other")
        Path("new").write_text("new")
        assert Path("../data/rows").read_text() == "1 2 3"
        assert len(list(Path("many").iterdir())) == 501
        monkeypatch.chdir(here)
    assert (here / "saved" / "model.pt").read_text() == "mine"
    assert sorted(path.name for path in here.iterdir()) == ["many", "saved"]
    assert not place.exists()
