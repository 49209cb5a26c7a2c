from __future__ import annotations

import json
import os

import pytest
import torch

from evener.files import dumps
from evener.hardware.survey import reading
from evener.hardware.survey.build import cudnn_text, read_software, seen_cards
from evener.hardware.survey.facts import Card, Plan, Survey
from evener.hardware.survey.files import as_json, from_json
from evener.hardware.survey.host import read_host
from evener.hardware.survey.reading import glance, joined, read_survey, variables_of_interest
from tests.hardware.survey.fake_nvml import FakeCard, FakeNvml

PLAN = Plan(ranks=2, threads=1, device="cpu")


def there(uuid: str, kind: str = "nvidia") -> Card:
    return Card(f"card {uuid}", kind, uuid=uuid, pci=f"pci {uuid}")


def seen(number: int, uuid: str, kind: str = "nvidia") -> Card:
    return Card(
        f"Card {uuid}", kind, device=f"cuda:{number}", uuid=uuid, architecture="sm_86", memory_nbytes=1
    )


def written_and_read(survey: Survey) -> Survey:
    return from_json(json.loads(dumps(as_json(survey))))


def devices(cards: tuple[Card, ...]) -> list[tuple[str | None, str]]:
    return [(card.device, card.pci) for card in cards]


def test_a_card_is_known_by_its_uuid_whatever_its_number() -> None:
    found = joined([there("a"), there("b"), there("c")], [seen(0, "c"), seen(1, "a")])
    assert devices(found) == [("cuda:1", "pci a"), (None, "pci b"), ("cuda:0", "pci c")]
    assert found[0].architecture == "sm_86"


def test_cards_without_uuid_are_joined_where_all_are_visible() -> None:
    of_driver = [there(""), there("")]
    both = joined(of_driver, [seen(0, "x"), seen(1, "y")])
    assert devices(both) == [("cuda:0", "pci "), ("cuda:1", "pci ")]
    one = joined(of_driver, [seen(0, "x")])
    assert devices(one) == [(None, "pci "), (None, "pci "), ("cuda:0", "")], "nobody knows which it is"


def test_cards_that_only_torch_knows_are_kept() -> None:
    assert joined([], [seen(0, "a")]) == (seen(0, "a"),)
    amd = seen(0, "x", "amd")
    assert joined([there("a")], [amd]) == (there("a"), amd), "no card of NVIDIA's is one of AMD's"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, ""),
        (0, ""),
        (8902, "8.9.2"),
        (7605, "7.6.5"),
        (90100, "9.1.0"),
        (91002, "9.10.2"),
        (100201, "10.2.1"),
    ],
)
def test_the_number_of_cudnn(number: int | None, text: str) -> None:
    assert cudnn_text(number) == text


def test_secrets_of_the_environment_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "TORCH_API_KEY", "NCCL_TOKEN", "HOME"):
        monkeypatch.setenv(name, "x")
    assert {"NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"} <= variables_of_interest().keys()
    assert not {"TORCH_API_KEY", "NCCL_TOKEN", "HOME"} & variables_of_interest().keys()


def test_this_machine() -> None:
    host, software = read_host(), read_software("1.2.3")
    assert 1 <= host.usable_cores <= host.allowed_cores <= host.cores
    assert host.usable_nbytes > 1 << 28
    assert (host.vectors, software.evener) == (torch.backends.cpu.get_cpu_capability(), "1.2.3")
    assert software.torch == torch.__version__
    assert (software.accelerator is not None) == torch.accelerator.is_available()
    assert len(seen_cards(software.accelerator)) == torch.accelerator.device_count()


def test_a_survey_of_this_machine_can_be_saved() -> None:
    survey = read_survey(PLAN, "1.2.3")
    assert written_and_read(survey) == survey
    assert survey.plan == PLAN
    assert glance(PLAN, "1.2.3").host.name == survey.host.name


def test_nvidias_library_is_a_part_of_it() -> None:
    """Here torch sees none of its cards."""
    survey = read_survey(
        PLAN, "1.2.3", FakeNvml([FakeCard(), FakeCard(uuid="GPU-1", bus="00000000:02:00.0")])
    )
    own = [card for card in survey.cards if card.uuid in ("0", "1")]
    assert [card.pci for card in own] == ["0000:01:00.0", "0000:02:00.0"]
    assert all(card.device is None for card in own)
    assert (survey.software.nvidia_driver, survey.software.driver_cuda) == ("570.124.06", "12.8")


@pytest.mark.parametrize("with_cards", [True, False])
def test_that_the_library_is_missing_is_said_where_there_are_cards(
    with_cards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "find_nvml", lambda: None)
    monkeypatch.setattr(reading, "seen_cards", lambda kind: ())
    monkeypatch.setattr(reading.kernel, "nvidia_cards", lambda: (there("a"),) if with_cards else ())
    assert read_survey(PLAN, "1.2.3").software.nvml == ("nvidia-ml-py is not installed" if with_cards else "")


def test_a_run_that_keeps_away_from_cards_does_not_look_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def woken(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.accelerator, "current_accelerator", woken)
    monkeypatch.setattr(reading.kernel, "nvidia_cards", lambda: (there("a"),))
    assert glance(PLAN, "1.2.3", accelerators=False).cards == ()
    with pytest.raises(AssertionError):
        glance(PLAN, "1.2.3")


@pytest.mark.gpu
def test_a_real_card_is_surveyed() -> None:
    survey = read_survey(Plan(1, 1, "cuda"), "1.2.3")
    assert [card.device for card in survey.seen] == [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    assert all(card.memory_nbytes and card.free_nbytes and card.architecture for card in survey.seen)
    assert survey.software.architectures
    assert {library.name: bool(library.loaded) for library in survey.software.libraries} == {
        "cuDNN": True,
        "NCCL": True,
    }
    assert written_and_read(survey) == survey
    assert os.getpid() not in {tenant.pid for card in survey.cards for tenant in card.tenants}
