"""A pruning run notifies the administrator, and may wait until the administrator approves its plan."""

from __future__ import annotations

import json
from datetime import timedelta
from uuid import UUID

import pytest

from perdure.casebank.runs import prune, state
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import Conflict, NotFound
from perdure.settings import PruneApproval
from tests.casebank.bank import (
    EXPECTED,
    Post,
    bank,
    details,
    statuses,
)

URL = "https://hooks.example/casebank"


def test_the_administrator_gets_the_plan_and_the_results(filled: Database, clock: MovedClock) -> None:
    """The administrator gets the plan before anything is removed, and the results afterwards."""
    active: list[int] = []
    post = Post()

    def notify(url: str, body: bytes) -> None:
        active.append(list(statuses(filled).values()).count("active"))
        post(url, body)

    parts = bank(filled, clock, notify_url=URL)
    result = prune.run(prune.RunContext(parts.database, parts.clock, parts.limits, notify, parts.pause))
    assert active == [8, 5]
    before, after = (json.loads(body) for _, body in post.sent)
    assert [url for url, _ in post.sent] == [URL, URL]
    assert (before["event"], after["event"]) == ("casebank.plan", "casebank.outcome")
    assert before["run_id"] == after["run_id"] == result["run_id"]
    assert (before["removed_cases"], before["spared_cases"], before["complete"]) == (1, 4, True)
    assert before["details"]["removed"] == ["low"]
    assert (before["approval_within_s"], after["approval_within_s"]) == (None, None)


def test_without_the_notice_nothing_is_removed(filled: Database, clock: MovedClock) -> None:
    """If a plan's notice is not delivered, the run removes nothing and ends as `withheld`. The next run starts anew."""
    post, pauses = Post(), list[float]()
    post.unavailable = True
    parts = bank(filled, clock, post, notify_url=URL)
    result = prune.run(prune.RunContext(parts.database, parts.clock, parts.limits, post, pauses.append))
    assert result["phase"] == "withheld"
    assert set(statuses(filled).values()) == {"active"}
    run = state.read_run(filled, UUID(result["run_id"]))
    assert "nothing was removed" in run["error"]
    assert run["outcome"]["removed_cases"] == 0
    assert len([each for each in pauses if each]) == 2, "three attempts"
    post.unavailable = False
    assert details(prune.run(parts)) == EXPECTED


def test_a_failed_notice_of_the_results_is_recorded(filled: Database, clock: MovedClock) -> None:
    """If the notice of the results cannot be delivered, the run still ends as `done`. The run's row has the error."""
    post = Post()

    def once(url: str, body: bytes) -> None:
        post.unavailable = bool(post.sent)
        post(url, body)

    parts = bank(filled, clock, notify_url=URL)
    result = prune.run(prune.RunContext(parts.database, parts.clock, parts.limits, once, parts.pause))
    assert result["phase"] == "done"
    assert "did not arrive" in state.read_run(filled, UUID(result["run_id"]))["error"]


def waiting(database: Database, clock: MovedClock) -> tuple[prune.RunContext, UUID]:
    """Start a run whose plan waits for approval. Returns the run's context and id."""
    parts = bank(database, clock, approval=PruneApproval.MANUAL, notify_url=URL)
    result = prune.run(parts)
    assert result["phase"] == "waiting_approval"
    assert result["removed_cases"] == 1, "the planned count"
    assert set(statuses(database).values()) == {"active"}
    return parts, UUID(result["run_id"])


def test_a_plan_that_is_approved_is_applied(filled: Database, clock: MovedClock) -> None:
    """A plan that waits for approval blocks other runs, and is applied after the approval.

    The plan's notice states the time limit for the approval.
    """
    parts, run_id = waiting(filled, clock)
    assert isinstance(parts.post, Post)
    assert json.loads(parts.post.sent[0][1])["approval_within_s"] == parts.limits.approval_expires_s
    with pytest.raises(Conflict, match="waiting_approval"):
        prune.run(parts)
    assert prune.advance(parts) is None
    state.approve(filled, run_id, "ana")
    result = prune.advance(parts)
    assert result is not None
    assert details(result) == EXPECTED
    assert state.read_run(filled, run_id)["decided_by"] == "ana"
    with pytest.raises(Conflict):
        state.approve(filled, run_id, "bob")
    with pytest.raises(NotFound):
        state.approve(filled, UUID(int=1), "bob")


def test_a_plan_that_is_rejected_is_void(filled: Database, clock: MovedClock) -> None:
    """A rejected plan is never applied, and a new run can start."""
    parts, run_id = waiting(filled, clock)
    state.reject(filled, run_id, "ana")
    assert prune.advance(parts) is None
    run = state.read_run(filled, run_id)
    assert (run["phase"], run["outcome"]) == ("rejected", None)
    with pytest.raises(Conflict):
        state.approve(filled, run_id, "bob")
    waiting(filled, clock)


def test_an_unapproved_plan_expires(filled: Database, clock: MovedClock) -> None:
    """A plan that is not approved in time expires, because its cases may have changed."""
    parts, run_id = waiting(filled, clock)
    clock.advance(timedelta(seconds=parts.limits.approval_expires_s + 1))
    with pytest.raises(Conflict, match="expired"):
        state.approve(filled, run_id, "ana")
    assert state.read_run(filled, run_id)["phase"] == "expired"
    _, another = waiting(filled, clock)
    assert another != run_id
    clock.advance(timedelta(seconds=parts.limits.approval_expires_s + 1))
    assert state.expire(filled) == 1


def test_an_empty_plan_needs_no_approval(database: Database, clock: MovedClock) -> None:
    """A run with an empty plan ends at once, even if plans need approval."""
    assert prune.run(bank(database, clock, approval=PruneApproval.MANUAL))["phase"] == "done"
