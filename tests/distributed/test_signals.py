"""What becomes of a signal, whatever catches it on its way."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, suppress

import pytest

from evener.distributed.failure import failure_of
from evener.distributed.signals import asked, check, deferring, raising
from evener.errors import InterruptedRunError, RankError


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def raising_here() -> AbstractContextManager[None]:
    return raising([signal.SIGTERM], lambda: "step 3")


def test_a_signal_ends_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(InterruptedRunError, match="interrupted by SIGTERM at step 3") as caught,
        raising_here(),
    ):
        interrupt()
    assert caught.value.exit_status == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert asked() is None


def test_what_was_made_of_the_signal_on_its_way_is_no_news() -> None:
    """A collective that fails because the other ranks were asked to stop too, or that gathers errors as values."""

    def collective() -> None:
        try:
            interrupt()
        except InterruptedRunError as error:
            raise RankError(f"some rank raised {error!r}") from error

    with pytest.raises(InterruptedRunError) as caught, raising_here():
        collective()
    assert failure_of(caught.value, 0).kind == "interrupted"


def test_an_error_before_the_signal_is_the_news() -> None:
    def step() -> None:
        try:
            raise ValueError("a layer has no luck")
        finally:
            interrupt()

    with pytest.raises(InterruptedRunError) as caught, raising_here():
        step()
    assert "a layer has no luck" in failure_of(caught.value, 0).message


def test_an_error_that_a_library_deals_with_is_no_news() -> None:
    """psutil looks into a cache that is usually not there, and does its work in the ``except`` of that."""

    def wrapper() -> None:
        try:
            raise AttributeError("no cache")
        except AttributeError:
            try:
                interrupt()
            except ValueError as error:
                raise error from None

    with pytest.raises(InterruptedRunError) as caught, raising_here():
        wrapper()
    assert failure_of(caught.value, 0).kind == "interrupted"


def test_an_error_that_is_passed_on_is_the_news() -> None:
    def step() -> None:
        try:
            raise ValueError("a layer has no luck")
        except ValueError:
            interrupt()
            raise

    with pytest.raises(InterruptedRunError) as caught, raising_here():
        step()
    assert "a layer has no luck" in failure_of(caught.value, 0).message


def test_a_signal_that_was_caught_is_raised_again() -> None:
    def steps() -> None:
        check()
        with suppress(Exception):
            interrupt()
        assert asked() is not None
        check()

    with pytest.raises(InterruptedRunError), raising_here():
        steps()
    check()


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="no luck"), raising_here():
        raise ValueError("no luck")


class Interrupts:
    def __del__(self) -> None:
        interrupt()
        sum(range(10))  # Python looks for signals between two instructions


def test_a_signal_within_a_destructor_is_no_noise(capsys: pytest.CaptureFixture[str]) -> None:
    """Python cannot raise there, and shows it; the next step raises it again."""

    def block() -> None:
        with raising_here():
            Interrupts()
            check()

    with pytest.raises(InterruptedRunError):
        block()
    assert capsys.readouterr().err == ""


def test_the_first_signal_waits_and_the_second_does_not() -> None:
    def block() -> None:
        with deferring(9.0, lambda: "the end") as stop:
            interrupt()
            assert stop.number == signal.SIGTERM
            stop.time -= 1
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError, match="interrupted by SIGINT at the end"):
        block()
    assert asked() is None


def test_a_signal_that_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferring(9.0, lambda: "") as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)
