"""The report of a run that goes on, served on this machine."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from evener.errors import ConfigurationError, DataError
from evener.tools.report.schema import FINISHED, UNDER_WAY, ReportFile
from evener.tools.report.watch import WatchedReport, WatchServer
from tests.tools.report.samples import report


class Run:
    """A run whose report is made anew each time, unless it fails."""

    def __init__(self) -> None:
        self.made, self.error, self.now = 0, None, 0.0
        self.error: Exception | None
        self.state = UNDER_WAY

    def make(self) -> ReportFile:
        self.made += 1
        if self.error is not None:
            raise self.error
        run = report(steps=10, ranks=2, columns=10)
        return ReportFile(
            (replace(run, identity=replace(run.identity, name=f"run {self.made}", state=self.state)),)
        )

    def watched(self) -> WatchedReport:
        return WatchedReport(
            self.make, lambda file: f'{{"name": "{file.runs[0].identity.name}"}}', lambda: self.now
        )


@contextmanager
def served(run: Run) -> Iterator[WatchServer]:
    with WatchServer(run.watched(), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def answer(
    server: WatchServer, path: str = "/", host: str | None = "localhost", method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)) as connection:
        connection.putrequest(method, path, skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())


def test_the_page_and_its_data_are_served_and_refreshed() -> None:
    run = Run()
    with served(run) as server:
        status, text, headers = answer(server)
        assert status == 200
        assert "run 1" in text
        assert headers["Refresh"] == "5"
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        status, text, headers = answer(server, "/report.json")
        assert (status, text) == (200, '{"name": "run 1"}')
        assert "Refresh" not in headers
        run.now += 10
        run.state = FINISHED
        _, text, headers = answer(server)
        assert "run 2" in text
        assert headers["Refresh"] == "60", "it may be resumed"


def test_viewers_share_a_report() -> None:
    run = Run()
    with served(run) as server:
        viewers = [threading.Thread(target=answer, args=(server,)) for _ in range(5)]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join(10)
    assert run.made == 1


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8780", "LOCALHOST:1", "[::1]:9"])
def test_names_of_this_machine_are_served(host: str) -> None:
    with served(Run()) as server:
        assert answer(server, host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:8780", "localhost.evil.example", "127.0.0.1.evil", "0.0.0.0"],
)
def test_a_name_that_leads_here_is_refused(host: str | None) -> None:
    """A page of a stranger may have its own name lead to 127.0.0.1 (DNS rebinding)."""
    run = Run()
    with served(run) as server:
        status, text, _ = answer(server, host=host)
        assert status == 421
        assert "run" not in text
    assert not run.made


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/../../etc/passwd", "//a", "/?a", "/records.jsonl", "http://a/"]
)
def test_there_is_nothing_else(path: str) -> None:
    with served(Run()) as server:
        assert answer(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_can_be_changed(method: str) -> None:
    with served(Run()) as server:
        status, _, headers = answer(server, method=method)
        assert status == 501
        assert not [name for name in headers if name.startswith("Access-Control")]


def test_others_may_not_embed_or_read_an_answer() -> None:
    with served(Run()) as server:
        headers = answer(server)[2]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not [name for name in headers if name.startswith("Access-Control")]


def test_only_this_machine_is_served() -> None:
    with served(Run()) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/"


@pytest.mark.parametrize(
    "error", [DataError("the run <went>"), FileNotFoundError(2, "No such file", "runs/a")]
)
def test_a_directory_that_vanishes_leaves_the_last_report(error: Exception) -> None:
    run = Run()
    with served(run) as server:
        assert answer(server)[0] == 200
        run.error, run.now = error, 10.0
        status, text, _ = answer(server)
        assert status == 200
        assert "run 1" in text
        assert "last report that could be made" in text
        assert "the run &lt;went&gt;" in text or "runs/a" in text
        run.error, run.now = None, 20.0
        assert "last report" not in answer(server)[1]


def test_a_run_that_cannot_be_read_yet() -> None:
    run = Run()
    run.error = DataError("line 1 is no record")
    with served(run) as server:
        status, text, headers = answer(server)
        assert (status, text) == (503, "line 1 is no record\n")
        assert headers["Refresh"] == "5"
        run.error = None
        assert answer(server)[0] == 200


def test_a_report_that_takes_long_is_made_seldom() -> None:
    run = Run()

    def slow() -> ReportFile:
        run.now += 3
        return run.make()

    watched = WatchedReport(slow, lambda file: "", lambda: run.now)
    watched.texts()
    run.now = 14.9
    watched.texts()
    assert run.made == 1
    run.now = 15.0
    watched.texts()
    assert run.made == 2


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port {port} of 127.0.0.1 cannot be had.*--port 0"):
            WatchServer(Run().watched(), port)


def test_a_viewer_that_leaves_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    with served(Run()) as server:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.server_port)) as viewer:
                viewer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                viewer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        assert answer(server)[0] == 200
    assert not capfd.readouterr().err
