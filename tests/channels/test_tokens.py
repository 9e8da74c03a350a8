"""User tokens: a token gives access to its user's data on every route, and to nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import jwt
import pytest
from starlette.testclient import TestClient

from perdure.access.tenants import UserKey
from perdure.access.tokens import Tokens
from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.tokens import LONGEST_TTL_S
from perdure.clock import MovedClock
from perdure.errors import SettingsError
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.turns.run.loop import Runner
from tests.channels.conftest import BASE_URL
from tests.channels.test_tenants import (
    BY_ID,
    BY_USER,
    FLEET,
    QUESTION,
    ROUTES,
    SERVICES,
    Ana,
    ById,
    ByUser,
    Fleet,
    with_unknown_ids,
)
from tests.memory.remembering import add_memory

SECRET = "the secret of these tests, long enough"
SERVICE = SERVICES[None]


class Installation:
    """A gateway with a service key and two users, `ana` and `bo`, each with a settled turn."""

    def __init__(self, client: TestClient, clock: MovedClock, runtime: Runtime) -> None:
        self.clock = clock
        self._client = client
        self._runtime = runtime
        runner = Runner(runtime, owner="test")
        self.ana, self.bo = self._live(runner, "ana"), self._live(runner, "bo")
        runner.close()

    def ask(self, key: str, method: str, path: str, **given: Any) -> Any:
        """Send a request with this key or token; returns the response."""
        return self._client.request(method, path, headers={"Authorization": f"Bearer {key}"}, **given)

    def token(self, user_id: str = "ana", ttl_s: int = 60) -> str:
        """A new token for the user."""
        answer = self.ask(SERVICE, "POST", "/v1/tokens", json={"user_id": user_id, "ttl_s": ttl_s})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["token"])

    def kept(self, user_id: str) -> Any:
        """The user's export without `memory_accesses`, because reading memories changes that table."""
        tables = self.ask(SERVICE, "GET", f"/v1/users/{user_id}/export").json()["tables"]
        return {name: rows for name, rows in tables.items() if name != "memory_accesses"}

    def _live(self, runner: Runner, user_id: str) -> Ana:
        secret = f"under the flowerpot of {user_id}"
        message = {"user_id": user_id, "text": f"{QUESTION}? It is {secret}", "message_id": "the same"}
        ids = self.ask(SERVICE, "POST", "/v1/messages", json=message).json()
        runner.run(UUID(ids["session_id"]))
        reminder = {"user_id": user_id, "text": secret, "cron": "30 7 * * *"}
        scheduled = self.ask(SERVICE, "POST", "/v1/schedules", json=reminder).json()
        file = self.ask(SERVICE, "POST", f"/v1/files?user_id={user_id}", content=secret.encode()).json()
        memory_id = add_memory(self._runtime, UserKey(user_id), secret)
        return Ana(
            None, secret, ids["turn_id"], ids["session_id"], scheduled["schedule_id"], file["file_id"], memory_id
        )


@pytest.fixture
def installation(runtime: Runtime, clock: MovedClock) -> Iterator[Installation]:
    """A gateway with a service key. The test can advance its clock."""
    settings = Settings(_env_file=None, api_keys=SERVICE, secret_key=SECRET)  # type: ignore[arg-type]
    runtime = replace(runtime, settings=settings, clock=clock)
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as client:
        yield Installation(client, clock, runtime)


@pytest.mark.parametrize(("method", "path", "route"), BY_ID, ids=[f"{method} {path}" for method, path, _ in BY_ID])
def test_an_id_of_another_user_does_not_exist(installation: Installation, method: str, path: str, route: ById) -> None:
    """A request with another user's id gets the same 404 as one with an unknown id, and changes nothing."""
    token, before = installation.token("ana"), installation.kept("bo")
    bo, ana = installation.bo, installation.ana
    theirs, nothings, own = (
        installation.ask(token, method, route.path(whose), json=route.body and route.body(whose))
        for whose in (bo, route.missing(), ana)
    )
    assert (theirs.status_code, theirs.content) == (404, nothings.content), path
    assert not [trace for trace in bo.traces if trace in theirs.text]
    assert installation.kept("bo") == before
    assert own.content != nothings.content, own.text


@pytest.mark.parametrize(("method", "path", "route"), BY_USER, ids=[f"{method} {path}" for method, path, _ in BY_USER])
def test_another_user_does_not_exist(installation: Installation, method: str, path: str, route: ByUser) -> None:
    """A token's request about another user gets the same 404 as one about an unknown user, and changes nothing."""
    if (method, path) in {("POST", "/v1/tokens"), ("POST", "/v1/links")}:
        return  # a token is refused with 403; tested below
    token, before = installation.token("bo"), installation.kept("ana")
    own = {"user_id": "bo", "text": "hello", "conversation": "of ana"}
    assert installation.ask(token, "POST", "/v1/messages", json=own).status_code == 202

    def ask(user_id: str) -> Any:
        body = route.body and {name: user_id if name == "user_id" else each for name, each in route.body.items()}
        where = route.path.replace("/ana", f"/{user_id}").replace("user_id=ana", f"user_id={user_id}")
        return installation.ask(token, method, where, json=body)

    theirs, nothings = ask("ana"), ask("nobody")
    assert (theirs.status_code, theirs.content) == (404, nothings.content), path
    assert installation.kept("ana") == before
    assert ask("bo").status_code in {200, 201, 202, 204, 409}, path


@pytest.mark.parametrize(("method", "path"), FLEET)
def test_routes_about_the_installation_refuse_a_token(installation: Installation, method: str, path: str) -> None:
    """Routes about the installation refuse a token with 403 before they check any id."""
    assert isinstance(ROUTES[method, path], Fleet)
    where = with_unknown_ids(path)
    answer = installation.ask(installation.token(), method, where)
    assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")


def test_a_token_cannot_exceed_its_users_rights(installation: Installation) -> None:
    """With a token, a user cannot create tokens or link codes, set `reply_to` or raise a priority.

    The user can neither search archived cases nor request the consolidation of all pending sessions.
    """
    token, says = installation.token(), {"user_id": "ana", "text": "hello"}
    for method, path, body in (
        ("POST", "/v1/tokens", {"user_id": "ana", "ttl_s": 60}),
        ("POST", "/v1/links", {"user_id": "ana"}),
        ("POST", "/v1/messages", {**says, "reply_to": {"url": "https://example.com/"}}),
        ("POST", "/v1/messages", {**says, "priority": 9}),
        ("POST", "/v1/memory/consolidate", {}),
        ("GET", "/v1/casebank/search?q=key&include_archived=true&user_id=ana", None),
    ):
        answer = installation.ask(token, method, path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), (path, answer.text)
    assert installation.ask(token, "POST", "/v1/messages", json={**says, "priority": 5}).status_code == 202


def test_prompts_are_for_keys(installation: Installation) -> None:
    """A service key reads what the model was given. The user's own token does not: instructions are not the user's."""
    path = f"/v1/turns/{installation.ana.turn_id}/prompt"
    [step] = installation.ask(SERVICE, "GET", path).json()["steps"]
    assert {"step", "model", "settings", "instructions_hash", "parts"} <= set(step)
    asked = [each for each in step["parts"] if each["kind"] == "message"]
    assert [each["text"] for each in asked] == [f"{QUESTION}? It is {installation.ana.secret}"]
    assert installation.ask(SERVICE, "GET", f"{path}?step=1").json()["steps"] == [step]
    wrong = [installation.ask(SERVICE, "GET", f"{path}?step={step}").status_code for step in ("0", "x", "2")]
    assert wrong == [400, 400, 404]
    answer = installation.ask(installation.token("ana"), "GET", path)
    assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")


def test_without_a_user_id_the_sessions_are_the_tokens_own(installation: Installation) -> None:
    """Without `user_id`, a request with a token lists the sessions of the token's user."""
    sessions = installation.ask(installation.token("bo"), "GET", "/v1/sessions").json()
    assert [each["session_id"] for each in sessions] == [installation.bo.session_id]


def test_a_token_expires(installation: Installation) -> None:
    """A token expires after `ttl_s` seconds. Expired tokens do not count towards the limit on wrong keys."""
    token = installation.token(ttl_s=60)
    installation.clock.advance(timedelta(seconds=58))
    assert installation.ask(token, "GET", "/v1/sessions").status_code == 200
    installation.clock.advance(timedelta(seconds=3))
    answers = [installation.ask(token, "GET", "/v1/sessions") for _ in range(50)]
    assert {(each.status_code, each.json()["code"]) for each in answers} == {(401, "UNAUTHORIZED")}
    assert "expired" in answers[0].json()["detail"]


def _forged(token: str) -> dict[str, str]:
    head, body, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    other = base64.urlsafe_b64encode(json.dumps({**claims, "sub": "bo"}).encode()).rstrip(b"=").decode()
    unsigned = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    return {
        "another user": f"{head}.{other}.{signature}",
        "no signature": f"{unsigned}.{other}.{signature}",
        "another key": jwt.encode(claims, "x" * 32, "HS256"),
        "no expiry": jwt.encode({"sub": "ana", "aud": claims["aud"]}, "x" * 32, "HS256"),
        "cut": token[:-2],
        "endless": f"{head}.{body}{'A' * 10_000}.{signature}",
    }


@pytest.mark.parametrize("kind", ["another user", "no signature", "another key", "no expiry", "cut", "endless"])
def test_a_forged_token_is_refused(installation: Installation, kind: str) -> None:
    """A forged token gets 401, like an unknown key. After many forged tokens, the client's address gets 429."""
    forged = _forged(installation.token())[kind]
    codes = {installation.ask(forged, "GET", "/v1/sessions").json()["code"] for _ in range(50)}
    assert codes == {"UNAUTHORIZED", "RATE_LIMITED"}


def test_another_secret_revokes_all_tokens(installation: Installation, clock: MovedClock) -> None:
    """A new `PERDURE_SECRET_KEY` revokes all tokens, but for those of `PERDURE_SECRET_KEY_BEFORE`."""
    old, _ = Tokens([b"the secret before"], clock).mint(UserKey("ana"), 60)
    assert installation.ask(old, "GET", "/v1/sessions").status_code == 401
    given = {"secret_key": "the-secret-of-now", "secret_key_before": "the-secret-before"}
    both = Settings(_env_file=None, **given)  # type: ignore[arg-type]
    before, _ = Tokens([b"the-secret-before"], clock).mint(UserKey("ana"), 60)
    now, _ = Tokens(both.signing_keys(), clock).mint(UserKey("ana"), 60)
    assert Tokens(both.signing_keys(), clock).user(before) == "ana"
    assert Tokens([b"the-secret-of-now"], clock).user(now) == "ana"


@pytest.mark.parametrize("ttl_s", [0, -1, LONGEST_TTL_S + 1, "60", 1.5, True, None])
def test_a_lifetime_is_a_number_of_seconds(installation: Installation, ttl_s: object) -> None:
    """A token's lifetime is an integer from one second to a month; anything else is refused."""
    answer = installation.ask(SERVICE, "POST", "/v1/tokens", json={"user_id": "ana", "ttl_s": ttl_s})
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST")


def test_a_short_secret_stops_the_gateway(runtime: Runtime) -> None:
    """The gateway does not start with a short secret, because the secret can be guessed.

    The error message does not contain the secret.
    """
    settings = Settings(_env_file=None, secret_key="guessable")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="PERDURE_SECRET_KEY is too short") as raised:
        create_app(replace(runtime, settings=settings), lambda: True)
    assert "guessable" not in str(raised.value)


def test_on_loopback_without_keys_a_token_still_restricts_access(runtime: Runtime) -> None:
    """If no keys are configured, a loopback caller has all rights. A token still limits a caller to one user's data."""
    settings = Settings(_env_file=None, secret_key=SECRET)  # type: ignore[arg-type]
    with TestClient(
        create_app(replace(runtime, settings=settings), lambda: True), base_url="http://localhost"
    ) as client:
        token = client.post("/v1/tokens", json={"user_id": "ana", "ttl_s": 60}).json()["token"]
        headers = {"Authorization": f"Bearer {token}"}
        assert client.get("/v1/sessions?user_id=bo", headers=headers).status_code == 404
        assert client.get("/v1/sessions?user_id=bo").status_code == 200
        assert client.get("/v1/sessions", headers={"Authorization": "Bearer eyJ.not.one"}).status_code == 401
