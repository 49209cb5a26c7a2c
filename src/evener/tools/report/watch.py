"""Serves the report of a run that goes on, to browsers on this machine.

The server listens on 127.0.0.1 alone, answers ``GET /`` and ``GET /report.json`` and nothing else, and changes nothing.
There is no password: each user of this machine can read the report, and whoever the port is forwarded to. Pages of
others in a browser here cannot: a name that leads to 127.0.0.1 (DNS rebinding) is refused by the ``Host`` header, and
no other origin may read or embed an answer. The page has no script: the ``Refresh`` header has the browser load it
again.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from evener.core.os_errors import os_error_message
from evener.errors import ConfigurationError, EvenerError
from evener.tools.report.page import page_of
from evener.tools.report.schema import UNDER_WAY, ReportFile

ADDRESS, PORT = "127.0.0.1", 8780
REFRESH_SECONDS, ENDED_SECONDS = 5, 60
"""A browser loads the page again after so many seconds, while a run is under way and when all have ended."""
_REST = 4
"""A report is made anew after so many times the time that making it took, so that watching leaves time to the run."""
_REQUEST_SECONDS = 10
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.I)
"""The names under which a browser may ask. The port may be another one, if it is forwarded."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class WatchedReport:
    """The newest report as page and as JSON. It is made when somebody asks, once for all viewers.

    Args:
        make: Makes the report from the run directories. When it fails later, as when a directory has gone, the last
            report stays, with the error above it.
        write: Returns the text of ``report.json``.
        clock: Returns seconds.
    """

    def __init__(
        self,
        make: Callable[[], ReportFile],
        write: Callable[[ReportFile], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._write, self._clock = make, write, clock
        self._lock = threading.Lock()
        self._file: ReportFile | None = None
        self._texts, self._until = ("", ""), 0.0

    @property
    def refresh_seconds(self) -> int:
        """The seconds after which a browser is to load the page again."""
        has_ended = self._file is not None and all(run.identity.state != UNDER_WAY for run in self._file.runs)
        return ENDED_SECONDS if has_ended else REFRESH_SECONDS

    def texts(self) -> tuple[str, str]:
        """Returns the page and the JSON.

        Raises:
            EvenerError: If no report could be made yet.
            OSError: Likewise.
        """
        with self._lock:
            begin = self._clock()
            if self._file is None or begin >= self._until:
                self._texts = self._made()
                took = self._clock() - begin
                self._until = begin + took + max(1.0, _REST * took)
            return self._texts

    def _made(self) -> tuple[str, str]:
        notice = ""
        try:
            self._file = self._make()
        except (EvenerError, OSError) as error:
            if self._file is None:
                raise
            reason = os_error_message(error) if isinstance(error, OSError) else str(error)
            notice = f"This is the last report that could be made: {reason}"
        return page_of(self._file, notice), self._write(self._file)


class WatchServer(ThreadingHTTPServer):
    """An HTTP server for a `WatchedReport`, at any free port if ``port`` is 0.

    Raises:
        ConfigurationError: If the port is in use, or this user may not take it.
    """

    daemon_threads = True

    def __init__(self, report: WatchedReport, port: int = PORT) -> None:
        self.report = report
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"port {port} of {ADDRESS} cannot be had: {os_error_message(error)}; "
                "name another one with --port, or --port 0 for any that is free"
            ) from error

    def server_bind(self) -> None:
        """Binds without asking for the name of the host, which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a viewer that has gone, or of one that asked while the server was being closed."""
        if not isinstance(sys.exception(), OSError) and self.fileno() >= 0:
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "evener", ""
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        if not _HOST.fullmatch(self.headers.get("Host", "")):
            self._send("This server is for http://127.0.0.1 and http://localhost.\n", "text/plain", 421)
        elif self.path not in ("/", "/report.json"):
            self._send("There is / and /report.json.\n", "text/plain", HTTPStatus.NOT_FOUND)
        else:
            try:
                page, data = self.server.report.texts()
            except (EvenerError, OSError) as error:
                self._send(f"{error}\n", "text/plain", HTTPStatus.SERVICE_UNAVAILABLE)
                return
            if self.path == "/":
                self._send(page, "text/html")
            else:
                self._send(data, "application/json")

    def _send(self, text: str, kind: str, status: int = HTTPStatus.OK) -> None:
        body = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if self.path == "/":
            self.send_header("Refresh", str(self.server.report.refresh_seconds))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Prints nothing: each viewer asks every few seconds."""
