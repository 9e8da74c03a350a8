"""What a child process that runs a turn reports to its worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from perdure.errors import Unavailable
from perdure.turns.lease.claim import Unequipped
from perdure.turns.run.child_watch import ChildEnd
from perdure.workers.isolated import child


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The two ends of a child's pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def _ended(monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int], body: Callable[[Any], None]) -> ChildEnd:
    """Run `body` as the turns of a child, which gets the child's report; returns what the worker reads."""
    monkeypatch.setattr(child, "_run", lambda _session_id, report: body(report))
    status = 0
    try:
        child.main(uuid4(), pipe[1])
    except SystemExit as error:
        status = int(error.code or 0)
    except OSError:
        status = 1
    return child._end(status, pipe[0], 2.0)


def test_an_error_after_the_turns_ran_is_no_second_report(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int]
) -> None:
    """If a flush or a `close` raises after the turns ran, the worker reads only that they ran."""

    def fails_at_the_end(report: Any) -> None:
        report.send()
        raise OSError("the flush failed")

    assert _ended(monkeypatch, pipe, fails_at_the_end) == ChildEnd(2.0)


def test_an_error_before_the_turns_ran_is_reported(monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int]) -> None:
    """The worker reads the error of a child that could not start."""

    def fails(_report: Any) -> None:
        raise OSError("no space")

    assert _ended(monkeypatch, pipe, fails) == ChildEnd(2.0, "OSError: no space")


def test_an_unreachable_server_is_reported_without_a_charge(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int]
) -> None:
    """The worker counts the time of a child that could not reach a server, and shows its error."""

    def reaches_no_server(_report: Any) -> None:
        raise Unavailable("Redis cannot be reached.")

    assert _ended(monkeypatch, pipe, reaches_no_server) == ChildEnd(2.0, "Redis cannot be reached.", charged=False)


def test_a_child_that_is_stopped_early_reports_nothing(pipe: tuple[int, int]) -> None:
    """SIGTERM before the child handles the signal costs the turn nothing."""
    assert child._end(-signal.SIGTERM, pipe[0], 2.0) == ChildEnd(2.0)


def test_a_child_that_leaves_its_session_reports_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int]
) -> None:
    """The worker reads the missing tool, however long its name is."""
    left = Unequipped("\N{GRINNING FACE}" * 500, 3)

    assert _ended(monkeypatch, pipe, lambda report: report.send(left=left)) == ChildEnd(2.0, left=left)
