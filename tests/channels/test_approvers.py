"""Who decides about waiting tool calls over HTTP and the WebSocket, and which of them a caller sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID, uuid4

import pytest
from fastapi import Request
from starlette.testclient import TestClient

from perdure import Agent, agent_tool, tool
from perdure.agents import Agents
from perdure.channels.http.app import create_app
from perdure.channels.http.auth import Authenticate, MayApprove
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.run.loop import Runner
from tests.channels.conftest import BASE_URL
from tests.channels.test_bad_input import refused
from tests.turns.broker import Broker
from tests.turns.scripted import Scripted, calls, says

SERVICE, ADMIN, ACME = "key-of-a-service", "key-of-the-admin", "key-of-the-service-of-acme"
STAFF = "boss"


@tool(requires_approval=True, approver="staff", effect="idempotent")
def refund(cents: int) -> str:
    """Refund an amount."""
    return f"refunded {cents}"


@tool(requires_approval=True, effect="idempotent")
def order(item: str) -> str:
    """Order an item."""
    return f"ordered {item}"


class _Model:
    """Calls the tools once for each turn."""

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        asks = request.messages[-1].role == "user"
        asked = calls(("refund", {"cents": 5}), ("order", {"item": "tea"}))
        return Scripted(asked if asks else says("It is done.")).respond(request, call)


class Shop:
    """A gateway, and users whose turns wait for the approval of a refund (`call_0`) and of an order (`call_1`)."""

    def __init__(self, client: TestClient, runtime: Runtime) -> None:
        self.client = client
        self.runtime = runtime

    def wait(self, user: str, tenant: str | None = None, **more: Any) -> str:
        """Run a turn of the user until it waits for approval; returns its id."""
        sent = accept(self.runtime, parse_incoming({"user_id": user, "text": "refund", **more}, tenant=tenant))
        runner = Runner(self.runtime, owner="test")
        runner.run(sent.session_id)
        runner.close()
        return str(sent.turn_id)

    def decide(self, who: str, turn_id: str, call_id: str = "call_0", **given: Any) -> Any:
        """Approve a call; returns the response."""
        body = {"call_id": call_id, "decision": "approve", **given}
        return self.client.post(f"/v1/turns/{turn_id}/approval", json=body, headers=_as(who))

    def listed(self, who: str, query: str = "") -> list[tuple[str, str]]:
        """The user and the tool of each call in the list."""
        answer = self.client.get(f"/v1/approvals{query}", headers=_as(who))
        assert answer.status_code == 200, answer.text
        return [(each["user_id"], each["tool"]) for each in answer.json()]


def _as(who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {who}"}


@pytest.fixture
def make(runtime: Runtime) -> Iterator[Callable[..., Shop]]:
    """A function that makes a shop with the given rules of its application."""
    settings = Settings(
        _env_file=None,
        api_keys=f"{SERVICE},acme={ACME}",  # type: ignore[arg-type]
        admin_keys=ADMIN,  # type: ignore[arg-type]
        secret_key="the secret of these tests, long enough",  # type: ignore[arg-type]
    )
    agents = Agents([Agent("assistant", "You help.", [refund, order])])
    runtime = replace(runtime, settings=settings, agents=agents, models=lambda _: _Model())  # type: ignore[arg-type, return-value]
    opened: list[TestClient] = []

    def make_shop(authenticate: Authenticate | None = None, may_approve: MayApprove | None = None) -> Shop:
        app = create_app(runtime, lambda: True, authenticate=authenticate, may_approve=may_approve)
        client = TestClient(app, base_url=BASE_URL)
        client.__enter__()
        opened.append(client)
        return Shop(client, runtime)

    yield make_shop
    for client in opened:
        client.__exit__(None, None, None)


def _visitor(request: Request) -> str:
    return request.headers["authorization"].removeprefix("Bearer ")


def _is_boss(user: str, approval: dict[str, Any]) -> bool:
    return user == STAFF and approval["tool"] == "refund"


def _token(shop: Shop, user: str, key: str = SERVICE) -> str:
    answer = shop.client.post("/v1/tokens", json={"user_id": user, "ttl_s": 60}, headers=_as(key))
    token: str = answer.json()["token"]
    return token


def test_a_user_token_decides_only_what_its_user_approves(make: Callable[..., Shop]) -> None:
    """The user cannot approve the user's own refund; a service key and an admin key can."""
    shop = make()
    turn_id = shop.wait("ana")
    ana, ben = _token(shop, "ana"), _token(shop, "ben")
    refused(shop.decide(ana, turn_id), 403, "FORBIDDEN")
    refused(shop.decide(ana, turn_id, decision="deny"), 403, "FORBIDDEN")
    refused(shop.decide(ben, turn_id), 404, "NOT_FOUND")
    refused(shop.decide(ACME, turn_id), 404, "NOT_FOUND")
    answer = shop.decide(ana, turn_id, "call_1").json()
    assert [(each["call_id"], each["approver"]) for each in answer["pending_approvals"]] == [("call_0", "staff")]
    assert [(each["call_id"], each["decided_by"]) for each in answer["decisions"]] == [("call_1", "user:ana")]
    decided = shop.decide(SERVICE, turn_id).json()
    assert [each["decided_by"] for each in decided["decisions"]] == ["service key", "user:ana"]
    assert shop.decide(ADMIN, shop.wait("ben")).status_code == 202


def test_a_caller_lists_the_calls_of_its_users(make: Callable[..., Shop]) -> None:
    """A key lists its tenant's calls, an operator lists all, and a token lists its user's."""
    shop = make()
    shop.wait("ana")
    shop.wait("ana", "acme")
    shop.wait("ben")
    ana, ben = [("ana", "refund"), ("ana", "order")], [("ben", "refund"), ("ben", "order")]
    assert shop.listed(SERVICE) == ana + ben
    assert shop.listed(SERVICE, "?user_id=ben") == ben
    assert shop.listed(SERVICE, "?user_id=nobody") == []
    assert shop.listed(ACME) == ana
    assert shop.listed(ADMIN) == ana + ana + ben
    assert shop.listed(ADMIN, "?tenant=acme") == ana
    assert shop.listed(_token(shop, "ben")) == ben
    assert shop.listed(_token(shop, "ana", ACME)) == ana
    refused(shop.client.get("/v1/approvals?user_id=ana", headers=_as(_token(shop, "ben"))), 404, "NOT_FOUND")
    refused(shop.client.get("/v1/approvals", headers=_as("a wrong key")), 401, "UNAUTHORIZED")


def test_a_long_list_has_pages(make: Callable[..., Shop]) -> None:
    """Each page but the last has the address of the next one."""
    shop = make()
    for user in ("ana", "ben"):
        shop.wait(user)
    seen: list[str] = []
    query = "limit=3"
    for _ in range(2):
        answer = shop.client.get(f"/v1/approvals?{query}", headers=_as(SERVICE))
        seen += [each["tool"] for each in answer.json()]
        link = answer.headers.get("link", "")
        query = link.partition("?")[2].partition(">")[0]
    assert seen == ["refund", "order"] * 2
    assert "link" not in answer.headers
    assert dict(parse_qsl(query)) == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_the_application_decides_who_approves(make: Callable[..., Shop], *, is_async: bool) -> None:
    """Staff of the application sees and approves what `may_approve` allows, and nothing else of the customer."""

    async def is_boss(user: str, approval: dict[str, Any]) -> bool:
        return _is_boss(user, approval)

    shop = make(_visitor, is_boss if is_async else _is_boss)
    turn_id = shop.wait("ana")
    refused(shop.decide("ana", turn_id), 403, "FORBIDDEN")
    for other in ("ben", STAFF):
        refused(shop.decide(other, turn_id, "call_1"), 404, "NOT_FOUND")
    refused(shop.decide("ben", turn_id), 404, "NOT_FOUND")
    refused(shop.decide(STAFF, str(uuid4())), 404, "NOT_FOUND")
    assert shop.listed("ben") == []
    assert shop.listed("ana") == [("ana", "refund"), ("ana", "order")]
    assert shop.listed(STAFF) == shop.listed(STAFF, "?user_id=ana") == [("ana", "refund")]
    assert shop.listed(STAFF, "?user_id=ben") == []
    refused(shop.client.get(f"/v1/turns/{turn_id}", headers=_as(STAFF)), 404, "NOT_FOUND")

    answer = shop.decide(STAFF, turn_id, arguments={"cents": 4})
    assert (answer.status_code, answer.json()["pending_approvals"], answer.json()["reply"]) == (202, [], None)
    assert "metadata" not in answer.json()
    assert shop.listed(STAFF) == []
    assert shop.decide("ana", turn_id, "call_1").status_code == 202
    turn = shop.client.get(f"/v1/turns/{turn_id}", headers=_as("ana")).json()
    assert [each["decided_by"] for each in turn["decisions"]] == ["user:boss", "user:ana"]


def test_the_call_of_an_agent_below_is_approved_in_the_turn_above(make: Callable[..., Shop]) -> None:
    """Staff of the application and the user decide by either turn, and the turn above shows what they see there."""
    shop = make(_visitor, _is_boss)
    below = Agent("assistant", "You help.", [refund, order])
    above = Agent("desk", "You ask.", [agent_tool(below, name="ask")])
    first = Scripted(calls(("ask", {"task": "Refund it."})))
    asking = replace(shop.runtime, agents=Agents([above]), models=lambda _: first, calls=Broker())
    turn_id = Shop(shop.client, asking).wait("ana")
    get = partial(shop.client.get, f"/v1/turns/{turn_id}", headers=_as("ana"))
    child = get().json()["children"][0]["turn_id"]
    runner = Runner(shop.runtime, owner="test")
    runner.run(UUID(child))
    runner.close()

    turn = get().json()
    names = {each["tool"]: each["call_id"] for each in turn["pending_approvals"]}
    assert (turn["status"], {each["turn_id"] for each in turn["pending_approvals"]}) == ("parked", {child})
    refused(shop.decide("ana", turn_id, names["refund"]), 403, "FORBIDDEN")
    refused(shop.decide("ben", turn_id, names["order"]), 404, "NOT_FOUND")
    refused(shop.decide(STAFF, turn_id, names["order"]), 404, "NOT_FOUND")
    assert shop.decide(STAFF, turn_id, names["refund"]).status_code == 202
    answer = shop.decide("ana", turn_id, names["order"]).json()
    assert (answer["pending_approvals"], [each["decided_by"] for each in answer["decisions"]]) == (
        [], ["user:boss", "user:ana"],
    )  # fmt: skip


def test_without_may_approve_nobody_approves_for_staff(make: Callable[..., Shop]) -> None:
    """The safe reading is the default: no user of a mounted gateway is staff."""
    shop = make(_visitor)
    turn_id = shop.wait("ana")
    refused(shop.decide("ana", turn_id), 403, "FORBIDDEN")
    refused(shop.decide(STAFF, turn_id), 404, "NOT_FOUND")
    assert shop.listed(STAFF) == []


def test_an_error_of_may_approve_allows_nothing_and_tells_nothing(make: Callable[..., Shop]) -> None:
    """An outsider gets the same answer for an existing and an unknown turn. The user's own approvals go on."""

    def broken(user: str, approval: dict[str, Any]) -> bool:
        raise RuntimeError("the application's directory is unavailable")

    shop = make(_visitor, broken)
    turn = shop.wait("ana")
    theirs, nothings = shop.decide("ben", turn), shop.decide("ben", str(uuid4()))
    assert (theirs.status_code, theirs.content) == (404, nothings.content)
    assert shop.listed("ben") == []
    assert shop.decide("ana", turn).status_code == 403
    assert shop.decide("ana", turn, "call_1").status_code == 202


def test_a_decider_sees_no_metadata_of_another_users_turn(make: Callable[..., Shop]) -> None:
    """The metadata of a message may hold what the application knows about its user."""
    shop = make(_visitor, _is_boss)
    turn = shop.wait("ana", metadata={"iban": "SECRET"})
    decided = shop.decide(STAFF, turn)
    assert (decided.status_code, "SECRET" in decided.text) == (202, False)


def test_may_approve_sees_the_arguments_that_would_run(make: Callable[..., Shop]) -> None:
    """Otherwise staff with a limit raises the amount while approving."""
    shop = make(_visitor, lambda user, approval: user == STAFF and approval["arguments"].get("cents", 99) <= 10)
    turn_id = shop.wait("ana")
    refused(shop.decide(STAFF, turn_id, arguments={"cents": 11}), 404, "NOT_FOUND")
    assert shop.decide(STAFF, turn_id).status_code == 202


def test_may_approve_never_reaches_another_tenant(make: Callable[..., Shop]) -> None:
    """A rule that allows everything allows only calls of the caller's tenant."""
    shop = make(may_approve=lambda *_: True)
    of_acme, of_none = shop.wait("ana", "acme"), shop.wait("ana")
    boss = _token(shop, STAFF, ACME)
    refused(shop.decide(boss, of_none), 404, "NOT_FOUND")
    assert len(shop.listed(boss)) == 2
    assert shop.decide(boss, of_acme).status_code == 202


def test_the_socket_follows_the_same_rules(make: Callable[..., Shop]) -> None:
    """The socket's frames `approve` and `deny` are another door to the same decision."""
    shop = make(_visitor, _is_boss)
    turn_id = shop.wait("ana")
    frame = {"type": "approve", "turn_id": turn_id, "call_id": "call_0", "ref": 1}
    for who, code in (("ana", "FORBIDDEN"), ("ben", "NOT_FOUND"), (STAFF, None)):
        with shop.client.websocket_connect("/v1/ws", headers=_as(who)) as socket:
            assert socket.receive_json()["type"] == "ready"
            socket.send_json(frame)
            assert socket.receive_json().get("code") == code, who


def test_the_stream_names_the_approver_and_the_decision(make: Callable[..., Shop]) -> None:
    """A page learns for whom a call waits, and who has decided while another call still waits."""
    shop = make(_visitor, _is_boss)
    turn_id = shop.wait("ana")
    with shop.client.websocket_connect("/v1/ws", headers=_as("ana")) as socket:
        assert socket.receive_json()["type"] == "ready"
        socket.send_json({"type": "follow", "turn_id": turn_id, "ref": 1})
        seen: list[tuple[str, str]] = []
        while len(seen) < 3:
            frame = socket.receive_json()
            if frame.get("event") == "approval_required":
                seen.append((frame["data"]["tool"], frame["data"]["approver"]))
            if frame.get("event") == "approval_decided":
                seen.append((frame["data"]["tool"], frame["data"]["decided_by"]))
            if len(seen) == 2 and frame["data"]["tool"] == "order":
                shop.decide(STAFF, turn_id)
        assert seen == [("refund", "staff"), ("order", "user"), ("refund", "user:boss")]
