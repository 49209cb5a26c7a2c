"""``evener report`` with a page: written to a file, or served while a run goes on."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evener.cli.main import main
from evener.errors import EvenerError
from evener.tools.report.watch import WatchServer
from tests.tools.report.making import directory, step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return directory(tmp_path / "first", [step(number, (0.1, 0.2)) for number in range(20)])


def test_the_page_is_written_and_nothing_is_replaced(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert "first: " in capfd.readouterr().out
    page = out.read_bytes()
    assert page.startswith(b"<!doctype html>")
    assert b"first" in page
    assert main(["report", str(run), "--out", str(out)]) == 2
    assert "is there already" in capfd.readouterr().err
    assert main(["report", str(run), "--out", str(out), "--overwrite"]) == 0
    assert out.read_bytes() == page, "the same run has the same bytes"


def test_the_page_of_the_data_is_that_of_the_run(run: Path, tmp_path: Path) -> None:
    data, first, second = (tmp_path / name for name in ("a.json", "a.html", "b.html"))
    assert main(["report", str(run), "--out", str(first), "--json", str(data)]) == 0
    assert main(["report", str(data), "--out", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()


def test_the_page_and_data_on_standard_output(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out), "--json", "-"]) == 0
    assert capfd.readouterr().out.startswith("{")
    assert out.exists()


def test_a_page_that_cannot_be_written(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--out", "/dev/null/report.html"]) == 1
    assert "the report cannot be written" in capfd.readouterr().err


def test_watching_serves_the_run_until_ctrl_c(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def one_viewer(server: WatchServer) -> None:
        def view() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
            connection.request("GET", "/")
            found.append(connection.getresponse().read())
            connection.close()

        viewer = threading.Thread(target=view)
        viewer.start()
        server.handle_request()
        viewer.join(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "serve_forever", one_viewer)
    assert main(["report", "--watch", str(run), "--port", "0"]) == 130
    said = capfd.readouterr().out
    assert re.search(r"http://127\.0\.0\.1:\d+/ until Ctrl-C; users of this machine can read it", said)
    assert b"first" in found[0]


def test_a_port_in_use(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["report", "--watch", str(run), "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be had" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "8780"), "the port of --watch"),
        (("--watch", "--out", "a.html"), "writes no file"),
        (("--watch", "--json", "a.json"), "writes no file"),
    ],
)
def test_what_a_user_gets_wrong(
    run: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["report", str(run), *arguments]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "²", "a", ""])
def test_a_number_that_is_no_port(run: Path, capfd: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "--watch", str(run), "--port", port])
    assert ended.value.code == 2
    assert "is no port" in capfd.readouterr().err


def test_a_directory_that_is_not_there_is_said_before_anything_is_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--watch", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "until Ctrl-C" not in capfd.readouterr().out


def test_a_run_that_has_no_records_yet_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(server: WatchServer) -> None:
        with pytest.raises(EvenerError):
            server.report.texts()
        directory(tmp_path, [step(number) for number in range(20)])
        assert "<!doctype html>" in server.report.texts()[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "serve_forever", ended)
    assert main(["report", "--watch", str(tmp_path), "--port", "0"]) == 130
    said = capfd.readouterr()
    assert "evener: waiting for the run: " in said.err
    assert "until Ctrl-C" in said.out


@pytest.mark.slow
def test_the_command_ends_at_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "evener", "report", "--watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = re.search(r":(\d+)/", process.stdout.readline())
        assert port is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=30)
        connection.request("GET", "/report.json")
        assert connection.getresponse().read().startswith(b"{")
        # A viewer that asks nothing holds nothing up.
        idle = socket.create_connection(("127.0.0.1", int(port[1])))
        os.kill(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=30)
        idle.close()
    assert process.returncode == 130
    assert error == "evener: interrupted by SIGINT\n"
