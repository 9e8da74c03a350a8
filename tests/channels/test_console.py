"""The console's routes: no session, no data; no CSRF token, no change. Operators' actions are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from perdure import audit, retention
from perdure.access.console_sessions import VALID
from perdure.access.tenants import UserKey
from perdure.channels.http.app import create_app
from perdure.channels.http.console.access import COOKIE
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.runtime import Runtime
from perdure.settings import Settings
from tests.channels.conftest import BASE_URL
from tests.channels.test_tenants import (
    ADMINS,
    ROUTES,
    SERVICES,
    TENANTS,
    Ana,
    ById,
    ByUser,
    Fleet,
    Tenants,
    tenants,
    with_unknown_ids,
)

__all__ = ["tenants"]

SECRET = "the secret of these tests, long enough"
KEY, OTHER, TENANTS_KEY = "key-of-the-operator", "key-of-another-one", "admin-key-of-acme"

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def _client(runtime: Runtime, keys: str | None, **options: Any) -> TestClient:
    settings = Settings(_env_file=None, admin_keys=keys or "", secret_key=SECRET)  # type: ignore[arg-type]
    app = create_app(replace(runtime, settings=settings), lambda: True, **options)
    return TestClient(app, base_url=BASE_URL)


@pytest.fixture
def console(runtime: Runtime, clock: MovedClock) -> Iterator[TestClient]:
    """A gateway with two admin keys of the operator and one of a tenant; nobody is signed in."""
    with _client(replace(runtime, clock=clock), f"{KEY},{OTHER},acme={TENANTS_KEY}") as made:
        yield made


def _sign_in(client: TestClient, key: str | None = KEY) -> dict[str, str]:
    """Sign in; returns the headers of changing requests."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = client.post("/console/session", headers=headers)
    assert answer.status_code == 201, answer.text
    return {"X-CSRF-Token": answer.json()["csrf"]}


def _of_console(method: str, path: str, route: object) -> tuple[str, Any]:
    """A request to the console for a route of the HTTP API, with ids that no object has."""
    where = path
    for name in ("turn_id", "session_id", "run_id", "schedule_id", "file_id", "memory_id", "delivery_id"):
        where = where.replace(f"{{{name}}}", str(uuid4()))
    for name in ("name", "case_id", "user_id", "conversation", "response_id"):
        where = where.replace(f"{{{name}}}", "ann")
    body = route.body if isinstance(route, ByUser) else None
    return f"/console{where}", body if method != "GET" else None


OF_CONSOLE = [
    (method, *_of_console(method, path, route)) for (method, path), route in ROUTES.items() if path.startswith("/v1/")
]


def test_without_a_session_nothing_is_shown_or_changed(
    console: TestClient, rows: Callable[[], dict[str, int]], say: Callable[..., dict[str, Any]]
) -> None:
    """Each route under `/console/v1`, and each other method of it, answers 401, whatever key or cookie is sent."""
    say(conversation="ann")
    before = rows()
    attempts: list[dict[str, str]] = [
        {},
        {"Authorization": f"Bearer {KEY}"},
        {"Cookie": f"{COOKIE}=x", "X-CSRF-Token": "x"},
        {"Cookie": f"{COOKIE}={KEY}"},
    ]
    paths = sorted({path for _, path, _ in OF_CONSOLE} | {"/console/v1/nothing", "/console/v1/"})
    bodies = {(method, path): body for method, path, body in OF_CONSOLE}
    for path in paths:
        for method in METHODS:
            for headers in attempts if (method, path) in bodies else attempts[:1]:
                answer = console.request(method, path, headers=headers, json=bodies.get((method, path)))
                assert answer.status_code == 401, (method, path, headers, answer.text)
                assert method == "HEAD" or answer.json()["code"] == "UNAUTHORIZED"
    assert console.delete("/console/session").status_code == 401
    assert rows() == before


@pytest.mark.long
def test_without_the_csrf_token_nothing_is_changed(
    console: TestClient, rows: Callable[[], dict[str, int]], say: Callable[..., dict[str, Any]]
) -> None:
    """With a session but without its token, or with that of another session, each changing request answers 403."""
    say(conversation="ann")
    _sign_in(console, OTHER)
    console.cookies.clear()
    foreign = _sign_in(console, OTHER)
    console.cookies.clear()
    _sign_in(console)
    before = rows()
    wrong: list[dict[str, str]] = [{}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": "x"}, foreign]
    bodies = {(method, path): body for method, path, body in OF_CONSOLE}
    for path in sorted({path for _, path, _ in OF_CONSOLE}):
        for method in METHODS[2:]:
            for headers in wrong if (method, path) in bodies else wrong[:1]:
                answer = console.request(method, path, headers=headers, json=bodies.get((method, path)))
                assert answer.status_code == 403, (method, path, headers, answer.text)
    assert console.delete("/console/session").status_code == 403
    assert rows() == before


def test_reading_changes_nothing(console: TestClient, rows: Callable[[], dict[str, int]]) -> None:
    """A GET of the console, which needs no CSRF token, writes no row."""
    _sign_in(console)
    before = rows()
    for method, path, _ in OF_CONSOLE:
        if method == "GET":
            answer = console.get(f"{path}{'&' if '?' in path else '?'}user_id=ann&q=a")
            assert answer.status_code in {200, 204, 400, 404}, (path, answer.text)
    assert rows() == before


def test_pages_of_other_origins_are_refused(console: TestClient) -> None:
    """Even with the cookie and the token, a request that a page of another origin has sent is refused."""
    csrf = _sign_in(console)
    for origin in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "same-site"}):
        assert console.get("/console/v1/breakers", headers=origin).status_code == 403
        assert console.post("/console/v1/breakers/a/reset", headers={**csrf, **origin}).status_code == 403
    assert console.get("/console/v1/breakers", headers={"Origin": BASE_URL}).status_code == 200


def test_the_cookie_is_for_the_console_only(console: TestClient) -> None:
    """Scripts cannot read the cookie, other sites and other paths do not get it, and HTTPS keeps it to HTTPS."""
    answer = console.post("/console/session", headers={"Authorization": f"Bearer {KEY}"})
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/console"} <= {each.strip() for each in cookie.split(";")}
    assert "Secure" not in cookie
    assert KEY not in cookie
    assert console.get("/v1/breakers").status_code == 401, "the cookie is no key"
    with_key = {"Authorization": f"Bearer {KEY}"}
    over_https = console.post(f"{BASE_URL.replace('http', 'https')}/console/session", headers=with_key)
    proxied = console.post("/console/session", headers={**with_key, "X-Forwarded-Proto": "https"})
    assert all("Secure" in each.headers["set-cookie"] for each in (over_https, proxied))


@pytest.mark.parametrize("key", [SERVICES[None], TENANTS_KEY, "unknown-key-of-nobody", None])
def test_only_an_operator_signs_in(console: TestClient, key: str | None) -> None:
    """A service key, a tenant's admin key, an unknown key and no key begin no session."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = console.post("/console/session", headers=headers)
    assert answer.status_code in {401, 403}
    assert "set-cookie" not in answer.headers


def test_a_session_ends(console: TestClient, clock: MovedClock) -> None:
    """A session ends when the operator signs out, and after some hours."""
    csrf = _sign_in(console)
    assert console.get("/console/session").json()["operator"] == console.get("/console/session").json()["operator"]
    answer = console.delete("/console/session", headers=csrf)
    assert (answer.status_code, "Max-Age=0" in answer.headers["set-cookie"]) == (204, True)
    _sign_in(console)
    clock.advance(VALID - timedelta(minutes=1))
    assert console.get("/console/v1/breakers").status_code == 200
    clock.advance(timedelta(minutes=2))
    assert console.get("/console/v1/breakers").status_code == 401
    assert console.get("/console/session").json()["operator"] is None


def test_a_session_ends_with_its_key(runtime: Runtime) -> None:
    """A key that is removed from the settings ends the sessions that were begun with it, on each gateway."""
    with _client(runtime, KEY) as before:
        _sign_in(before)
        cookie = {"Cookie": f"{COOKIE}={before.cookies[COOKIE]}"}
        assert before.get("/console/v1/breakers").status_code == 200
    for keys, status in ((f"{OTHER},{KEY}", 200), (OTHER, 401), (f"acme={KEY}", 401)):
        with _client(runtime, keys) as after:
            assert after.get("/console/v1/breakers", headers=cookie).status_code == status, keys
    with _client(runtime, None) as keyless:
        assert keyless.get("/console/v1/breakers", headers=cookie).status_code == 401


def test_a_gateway_without_keys_needs_none_from_its_own_machine(runtime: Runtime) -> None:
    """On loopback, the console opens without a key, for its own page only; once keys are set, the session is void."""
    with _client(runtime, None) as keyless:
        assert keyless.post("/console/session", headers={"Origin": "https://evil.example"}).status_code == 403
        assert keyless.post("/console/session", headers={"Host": "evil.example"}).status_code == 403
        csrf = _sign_in(keyless, None)
        assert keyless.post("/console/v1/breakers/a/reset", headers=csrf).status_code == 404
        assert keyless.get("/console/v1/breakers", headers={"Host": "evil.example"}).status_code in {401, 403}
        cookie = {"Cookie": f"{COOKIE}={keyless.cookies[COOKIE]}"}
    with _client(runtime, KEY) as keyed:
        assert keyed.get("/console/v1/breakers", headers=cookie).status_code == 401


def test_an_application_that_authenticates_users_needs_an_admin_key(runtime: Runtime) -> None:
    """In a mounted gateway, a signed-in user is no operator: without admin keys, there is no console."""
    with _client(runtime, None, authenticate=lambda _request: "ann") as mounted:
        assert mounted.post("/console/session").status_code == 403
    with _client(runtime, KEY, authenticate=lambda _request: "ann") as mounted:
        assert mounted.post("/console/session").status_code == 401
        _sign_in(mounted)
        assert mounted.get("/console/v1/breakers").status_code == 200


def test_the_page_and_its_files_need_no_session(console: TestClient) -> None:
    """The page loads only its own files, and each script that a script imports exists."""
    page = console.get("/console")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    names = ["console/console.css", "console/console.js", "chat/icon.svg"]
    assert [console.get(f"/{name}").status_code for name in names] == [200, 200, 200]
    assert console.get("/console/chat.js").status_code == 404


# --- the record of operators' actions ----------------------------------------------------

UNRECORDED = {
    "POST /v1/messages": "a user's message",
    "POST /v1/turns/{turn_id}/feedback": "a user's opinion",
    "POST /v1/chat/completions": "a user's message",
    "POST /v1/responses": "a user's message",
    "POST /v1/responses/{response_id}/cancel": "a client's request",
    "POST /v1/files": "a part of a user's message",
    "POST /v1/memory/search": "it changes nothing",
    "POST /v1/consolidation/dry-run": "it changes nothing",
}
"""Changing routes that are no operator's action, each with the reason."""


def _audit(database: Database) -> list[dict[str, Any]]:
    return audit.list_actions(database, 1_000)


def _request(path: str, route: object, ana: Ana) -> tuple[str, Any] | None:
    """A request to a route; `None` if another test sends it, or if it erases what the other routes need."""
    match route:
        case ById():
            return route.path(ana), route.body and route.body(ana)
        case ByUser() if not path.startswith("/v1/users"):
            return route.path, route.body
        case Fleet():
            return with_unknown_ids(path), {"agent": "none"} if path == "/v1/pauses" else None
        case _:
            return None


@pytest.mark.long
def test_each_changing_route_is_recorded(tenants: Tenants) -> None:
    """An admin key's request to a changing route leaves a record, and one of a service key none."""
    recorded, wrong = set(), []
    for (method, path), route in ROUTES.items():
        request = _request(path, route, tenants.anas[None])
        if request is None:
            continue
        changes = method != "GET" and f"{method} {path}" not in UNRECORDED
        for key, expected in ((SERVICES[None], 0), (ADMINS[None], int(changes))):
            before = len(_audit(tenants.runtime.database))
            wait = {"params": {"wait": 0}} if path.endswith("run") else {}
            tenants.ask(key, method, request[0], json=request[1], **wait)
            count = len(_audit(tenants.runtime.database)) - before
            recorded |= {f"{method} {path}"} if count else set()
            wrong += [(method, path, key, count)] if count != expected else []
    assert wrong == []
    assert len(recorded) > 20
    assert all(each["outcome"] is not None for each in _audit(tenants.runtime.database))


def test_a_record_names_the_operator_the_target_and_the_user(
    console: TestClient, runtime: Runtime, say: Callable[..., dict[str, Any]]
) -> None:
    """What was cancelled in the console is recorded with the session's key, the turn and its user, and how it ended."""
    ids = say()
    csrf = _sign_in(console)
    assert console.post(f"/console/v1/turns/{ids['turn_id']}/cancel", headers=csrf).status_code == 202
    assert console.post(f"/console/v1/turns/{uuid4()}/cancel", headers=csrf).status_code == 404
    failed, cancelled, signed_in = console.get("/console/v1/audit").json()
    members = ("via", "action", "target", "user_id", "outcome")
    assert [cancelled[each] for each in members] == ["console", "turns.cancel", ids["turn_id"], "ann", "done"]
    assert [failed[each] for each in ("action", "user_id", "outcome")] == ["turns.cancel", None, "NOT_FOUND"]
    assert signed_in["action"] == "console.sign-in"
    assert {each["actor"] for each in (failed, cancelled, signed_in)} == {cancelled["actor"]}
    assert KEY not in cancelled["actor"]
    older = console.get(f"/console/v1/audit?limit=1&before={cancelled['audit_id']}").json()
    assert older == [signed_in]


@pytest.mark.long
def test_an_erasure_erases_the_records_of_the_user(tenants: Tenants) -> None:
    """What operators did with a user's data goes with the user; that a user was erased stays recorded, without a name.

    The records of users of the same name in other tenants stay.
    """
    for tenant in TENANTS:
        answer = tenants.ask(ADMINS[tenant], "POST", f"/v1/turns/{tenants.anas[tenant].turn_id}/cancel")
        assert answer.status_code == 202
    database = tenants.runtime.database
    assert tenants.kept(tenants.anas["acme"])["audit"][0]["action"] == "turns.cancel"
    assert "actor" not in tenants.kept(tenants.anas["acme"])["audit"][0]
    erased = tenants.ask(ADMINS[None], "DELETE", "/v1/users/ana?tenant=acme")
    assert (erased.status_code, erased.json()["rows"]["audit"]) == (200, 1)
    left = [(each["action"], each["tenant"], each["user_id"]) for each in _audit(database)]
    assert left == [("users.erase", None, None), ("turns.cancel", None, "ana"), ("turns.cancel", "bolt", "ana")]


def test_an_action_is_recorded_before_it_begins(database: Database, clock: MovedClock) -> None:
    """If the process dies during an action, its record stays, without an outcome. An error's code is its outcome."""
    action = audit.Action("command", "tests", "turns.cancel", user=UserKey("ann"))
    during: list[Any] = []

    def act() -> None:
        with audit.recorded(database, clock, action):
            during.extend(each["outcome"] for each in _audit(database))
            raise KeyError

    with pytest.raises(KeyError):
        act()
    assert during == [None]
    [record] = _audit(database)
    assert (record["outcome"], record["user_id"]) == ("KeyError", "ann")


def test_records_are_kept_for_a_month(database: Database, clock: MovedClock) -> None:
    """Records are deleted after the days of the setting."""
    with audit.recorded(database, clock, audit.Action("command", "tests", "drain")):
        pass
    clock.advance(timedelta(days=29))
    assert retention.retain(database)["operators' actions"] == 0
    clock.advance(timedelta(days=2))
    assert retention.retain(database)["operators' actions"] == 1
    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM audit")).scalar_one() == 0
