"""Which errors are retried, how often, and after which waits."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import (
    Abandoned,
    CircuitBreakerOpen,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    InvalidResponse,
    ProviderError,
    RateLimited,
)
from perdure.resilience.failures import FailureKind, requested_pause_s, verdict
from perdure.resilience.retry import backoff_s, retrying
from perdure.settings import RetrySettings


class Time:
    """The remaining time of a call. Only waits reduce it."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.waits: list[float] = []

    def remaining(self) -> float:
        if self.left <= 0:
            raise DeadlineExceeded("over")
        return self.left

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.left -= seconds


def failing(*errors: BaseException) -> Callable[[], str]:
    """Work that raises these errors, one per attempt, and then succeeds."""
    left = list(errors)

    def work() -> str:
        if left:
            raise left.pop(0)
        return "fine"

    return work


def run(work: Callable[[], str], time: Time, policy: RetrySettings | None = None) -> str:
    """Run `work` with retries. The default policy is the default settings without jitter."""
    return retrying("test", work, policy or RetrySettings(jitter=0), time, lambda: 0.5)


def caused_by(cause: BaseException, error: BaseException | None = None) -> BaseException:
    """`error` with `cause` as its cause. The default error does not say whether it is transient."""
    made = error or ProviderError("something failed")
    made.__cause__ = cause
    return made


class Answered(Exception):
    """An HTTP library's error for a response with `status_code`."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"status {status_code}")
        self.status_code = status_code


DOWN = ProviderError("down", transient=True)
VERDICTS: list[tuple[BaseException, FailureKind]] = [
    (RateLimited("429"), FailureKind.TRANSIENT),
    (asyncio.CancelledError(), FailureKind.ABANDONED),
    (caused_by(asyncio.CancelledError()), FailureKind.ABANDONED),
    (DeadlineExceeded("timeout"), FailureKind.TRANSIENT),
    (InvalidResponse("a page of some proxy"), FailureKind.TRANSIENT),
    (DOWN, FailureKind.TRANSIENT),
    (caused_by(ConnectionResetError()), FailureKind.TRANSIENT),
    (caused_by(caused_by(TimeoutError(), RuntimeError("wrapped"))), FailureKind.TRANSIENT),
    (caused_by(socket.gaierror(8, "no such name")), FailureKind.TRANSIENT),
    (caused_by(Answered(429)), FailureKind.TRANSIENT),
    (caused_by(Answered(503)), FailureKind.TRANSIENT),
    (ProviderError("no word why"), FailureKind.PERMANENT),
    (caused_by(FileNotFoundError()), FailureKind.PERMANENT),
    (RuntimeError("a bug"), FailureKind.PERMANENT),
    (ProviderError("refused", transient=False), FailureKind.REFUSED),
    (caused_by(ConnectionResetError(), ContextTooLong("long")), FailureKind.REFUSED),
    (caused_by(Answered(401)), FailureKind.REFUSED),
    (InvalidRequest("wrong"), FailureKind.REFUSED),
    (CircuitBreakerOpen(retry_after_s=1), FailureKind.REFUSED),
    (Abandoned("given up"), FailureKind.ABANDONED),
    (caused_by(Abandoned("given up")), FailureKind.ABANDONED),
    (KeyboardInterrupt(), FailureKind.ABANDONED),
]
NOT_TRANSIENT = [error for error, what in VERDICTS if what is not FailureKind.TRANSIENT]


def _ids(errors: Iterable[BaseException]) -> list[str]:
    """The test ids: each error with its cause."""
    return [f"{each!r}" + (f" from {each.__cause__!r}" if each.__cause__ else "") for each in errors]


@pytest.mark.parametrize(("error", "expected"), VERDICTS, ids=_ids(error for error, _ in VERDICTS))
def test_what_an_error_means(error: BaseException, expected: FailureKind) -> None:
    """`verdict` classifies an error. If an error itself cannot be classified, its causes are classified, in order."""
    assert verdict(error) is expected


def test_a_cycle_of_causes_ends() -> None:
    """If the causes of an error form a cycle, `verdict` and `requested_pause_s` return instead of looping forever."""
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert verdict(one) is FailureKind.PERMANENT
    assert requested_pause_s(one) is None


@pytest.mark.parametrize("error", NOT_TRANSIENT, ids=_ids(NOT_TRANSIENT))
def test_errors_that_are_not_transient_are_not_retried(error: BaseException) -> None:
    """Errors that are not transient, such as refused requests, cancelled calls and bugs, are not retried."""
    time = Time(100)
    with pytest.raises(type(error)):
        run(failing(error), time)
    assert time.waits == []


def test_work_is_retried_as_configured_with_growing_waits() -> None:
    """Waits grow exponentially up to the cap, and the last attempt's error is raised."""
    time = Time(100)
    errors = [ProviderError(str(number), transient=True) for number in range(6)]
    with pytest.raises(ProviderError) as caught:
        run(failing(*errors), time, RetrySettings(max_attempts=5, base_s=1, cap_s=3, jitter=0))
    assert caught.value is errors[4]
    assert time.waits == [1, 2, 3, 3]


def test_a_transient_failure_is_hidden_from_the_caller() -> None:
    """The caller does not notice a failure that a retry cures."""
    assert run(failing(DOWN, RateLimited("slow")), Time(100)) == "fine"


@pytest.mark.parametrize(("requested", "waited"), [(0.0, 0.2), (0.1, 0.2), (30.0, 30.0)])
def test_retry_after_is_obeyed(requested: float, waited: float) -> None:
    """A wait lasts as long as `Retry-After` or the backoff, whichever is longer. The cap limits only the backoff."""
    time = Time(100)
    wrapped = caused_by(RateLimited("slow", retry_after_s=requested), RuntimeError("wrapped"))
    assert run(failing(wrapped), time) == "fine"
    assert time.waits == [waited]


def test_a_retry_after_beyond_the_calls_time_is_an_error_at_once() -> None:
    """If `Retry-After` exceeds the call's remaining time, the error is raised without a wait."""
    time = Time(100)
    with pytest.raises(RateLimited):
        run(failing(RateLimited("slow", retry_after_s=3_600)), time)
    assert time.waits == []


@pytest.mark.parametrize("nonsense", [-5.0, math.nan, math.inf])
def test_an_invalid_retry_after_is_ignored(nonsense: float) -> None:
    """A negative or non-finite `Retry-After` is ignored."""
    time = Time(100)
    assert run(failing(RateLimited("slow", retry_after_s=nonsense)), time) == "fine"
    assert time.waits == [0.2]


def test_waits_stay_within_the_calls_time() -> None:
    """If a wait would use up the remaining time, the error is raised instead."""
    time = Time(0.5)
    with pytest.raises(ProviderError):
        run(failing(DOWN, DOWN, DOWN, DOWN), time, RetrySettings(max_attempts=10, jitter=0))
    assert time.waits == [0.2]
    with pytest.raises(DeadlineExceeded):
        run(failing(DOWN), Time(0))


def test_a_wait_ends_when_the_call_does() -> None:
    """A cancelled call ends its backoff at once."""

    class Ended(Time):
        def wait(self, seconds: float) -> None:
            raise Abandoned("given up")

    with pytest.raises(Abandoned):
        run(failing(DOWN), Ended(100))


POLICIES = st.builds(
    RetrySettings,
    base_s=st.floats(0.001, 1e6),
    multiplier=st.floats(1, 100),
    cap_s=st.floats(0.001, 1e6),
    jitter=st.floats(0, 1),
)


@given(POLICIES, st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_backoff_is_within_its_bounds(policy: RetrySettings, tried: int, drawn: float) -> None:
    """A backoff is between 0 and the cap. Jitter changes the backoff by at most the fraction `policy.jitter`."""
    plain = backoff_s(policy.model_copy(update={"jitter": 0}), tried, drawn)
    found = backoff_s(policy, tried, drawn)
    assert 0 <= found <= policy.cap_s
    assert abs(found - plain) <= plain * (policy.jitter + 1e-9)
    assert plain <= backoff_s(policy.model_copy(update={"jitter": 0}), tried + 1, drawn)
