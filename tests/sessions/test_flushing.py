"""The flush of a process that leaves: each session once, in order, under its token, within its time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest

from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.workers.shutdown.flush import Flushed, flush
from tests.turns.harness import PATIENCE_S

TOUCHED = [(uuid4(), Fence(token, uuid4())) for token in (7, 3, 5)]
FIRST, SECOND, THIRD = (session_id for session_id, _ in TOUCHED)


class Recorder:
    """A flusher that writes `written` for each session, after whatever is to happen for it."""

    def __init__(self, written: int = 1) -> None:
        self.written = written
        self.seen: list[tuple[UUID, Fence]] = []
        self.happens: dict[UUID, Callable[[], object]] = {}
        self.leaves: set[UUID] = set()

    def __call__(self, session_id: UUID, fence: Fence) -> int | None:
        """Flush."""
        self.seen.append((session_id, fence))
        self.happens.get(session_id, lambda: None)()
        return None if session_id in self.leaves else self.written


def _raising(error: Exception) -> Callable[[], object]:
    def happen() -> None:
        raise error

    return happen


def test_each_session_is_flushed_once_by_each_flusher_under_its_token() -> None:
    """In the order given, which is the latest first."""
    one, other = Recorder(1), Recorder(10)
    assert flush(TOUCHED, [one, other], PATIENCE_S) == Flushed(touched=3, sessions=3, written=33)
    assert one.seen == other.seen == TOUCHED


@pytest.mark.parametrize(("touched", "flushers"), [([], [Recorder()]), (TOUCHED, [])])
def test_nothing_to_flush_is_all_of_it(touched: list[tuple[UUID, Fence]], flushers: list[Recorder]) -> None:
    """The flush is complete in a process that did nothing, or that has no Redis."""
    assert flush(touched, flushers, PATIENCE_S) == Flushed(len(touched), len(touched), 0)


def test_an_error_of_one_session_is_told_and_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """That session is not counted as flushed, so that the shutdown's line in the log is a warning."""
    one, other = Recorder(1), Recorder(10)
    one.happens[SECOND] = _raising(RuntimeError("damaged"))
    assert flush(TOUCHED, [one, other], PATIENCE_S) == Flushed(touched=3, sessions=2, written=32)
    assert one.seen == other.seen == TOUCHED
    assert caplog.messages == [f"session {SECOND} could not be flushed"]


def test_what_is_left_to_others_is_seen_to_and_not_flushed() -> None:
    """The process that has claimed the session since flushes it: no warning at this one's shutdown."""
    one, other = Recorder(1), Recorder(10)
    one.leaves.add(SECOND)
    flushed = flush(TOUCHED, [one, other], PATIENCE_S)
    assert flushed == Flushed(touched=3, sessions=2, written=32, left=1)
    assert str(flushed) == "flushed 2 of 3 sessions, 32 entries, 1 left to others"
    assert flushed.complete


def test_a_server_that_is_away_ends_the_flush(caplog: pytest.LogCaptureFixture) -> None:
    """It is not asked again for each of ten thousand sessions."""
    flusher = Recorder()
    flusher.happens[SECOND] = _raising(Unavailable("Redis cannot be reached."))
    assert flush(TOUCHED, [flusher], PATIENCE_S) == Flushed(touched=3, sessions=1, written=1)
    assert flusher.seen == TOUCHED[:2]
    assert caplog.messages == ["the flush ended early: Redis cannot be reached."]


def test_a_flusher_that_hangs_is_left_behind() -> None:
    """A server that has fallen silent keeps no process from leaving, and nothing is begun behind it."""
    opened, ended = threading.Event(), threading.Event()
    flusher = Recorder()

    def hang() -> None:
        opened.wait(PATIENCE_S)
        ended.set()

    flusher.happens[SECOND] = hang
    flushed = flush(TOUCHED, [flusher], 0.05)
    assert (flushed.touched, flushed.sessions) == (3, 1)
    assert not ended.is_set()
    opened.set()
    assert ended.wait(PATIENCE_S)
    for thread in threading.enumerate():
        if thread.name == "perdure-flush":
            thread.join(PATIENCE_S)
    assert flusher.seen == TOUCHED[:2]


def test_no_time_is_no_flush() -> None:
    """The hard limit is near."""
    flusher = Recorder()
    assert flush(TOUCHED, [flusher], 0.0).sessions == 0
    assert flusher.seen == []
