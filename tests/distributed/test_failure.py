from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from evener.distributed.failure import (
    Failure,
    failure_of,
    is_communication_error,
    is_timeout,
    record_failure,
    recorded_failure,
)
from evener.errors import (
    ConfigurationError,
    DivergenceError,
    EvenerError,
    InterruptedRunError,
    RankError,
    RankTimeoutError,
    ShareError,
)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:36170"),
        RuntimeError("[..] Timed out waiting 5000ms for recv operation to complete"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        dist.DistNetworkError("Connection reset by peer"),
        ConnectionResetError("Connection reset by peer"),
        RankTimeoutError("rank 1 is late"),
    ],
)
def test_what_collectives_raise_is_known(error: BaseException) -> None:
    assert is_communication_error(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA out of memory"),
        ValueError("timeout must be positive"),
        KeyError("store"),
        ConfigurationError("timeout_seconds is 0"),
    ],
)
def test_what_a_rank_does_wrong_by_itself_is_no_communication_error(error: BaseException) -> None:
    assert not is_communication_error(error)


def connect_to_nobody() -> None:
    with socket.socket() as nobody:  # bound, so that nobody else listens there
        nobody.bind(("127.0.0.1", 0))
        socket.create_connection(nobody.getsockname())


def wait_for_a_key() -> None:
    dist.HashStore().wait(["missing"], timedelta(milliseconds=1))


def caught(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError


def test_errors_of_a_data_set_with_the_words_of_collectives_are_its_own() -> None:
    """The same words are in errors of what connects ranks, and of what reads samples over a network."""
    assert is_communication_error(caught(wait_for_a_key))
    assert not is_communication_error(caught(connect_to_nobody))
    for own in (RuntimeError("DataLoader timed out after 3 seconds"), TimeoutError("timed out")):
        assert not is_communication_error(raised(own))


def test_an_error_that_follows_from_a_lost_rank_is_no_rank_s_own() -> None:
    def wait_and_say() -> None:
        try:
            wait_for_a_key()
        except RuntimeError as error:
            raise RuntimeError("a timeout of the store") from error

    assert is_communication_error(caught(wait_and_say))


def test_a_late_rank_and_a_lost_one_are_told_apart() -> None:
    assert is_timeout(RuntimeError("Timed out waiting 5000ms for recv operation"))
    assert not is_timeout(RuntimeError("Connection closed by peer"))


def test_the_cause_goes_before_what_followed_from_it_however_early_that_was() -> None:
    consequences = [
        failure_of(RuntimeError("Connection closed by peer"), 0),
        failure_of(raised(InterruptedRunError("stopped", 15)), 3),
        Failure(4, "ended", "was ended", time=0.0),
    ]
    cause = failure_of(raised(IndexError("7")), 2)
    assert min([*consequences, cause], key=lambda failure: failure.order) is cause
    assert min([Failure(1, "killed", "was killed", time=9e9), *consequences], key=lambda f: f.order).rank == 1


def test_the_first_of_two_causes_is_told() -> None:
    first, second = Failure(1, "error", "", time=1.0), Failure(0, "exit", "", time=2.0)
    assert min([second, first], key=lambda failure: failure.order) is first


def test_an_unexpected_exception_arrives_with_its_rank_and_traceback() -> None:
    error = failure_of(raised(IndexError("7")), 2).to_error()
    assert isinstance(error, RankError)
    assert str(error).startswith("rank 2 raised IndexError: 7\n\nTraceback")
    assert "in raised" in str(error)
    assert error.exit_status == 1


@pytest.mark.parametrize("kind", [ConfigurationError, ShareError, DivergenceError, EvenerError])
def test_errors_of_evener_arrive_as_what_they_are(kind: type[EvenerError]) -> None:
    error = failure_of(raised(kind("what was seen")), 2).to_error()
    assert type(error) is kind
    assert str(error) == "rank 2: what was seen"


def test_errors_that_name_their_ranks_arrive_unchanged() -> None:
    for error in (RankTimeoutError("rank 1 is late"), RankError("rank 1 is gone")):
        assert str(failure_of(raised(error), 0).to_error()) == str(error)


def test_the_rank_that_is_the_cause_arrives_with_the_error() -> None:
    late = RankTimeoutError("rank 0 waits")
    late.rank = 3
    errors = (IndexError("7"), ShareError("shares"), late, RankTimeoutError("rank 1 is late"))
    assert [failure_of(raised(error), 2).to_error().rank for error in errors] == [2, 2, 3, None]


def test_an_interruption_arrives_with_its_signal() -> None:
    for error in (InterruptedRunError("stopped", 15), KeyboardInterrupt()):
        again = failure_of(raised(error), 0).to_error()
        assert isinstance(again, InterruptedRunError)
    assert again.exit_status == 130


def test_an_exit_arrives_with_its_status() -> None:
    error = failure_of(SystemExit(3), 1).to_error()
    assert (str(error), error.exit_status) == ("rank 1 ended with status 3", 3)
    error = failure_of(SystemExit("no data here"), 1).to_error()
    assert (str(error), error.exit_status) == ("rank 1 ended: no data here", 1)


def test_a_failure_survives_the_agents_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    failure = record_failure(raised(ShareError("shares are 0.5, 0.6")), 1)
    document = json.loads(path.read_text())
    assert recorded_failure(document) == failure
    assert int(document["message"]["extraInfo"]["timestamp"]) == int(failure.time)


def test_an_error_file_of_another_writer_is_not_read_as_ours() -> None:
    assert recorded_failure({"message": "<NONE>"}) is None
    assert recorded_failure({"message": {"message": "x", "extraInfo": {"timestamp": "1"}}}) is None


def test_a_failure_that_the_launcher_cannot_be_told_is_said_on_the_spot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert record_failure(raised(ShareError("shares are 0.5, 0.6")), 1).exit_status == ShareError.exit_status
    told = capsys.readouterr().err
    assert "evener: rank 1: shares are 0.5, 0.6\nthe launcher's directory cannot be written" in told
    assert "TMPDIR names another place" in told


def test_a_full_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(OSError(errno.ENOSPC, "No space left on device"))
    assert "make room on the device" in str(failure_of(error, 0).to_error())
    # The error names no file.
    monkeypatch.setattr("evener.distributed.failure._SEMAPHORES", Path(__file__).name)
    assert "No space left on device: /dev/shm, where workers" in str(failure_of(error, 0).to_error())
