"""The battery passes Evener's own strategies, and finds the promises that some wrong ones break, each in its run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.core.config.strategy_names import STRATEGIES
from evener.errors import ConfigurationError
from evener.strategies.registry import strategy_called
from evener.testing import ConformanceError, check_strategy
from evener.tools.conformance.strategies import TOLERANCE, difference
from evener.tools.conformance.trials import NAMES
from tests.distributed.processes import call
from tests.tiers import NIGHTLY, SLOW, spread

NOT_BY_FEATURES = ("idle", "tokens", "sparse")
"""A rank without features has nothing to compute; words are no features."""
NOT_IN_STAGES = ("unused", "by_hand", "error")
"""Models whose outermost code asks for numbers or counts its calls, and loops of the user's own."""
TWO_LAYERS = ("several", "buffers")
"""Tasks whose models cannot be cut into three stages."""


@pytest.mark.parametrize(
    ("strategy", "processes", "without"),
    spread(
        [
            ("ddp", 3, ()),
            ("ddp", 2, ()),
            ("dimension", 2, NOT_BY_FEATURES),
            ("dimension", 3, NOT_BY_FEATURES),
            ("pipeline", 2, NOT_IN_STAGES),
            ("pipeline", 3, (*NOT_IN_STAGES, *TWO_LAYERS)),
        ],
        SLOW,
        NIGHTLY,
    ),
)
def test_evener_keeps_its_own_promises(
    ranks: Any, strategy: str, processes: int, without: tuple[str, ...]
) -> None:
    ranks(processes).run(check_strategy, strategy, without=without)


def test_every_strategy_for_several_ranks_is_tried() -> None:
    """Others have tests of their own, with tasks that have what they divide."""
    on_one_rank = {name for name in STRATEGIES if strategy_called(name).one_process}
    elsewhere = {"single", "experts", "tensor", "context", "sharded", "local_sgd", "diloco", "asynchronous"}
    assert STRATEGIES.keys() - elsewhere - on_one_rank == {"ddp", "dimension", "pipeline"}


def found(name: str, tried: str) -> str:
    without = [other for other in NAMES if other != tried]
    with pytest.raises(ConformanceError) as raised:
        check_strategy(f"tests.tools.conformance.wrong_strategies:{name}", without=without)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "tried", "promise", "seen"),
    [
        pytest.param("Averages", "plain", "gradients are sums over all samples", "is off by", marks=NIGHTLY),
        ("CountsTwice", "plain", "gradients are sums over all samples", "task plain, balance uneven"),
        ("OwnBatchNorm", "batch_norm", "BatchNorm normalizes by the samples of all ranks. ", "is off by"),
        ("ClipsLocally", "clip", "clipped by the norm of the sum over all ranks", "clip_norm 0.05"),
        ("PenaltyPerRank", "penalty", "a penalty counts once, and not once for each rank", "is off by"),
        ("KeepsBuffers", "buffers", "buffers that a forward pass writes are the same", "The digests"),
        ("DropsTheNone", "several", "inputs and outputs may be several, and None", "came as tensor([])"),
        ("Flips", "prediction", "predictions come in the order of the samples", "the predictions is off"),
        ("ForgetsTheOptimizer", "checkpoint", "one device goes on from a checkpoint", "is off by"),
        ("NamesNobody", "error", "names the rank whose gradient is not a number", "On rank 0: "),
        ("KeepsTheModel", "close", "close() gives everything back", "there are still the model"),
    ],
)
def test_a_broken_promise_is_named_on_all_ranks(
    ranks: Any, name: str, tried: str, promise: str, seen: str
) -> None:
    for message in ranks(2).run(found, name, tried):
        assert message.startswith(
            f"strategy 'tests.tools.conformance.wrong_strategies:{name}' breaks its promise: "
        )
        assert promise in message
        assert seen in message
        assert f"in {tried!r} on 2 ranks" in message


def test_what_is_right_but_for_the_clipping_is_right_without(ranks: Any) -> None:
    """So it is the clipping that was found, and not something that every such strategy has."""
    tried = ("plain", "batch_norm", "penalty", "buffers", "prediction", "error")
    without = [name for name in NAMES if name not in tried]
    ranks(2).run(check_strategy, "tests.tools.conformance.wrong_strategies:WithDdp", without=without)


def test_a_refused_task_is_named_with_the_way_out(ranks: Any) -> None:
    def refused() -> str:
        with pytest.raises(ConformanceError) as raised:
            check_strategy("dimension", without=[name for name in NAMES if name != "idle"])
        return str(raised.value)

    for message in ranks(2).run(refused):
        assert "it raised ConfigurationError: 6 features in the parts" in message
        assert "left out by `without`; in 'idle' on 2 ranks" in message


def test_one_rank_of_a_group_is_too_few(ranks: Any) -> None:
    def refused() -> str:
        with pytest.raises(ConfigurationError) as raised:
            check_strategy("ddp")
        return str(raised.value)

    assert ranks(1).run(refused) == ["a strategy is tried on at least two ranks, not [1]"]


def test_what_cannot_be_tried() -> None:
    with pytest.raises(ConfigurationError, match=r"nothing that is tried is called 'speed'; there are plain"):
        check_strategy("ddp", without=("speed",))
    with pytest.raises(ConfigurationError, match=r"at least two ranks, not \[1\]"):
        check_strategy("ddp", processes=(1,))
    with pytest.raises(ConfigurationError, match=r"at least two ranks, not \[\]"):
        check_strategy("ddp", processes=())
    with pytest.raises(ConfigurationError, match="no strategy is called 'dpp'"):
        check_strategy("dpp")


@pytest.mark.slow
def test_ranks_are_started_where_there_are_none() -> None:
    without = [name for name in NAMES if name != "plain"]
    with pytest.raises(ConformanceError, match="gradients are sums over all samples"):
        call(
            check_strategy,
            "tests.tools.conformance.wrong_strategies:Averages",
            processes=(2,),
            without=without,
        )


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "without"), [("ddp", ()), ("dimension", NOT_BY_FEATURES)])
def test_evener_keeps_its_own_promises_on_ranks_of_its_own(strategy: str, without: tuple[str, ...]) -> None:
    check_strategy(strategy, without=without)


def test_the_page_names_every_strategy_and_everything_that_is_tried() -> None:
    page = (Path(__file__).parents[3] / "docs/strategies.md").read_text()
    first_cells = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", first_cells)) == {*NAMES, *STRATEGIES}


def test_differences_in_words() -> None:
    a = {"weight w": torch.tensor([1.0, -4.0], dtype=torch.float64)}
    assert difference(a, {"weight w": a["weight w"] * (1 + TOLERANCE / 2)}) is None
    assert difference(a, {"weight w": torch.tensor([1.0, -4.4])}) == (
        "the weight w is off by 1.0e-01 of its largest number, where 1e-10 is rounding; "
        "element 1 is -4.4000000953674316 in place of -4"
    )
    assert "element 0 is nan in place of 1" in str(
        difference(a, {"weight w": torch.tensor([torch.nan, -4.0])})
    )
    assert "of shape (1,) in place of (2,)" in str(difference(a, {"weight w": torch.zeros(1)}))
    assert difference(a, {}) == "'weight w' is there only on one device"
    assert difference({}, a) == "'weight w' is there only here"
    masked = torch.tensor([-torch.inf, torch.nan, 1.0])
    assert "is off by inf" in str(difference(a, {"weight w": torch.tensor([1.0, torch.inf])}))
    masked = {"mask": torch.tensor([-torch.inf, torch.nan, 1.0])}
    assert "element 2 is 2 in place of 1" in str(
        difference(masked, {"mask": torch.tensor([-torch.inf, torch.nan, 2.0])})
    )
    same = {"mask": torch.tensor([-torch.inf, torch.nan]), "none": torch.zeros(0)}
    assert difference(same, same) is None
