"""Takes the pictures of a report that the documentation shows: ``make pictures``.

A real run on two unequal CPU ranks, and its report on a phone and on a desk, by day and by night. It needs a Chromium
on the PATH.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from evener.cli.main import main
from tests.browser import Browser, chromium

PICTURES = Path(__file__).parents[1] / "docs/pictures"
SCREENS = {"phone": (390, 844), "desk": (1400, 900)}
LARGEST = 150_000
"""The largest picture, in bytes."""
RUN = ("digits", "--processes", "2", "--throttle", "1,0.4", "--balance", "equal", "--epochs", "30")


def take() -> None:
    """Trains, makes the report, and takes the pictures."""
    if chromium() is None:
        sys.exit("the pictures need a Chromium on the PATH")
    with tempfile.TemporaryDirectory() as home, Browser() as browser:
        run, page = Path(home) / "first", Path(home) / "report.html"
        for command in (["train", *RUN, "--run-dir", str(run)], ["report", str(run), "--out", str(page)]):
            if status := main(command):
                sys.exit(status)
        for screen, (width, height) in SCREENS.items():
            for scheme in ("light", "dark"):
                path = PICTURES / f"report-{screen}-{scheme}.png"
                browser.show(page.as_uri(), width, height, scheme)
                browser.picture(path)
                size = path.stat().st_size
                print(f"{path}: {size:,} bytes{', TOO LARGE' if size > LARGEST else ''}")


if __name__ == "__main__":
    take()
