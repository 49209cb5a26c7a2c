from __future__ import annotations

import gzip
import hashlib
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from evener.data.datasets import mnist as module
from evener.data.datasets.mnist import download, mnist, read_idx
from evener.errors import DataError

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(*shape: int) -> bytes:
    size = 1
    for length in shape:
        size *= length
    return (
        bytes((0, 0, 8, len(shape)))
        + struct.pack(f">{len(shape)}I", *shape)
        + bytes(i % 256 for i in range(size))
    )


class Counted(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.requested.append(self.path)  # type: ignore[attr-defined]
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path, list[str]]]:
    """The address of a server, the directory that it serves, and the paths asked of it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    served = tmp_path / "served"
    served.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Counted, directory=str(served)))
    server.requested = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", served, server.requested  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def test_plain_files_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / IMAGES).write_bytes(idx(5, 4, 3))
    (tmp_path / LABELS).write_bytes(idx(5))
    data = mnist(True, tmp_path)
    assert len(data) == 5
    images, labels = data.gather_batch(torch.tensor([4, 0]))
    assert images.shape == (2, 1, 4, 3)
    assert labels.tolist() == [4, 0]
    for row, index in enumerate((4, 0)):
        assert torch.equal(images[row], data[index][0])
        assert labels[row] == data[index][1]
    assert data[0][0].flatten().tolist() == pytest.approx([i / 255 for i in range(12)])


def test_a_missing_file_says_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=rf"neither {IMAGES}.gz nor {IMAGES}, but notes.txt"):
        mnist(True, tmp_path)
    with pytest.raises(DataError, match="there is no directory"):
        mnist(True, tmp_path / "none")


def test_a_wrong_checksum_shows_both_sums(tmp_path: Path) -> None:
    content = gzip.compress(idx(5, 4, 3))
    (tmp_path / f"{IMAGES}.gz").write_bytes(content)
    with pytest.raises(DataError, match=rf"{md5(content)}, not {module.MD5[IMAGES + '.gz']}"):
        mnist(True, tmp_path)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / IMAGES).write_bytes(idx(5, 4, 3))
    (tmp_path / LABELS).write_bytes(idx(6))
    with pytest.raises(DataError, match="5 images but 6 labels"):
        mnist(True, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(5), "starts with 0x00000801, not 0x00000803"),
        (b"", "starts with 0x, not"),
        (idx(5, 4, 3)[:-1], r"has 75 bytes, but its header \(5, 4, 3\) means 76"),
        (idx(5, 4, 3)[:10], "not an IDX file"),
    ],
)
def test_what_is_no_idx_file_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_idx(content, 3, "file")


def test_a_download_is_verified_kept_and_not_repeated(
    mirror: tuple[str, Path, list[str]], tmp_path: Path
) -> None:
    address, served, requested = mirror
    (served / "a.gz").write_bytes(b"content")
    for _ in range(2):
        path = download("a.gz", md5(b"content"), tmp_path / "cache", [address])
        assert path.read_bytes() == b"content"
    assert requested == ["/a.gz"]


def test_ranks_that_ask_at_once_download_once(mirror: tuple[str, Path, list[str]], tmp_path: Path) -> None:
    address, served, requested = mirror
    (served / "a.gz").write_bytes(b"content")
    arguments = ("a.gz", md5(b"content"), tmp_path / "cache", [address])
    threads = [threading.Thread(target=download, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert requested == ["/a.gz"]


def test_the_next_mirror_is_tried_and_a_wrong_file_never_kept(
    mirror: tuple[str, Path, list[str]], tmp_path: Path
) -> None:
    address, served, _ = mirror
    (served / "bad").mkdir()
    (served / "bad" / "a.gz").write_bytes(b"other")
    with pytest.raises(DataError, match="could not be downloaded"):
        download("a.gz", md5(b"content"), tmp_path / "cache", [address + "bad/", address])
    assert not (tmp_path / "cache" / "a.gz").exists()
    (served / "a.gz").write_bytes(b"content")
    path = download("a.gz", md5(b"content"), tmp_path / "cache", [address + "bad/", address])
    assert path.read_bytes() == b"content"


def test_a_lock_that_is_held_does_not_hang(tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / ".a.gz.lock"),
        pytest.raises(DataError, match="another process has been downloading"),
    ):
        download("a.gz", "0", tmp_path, [], timeout_seconds=0.01)
