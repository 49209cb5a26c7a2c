"""Which mesh stands for which strategies, what is refused, and that two strategies make one step together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from evener.core.config.run_config import RunConfig
from evener.distributed.environment import Environment
from evener.errors import ConfigurationError
from evener.strategies import Ddp, Strategy, StrategySettings
from evener.strategies.after_backward import PostBackwardSum, summing_afterwards
from evener.strategies.composed import Composed, degrees_of, laid
from evener.strategies.features import FeatureParallel
from evener.strategies.registry import strategies_called
from evener.strategies.single import Single
from evener.testing import check_strategy
from evener.tools.verify import record
from evener.training.engine import Engine
from evener.training.fit import check_plan, fit
from tests.comparing import worst
from tests.strategies.seven import normalised, plain  # noqa: F401 (tasks of this module, by name)
from tests.tiers import NIGHTLY


@dataclass(frozen=True)
class Late(Ddp):
    """Sums when backward is over."""

    sums_in_backward: ClassVar[bool] = False
    bits: int = 32
    words: str | None = None
    share: float = 0.5
    quick: bool = False

    def synchronizer(self, learner: Any) -> Any:
        return summing_afterwards(learner)


LATE = f"{__name__}:Late"


def lay(names: str, mesh: str | None, world_size: int) -> Strategy:
    return laid(strategies_called(names), mesh, world_size)


@pytest.mark.parametrize(
    ("names", "mesh", "world_size", "label"),
    [
        ("auto", None, 1, "single"),
        ("auto", None, 4, "ddp"),
        ("auto", "data=4", 4, "ddp"),
        ("dimension", None, 2, "dimension"),
        ("dimension", "tensor=2", 2, "dimension"),
        ("dimension", "data=2", 4, "ddp 2 x dimension 2"),
        ("dimension", "tensor=2", 6, "ddp 3 x dimension 2"),
        ("dimension,ddp", "tensor=2,data=3", 6, "ddp 3 x dimension 2"),
        ("dimension", "data=1,tensor=2", 2, "dimension"),
        ("auto", "context=2,tensor=2", 4, "context 2 x tensor 2"),
        ("auto", "pipeline=2,context=2", 4, "pipeline 2 x context 2"),
        ("auto", "data=2,shard=2,context=2", 8, "ddp 2 x sharded 2 x context 2"),
        ("auto", "data=1", 1, "single"),
    ],
)
def test_a_mesh_stands_for_strategies(names: str, mesh: str | None, world_size: int, label: str) -> None:
    found = lay(names, mesh, world_size)
    assert found.label == str(found) == label
    layout = found.layout(world_size, StrategySettings())
    assert layout.world_size == world_size
    assert {axis: layout.degree(axis) for axis in degrees_of(mesh)} == degrees_of(mesh)


@pytest.mark.parametrize(
    ("names", "mesh", "world_size", "words"),
    [
        ("auto", "data=2,rows=2", 4, "no axis 'rows'; there are pipeline, data, shard, context, tensor"),
        ("auto", "data", 2, "'data' is not of the form AXIS=N"),
        ("auto", "data=2,data=2", 4, "each axis once"),
        ("auto", "data=0", 2, "degree 0; it must be at least 1"),
        ("auto", "data=-2", 2, "'data=-2' is not of the form"),
        ("auto", "data=3", 4, "a mesh of data 3 has 3 places, and there are 4 ranks"),
        ("dimension", "tensor=3", 4, "a mesh of tensor 3 has 3 places, and there are 4 ranks"),
        ("auto", "data=2", 1, "a mesh of data 2 has 2 places, and there are 1 ranks"),
        ("dimension", "data=4,tensor=1", 4, "'dimension' divides over the axis 'tensor', of which the mesh"),
        ("ddp,experts", "data=4", 4, "ddp and experts both want the axis 'data'"),
        ("dimension,ddp", None, 4, "dimension and ddp together need a mesh .* along tensor and data"),
        (
            "experts,dimension",
            "data=2,tensor=2",
            4,
            "'experts' cannot be laid .* 'tensor' too: an expert's gradient .* leave 'experts' out, .* no other$",
        ),
        (
            "dimension",
            "tensor=2,context=2",
            4,
            "'dimension' cannot be laid .* 'context' too\\. .* 'data', 'shard'$",
        ),
        (
            "sharded",
            "pipeline=2,shard=2",
            4,
            "all ranks gather a unit together, .* say zero=2, .* with 'data', 'context', 'tensor'",
        ),
        ("auto", "pipeline=2,data=2,shard=2", 8, "'sharded' cannot be laid .* 'pipeline' too: .* say zero=2"),
        ("single", "data=2", 2, "runs on one rank, not on 2"),
    ],
)
def test_what_makes_no_sense_is_refused(names: str, mesh: str | None, world_size: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        lay(names, mesh, world_size).layout(world_size, StrategySettings())


def test_options_reach_the_strategy_that_has_them() -> None:
    options = ["bits=8", "share=1", "quick=yes", "words=none"]
    (found,) = strategies_called(LATE, options)
    assert found == Late(bits=8, words=None, share=1.0, quick=True)
    assert str(found) == "late(bits=8, share=1.0, quick=True)"
    both = strategies_called(f"dimension,{LATE}", [f"{LATE}.words=a=b"])
    assert both[1] == Late(words="a=b")
    assert both[0].label == "dimension"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("bits", "'bits' is not of the form KEY=VALUE"),
        ("bits=few", "strategy option bits is 'few'; it must be int"),
        ("quick=2", "quick is '2'; it must be bool"),
        ("bytes=3", f"no strategy option 'bytes'; {re.escape(LATE)} has bits, words, share, quick"),
    ],
)
def test_options_that_are_none_are_refused(option: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        strategies_called(LATE, [option])


def test_options_without_a_strategy_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'auto' has none: name the strategy"):
        strategies_called("auto", ["bits=3"])
    with pytest.raises(ConfigurationError, match=r"strategy_option bits=8 goes with a strategy's name; late"):
        check_plan(RunConfig(strategy=Late(), strategy_option=("bits=8",), processes=2))


def test_strategies_are_objects_in_python() -> None:
    assert check_plan(RunConfig(strategy=Late(bits=8), processes=3)) == 3
    assert check_plan(RunConfig(strategy=(FeatureParallel(), Late()), mesh="data=2,tensor=2")) == 4
    assert RunConfig(strategy=Late(bits=8)).as_dict()["strategy"] == "late(bits=8)"
    for strange in (Late, 3, (), ("ddp",)):
        with pytest.raises(ConfigurationError, match="must be a name, a Strategy, or a tuple of them"):
            check_plan(RunConfig(strategy=strange, processes=2))  # type: ignore[arg-type]


def test_devices_are_those_of_one_process() -> None:
    with pytest.raises(ConfigurationError, match="'cpu:0,cpu:1' are those of one process"):
        check_plan(RunConfig(strategy="ddp", devices="cpu:0,cpu:1", processes=2))


def test_shares_of_devices_are_an_option_of_the_strategy() -> None:
    config = RunConfig(strategy="data_parallel", devices="cpu:0,cpu:1", balance="3,1")
    with pytest.raises(ConfigurationError, match="divides by its own option, strategy_option balance=3,1"):
        check_plan(config)
    assert check_plan(config.replace(balance="equal", strategy_option=("balance=3,1",))) == 1


def test_the_mesh_says_how_many_ranks_there_are() -> None:
    assert check_plan(RunConfig(mesh="data=3")) == 3
    with pytest.raises(ConfigurationError, match="data 3 has 3 places, and there are 2 ranks"):
        check_plan(RunConfig(mesh="data=3", processes=2))


def trajectory(name: str, environment: Environment | None = None, **settings: Any) -> Any:
    usual = {
        "dtype": "float64",
        "device": "cpu",
        "steps": 5,
        "strategy": "dimension",
        "mesh": "data=2,tensor=2",
    }
    return record(f"{__name__}:{name}", None, RunConfig(**(usual | settings)), environment)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plain", {"balance": "3,1", "clip_norm": 0.05}),
        pytest.param("normalised", {"balance": "3,1", "micro_batch": 5}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_two_strategies_make_one_step(ranks: Any, name: str, settings: dict[str, Any]) -> None:
    alike = settings | {"balance": "equal", "strategy": "single", "mesh": None}
    reference = trajectory(name, Environment(), **alike)
    divided = ranks(4).run(trajectory, name, **settings)
    assert worst(reference.weights, divided[0].weights) <= 1e-11
    assert len({one.digest for one in divided}) == 1
    late = ranks(4).run(trajectory, name, **(settings | {"strategy": (FeatureParallel(), Late())}))
    assert worst(reference.weights, late[0].weights) <= 1e-11
    assert len({one.digest for one in late}) == 1


def summed_by(strategy: Any, mesh: str | None) -> tuple[str, str]:
    with Engine(plain(), RunConfig(strategy=strategy, mesh=mesh, device="cpu", steps=1)) as engine:
        inner = getattr(engine.learner.synchronizer, "_inner", engine.learner.synchronizer)
        return type(inner).__name__, engine.learner.name


def test_gradients_are_summed_afterwards_where_a_strategy_says_so(ranks: Any) -> None:
    late, name = ranks(4).run(summed_by, (FeatureParallel(), Late()), "data=2,tensor=2")[0]
    assert (late, name) == (PostBackwardSum.__name__, "late 2 x dimension 2")
    usual, name = ranks(4).run(summed_by, "dimension", "data=2,tensor=2")[0]
    assert (usual, name) == ("DdpSum", "ddp 2 x dimension 2")


@pytest.mark.slow
def test_sums_afterwards_keep_the_promises(ranks: Any) -> None:
    ranks(3).run(check_strategy, LATE)


def summary_of(directory: Path) -> Any:
    return fit(
        plain(),
        mesh="data=1,tensor=2",
        strategy="dimension",
        device="cpu",
        steps=2,
        run_home=directory,
        show=False,
    ).summary


def test_records_name_strategy_and_mesh(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(summary_of, tmp_path)[0].strategy == "dimension"
    found = next(tmp_path.glob("*/config.json")).read_text()
    assert '"mesh": "data=1,tensor=2"' in found


def test_one_rank_needs_no_division() -> None:
    assert isinstance(laid((FeatureParallel(),), None, 1), Single)
    assert isinstance(laid((FeatureParallel(), Ddp()), "data=2,tensor=2", 4), Composed)
