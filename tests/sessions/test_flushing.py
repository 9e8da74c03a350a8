"""A process that shuts down flushes each of its sessions once, under the session's fence and within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest

from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.workers.shutdown.flush import WorkerFlushed, flush
from tests.turns.harness import PATIENCE_S

TOUCHED = [(uuid4(), Fence(token, uuid4())) for token in (7, 3, 5)]
FIRST, SECOND, THIRD = (session_id for session_id, _ in TOUCHED)


class Recorder:
    """A flusher that records its calls.

    If `happens` contains a function for the session, the flusher also calls that function. The flusher returns `None`
    for a session in `leaves`, and `written` for other sessions.
    """

    def __init__(self, written: int = 1) -> None:
        self.written = written
        self.seen: list[tuple[UUID, Fence]] = []
        self.happens: dict[UUID, Callable[[], object]] = {}
        self.leaves: set[UUID] = set()

    def __call__(self, session_id: UUID, fence: Fence) -> int | None:
        self.seen.append((session_id, fence))
        self.happens.get(session_id, lambda: None)()
        return None if session_id in self.leaves else self.written


def _raising(error: Exception) -> Callable[[], object]:
    def happen() -> None:
        raise error

    return happen


def test_each_session_is_flushed_once_by_each_flusher_under_its_token() -> None:
    """Each flusher is called once for each session, in the given order and with the session's fence."""
    one, other = Recorder(1), Recorder(10)
    assert flush(TOUCHED, [one, other], PATIENCE_S) == WorkerFlushed(touched=3, sessions=3, written=33)
    assert one.seen == other.seen == TOUCHED


@pytest.mark.parametrize(("touched", "flushers"), [([], [Recorder()]), (TOUCHED, [])])
def test_without_anything_to_flush_the_flush_is_complete(
    touched: list[tuple[UUID, Fence]], flushers: list[Recorder]
) -> None:
    """A flush without sessions, or without flushers, is complete."""
    assert flush(touched, flushers, PATIENCE_S) == WorkerFlushed(len(touched), len(touched), 0)


def test_an_error_of_one_session_is_logged_and_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """A session whose flusher raises an error does not count as flushed. The other sessions are flushed."""
    one, other = Recorder(1), Recorder(10)
    one.happens[SECOND] = _raising(RuntimeError("damaged"))
    assert flush(TOUCHED, [one, other], PATIENCE_S) == WorkerFlushed(touched=3, sessions=2, written=32)
    assert one.seen == other.seen == TOUCHED
    assert caplog.messages == [f"session {SECOND} could not be flushed"]


def test_a_session_left_to_another_process_is_no_failure() -> None:
    """A session that another process has claimed is left to that process. The flush is complete without the session."""
    one, other = Recorder(1), Recorder(10)
    one.leaves.add(SECOND)
    flushed = flush(TOUCHED, [one, other], PATIENCE_S)
    assert flushed == WorkerFlushed(touched=3, sessions=2, written=32, left=1)
    assert str(flushed) == "flushed 2 of 3 sessions, 32 turns, 1 left to others"
    assert flushed.complete


def test_an_unavailable_server_ends_the_flush(caplog: pytest.LogCaptureFixture) -> None:
    """If a server is unavailable, the flush ends at once and does not try the remaining sessions."""
    flusher = Recorder()
    flusher.happens[SECOND] = _raising(Unavailable("Redis cannot be reached."))
    assert flush(TOUCHED, [flusher], PATIENCE_S) == WorkerFlushed(touched=3, sessions=1, written=1)
    assert flusher.seen == TOUCHED[:2]
    assert caplog.messages == ["the flush ended early: UNAVAILABLE: Redis cannot be reached."]


def test_a_flusher_that_hangs_is_abandoned() -> None:
    """If a flusher hangs, `flush` returns at the time limit. The remaining sessions are not flushed."""
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


def test_without_time_nothing_is_flushed() -> None:
    """With a time limit of 0 seconds, no session is flushed."""
    flusher = Recorder()
    assert flush(TOUCHED, [flusher], 0.0).sessions == 0
    assert flusher.seen == []
