"""Settings from files and variables: which of them wins, and what is refused."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.cli import sources
from evener.cli.main import main, parser
from evener.cli.options import config_of, rendezvous_of, task_options_of
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError

ALL = """
task = "mine:task"
data_dir = "some where"
epochs = 3
clip_norm = 1
micro_batch = 16
processes = "1:2"
compile = true
overwrite = true
strategy_option = ["a=1", "b=x y"]
run_dir = "runs/\\u00e4 \\"b\\""
max_restarts = 2
[option]
width = 3
name = "3"
layers = [1, 2]
deep = {a = 1.5, b = false}
"""


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def parsed(*words: str, **variables: str) -> argparse.Namespace:
    arguments: argparse.Namespace = parser(words[0]).parse_args(words)
    sources.complete(arguments, variables)
    return arguments


def test_the_command_line_wins_over_variables_and_these_over_the_file() -> None:
    Path("run.toml").write_text("epochs = 1\nsteps = 1\nseed = 1\nkeep = 5\n")
    found = parsed(
        *("train", "digits", "--config", "run.toml", "--epochs", "3"), EVENER_EPOCHS="2", EVENER_STEPS="2"
    )
    config = config_of(found)
    assert (config.epochs, config.steps, config.seed, config.keep) == (3, 2, 1, 5)
    assert found.sources == {"steps": "EVENER_STEPS", "seed": "run.toml", "keep": "run.toml"}


def test_a_file_says_all_that_the_command_line_can() -> None:
    Path("run.toml").write_text(ALL)
    found = parsed("train", "--config", "run.toml", "--option", "width=4")
    assert config_of(found) == RunConfig(
        epochs=3,
        clip_norm=1.0,
        micro_batch=16,
        processes="1:2",
        compile="auto",
        overwrite=True,
        strategy_option=("a=1", "b=x y"),
        run_dir=Path('runs/ä "b"'),
    )
    assert found.task == "mine:task"
    options: dict[str, Any] = {"width": 4, "name": "3", "layers": [1, 2], "deep": {"a": 1.5, "b": False}}
    assert task_options_of(found) == {**options, "data_dir": Path("some where")}
    met = rendezvous_of(found)
    assert met is not None
    assert met.max_restarts == 2


def test_variables_are_read_as_the_command_line_is() -> None:
    found = parsed(
        "train",
        EVENER_TASK="digits",
        EVENER_CLIP_NORM="0.5",
        EVENER_OVERWRITE="yes",
        EVENER_PRECISION_OF="head=fp32 'a b=bf16'",
        EVENER__RUN_DIR="of the ranks, and no setting",
        HOME="x",
    )
    config = config_of(found)
    assert (found.task, config.clip_norm, config.overwrite) == ("digits", 0.5, True)
    assert config.precision_of == ("head=fp32", "a b=bf16")
    assert config.run_dir is None


def test_a_command_takes_what_it_has_an_option_for() -> None:
    Path("run.toml").write_text('epochs = 1\nrun_dir = "x"\nseed = 4\n')
    found = parsed("verify", "digits", "--config", "run.toml", EVENER_KEEP="3")
    assert found.sources == {"seed": "run.toml"}


@pytest.mark.parametrize("words", [("train", "--config", "run.toml"), ("verify", "--config", "run.toml")])
def test_what_is_printed_says_the_same(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.toml").write_text(ALL + "\n")
    monkeypatch.setenv("EVENER_TIMEOUT_SECONDS", "7")
    given = [*words, "--seed", "5", "--option", "width=5"]
    assert main([*given, "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "seed = 5  # the command line\n" in shown
    assert "timeout_seconds = 7.0  # EVENER_TIMEOUT_SECONDS\n" in shown
    Path("again.toml").write_text(shown)
    first, again = parsed(*given, EVENER_TIMEOUT_SECONDS="7"), parsed(words[0], "--config", "again.toml")
    assert config_of(first) == config_of(again)
    assert task_options_of(first) == task_options_of(again)
    assert first.task == again.task


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs = 'x'", "run.toml: epochs = 'x': it must be a whole number"),
        ("epochs = true", "run.toml: epochs = True: it must be a whole number"),
        ("epochs = 2.0", "run.toml: epochs = 2.0: it must be a whole number"),
        ("clip_norm = '1'", "run.toml: clip_norm = '1': it must be a number"),
        ("overwrite = 1", "run.toml: overwrite = 1: it must be true or false"),
        ("run_dir = ''", "run.toml: run_dir = '': it must be a path that is not empty"),
        ("strategy_option = 'a=1'", "it must be a list of texts"),
        (
            "on_replica_mismatch = 'rank7'",
            "run.toml: on_replica_mismatch = 'rank7': it must be one of majority, rank0",
        ),
        ("epochs = 0", "run.toml: epochs is 0; it must be a whole number of at least 1"),
        (
            "compile_mode = 'default'",
            "run.toml: compile_mode and compile_backend would do nothing",
        ),
        ("batchsize = 3", "run.toml: batchsize is no setting; did you mean run.toml: batch_size?"),
        ("qqqq = 3", "run.toml: qqqq is no setting; settings are batch_size, "),
        ("option = 3", "it must be a table [option] of arguments"),
        ("epochs = = 3", "run.toml is no TOML: "),
        ("[option]\n'a b' = 3", "run.toml: [option] 'a b' is no name of an argument"),
    ],
)
def test_a_file_that_is_wrong_is_named(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(text)
    assert main(["train", "digits", "--config", "run.toml", "--print-config"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("EVENER_EPOCHS", "x", "EVENER_EPOCHS = 'x': it must be a whole number"),
        ("EVENER_EPOCHS", "0", "EVENER_EPOCHS: epochs is 0; it must be"),
        ("EVENER_OVERWRITE", "maybe", "it must be true or false"),
        ("EVENER_RUN_DIR", "", "EVENER_RUN_DIR = '': it must be a path that is not empty"),
        ("EVENER_ON_REPLICA_MISMATCH", "x", "EVENER_ON_REPLICA_MISMATCH = 'x': it must be one of"),
        ("EVENER_STRATEGY_OPTION", "'a", "it must be a list of texts"),
        ("EVENER_BATCHSIZE", "3", "EVENER_BATCHSIZE is no setting; did you mean EVENER_BATCH_SIZE?"),
    ],
)
def test_a_variable_that_is_wrong_is_named(
    name: str, text: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    assert main(["train", "digits", "--print-config"]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--config", "absent.toml"]) == 2
    assert "absent.toml" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no such file")
def test_a_file_whose_end_is_not_known_is_refused_and_a_pipe_of_the_shell_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "digits", "--config", "/proc/cpuinfo"]) == 2
    assert "no regular file: /proc/cpuinfo" in capsys.readouterr().err
    reading, writing = os.pipe()
    os.write(writing, b"epochs = 3")
    os.close(writing)
    try:
        assert parsed("train", "digits", "--config", f"/dev/fd/{reading}").epochs == 3
    finally:
        os.close(reading)


def test_what_toml_has_no_word_for_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="width is None, for which TOML has no word"):
        sources.as_toml(parsed("train", "digits", "--option", "width=None"))


def test_variables_of_evener_itself_are_no_settings() -> None:
    from evener.distributed import session
    from evener.distributed.recovery import replacement as succession
    from evener.distributed.watchdog import store_health as keeper

    for name in (keeper.LAUNCHER_PID, session.RUN_DIR, succession.ALLOWED):
        assert name.startswith(sources.OWN)


def test_a_second_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It took the place of the first, whose settings were lost without a word."""
    with pytest.raises(SystemExit):
        parsed("train", "digits", "--config", "a.toml", "--config", "b.toml")
    assert "--config is given twice: a.toml and b.toml; give one" in capsys.readouterr().err
