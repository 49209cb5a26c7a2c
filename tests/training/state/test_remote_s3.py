"""Whole runs on an S3 server of this machine: ``pip install s3fs 'moto[server]'``, which only these tests need."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.checkpoint.remote.files import RemoteFiles
from evener.checkpoint.remote.lock import LOCK, RemoteLock
from evener.errors import ConfigurationError
from evener.training.fit import fit
from tests import tasks
from tests.elsewhere import memory

__all__ = ["memory"]

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The files of a bucket, as another client sees them."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")

    def content() -> dict[str, bytes]:
        keys = [each["Key"] for each in client.list_objects_v2(Bucket="bucket").get("Contents", [])]
        return {key: client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys}

    yield content
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def digest(**settings: Any) -> str:
    usual = {"processes": 1, "device": "cpu", "dtype": "float64", "save_every": 2, "epochs": 2}
    return fit(tasks.plain, show=False, **(usual | settings)).summary.weights_digest


def test_a_run_on_s3_goes_on_on_another_host(bucket: Any, tmp_path: Path) -> None:
    digest(run_dir="s3://bucket/a/run", steps=3)
    shutil.rmtree(tmp_path / "cache")
    assert digest(run_dir="s3://bucket/a/run", resume="auto") == digest()
    found = bucket()
    assert {name.split("/")[3] for name in found if "step-" in name} == {"step-00000006", "step-00000008"}
    sums = json.loads(found["a/run/checkpoints/step-00000008/sums.json"])
    for name, (nbytes, _) in sums.items():
        assert len(found[f"a/run/checkpoints/step-00000008/{name}"]) == nbytes
    assert found["a/run/checkpoints/latest"] == b"step-00000008\n"
    assert f"a/run/{LOCK}" not in found
    assert len(found["a/run/records.jsonl"].splitlines()) > 8


def test_a_lock_on_s3_is_created_once(bucket: Any) -> None:
    files = RemoteFiles("s3://bucket/run")
    with RemoteLock(files, print):
        with pytest.raises(FileExistsError):
            files.create(LOCK, b"")
        with pytest.raises(ConfigurationError, match="another run writes to s3://bucket/run"):
            RemoteLock(files, print).__enter__()


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(bucket: Any) -> None:
    with pytest.raises(ConfigurationError, match="s3://other/run cannot hold a run"):
        digest(run_dir="s3://other/run")
    with pytest.raises(ConfigurationError, match="there is no run at s3://bucket/none"):
        digest(resume="s3://bucket/none")
