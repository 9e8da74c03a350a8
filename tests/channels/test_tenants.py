"""Tenants share no data. The tests call each route about a user's data with the keys of other tenants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from httpx2 import Response
from sqlalchemy import text
from starlette.testclient import TestClient

from perdure.access.tenants import everybodys, user_key
from perdure.casebank.cases import NewCase, add
from perdure.channels.http.app import create_app
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.turns.run.loop import Runner
from perdure.users.identities import mint_code, redeem
from tests.channels.conftest import BASE_URL
from tests.memory.remembering import add_memory

TENANTS = ("acme", "bolt", None)
SERVICES = {tenant: f"service-key-of-{tenant}" for tenant in TENANTS}
ADMINS = {tenant: f"administrator-of-{tenant}" for tenant in TENANTS}
QUESTION = "where is the spare key hidden"
NOT_THERE = 404


@dataclass(frozen=True)
class Ana:
    """A tenant's user `ana`: the secret in her message, and the ids of her turn, session and schedule."""

    tenant: str | None
    secret: str
    turn_id: str
    session_id: str
    schedule_id: str
    file_id: str = ""
    memory_id: str = ""

    @property
    def traces(self) -> tuple[str, ...]:
        """The texts that no answer to another tenant may contain."""
        return (self.secret, self.turn_id, self.session_id, "\x1f", "\\u001f")


class Tenants:
    """A gateway with keys of two tenants and keys without a tenant.

    Each tenant has its own user `ana`. A third `ana` has no tenant.
    """

    def __init__(self, client: TestClient, anas: dict[str | None, Ana], runtime: Runtime) -> None:
        self._client = client
        self.anas = anas
        self.runtime = runtime

    def ask(self, key: str, method: str, path: str, **given: Any) -> Response:
        """Send a request with this key; returns the response."""
        headers = {"Authorization": f"Bearer {key}"}
        answer: Any = self._client.request(method, path, headers=headers, **given)
        return answer  # type: ignore[no-any-return]

    def others(self, ana: Ana) -> list[str]:
        """The keys that have no access to this user: service and admin keys of the other tenants."""
        others = [tenant for tenant in TENANTS if tenant != ana.tenant]
        return [SERVICES[tenant] for tenant in others] + [ADMINS[tenant] for tenant in others if tenant]

    def routes(self) -> set[tuple[str, str]]:
        """The method and path of each route in the OpenAPI document."""
        app: Any = self._client.app
        return {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}

    def kept(self, ana: Ana) -> Any:
        """The tables of this user's export, requested with the operator's key."""
        query = {"tenant": ana.tenant} if ana.tenant else {}
        answer = self.ask(ADMINS[None], "GET", "/v1/users/ana/export", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()["tables"]


@pytest.fixture
def tenants(runtime: Runtime) -> Iterator[Tenants]:
    """A gateway on which each `ana` has sent a message, got a reply and rated it."""
    services = ",".join(key if tenant is None else f"{tenant}={key}" for tenant, key in SERVICES.items())
    admins = ",".join(key if tenant is None else f"{tenant}={key}" for tenant, key in ADMINS.items())
    settings = Settings(_env_file=None, api_keys=services, admin_keys=admins)  # type: ignore[arg-type]
    runtime = replace(runtime, settings=settings)
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as client:
        made = Tenants(client, {}, runtime)
        runner = Runner(runtime, owner="test")
        for tenant in TENANTS:
            made.anas[tenant] = _live(made, runner, tenant)
        runner.close()
        yield made


def _live(tenants: Tenants, runner: Runner, tenant: str | None) -> Ana:
    secret = f"under the {tenant or 'plain'} flowerpot"
    key = SERVICES[tenant]
    message = {
        "user_id": "ana",
        "text": f"{QUESTION}, it is {secret}",
        "message_id": "the same",
        "conversation": "of ana",
    }
    sent = tenants.ask(key, "POST", "/v1/messages", json=message)
    assert sent.status_code == 202, sent.text
    ids = sent.json()
    runner.run(UUID(ids["session_id"]))
    rated = tenants.ask(key, "POST", f"/v1/turns/{ids['turn_id']}/feedback", json={"score": 1})
    assert rated.status_code == 202, rated.text
    database = tenants.runtime.database
    for external_id in ("1", secret):
        redeem(database, "telegram", external_id, mint_code(database, user_key(tenant, "ana")).code, tenant)
    reminder = {"user_id": "ana", "text": secret, "cron": "30 7 * * *"}
    scheduled = tenants.ask(key, "POST", "/v1/schedules", json=reminder)
    assert scheduled.status_code == 201, scheduled.text
    file = tenants.ask(key, "POST", "/v1/files?user_id=ana", content=secret.encode()).json()
    memory_id = add_memory(tenants.runtime, user_key(tenant, "ana"), secret)
    schedule_id = scheduled.json()["schedule_id"]
    return Ana(tenant, secret, ids["turn_id"], ids["session_id"], schedule_id, file["file_id"], memory_id)


@dataclass(frozen=True)
class ById:
    """A route with an id in its path or body. Other tenants get the same 404 as for an unknown id."""

    path: Callable[[Ana], str]
    body: Callable[[Ana], dict[str, Any]] | None = None
    ends: bool = False  # the route deletes its target, so only the first call finds it
    missing: Callable[[], Ana] = lambda: Ana(None, "", *(str(uuid4()) for _ in range(5)))


@dataclass(frozen=True)
class ByUser:
    """A route that names a user. With another tenant's key, the same name means a different user."""

    path: str
    body: dict[str, Any] | None = None
    shows: bool = True
    """Whether the response to the user's own key contains the secret."""


class Fleet:
    """A route about the whole installation. A tenant's keys are refused."""


class Open:
    """A route that needs no key and shows no user's data."""


class Everyone:
    """A route without a `user_id`.

    Some of these routes show no user's data. The others identify the user in another way and have their own tests.
    """


def with_unknown_ids(path: str) -> str:
    """The path of a route about the installation, with ids that no object has."""
    for name in ("run_id", "turn_id", "delivery_id"):
        path = path.replace(f"{{{name}}}", str(uuid4()))
    return path.replace("{name}", "a").replace("{case_id}", "a")


NEAR = f"?q={QUESTION}"
SAYS = {"user_id": "ana", "text": "hello", "message_id": "the same"}

ROUTES: dict[tuple[str, str], ById | ByUser | Fleet | Open | Everyone] = {
    ("GET", "/healthz"): Open(),
    ("GET", "/readyz"): Open(),
    ("GET", "/metrics"): Fleet(),
    ("POST", "/v1/messages"): ByUser("/v1/messages", SAYS, shows=False),
    ("GET", "/v1/turns/{turn_id}"): ById(lambda ana: f"/v1/turns/{ana.turn_id}?wait=0.1"),
    ("GET", "/v1/turns/{turn_id}/events"): ById(lambda ana: f"/v1/turns/{ana.turn_id}/events"),
    ("GET", "/v1/turns/{turn_id}/prompt"): ById(lambda ana: f"/v1/turns/{ana.turn_id}/prompt"),
    ("POST", "/v1/turns/{turn_id}/cancel"): ById(lambda ana: f"/v1/turns/{ana.turn_id}/cancel"),
    ("POST", "/v1/turns/{turn_id}/approval"): ById(
        lambda ana: f"/v1/turns/{ana.turn_id}/approval", lambda _: {"call_id": "a", "decision": "deny"}
    ),
    ("POST", "/v1/turns/{turn_id}/results"): ById(
        lambda ana: f"/v1/turns/{ana.turn_id}/results", lambda _: {"call_id": "a", "result": 1}
    ),
    ("GET", "/v1/approvals"): ByUser("/v1/approvals?user_id=ana", shows=False),
    ("POST", "/v1/turns/{turn_id}/feedback"): ById(
        lambda ana: f"/v1/turns/{ana.turn_id}/feedback", lambda _: {"score": -1}
    ),
    ("GET", "/v1/sessions"): ByUser("/v1/sessions?user_id=ana", shows=False),
    ("GET", "/v1/sessions/{session_id}"): ById(lambda ana: f"/v1/sessions/{ana.session_id}"),
    ("GET", "/v1/sessions/{session_id}/messages"): ById(lambda ana: f"/v1/sessions/{ana.session_id}/messages"),
    ("GET", "/v1/sessions/{session_id}/queue"): ById(lambda ana: f"/v1/sessions/{ana.session_id}/queue"),
    ("POST", "/v1/sessions/{session_id}/end"): ById(lambda ana: f"/v1/sessions/{ana.session_id}/end"),
    ("POST", "/v1/sessions/{session_id}/fork"): ById(lambda ana: f"/v1/sessions/{ana.session_id}/fork"),
    ("GET", "/v1/models"): Everyone(),
    ("GET", "/v1/models/{name}"): Everyone(),
    ("POST", "/v1/chat/completions"): Everyone(),  # see tests/openai_routes
    ("POST", "/v1/responses"): Everyone(),
    ("GET", "/v1/responses/{response_id}"): ById(lambda ana: f"/v1/responses/resp_{ana.turn_id.replace('-', '')}"),
    ("POST", "/v1/responses/{response_id}/cancel"): ById(
        lambda ana: f"/v1/responses/resp_{ana.turn_id.replace('-', '')}/cancel"
    ),
    ("GET", "/v1/conversations"): ByUser("/v1/conversations?user_id=ana"),
    ("PATCH", "/v1/conversations/{conversation}"): ByUser(
        "/v1/conversations/of%20ana?user_id=ana", {"archived": False}
    ),
    ("POST", "/v1/schedules"): ByUser(
        "/v1/schedules", {"user_id": "ana", "text": "x", "cron": "0 7 * * *"}, shows=False
    ),
    ("GET", "/v1/schedules"): ByUser("/v1/schedules?user_id=ana"),
    ("PATCH", "/v1/schedules/{schedule_id}"): ById(
        lambda ana: f"/v1/schedules/{ana.schedule_id}", lambda _: {"paused": True}
    ),
    ("DELETE", "/v1/schedules/{schedule_id}"): ById(lambda ana: f"/v1/schedules/{ana.schedule_id}", ends=True),
    ("POST", "/v1/files"): ByUser("/v1/files?user_id=ana", {"a": "text"}, shows=False),
    ("GET", "/v1/files/{file_id}/content"): ById(lambda ana: f"/v1/files/{ana.file_id}/content"),
    ("GET", "/v1/memories"): ByUser("/v1/memories?user_id=ana"),
    ("GET", "/v1/memories/{memory_id}"): ById(lambda ana: f"/v1/memories/{ana.memory_id}"),
    ("PATCH", "/v1/memories/{memory_id}"): ById(
        lambda ana: f"/v1/memories/{ana.memory_id}", lambda _: {"content": "It is elsewhere."}
    ),
    ("DELETE", "/v1/memories/{memory_id}"): ById(lambda ana: f"/v1/memories/{ana.memory_id}", ends=True),
    ("POST", "/v1/memory/search"): ByUser("/v1/memory/search", {"user_id": "ana", "query": QUESTION}),
    ("POST", "/v1/memory/consolidate"): ById(
        lambda _: "/v1/memory/consolidate", lambda ana: {"session_id": ana.session_id}
    ),
    ("GET", "/v1/users/{user_id}/export"): ByUser("/v1/users/ana/export"),
    ("DELETE", "/v1/users/{user_id}"): ByUser("/v1/users/ana", shows=False),
    ("POST", "/v1/tokens"): ByUser("/v1/tokens", {"user_id": "ana", "ttl_s": 60}, shows=False),
    ("POST", "/v1/links"): ByUser("/v1/links", {"user_id": "ana"}, shows=False),
    ("GET", "/v1/links"): ByUser("/v1/links?user_id=ana"),
    ("DELETE", "/v1/links"): ByUser("/v1/links?user_id=ana&channel=telegram&external_id=1", shows=False),
    ("GET", "/v1/casebank/search"): ByUser(f"/v1/casebank/search{NEAR}&user_id=ana"),
    ("POST", "/v1/casebank/cases/{case_id}/share"): Fleet(),
    ("DELETE", "/v1/casebank/cases/{case_id}/share"): Fleet(),
    ("GET", "/v1/audit"): Fleet(),
    ("GET", "/v1/status"): Fleet(),
    ("GET", "/v1/sessions/live"): Fleet(),
    ("GET", "/v1/pauses"): Fleet(),
    ("POST", "/v1/pauses"): Fleet(),
    ("DELETE", "/v1/pauses"): Fleet(),
    ("GET", "/v1/usage"): Fleet(),
    ("GET", "/v1/schedule-entries"): Fleet(),
    ("GET", "/v1/deliveries"): Fleet(),
    ("POST", "/v1/deliveries/{delivery_id}/resend"): Fleet(),
    ("POST", "/v1/deliveries/resend"): Fleet(),
    ("GET", "/v1/turns"): Fleet(),
    ("GET", "/v1/turns/{turn_id}/timeline"): Fleet(),
    ("POST", "/v1/turns/{turn_id}/retry"): Fleet(),
    ("GET", "/v1/consolidation/runs/{run_id}/report"): Fleet(),
    ("GET", "/v1/breakers"): Fleet(),
    ("POST", "/v1/breakers/{name}/reset"): Fleet(),
    ("POST", "/v1/consolidation/run"): Fleet(),
    ("POST", "/v1/consolidation/dry-run"): Fleet(),
    ("GET", "/v1/consolidation/runs"): Fleet(),
    ("GET", "/v1/consolidation/runs/{run_id}"): Fleet(),
    ("POST", "/v1/consolidation/runs/{run_id}/approve"): Fleet(),
    ("POST", "/v1/consolidation/runs/{run_id}/reject"): Fleet(),
    ("POST", "/v1/consolidation/restore/{case_id}"): Fleet(),
}

BY_ID = [(method, path, kind) for (method, path), kind in ROUTES.items() if isinstance(kind, ById)]
BY_USER = [(method, path, kind) for (method, path), kind in ROUTES.items() if isinstance(kind, ByUser)]
FLEET = [(method, path) for (method, path), kind in ROUTES.items() if isinstance(kind, Fleet)]


def test_every_route_is_in_the_matrix(tenants: Tenants) -> None:
    """`ROUTES` contains every route of the gateway. A new route must be added to it."""
    assert tenants.routes() == set(ROUTES)


@pytest.mark.long
@pytest.mark.parametrize(("method", "path", "route"), BY_ID, ids=[f"{method} {path}" for method, path, _ in BY_ID])
def test_an_id_of_another_tenant_does_not_exist(tenants: Tenants, method: str, path: str, route: ById) -> None:
    """A request with another tenant's id gets the same 404 as one with an unknown id, and changes nothing."""
    for ana in tenants.anas.values():
        before = tenants.kept(ana)
        for key in tenants.others(ana):
            theirs, nothings = (
                tenants.ask(key, method, route.path(whose), json=route.body and route.body(whose))
                for whose in (ana, route.missing())
            )
            assert (theirs.status_code, theirs.content) == (NOT_THERE, nothings.content), (path, key)
            assert not [trace for trace in ana.traces if trace in theirs.text]
        assert tenants.kept(ana) == before
        for key in (SERVICES[ana.tenant], ADMINS[ana.tenant], ADMINS[None])[: 1 if route.ends else None]:
            own = tenants.ask(key, method, route.path(ana), json=route.body and route.body(ana))
            assert own.content != nothings.content, (path, key, own.text)


@pytest.mark.long
@pytest.mark.parametrize(("method", "path", "route"), BY_USER, ids=[f"{method} {path}" for method, path, _ in BY_USER])
def test_a_user_of_another_tenant_is_another_user(tenants: Tenants, method: str, path: str, route: ByUser) -> None:
    """With another tenant's key, the same `user_id` names another user.

    The response does not show the first user's data, and the request does not change it.
    """
    ana = tenants.anas["acme"]
    before = tenants.kept(ana)
    if route.shows:
        assert ana.secret in tenants.ask(SERVICES["acme"], method, route.path, json=route.body).text, path
    for key in tenants.others(ana):
        answer = tenants.ask(key, method, route.path, json=route.body)
        assert answer.status_code in {200, 201, 204, 409}, (
            answer.text
        )  # 409: this tenant's user has sent another text with the same message_id
        assert not [trace for trace in ana.traces if trace in answer.text], (path, key)
    assert _without_accesses(tenants.kept(ana)) == _without_accesses(before)


def _without_accesses(tables: dict[str, Any]) -> dict[str, Any]:
    return {name: rows for name, rows in tables.items() if name != "memory_accesses"}


@pytest.mark.long
@pytest.mark.parametrize(("method", "path", "route"), BY_USER, ids=[f"{method} {path}" for method, path, _ in BY_USER])
def test_no_user_id_reaches_into_a_tenant(tenants: Tenants, method: str, path: str, route: ByUser) -> None:
    """A `user_id` that contains U+001F is refused, because such an id could equal the user key of a tenant's user.

    A tenant's API key may name only its own tenant in the parameter `tenant`. The operator's key may name any tenant.
    """
    smuggled = route.body and {name: "acme\x1fana" if name == "user_id" else each for name, each in route.body.items()}
    where = route.path.replace("/ana", "/acme%1Fana").replace("user_id=ana", "user_id=acme%1Fana")
    if (where, smuggled) != (route.path, route.body):
        for key in (*SERVICES.values(), *ADMINS.values()):
            answer = tenants.ask(key, method, where, json=smuggled)
            assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST"), (path, key)
    named = f"{route.path}{'&' if '?' in route.path else '?'}tenant="
    for key in (SERVICES[None], SERVICES["bolt"], ADMINS["bolt"]):
        answer = tenants.ask(key, method, f"{named}acme", json=route.body)
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), (path, key)
    assert tenants.ask(ADMINS[None], method, f"{named}Acme!", json=route.body).status_code == 400
    for key in (SERVICES["acme"], ADMINS["acme"], ADMINS[None]):
        answer = tenants.ask(key, method, f"{named}acme", json=route.body)
        assert answer.status_code in {200, 201, 204, 409}, answer.text
        if route.shows:
            assert tenants.anas["acme"].secret in answer.text, (path, key)
            assert tenants.anas["bolt"].secret not in answer.text


@pytest.mark.parametrize(("method", "path"), FLEET)
def test_routes_about_all_tenants_need_a_key_without_a_tenant(tenants: Tenants, method: str, path: str) -> None:
    """Routes that concern all tenants need an admin key without a tenant. Other keys get 403."""
    where = with_unknown_ids(path)
    for key in (SERVICES["acme"], ADMINS["acme"], SERVICES[None]):
        answer = tenants.ask(key, method, where)
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), key
    wait = {"params": {"wait": 0}} if method == "POST" and where.endswith("run") else {}
    assert tenants.ask(ADMINS[None], method, where, **wait).status_code != 403


def test_the_same_message_id_is_another_tenants_message(tenants: Tenants) -> None:
    """Several tenants can use the same `message_id`. A repeated request finds the message of its own tenant."""
    assert len({ana.turn_id for ana in tenants.anas.values()}) == 3
    for ana in tenants.anas.values():
        message = {"user_id": "ana", "text": f"{QUESTION}, it is {ana.secret}", "message_id": "the same"}
        again = tenants.ask(SERVICES[ana.tenant], "POST", "/v1/messages", json=message)
        assert (again.status_code, again.json()["turn_id"]) == (200, ana.turn_id)


def test_a_message_cannot_enter_another_tenants_session(tenants: Tenants) -> None:
    """Neither another tenant's key nor a service key without a tenant can send a message to a tenant's session."""
    ana = tenants.anas["acme"]
    message = {"user_id": "ana", "text": "hello", "session_id": ana.session_id}
    for key in tenants.others(ana):
        assert tenants.ask(key, "POST", "/v1/messages", json=message).status_code == NOT_THERE
    assert tenants.ask(SERVICES["acme"], "POST", "/v1/messages", json=message).status_code == 202


def test_a_message_cannot_have_another_tenants_file(tenants: Tenants) -> None:
    """A file that was sent without a user is its tenant's, whose users may all use it. A user's file is the user's."""
    ana = tenants.anas["acme"]
    unowned = tenants.ask(SERVICES["acme"], "POST", "/v1/files", content=ana.secret.encode()).json()["file_id"]
    for file_id in (unowned, ana.file_id):
        message = {"user_id": "ana", "parts": [{"type": "file", "file_id": file_id}]}
        for key in tenants.others(ana):
            assert tenants.ask(key, "POST", "/v1/messages", json=message).status_code == NOT_THERE
        assert tenants.ask(SERVICES["acme"], "POST", "/v1/messages", json=message).status_code == 202
    for file_id, status in ((unowned, 202), (ana.file_id, NOT_THERE)):
        message = {"user_id": "bob", "parts": [{"type": "file", "file_id": file_id}]}
        assert tenants.ask(SERVICES["acme"], "POST", "/v1/messages", json=message).status_code == status


def test_only_admin_keys_list_the_sessions_in_which_agents_answer_each_other(tenants: Tenants) -> None:
    """A user's list from a service key lacks them; the tenant's administrator and the operator see them."""
    session_id = tenants.anas["acme"].session_id
    with tenants.runtime.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE sessions SET depth = 1 WHERE session_id = %(id)s", {"id": session_id})

    def listed(key: str, query: str) -> list[str]:
        return [each["session_id"] for each in tenants.ask(key, "GET", f"/v1/sessions?user_id=ana{query}").json()]

    assert listed(SERVICES["acme"], "") == []
    assert listed(ADMINS["acme"], "") == listed(ADMINS[None], "&tenant=acme") == [session_id]


def test_sessions_are_listed_within_the_tenant(tenants: Tenants) -> None:
    """A tenant's admin key lists the tenant's sessions.

    The operator's key lists the sessions of all tenants or of one tenant.
    """

    def listed(key: str, query: str = "") -> dict[str, tuple[str | None, str]]:
        answer = tenants.ask(key, "GET", f"/v1/sessions{query}")
        assert answer.status_code == 200, answer.text
        return {each["session_id"]: (each["tenant"], each["user_id"]) for each in answer.json()}

    own = {ana.session_id: (tenant, "ana") for tenant, ana in tenants.anas.items()}
    acmes = {tenants.anas["acme"].session_id: ("acme", "ana")}
    assert listed(ADMINS["acme"]) == listed(ADMINS[None], "?tenant=acme") == acmes
    assert listed(SERVICES["acme"], "?user_id=ana") == listed(ADMINS[None], "?tenant=acme&user_id=ana") == acmes
    assert listed(SERVICES[None], "?user_id=ana") == {tenants.anas[None].session_id: (None, "ana")}
    assert listed(ADMINS[None]) == own
    assert tenants.ask(SERVICES["acme"], "GET", "/v1/sessions").status_code == 403
    assert listed(ADMINS["bolt"], "?user_id=eve") == {}


IMPLIED_BY_TOKENS = [
    ("GET", "/v1/sessions", None),
    ("GET", "/v1/conversations", None),
    ("PATCH", "/v1/conversations/holidays", {"title": "Holidays"}),
    ("GET", "/v1/schedules", None),
    ("GET", "/v1/memories", None),
    ("GET", "/v1/links", None),
    ("DELETE", "/v1/links?channel=slack&external_id=T1", None),
]
"""Requests whose `user_id`, in the query, is a user token's own user by default."""


@pytest.mark.parametrize(("method", "path", "body"), IMPLIED_BY_TOKENS, ids=[each[1] for each in IMPLIED_BY_TOKENS])
def test_a_service_key_names_the_user_in_the_query(tenants: Tenants, method: str, path: str, body: Any) -> None:
    """A service key that leaves out the `user_id` of a query gets 403 on each of these routes."""
    for key in (SERVICES["acme"], SERVICES[None]):
        answer = tenants.ask(key, method, path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), (key, answer.text)
        assert answer.json()["detail"].startswith("Name a user_id: ")
    token = tenants.ask(SERVICES["acme"], "POST", "/v1/tokens", json={"user_id": "ana", "ttl_s": 60}).json()["token"]
    assert tenants.ask(token, method, path, json=body).status_code in {200, 204, 404}


def test_memories_are_consolidated_by_batch_only_without_a_tenant(tenants: Tenants) -> None:
    """A request without a `session_id` consolidates sessions of all tenants, so a tenant's key gets 403."""
    answers = {tenant: tenants.ask(key, "POST", "/v1/memory/consolidate", json={}) for tenant, key in SERVICES.items()}
    assert {tenant: answer.status_code for tenant, answer in answers.items()} == {"acme": 403, "bolt": 403, None: 202}


def test_cases_without_an_author_stay_in_their_tenant(tenants: Tenants) -> None:
    """A search finds a case without an author only if the caller has the same tenant as the case.

    A user without a tenant finds only cases without a tenant. The operator's key finds the cases of all tenants.
    """
    runtime = tenants.runtime
    for tenant in TENANTS:
        case = NewCase(
            f"faq {tenant}",
            "what are the opening hours",
            f"Ask {tenant}.",
            query_vector=runtime.embedder.embed(["what are the opening hours"])[0],
            embedder=runtime.embedder.name,
            user_id=None if tenant is None else everybodys(tenant),
        )
        assert add(runtime.database, case, now=runtime.clock.now())
    search_url = "/v1/casebank/search?q=opening hours&k=100"
    for more in ("", "&include_archived=true", "&user_id=ana"):
        for tenant in TENANTS:
            if tenant is None and "user_id" not in more:
                continue  # without a tenant, an admin key is the operator's and finds all cases
            key = SERVICES[tenant] if "user_id" in more else ADMINS[tenant]
            answer = tenants.ask(key, "GET", f"{search_url}{more}")
            found = {each["case_id"]: each for each in answer.json()["results"]}
            assert [each for each in found if each.startswith("faq")] == [f"faq {tenant}"]
            assert {each["tenant"] for each in found.values()} == {tenant}
            assert {each["user_id"] for each in found.values()} == {"ana", None}
    everything = tenants.ask(ADMINS[None], "GET", search_url).json()
    assert {each["tenant"] for each in everything["results"]} == set(TENANTS)


@pytest.mark.long
@pytest.mark.parametrize("owner", TENANTS)
def test_a_case_that_is_shared_stays_in_its_tenant(tenants: Tenants, owner: str | None) -> None:
    """A shared case is visible only to users of its author's tenant."""
    search_url = f"/v1/casebank/search{NEAR}&user_id=bob"
    found = tenants.ask(SERVICES[owner], "GET", f"/v1/casebank/search{NEAR}&user_id=ana").json()["results"]
    [case_id] = [each["case_id"] for each in found]
    assert tenants.ask(SERVICES[owner], "GET", search_url).json()["results"] == []
    assert tenants.ask(ADMINS[None], "POST", f"/v1/casebank/cases/{case_id}/share").status_code == 200
    for tenant, key in SERVICES.items():
        seen = [each["case_id"] for each in tenants.ask(key, "GET", search_url).json()["results"]]
        assert seen == ([case_id] if tenant == owner else []), tenant


def test_erasing_a_user_leaves_the_others_of_that_name(tenants: Tenants) -> None:
    """Erasing a tenant's user keeps the users of the same name in other tenants.

    The tenant's key can erase the user, and so can the operator's key with `?tenant=`.
    """
    gone = tenants.ask(SERVICES["acme"], "DELETE", "/v1/users/ana")
    assert (gone.status_code, gone.json()["user_id"]) == (200, "ana")
    assert gone.json()["rows"]["turns"] == 1
    assert tenants.ask(ADMINS[None], "DELETE", "/v1/users/ana?tenant=bolt").json()["rows"]["turns"] == 1
    with tenants.runtime.database.engine.connect() as connection:
        left = connection.execute(text("SELECT user_id FROM users")).scalars().all()
        assert left == ["ana"]
    assert tenants.anas[None].secret in json.dumps(tenants.kept(tenants.anas[None]))
