from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evener import files
from evener.files import (
    lines_of,
    open_regular,
    read_bytes,
    read_json,
    read_named,
    read_text,
    replacing,
    write_json,
)


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text('{"é": 1}', encoding="utf-8")
    (tmp_path / "b").symlink_to(path)
    assert read_json(path) == read_json(tmp_path / "b") == {"é": 1}
    assert read_text(path, 9) == '{"é": 1}'


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "nothing"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    make = {"pipe": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero"), "directory": Path.mkdir}
    make.get(kind, lambda at: None)(path)
    with pytest.raises(OSError):  # noqa: PT011
        open_regular(path)


@pytest.mark.parametrize("name", ["/proc/self/pagemap", "/proc/self/maps", "/proc/cpuinfo"])
def test_a_file_of_the_kernels_does_not_know_its_length(name: str) -> None:
    """The first of them has no end."""
    if not os.path.exists(name):
        pytest.skip("no such file")
    with pytest.raises(OSError):  # noqa: PT011
        open_regular(Path(name))


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "nothing"])
def test_a_named_file_is_refused_without_waiting_where_it_may_have_no_end(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    make = {"pipe": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero"), "directory": Path.mkdir}
    make.get(kind, lambda at: None)(path)
    with pytest.raises(OSError, match="No such file" if kind == "nothing" else "no regular file"):
        read_named(path)


def test_a_pipe_that_the_shell_has_opened_is_read_to_its_end_or_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("é = 1", encoding="utf-8")
    assert read_named(tmp_path / "a") == "é = 1"
    assert read_named(Path(os.devnull)) == ""
    for most in (11, 10):
        reading, writing = os.pipe()
        os.write(writing, b"x" * 11)
        os.close(writing)
        try:
            if most == 11:
                assert read_named(Path(f"/dev/fd/{reading}"), most) == "x" * 11
            else:
                with pytest.raises(OSError, match="more than 10 bytes"):
                    read_named(Path(f"/dev/fd/{reading}"), most)
        finally:
            os.close(reading)


def test_an_empty_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert read_bytes(tmp_path / "a") == b""


def test_a_file_ends_where_it_ended_when_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"ab\ncd")
    for act in (
        lambda file: file.read(),
        lambda file: file.read(99),
        lambda file: b"".join(file),
        lambda file: b"".join(lines_of(file)),
        lambda file: file.raw.readall(),
        lambda file: file.raw.read(99),
        lambda file: file.seek(0, os.SEEK_SET) or file.read1(99),
    ):
        with path.open("r+b") as more, open_regular(path) as file:
            more.seek(5)
            more.write(b"more")
            more.flush()
            assert act(file) == b"ab\ncd"
            more.truncate(5)


def test_a_line_without_end_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 4)
    (tmp_path / "a").write_bytes(b"ab\n123456789\n")
    with open_regular(tmp_path / "a") as file:
        assert list(lines_of(file)) == [b"ab\n", b"1234", b"5678", b"9\n"]


def test_a_link_is_refused_where_none_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):  # noqa: PT011
        open_regular(tmp_path / "b", follow=False)


def test_no_more_is_read_than_there_may_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 11)
    assert len(read_bytes(tmp_path / "a", 11)) == 11
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_bytes(tmp_path / "a", 10)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011
        read_json(tmp_path / "a")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"good": 1})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"good": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_the_user_names_is_written_behind_its_link_and_keeps_its_permissions(
    tmp_path: Path,
) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.touch()
    target.chmod(0o600)
    link.symlink_to(target)
    write_json(link, {"good": 1}, follow=True)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"good": 1}
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_link_in_a_run_directory_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_json(tmp_path / "link", 1)
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "link").is_symlink()


def test_a_file_is_never_written_through_what_lies_under_its_temporary_name(tmp_path: Path) -> None:
    mine, target = tmp_path / "mine", tmp_path / "summary.json"
    mine.write_text("mine")
    (tmp_path / f".summary.json.{os.getpid()}").symlink_to(mine)
    write_json(target, 3)
    assert (mine.read_text(), target.is_symlink(), read_json(target)) == ("mine", False, 3)


def test_a_pipe_that_the_user_names_is_written_into_and_stays(tmp_path: Path) -> None:
    """As root, ``--json /dev/null`` put a regular file in the place of the machine's ``/dev/null``."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with replacing(path, follow=True, sync=True) as file:
        file.write(b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]
