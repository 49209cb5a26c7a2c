from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError, TaskError
from evener.strategies.interfaces import StrategySettings
from evener.strategies.single_process.model_parallel import Gathering, Layers, moves_of, placement_of
from evener.strategies.single_process.placement import parse_placement, said_places
from evener.tools.conformance.tasks import CLASSES, FEATURES
from tests.comparing import worst
from tests.strategies.logical import LogicalDevices, MixedDevicesError
from tests.strategies.one_process import engine_of, refused, task_of, trained, try_all
from tests.tiers import ALWAYS, NIGHTLY, crossed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + self.scale * block(x)
        scores: Tensor = self.last(x)
        return scores


@pytest.mark.slow
def test_all_trials_with_a_computed_placement() -> None:
    try_all(Layers("cpu:0,cpu:1"))


@pytest.mark.parametrize(
    ("placement", "settings"),
    crossed(
        ["blocks=cpu:1,last=cpu:2", "first=cpu:2,blocks.1=cpu:1", "blocks.*.1=cpu:1"],
        [{"clip_norm": 0.05}, {"micro_batch": 5}],
        lambda _: (ALWAYS, NIGHTLY),
    ),
)
def test_weights_are_those_of_one_device(placement: str, settings: dict[str, Any]) -> None:
    task = task_of(Net, penalty=lambda model: sum(p.norm() for p in model.parameters()))
    reference = trained(task, "single", **settings)
    assert worst(reference, trained(task, Layers("cpu:0,cpu:1,cpu:2", placement), **settings)) <= 1e-12


def test_a_forward_pass_never_mixes_devices() -> None:
    placement = "first=cpu:2,blocks.1=cpu:1,last=cpu:1"
    with engine_of(task_of(Net), Layers("cpu:0,cpu:1,cpu:2", placement)) as engine:
        x = torch.randn(3, FEATURES, dtype=torch.float64)
        places = said_places(engine.model, parse_placement(placement), torch.device("cpu:0"))
        with LogicalDevices(engine.model, places):
            engine.model(x)
    with pytest.raises(MixedDevicesError), LogicalDevices(plain := Net().double(), places):
        plain(x)


def test_where_everything_is_and_what_was_moved_is_told() -> None:
    with engine_of(task_of(Net), Layers("cpu:0,cpu:1", "blocks.1=cpu:1,last=cpu:1"), steps=1) as engine:
        placed = placement_of(engine.model)
        assert {name: str(part.device) for name, part in placed.items()} == {
            "": "cpu:0",
            "blocks.1": "cpu:1",
            "last": "cpu:1",
        }
        sizes = {
            name: sum(t.nbytes for t in engine.model.get_submodule(name).state_dict().values())
            for name in placed
        }
        assert placed["last"].nbytes == sizes["last"]
        assert sum(part.nbytes for part in placed.values()) == sizes[""]
        assert "blocks.1 on cpu:1" in engine.learner.synchronizer.words
        for batch in engine.batches():
            engine.step(batch)
        moves = moves_of(engine.model)
        assert moves.count == {("cpu:0", "cpu:1"): 2, ("cpu:1", "cpu:0"): 2}
        assert moves.nbytes["cpu:0", "cpu:1"] == 2 * 13 * 8 * 8
        moves.clear()
        assert not moves.count


@pytest.mark.slow
def test_a_computed_placement_heeds_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    def parts(memory: str) -> set[str]:
        with engine_of(task_of(Net), Layers("cpu:0,cpu:1", memory=memory)) as engine:
            return {name for name, part in placement_of(engine.model).items() if str(part.device) == "cpu:1"}

    assert parts("1GiB,5KiB") == {"last"}
    assert re.search(r"layers: the model on cpu:0 \(.* KiB\), last on cpu:1", capsys.readouterr().err)
    assert "first" not in parts("20KiB,1GiB")
    assert len(parts("20KiB,1GiB")) > 1
    refused(
        ConfigurationError, "have 2 KiB together", task_of(Net), Layers("cpu:0,cpu:1", memory="1KiB,1KiB")
    )


def test_a_model_need_not_fit_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.components.memory_limits.fits.memory_nbytes", lambda *_: 100)
    refused(ConfigurationError, "need .* GiB on every rank", task_of(Net), "single")
    trained(task_of(Net), Layers("cpu:0,cpu:1"), steps=1)


def test_the_first_pass_leaves_no_trace() -> None:
    reference = trained(task_of(Net), "single")
    assert worst(reference, trained(task_of(Net), Layers("cpu:0,cpu:1"))) <= 1e-12


def test_a_placed_model_is_copied_and_pickled() -> None:
    with engine_of(task_of(Net), Layers("cpu:0,cpu:1", "blocks=cpu:1")) as engine:
        x = torch.randn(3, FEATURES, dtype=torch.float64)
        for made in (copy.deepcopy(engine.model), pickle.loads(pickle.dumps(engine.model))):
            engine.model.eval(), made.eval()
            assert torch.equal(made(x), engine.model(x))


def test_modules_without_tensors_may_stand_anywhere() -> None:
    def model() -> nn.Module:
        shared = nn.Tanh()
        return nn.Sequential(
            nn.Linear(FEATURES, 8), shared, nn.Sequential(nn.Linear(8, 8), shared), nn.Linear(8, CLASSES)
        )

    task = task_of(model)
    assert worst(trained(task, "single"), trained(task, Layers("cpu:0,cpu:1", "2=cpu:1"))) <= 1e-12


def test_one_buffer_stays_one() -> None:
    def model() -> nn.Module:
        made = Net()
        made.blocks[1][1].running_mean = made.blocks[0][1].running_mean
        return made

    with engine_of(task_of(model), Layers("cpu:0,cpu:1", "blocks=cpu:1"), dtype=None) as engine:
        first, second, third = (block[1].running_mean for block in engine.model.blocks)
        assert first is second
        assert first is not third


def test_an_operation_of_several_devices_goes_to_the_first() -> None:
    there, here = torch.ones(2, device="meta"), torch.ones(2)
    with Gathering():
        assert torch.stack([there, here]).device == there.device
        total = torch.zeros((), device="meta")
        total += here.sum()
        assert total.device == there.device
    with pytest.raises(RuntimeError):
        torch.stack([there, here])


def tied() -> nn.Module:
    model = Net()
    model.blocks[2][0].weight = model.blocks[0][0].weight
    return model


@pytest.mark.parametrize(
    ("model", "strategy", "kind", "words"),
    [
        (
            tied,
            {"placement": "blocks.0=cpu:1"},
            TaskError,
            "0.0.weight on cpu:1 and blocks.2.0.weight on",
        ),
        (Net, {"placement": "block.1=cpu:1"}, ConfigurationError, "'block.1' is no module"),
        (Net, {"memory": "1GiB"}, ConfigurationError, "1 numbers of memory for 2 devices"),
        (Net, {"speeds": "1,2,3"}, ConfigurationError, "3 numbers of speeds for 2 devices"),
        (lambda: nn.Linear(FEATURES, CLASSES), {}, ConfigurationError, "has 0 parts .* fewer than 2 devices"),
    ],
)
def test_what_cannot_be_placed_is_refused(model: Any, strategy: Any, kind: Any, words: str) -> None:
    refused(kind, words, task_of(model), Layers("cpu:0,cpu:1", **strategy))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": "cpu:0,cpu:0"}, "cpu:0 stands there twice"),
        ({"devices": "cpu:0,tpu"}, "write them as cuda:0,cuda:1"),
        ({"devices": "cpu:0", "placement": "a=cpu:1"}, "'a=cpu:1' is on none of the devices cpu:0"),
        ({"placement": "a=cpu:1", "memory": "1GiB,1GiB"}, "memory would do nothing"),
        ({"speeds": "1,-2"}, "a number above 0 for each device"),
        ({"speeds": "1,x"}, "a number above 0 for each device"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Layers(**options)


def test_devices_are_those_of_the_settings_and_several_ranks_are_refused() -> None:
    with engine_of(task_of(Net), "layers", devices="cpu:0,cpu:1") as engine:
        assert {str(part.device) for part in placement_of(engine.model).values()} == {"cpu:0", "cpu:1"}
    refused(ConfigurationError, "have to be named", task_of(Net), Layers())
    refused(ConfigurationError, "leave out cpu", task_of(Net), Layers("cuda:0,cuda:1"))
    with pytest.raises(ConfigurationError, match="there are 2 ranks"):
        Layers().layout(2, StrategySettings())
    assert Layers().layout(1, StrategySettings()) == Layout({"data": 1})
