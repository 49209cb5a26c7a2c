"""URLs as paths, and paths as URLs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import local_path, place_of, shown, url_of
from evener.core.text import from_here
from evener.errors import ConfigurationError

URLS = (
    "s3://bucket/run",
    "gs://bucket/deep/er/run.1",
    "memory://run",
    "file:///mnt/disk/run",
    "hdfs://host:9000/user/run",
    "sftp://me@host/run",
)


@pytest.mark.parametrize("url", URLS)
def test_a_path_is_that_of_one_url(url: str) -> None:
    path = local_path(url)
    assert path.is_absolute()
    assert url_of(path) == shown(path) == from_here(path) == url
    assert url_of(path / "checkpoints" / "best") == f"{url}/checkpoints/best"
    assert local_path(f"{url}/checkpoints/best") == path / "checkpoints" / "best"
    assert local_path(url + "/") == path


def test_other_paths_are_none(tmp_path: Path) -> None:
    root = local_path("s3://bucket").parent
    assert [url_of(path) for path in (tmp_path, Path("runs/a"), root, root.parent, Path())] == [None] * 5


@pytest.mark.parametrize(
    "url",
    [
        *("s3://../c", "s3://b/\x1b[2J", "s3://b/\0", "s3://%/c"),
        "s3://",
        "s3:///",
        "s3://b/../c",
        "s3://b//c",
        "s3://b/./c",
        "s3://b/c?d=e",
        "a::s3://b/c",
    ],
)
def test_what_is_no_directory_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no URL of a directory|is no URL"):
        local_path(url) if "::" not in url else local_path(f"s3://{url}")


@pytest.mark.parametrize("url", ["file://runs/a", "file://localhost/mnt/a", "local://runs/a", "FILE://~/a"])
def test_files_are_not_looked_for_below_the_working_directory(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"two slashes: give an absolute path"):
        local_path(url)


def test_a_password_is_neither_taken_nor_shown() -> None:
    with pytest.raises(ConfigurationError, match="holds a password") as refused:
        RunConfig(run_dir="sftp://me:secret@host/run")  # type: ignore[arg-type]
    assert "secret" not in str(refused.value)


def test_settings_take_urls_and_show_them() -> None:
    config = RunConfig(run_dir="s3://b/run", weights="s3://b/w.safetensors")  # type: ignore[arg-type]
    assert config.run_dir == local_path("s3://b/run")
    assert (config.as_dict()["run_dir"], config.as_dict()["weights"]) == (
        "s3://b/run",
        "s3://b/w.safetensors",
    )
    assert RunConfig(**{"run_dir": config.as_dict()["run_dir"]}) == config.replace(weights=None)
    assert url_of(pickle.loads(pickle.dumps(config)).run_dir) == "s3://b/run"
    with pytest.raises(ConfigurationError, match="offload_to is 's3://b/x', and must be local"):
        RunConfig(offload="optimizer", offload_to="s3://b/x")  # type: ignore[arg-type]


def test_a_path_that_was_a_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="'s3:/bucket/run', a URL that has lost a slash"):
        RunConfig(run_dir=Path("s3://bucket/run"))
    (tmp_path / "s3:").mkdir()
    assert place_of("run_dir", "s3:/bucket") == Path("s3:/bucket")  # a directory that is there
