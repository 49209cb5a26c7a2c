from __future__ import annotations

import pytest

import evener
from evener.cli.main import main
from evener.core.config.process_range import ProcessRange
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError


def test_a_range_is_a_setting() -> None:
    config = RunConfig(processes="2:4")
    assert config.processes == "2:4"
    assert ProcessRange.parse("2:4") == ProcessRange(2, 4)
    assert config.as_dict()["processes"] == "2:4"


def test_a_number_in_words_is_a_number() -> None:
    assert RunConfig(processes="3").processes == 3
    assert RunConfig(processes="3:3").processes == 3


@pytest.mark.parametrize("text", ["4:2", "0:2", "a:b", "2:", ":2", "1:2:3", "-1:2", "2.5", "", "1 : 2"])
def test_what_is_no_range_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"it must be a whole number of at least 1, or MIN:MAX"):
        RunConfig(processes=text)
    assert main(["train", "digits", f"--processes={text}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_zero_in_words_is_refused_as_zero_is() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^processes is 0; it must be a whole number of at least 1$"
    ):
        RunConfig(processes="0")


@pytest.mark.parametrize(
    "arguments", [["verify", "digits"], ["run", __file__], ["bench", "allreduce", "--sizes", "4K"]]
)
def test_what_saves_nothing_takes_one_number(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = arguments
    options = ["--processes", "2:3", "--device", "cpu"]
    split = 1 if command == "bench" else 0
    assert main([command, *rest[:split], *options, *rest[split:]]) == 2
    assert "processes is '2:3': only a run of evener train" in capsys.readouterr().err


def test_a_function_takes_one_number() -> None:
    with pytest.raises(ConfigurationError, match="give one number here"):
        evener.launch(print, processes="2:3")  # type: ignore[arg-type]
