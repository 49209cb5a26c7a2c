"""Run directories that are torn, or a stranger's: every command that reads one ends in words, and in time."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.checkpoint.checksums import sum_of
from evener.cli.main import main
from tests.tiers import ALWAYS, NIGHTLY, crossed

ONE = ("--processes", "1", "--device", "cpu")
COMMANDS = {
    "report": ("report", "torn", "--json", "out.json", "--overwrite"),
    "plot": ("plot", "torn", "--out", "out.svg", "--overwrite"),
    "export": ("export", "torn", "--to", "out.safetensors", "--overwrite"),
    "evaluate": ("evaluate", "torn", "--task", "tests.tasks:plain", *ONE),
}
READERS = {
    "records.jsonl": ("plot", "report"),
    "attempts.jsonl": ("report",),
    "summary.json": ("report",),
    "config.json": ("evaluate", "report"),
    "task.json": ("evaluate", "report"),
}
FILES = (
    "records.jsonl",
    "attempts.jsonl",
    "summary.json",
    "config.json",
    "task.json",
    "latest",
    "rest.pt",
    "sums.json",
    "tensors.json",
    "__0_0.distcp",
    "evener.json",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("whole")
    run = ("train", "tests.tasks:plain", *ONE, "--steps", "3", "--run-dir", str(home / "run"))
    assert main(run) == 0
    return home / "run"


def changed(at: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for place in range(at, len(content), 97):
            content[place] ^= 1 << at % 8
        path.write_bytes(content)

    return change


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def of_the_kernel(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/pagemap")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def odd(path: Path) -> None:
    """JSON of another form, a line of it or all."""
    first, *rest = path.read_bytes().splitlines()
    try:
        found = json.loads(first if rest else path.read_bytes())
        known = {key: value if key == "kind" else [{}] for key, value in found.items()}
    except (ValueError, AttributeError):
        known = {}
    path.write_bytes(b"\n".join([json.dumps(known).encode(), *rest]))


TEARS: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "without its end": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "zeros": lambda path: path.write_bytes(bytes(300)),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("3"),
    "deep": lambda path: path.write_text("[" * 50_000),
    "long lines": lambda path: path.write_bytes(path.read_bytes() * 3 + b"x" * 1_000_000),
    "of another form": odd,
    **{f"changed from {at} on": changed(at) for at in (0, 5, 40)},
    "a pipe": pipe,
    "endless": endless,
    "of the kernel": of_the_kernel,
    "a directory": directory,
}


def place_of(torn: Path, name: str) -> Path:
    return next(path for path in torn.rglob(name) if path.parent != torn or name != "evener.json")


def summed(torn: Path) -> None:
    """Who can write the files can write their checksums."""
    place = place_of(torn, "sums.json").parent
    if (place / "sums.json").is_file():
        files = [path for path in place.iterdir() if path.is_file() and path.name != "sums.json"]
        (place / "sums.json").write_text(json.dumps({path.name: sum_of(path) for path in files}))


@pytest.mark.parametrize(("name", "part"), crossed(FILES, [0, 1], lambda _: (ALWAYS, NIGHTLY)))
def test_every_torn_file_ends_in_words(
    whole: Path,
    tmp_path: Path,
    name: str,
    part: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Torn in every other way; both parts together have all."""
    monkeypatch.chdir(tmp_path)
    for tear, act in list(TEARS.items())[part::2]:
        torn = Path(shutil.copytree(whole, tmp_path / "torn"))
        act(place_of(torn, name))
        if name in ("rest.pt", "tensors.json", "__0_0.distcp") and tear not in (
            "a pipe",
            "endless",
            "of the kernel",
        ):
            summed(torn)
        for command in READERS.get(name, ("export", "evaluate")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                status = main(COMMANDS[command])
            said = capfd.readouterr().err
            assert status in (0, 1, 2), (tear, command)
            assert "Traceback" not in said, (tear, command, said)
            assert status == 0 or said.splitlines()[-1].startswith("evener: "), (tear, command, said)
        shutil.rmtree(torn)


def test_numbers_of_records_that_are_none(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torn = Path(shutil.copytree(whole, tmp_path / "torn"))
    with (torn / "records.jsonl").open("a") as file:
        file.write('{"kind": "note", "step": 1e400}\n')
    assert main(("train", "tests.tasks:plain", *ONE, "--resume", "torn", "--steps", "4")) == 1
    assert "is no record" in capfd.readouterr().err
    assert (torn / "summary.json").exists(), "the run is as it was"


@pytest.mark.parametrize(
    "name",
    ["records.jsonl", "summary.json", ".evener-owner", pytest.param("evener.json", marks=NIGHTLY)],
)
def test_a_run_goes_on_in_a_torn_directory_or_ends_in_words(
    whole: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for tear in ("half", "a number", "of another form", "a pipe", "endless", "of the kernel"):
        torn = Path(shutil.copytree(whole, tmp_path / "torn"))
        if not (torn / name).exists():
            (torn / name).write_text("process 1 on a host\n")
        TEARS[tear](torn / name)
        status = main(("train", "tests.tasks:plain", *ONE, "--resume", "torn", "--steps", "4"))
        said = capfd.readouterr().err
        assert status in (0, 1, 2), (tear, said)
        assert "Traceback" not in said, (tear, said)
        shutil.rmtree(torn)
