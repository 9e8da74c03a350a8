"""The operator's routes: status, live sessions, pauses, usage, turns with their timelines, and deliveries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from starlette.testclient import TestClient

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.casebank.runs import prune, state
from perdure.channels.notices import bank_of
from perdure.clock import MovedClock
from perdure.observe.readings import Readings
from perdure.runtime import Runtime
from perdure.settings import CasebankSettings, PruneApproval
from perdure.tools.registry import ToolContext
from perdure.turns.lease.claim import claim
from perdure.turns.lease.tenure import Tenure
from perdure.turns.run.loop import Runner
from tests.casebank.bank import put
from tests.turns.scripted import Scripted, calls, says

Say = Callable[..., dict[str, Any]]
Run = Callable[[str], None]


class _Lost:
    """A source whose database does not answer."""

    def stuck(self, stuck_s: float, most: int) -> list[Any]:
        raise AssertionError("each statement would wait until its connection times out")


@tool(requires_approval=True, effect="unsafe")
def pay(amount: int, context: ToolContext) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@pytest.fixture
def agents() -> Agents:
    """An agent whose tool needs an approval."""
    return Agents([Agent("assistant", "You pay.", [pay])])


def test_the_status_waits_once_for_a_database_that_does_not_answer(client: TestClient) -> None:
    """If the readings tell that PostgreSQL does not answer, no further statement is tried."""
    state = client.app.state  # type: ignore[attr-defined]  # of the application
    state.latest, state.source = (lambda: Readings(failed={"server": "It cannot be reached."})), _Lost()
    found = client.get("/v1/status").json()
    assert (found["status"], found["stuck"]) == ("down", [])
    assert found["faults"][0]["message"] == "It cannot be reached."


def test_live_sessions_say_what_they_wait_for(client: TestClient, runtime: Runtime, say: Say) -> None:
    """A session that waits for a worker, one that a worker holds, and one that is paused; a settled one is missing."""
    waiting, held, paused = (say(user_id=user, conversation=user) for user in ("ann", "bo", "cy"))
    assert client.post("/v1/pauses", json={"user_id": "cy"}).json() == {"paused": True, "turns": 1}
    tenure = claim(runtime, UUID(held["session_id"]), "worker-7")
    assert isinstance(tenure, Tenure)
    claim(runtime, UUID(paused["session_id"]), "worker-7")
    found = {each["session_id"]: each for each in client.get("/v1/sessions/live").json()}
    assert {each["turn_id"] for each in found.values()} == {each["turn_id"] for each in (waiting, held, paused)}
    assert "no worker has claimed it" in found[waiting["session_id"]]["reason"]
    assert found[held["session_id"]]["reason"].startswith("held by worker-7 until")
    assert (found[held["session_id"]]["user_id"], found[held["session_id"]]["state"]) == ("bo", "thinking")
    assert found[paused["session_id"]]["reason"].startswith("paused")
    [first] = client.get("/v1/sessions/live?limit=1").json()
    assert first["session_id"] == waiting["session_id"]


def test_a_pause_ends_by_its_parts(client: TestClient, say: Say) -> None:
    """A pause is listed with its parts, and ended by the same ones. One without parts is refused."""
    say(user_id="ann")
    assert client.post("/v1/pauses", json={}).status_code == 400
    assert client.post("/v1/pauses", json={"tenant": "acme", "agent": "assistant"}).json()["turns"] == 0
    [listed] = client.get("/v1/pauses").json()
    assert (listed["tenant"], listed["user_id"], listed["agent"]) == ("acme", None, "assistant")
    assert client.delete("/v1/pauses?tenant=acme").status_code == 404
    assert client.delete("/v1/pauses?tenant=acme&agent=assistant").json() == {"paused": False, "turns": 0}
    assert client.get("/v1/pauses").json() == []


def test_the_condition_is_that_of_the_command(client: TestClient) -> None:
    """Without a worker, no message would be answered."""
    found = client.get("/v1/status").json()
    assert found["status"] == "down"
    assert any(fault["part"] == "workers" for fault in found["faults"])
    assert {"processes", "due", "amounts", "stuck", "redis", "unread"} <= found.keys()


@pytest.mark.parametrize("seconds", ["6e16", "nan", "inf", "-1"])
def test_a_time_that_no_interval_holds_is_refused(client: TestClient, seconds: str) -> None:
    """Such numbers are refused here, since PostgreSQL would refuse them as an error of the statement."""
    assert client.get(f"/v1/status?stuck_after={seconds}").status_code == 400


@pytest.mark.parametrize("given", [0, 1, "true", "no", None])
def test_a_dry_run_is_true_or_false(client: TestClient, given: object) -> None:
    """A number or a text is refused: the caller may have meant the other one."""
    assert client.post("/v1/deliveries/resend", json={"dry_run": given}).status_code == 400


def test_a_timeline_has_the_take_over_the_decision_and_the_steps(
    client: TestClient, runtime: Runtime, clock: MovedClock, say: Say
) -> None:
    """A worker is lost before the first reply, another one takes over; the call waits for a person, and runs."""
    runtime = _scripted(runtime, calls(("pay", {"amount": 5})), says("paid"))
    ids = say("pay", reply_to=None)
    turn_id, session_id = ids["turn_id"], UUID(ids["session_id"])
    assert isinstance(claim(runtime, session_id, "worker-1"), Tenure)
    clock.advance(timedelta(seconds=60))
    runner = Runner(runtime, owner="worker-2")
    runner.run(session_id)
    [pending] = client.get(f"/v1/turns/{turn_id}").json()["pending_approvals"]
    asked = client.get(f"/v1/turns/{turn_id}/timeline").json()
    [taken] = asked["takeovers"]
    assert (taken["owner"], taken["lost"]) == ("worker-2", "worker-1")
    assert [(call["tool"], call["status"], call["approver"]) for call in asked["calls"]] == [("pay", "asked", "user")]
    decided = {"call_id": pending["call_id"], "decision": "approve"}
    assert client.post(f"/v1/turns/{turn_id}/approval", json=decided).status_code == 202
    runner.run(session_id)
    runner.close()
    done = client.get(f"/v1/turns/{turn_id}/timeline").json()
    assert (done["status"], done["takeovers"], done["attempts"]) == ("done", [taken], 2)
    assert [(step["step"], step["calls"]) for step in done["steps"]] == [(1, 1), (2, 0)]
    [call] = done["calls"]
    assert (call["status"], call["decided_by"]) == ("done", "admin key")
    times = [done["accepted_at"], done["started_at"], taken["at"], done["steps"][0]["committed_at"], call["decided_at"]]
    assert times == sorted(times)
    assert client.get(f"/v1/turns/{uuid4()}/timeline").status_code == 404


def test_a_timeline_ends_before_the_next_turn(client: TestClient, say: Say, run: Run) -> None:
    """The steps of a turn are its own, in a session of several turns, also those of a cancelled one."""
    first = say("hello")
    run(first["session_id"])
    second = say("again")
    run(second["session_id"])
    for ids in (first, second):
        found = client.get(f"/v1/turns/{ids['turn_id']}/timeline").json()
        assert [step["step"] for step in found["steps"]] == [1]
    waiting = say("later")
    assert client.get(f"/v1/turns/{waiting['turn_id']}/timeline").json()["steps"] == []


def test_turns_are_listed_by_how_they_ended_and_tried_again(client: TestClient, say: Say, run: Run) -> None:
    """A cancelled turn is found by its status, and tried again once."""
    done, cancelled = say("hello"), say("stop", conversation="other")
    run(done["session_id"])
    client.post(f"/v1/turns/{cancelled['turn_id']}/cancel")
    for query, wanted in (
        ("", [cancelled, done]),
        ("?status=done", [done]),
        ("?status=cancelled", [cancelled]),
        ("?status=failed", []),
        ("?user_id=ann", [cancelled, done]),
        ("?user_id=bo", []),
        (f"?session_id={done['session_id']}", [done]),
    ):
        found = client.get(f"/v1/turns{query}").json()
        assert [each["turn_id"] for each in found] == [each["turn_id"] for each in wanted], query
    assert client.post(f"/v1/turns/{done['turn_id']}/retry").status_code == 409
    first, second = (client.post(f"/v1/turns/{cancelled['turn_id']}/retry") for _ in range(2))
    assert (first.status_code, first.json()["turn_id"]) == (202, second.json()["turn_id"])
    assert (first.json()["duplicate"], second.json()["duplicate"]) == (False, True)


def test_deliveries_are_listed_and_sent_again(client: TestClient, runtime: Runtime, say: Say, run: Run) -> None:
    """A failed delivery is found by its status, counted by its receiver, and due again."""
    sent = say("hello", reply_to={"url": "https://shop.example/replies"})
    run(sent["session_id"])
    [pending] = client.get("/v1/deliveries?status=pending").json()
    assert (pending["turn_id"], pending["target"]) == (sent["turn_id"], {"url": "https://shop.example/replies"})
    with runtime.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE deliveries SET status = 'failed', attempts = 12, last_error = 'down'")
    assert client.get("/v1/deliveries?status=pending").json() == []
    [failed] = client.get("/v1/deliveries?status=failed").json()
    assert (failed["delivery_id"], failed["last_error"]) == (pending["delivery_id"], "down")
    count = client.post("/v1/deliveries/resend", json={"to": "https://shop.example/*", "dry_run": True})
    assert (count.status_code, count.json()) == (202, {"deliveries": 1, "due": False})
    assert client.post("/v1/deliveries/resend", json={"to": "https://other.example/*"}).json()["deliveries"] == 0
    assert client.post("/v1/deliveries/resend", json={}).json() == {"deliveries": 1, "due": True}
    assert client.post(f"/v1/deliveries/{failed['delivery_id']}/resend").json() == {"deliveries": 1, "due": True}
    assert client.post(f"/v1/deliveries/{uuid4()}/resend").status_code == 404
    assert [each["status"] for each in client.get("/v1/deliveries").json()] == ["pending"]
    noted = [each["note"] for each in client.get("/v1/audit").json() if each["action"] == "deliveries.resend"]
    assert noted[-2:] == ["0 failed to https://other.example/*", "1 failed to https://shop.example/*, dry run"]


@pytest.mark.parametrize("by", ["user", "tenant", "agent", "model", "day"])
def test_usage_is_added_up(client: TestClient, say: Say, run: Run, by: str) -> None:
    """The sums of a turn are those of its replies."""
    run(say("hello")["session_id"])
    [row] = client.get(f"/v1/usage?by={by}").json()
    assert row["replies"] == 1
    if by in {"user", "agent"}:
        assert row["name"] == {"user": "ann", "agent": "assistant"}[by]
    assert client.get("/v1/usage?by=colour").status_code == 400


def test_usage_may_be_limited(client: TestClient, say: Say, run: Run) -> None:
    """Of many users, the first ones are those who cost most."""
    for user in ("ann", "bo", "cy"):
        run(say("hello", user_id=user)["session_id"])
    assert [len(client.get(f"/v1/usage?by=user{limit}").json()) for limit in ("", "&limit=2")] == [3, 2]
    assert client.get("/v1/usage?limit=0").status_code == 400


def test_an_operator_lists_the_schedules_of_all_users(client: TestClient) -> None:
    """Without a user, an operator gets the schedules of all users."""
    for user in ("ann", "bo"):
        body = {"user_id": user, "text": "tea", "cron": "0 17 * * *"}
        assert client.post("/v1/schedules", json=body).status_code == 201
    assert {each["user_id"] for each in client.get("/v1/schedules").json()} == {"ann", "bo"}
    assert client.get("/v1/schedule-entries").json() == []  # only a gateway process knows the entries


def test_a_report_has_the_texts_of_duplicates(client: TestClient, runtime: Runtime) -> None:
    """The report of a plan that waits for approval has both texts of a duplicate, a page at a time."""
    for number in range(3):
        put(runtime.database, f"c{number}", query="reset", vector=[1, 0, 0, 0], usage=9 - number, rate=90)
    limits = CasebankSettings(load_percent=100, approval=PruneApproval.MANUAL)
    planning = replace(runtime, settings=runtime.settings.model_copy(update={"casebank": limits}))
    run_id = state.request(runtime.database, runtime.clock, dry_run=False)
    prune.advance(bank_of(planning))
    path = f"/v1/consolidation/runs/{run_id}/report"
    merged = client.get(f"{path}?action=merge").json()
    assert [(each["case_id"], each["keeper_id"], each["keeper_query"]) for each in merged] == [
        ("c1", "c0", "reset"),
        ("c2", "c0", "reset"),
    ]
    assert client.get(f"{path}?action=merge&after={merged[0]['position']}").json() == merged[1:]


def _scripted(runtime: Runtime, *replies: Any) -> Runtime:
    model = Scripted(*replies)
    return replace(runtime, models=lambda _name: model)


def test_a_record_names_what_was_changed_for_a_user(client: TestClient) -> None:
    """A schedule by its id, a conversation by its key, and a link by its channel: its id may be a telephone number."""
    user = {"user_id": "ann"}
    made = client.post("/v1/schedules", json={**user, "text": "a secret", "cron": "0 7 * * *"})
    assert made.status_code == 201
    assert client.post("/v1/messages", json={**user, "text": "hi", "conversation": "tea"}).status_code == 202
    assert client.patch("/v1/conversations/tea", params=user, json={"title": "a secret"}).status_code == 200
    link = {**user, "channel": "telegram", "external_id": "a secret"}
    assert client.delete("/v1/links", params=link).status_code == 204
    recorded = client.get("/v1/audit").json()
    assert [(each["action"], each["target"], each["user_id"], each["note"]) for each in recorded] == [
        ("links.remove", None, "ann", "telegram"),
        ("conversations.change", "tea", "ann", None),
        ("schedules.add", None, "ann", made.json()["schedule_id"]),
    ]
    assert "a secret" not in str(recorded)
