"""Help, errors and completion of the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from evener.checkpoint.run_mark import Identity, write_mark
from evener.cli.main import main, parser
from evener.cli.parsing import WIDTH, Parser
from evener.cli.train import speaks
from evener.core.config import help_text as settings_help
from evener.core.config.run_config import RunConfig
from tests.distributed.processes import run


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def whole_parsers(top: Parser) -> Iterator[Parser]:
    yield top
    for inner in top.inner:
        yield from whole_parsers(inner)


def test_every_setting_is_in_one_group_with_one_line() -> None:
    lines = [name for group in settings_help.GROUPS.values() for name in group]
    assert sorted(lines) == sorted(entry.name for entry in fields(RunConfig))


@pytest.mark.parametrize("of_command", list(whole_parsers(parser())), ids=lambda parser: parser.prog)
def test_an_option_has_one_line_in_the_help(of_command: Parser) -> None:
    shown = of_command.format_help().splitlines()
    for line in shown:
        assert len(line) <= WIDTH
    explained = [line for line in shown if re.match(r"  -", line)]
    for option in of_command.options:
        if not option.startswith("--no-"):
            assert (
                sum(bool(re.search(rf"(^|[ ,]){option}[ ,\]]|{option}$", line[:36])) for line in explained)
                == 1
            ), option
    following = [after for line, after in pairwise(shown) if line in explained]
    assert not [line for line in following if line.startswith(" " * 10)], "an explanation goes on"


def test_defaults_and_examples_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert re.search(r"--seed N .*\(default: 0\)", shown)
    assert "examples:\n  evener train digits" in shown
    assert "usage: evener train TASK [OPTIONS]\n" in shown


def test_the_full_help_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help-full"])
    said = "".join(capsys.readouterr().out.split())
    for entry in fields(RunConfig):
        assert "".join(entry.metadata["help"].split()) in said, entry.name


@pytest.mark.parametrize(
    ("arguments", "usage", "words"),
    [
        (
            ("train", "digits", "--bach-size", "3"),
            "train TASK",
            "no option --bach-size; did you mean --batch-size?",
        ),
        (("train", "digits", "--epo", "3"), "train TASK", "no option --epo; did you mean --epochs?"),
        (("bench", "--size=4"), "bench", "no option --size; did you mean --sizes?"),
        (("train", "digits", "--clip-norm=--"), "train TASK", "--clip-norm: expected one argument"),
        (("export", "x", "y"), "export RUN", "unrecognized arguments: y"),
        (("verfy",), "COMMAND", "did you mean verify?"),
        (("train", "digits", "--on-replica-mismatch", "rank1"), "train TASK", "did you mean rank0?"),
        (("verify",), "verify TASK", "no task is named"),
        (("predict", "x"), "predict RUN", "required: --data, --out"),
    ],
)
def test_an_error_has_the_commands_own_usage_and_what_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], usage: str, words: str
) -> None:
    shown = failed(capsys, *arguments)
    assert shown.startswith(f"usage: evener {usage}")
    assert words in shown
    assert len(shown.splitlines()) == 2


def test_the_version_is_printed_without_torch() -> None:
    """By ``python -m evener`` too. What is imported for a help or the version is counted, not timed."""
    for arguments in (
        ["--version"],
        ["--help"],
        ["train", "--help"],
        ["list"],
        ["train", "x", "--print-config"],
    ):
        ask = (
            "import runpy, sys\nsys.argv[1:] = %r\ntry:\n    runpy.run_module('evener', run_name='__main__')\n"
            "finally:\n    print(len(sys.modules), [m for m in ('torch', 'numpy', 'shtab') if m in sys.modules])"
        )
        ended = run("-c", ask % arguments)
        number, _, strange = ended.out.splitlines()[-1].partition(" ")
        assert strange == "[]", arguments
        assert int(number) < (160 if "--help" in arguments else 260), arguments
        assert arguments != ["--version"] or re.match(r"evener \d+\.\d+", ended.out)


def test_evener_itself_imports_next_to_nothing() -> None:
    ended = run(
        "-c", "import sys; before = set(sys.modules); import evener; print(len(set(sys.modules) - before))"
    )
    assert int(ended.out) < 60


def test_what_starts_the_ranks_imports_no_tensors_of_theirs() -> None:
    """DTensors, sharding and checkpoints take more than a second, and a launcher needs none of them."""
    costly = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo")
    ended = run(
        "-c",
        "import sys, torch; before = set(sys.modules); import evener.training.fit, evener.tools.plan; "
        f"print([m for m in {costly} if m in sys.modules and m not in before])",
    )
    assert ended.out.strip() == "[]"


def test_each_command_has_its_options_alone() -> None:
    """Those of the others are not made, which costs the most of a help."""
    assert [len(each.options) > 5 for each in parser("train").inner].count(True) == 1


# Completion

ASK = """
source {script}
complete -p evener >&2
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
_shtab_evener
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "evener.bash"
    ended = subprocess.run(
        [sys.executable, "-m", "evener", "completion", "bash"], capture_output=True, check=True
    )
    path.write_bytes(ended.stdout)
    return path


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("evener tr", "train"),
        ("evener train digits --ba", "--batch-size --balance --batch-norm"),
        ("evener train digits --non-finite s", "stop skip"),
        ("evener bench --si", "--sizes --simulate"),
        ("evener list b", "balancers"),
        ("evener train digits --config some", "some.toml"),
        ("evener evaluate so", "some.toml"),
        ("evener train --rdzv_b", ""),
    ],
)
def test_bash_completes(words: str, found: str, script: Path, tmp_path: Path) -> None:
    (tmp_path / "some.toml").touch()
    text = ASK.format(script=script, words=words)
    ended = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=tmp_path)
    assert "_shtab_evener" in ended.stderr
    assert ended.stdout.strip() == found


@pytest.mark.parametrize(("shell", "begin"), [("zsh", "#compdef evener"), ("fish", "complete -c evener")])
def test_other_shells_get_a_script(shell: str, begin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert begin in shown
    assert "batch-size" in shown


# The first line


FIRST = """
import sys
class Stream:
    def write(self, text):
        print(repr(text), 'torch' in sys.modules, 'numpy' in sys.modules, file=sys.__stdout__, flush=True)
        raise SystemExit(0)
    def flush(self): pass
    def isatty(self): return False
sys.stderr = Stream()
from evener.checkpoint.run_mark import Identity, write_mark
from evener.cli.main import main
main(sys.argv[1:])
"""


def test_the_first_line_comes_before_torch() -> None:
    ended = run("-c", FIRST, "train", "digits", "--processes", "2", "--run-dir", "runs/a")
    text, *imported = ended.out.splitlines()[0].rsplit(" ", 2)
    assert re.fullmatch(r"'training digits on 2 processes with evener .*, kept in runs/a'", text)
    assert imported == ["False", "False"]


@pytest.mark.parametrize(
    ("variables", "speaking"),
    [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False), ({"SLURM_PROCID": "3"}, False)],
)
def test_one_rank_alone_says_it(variables: dict[str, str], speaking: bool) -> None:
    assert speaks(variables) == speaking


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices", "--save"),
        ("train", "digits", "--json"),
        ("plan", "digits", "--save"),
        ("compare", "old", "new", "--json"),
    ],
)
@pytest.mark.parametrize("text", ["precious", '{"name": "of another program"}', "[1, 2]"])
def test_a_file_of_another_kind_is_not_replaced(
    arguments: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kept.json"
    file.write_text(text)
    assert f"{file} is there already, and was not written by {arguments[-1]}" in failed(
        capsys, *arguments, str(file)
    )
    assert file.read_text() == text


@pytest.mark.parametrize("text", ["", '{"cards": []}'])
def test_a_file_of_the_same_kind_is_replaced(text: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    assert parser().parse_args(["devices", "--save", str(file)]).save == file


@pytest.mark.parametrize("name", ["checkpoints/latest", "checkpoints/step-00000002/rest.pt", "config.json"])
@pytest.mark.parametrize(
    "arguments",
    [("export", "RUN", "--to"), ("report", "RUN", "--json"), ("predict", "RUN", "--data", "train", "--out")],
)
def test_a_file_of_a_run_is_not_replaced(
    arguments: tuple[str, ...], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    write_mark(tmp_path, Identity().as_plain())
    (tmp_path / "config.json").write_text("{}")
    assert "is a file of a run, or lies in its checkpoints" in failed(
        capsys, *arguments, str(tmp_path / name), "--overwrite"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices", "--save", "machine.json", "--json", "./machine.json"),
        ("devices", "--from", "machine.json", "--json", "machine.json"),
        ("report", "run", "--out", "report", "--json", "report"),
        ("plan", "digits", "--save", "link.json", "--json", "plan.json"),
    ],
)
def test_two_options_write_into_files_of_their_own(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link.json").symlink_to("plan.json")
    assert f"{arguments[-4]} and {arguments[-2]} both name {Path(arguments[-1])}" in failed(
        capsys, *arguments
    )
