"""Each route, called with each kind of credential and with existing and unknown ids.

The list of routes is that of `test_tenants`, which a new route must be added to. A caller without access gets the same
answer whether the named user, turn, session or schedule exists or not, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import SecretStr
from starlette.websockets import WebSocketDisconnect

from perdure.access.tenants import UserKey, user_key
from perdure.access.tokens import Tokens
from perdure.clock import MovedClock
from perdure.settings import Settings
from tests.channels.test_tenants import NOT_THERE, ROUTES, SERVICES, Ana, ById, ByUser, Everyone, Fleet, Open, Tenants
from tests.channels.test_tenants import tenants as tenants  # noqa: PLC0414 (a fixture)

OTHER_SECRET = "the secret key of another installation"
UNAUTHORIZED, FORBIDDEN, CLOSED = 401, 403, 4401
BAD = ("none", "wrong", "expired", "forged", "changed", "cut")
HOLDERS = ("a user without a tenant", "a user of the same tenant", "a user of another tenant")


@dataclass(frozen=True)
class Asked:
    """One request: the method, the path and the body."""

    method: str
    path: str
    body: dict[str, Any] | None


def _token(tenants: Tenants, user: str, ttl_s: int = 600) -> str:
    return Tokens(tenants.runtime.settings.signing_keys(), tenants.runtime.clock).mint(UserKey(user), ttl_s)[0]


def _bad_credential(tenants: Tenants, kind: str, clock: MovedClock) -> str | None:
    """A credential of this kind that would give access to acme's `ana` if it were accepted."""
    ana = user_key("acme", "ana")
    match kind:
        case "none":
            return None
        case "wrong":
            return "wrong-key-of-a-service"
        case "expired":
            made = _token(tenants, ana, 60)
            clock.advance(timedelta(seconds=61))
            return made
        case "forged":
            other = Settings(_env_file=None, secret_key=SecretStr(OTHER_SECRET))
            return Tokens(other.signing_keys(), tenants.runtime.clock).mint(ana, 600)[0]
        case "changed":
            head, _, signature = _token(tenants, user_key("acme", "ben")).split(".")
            return f"{head}.{_token(tenants, ana).split('.')[1]}.{signature}"
        case _:
            return _token(tenants, ana)[:-4]


def _holder(tenants: Tenants, which: str) -> str:
    """A valid token of another user than acme's `ana`."""
    users = dict(zip(HOLDERS, (user_key(None, "ben"), user_key("acme", "ben"), user_key("bolt", "ana")), strict=True))
    return _token(tenants, users[which])


def _pairs(method: str, path: str, ana: Ana) -> tuple[Asked, Asked]:
    """The same request about acme's `ana`, and about a user, turn, session or schedule that does not exist."""
    route = ROUTES[method, path]
    match route:
        case ById():
            made = [
                Asked(method, route.path(whose), route.body and route.body(whose)) for whose in (ana, route.missing())
            ]
        case ByUser():
            made = [_of_user(method, route, name) for name in ("ana", "nobody")]
        case _:
            filled = path
            for name in ("run_id", "case_id", "name"):
                filled = filled.replace(f"{{{name}}}", str(uuid4()))
            body = {"user": "ana", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
            made = [Asked(method, filled, body if method == "POST" else None)] * 2
    return made[0], made[1]


def _of_user(method: str, route: ByUser, name: str) -> Asked:
    path = route.path.replace("user_id=ana", f"user_id={name}").replace("/users/ana", f"/users/{name}")
    return Asked(method, path, route.body and {**route.body, **({"user_id": name} if "user_id" in route.body else {})})


def _ask(tenants: Tenants, key: str | None, asked: Asked) -> tuple[int, str]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer: Any = tenants._client.request(asked.method, asked.path, json=asked.body, headers=headers)
    return answer.status_code, answer.text


SERVICES_ONLY = {("POST", "/v1/tokens"), ("POST", "/v1/links")}
EACH = [(method, path) for (method, path), kind in ROUTES.items() if not isinstance(kind, Open)]


def test_no_route_answers_a_bad_credential(tenants: Tenants, clock: MovedClock) -> None:
    """Each route answers 401, alike for existing and unknown ids, and before it looks at the request."""
    ana = tenants.anas["acme"]
    before = tenants.kept(ana)
    for kind, (method, path) in product(BAD, EACH):
        clock.advance(timedelta(seconds=60))  # else the address has sent too many wrong keys
        key = _bad_credential(tenants, kind, clock)
        answers = [_ask(tenants, key, asked) for asked in _pairs(method, path, ana)]
        assert answers[0] == answers[1], (kind, method, path)
        assert answers[0][0] == UNAUTHORIZED, (kind, method, path, answers[0])
    assert tenants.kept(ana) == before


@pytest.mark.long
def test_no_route_shows_another_users_things(tenants: Tenants) -> None:
    """A user's token gets the same answer for another user's things as for unknown ones, and 403 for the rest."""
    ana = tenants.anas["acme"]
    before = tenants.kept(ana)
    for which, (method, path) in product(HOLDERS, EACH):
        key = _holder(tenants, which)
        kind = ROUTES[method, path]
        if isinstance(kind, Everyone) or (which == HOLDERS[2] and isinstance(kind, ByUser)):
            continue  # `ana` is then the token's own user, of another tenant
        theirs, nothings = (_ask(tenants, key, asked) for asked in _pairs(method, path, ana))
        assert theirs == nothings, (method, path)
        needs_key = isinstance(kind, Fleet) or (method, path) in SERVICES_ONLY
        assert theirs[0] == (FORBIDDEN if needs_key else NOT_THERE), (method, path, theirs)
        assert not [trace for trace in ana.traces if trace in theirs[1]], (method, path)
    assert tenants.kept(ana) == before


REFERENCES: dict[str, Callable[[Ana], tuple[str, dict[str, Any]]]] = {
    "a session of a message": lambda ana: (
        "/v1/messages",
        {"user_id": "ben", "text": "hi", "session_id": ana.session_id},
    ),
    "the previous response": lambda ana: (
        "/v1/responses",
        {"input": "hi", "user": "ben", "previous_response_id": f"resp_{UUID(ana.turn_id).hex}"},
    ),
}


def test_a_reference_to_anothers_thing_is_like_one_to_nothing(tenants: Tenants) -> None:
    """An id in a body gets the same answer whether it is another user's or unknown."""
    ana = tenants.anas["acme"]
    missing = Ana(None, "", str(uuid4()), str(uuid4()), str(uuid4()))
    keys = [*(_holder(tenants, which) for which in HOLDERS[:2]), SERVICES["bolt"]]
    for key, (what, reference) in product(keys, REFERENCES.items()):
        theirs, nothings = (
            _ask(tenants, key, Asked("POST", path, body)) for path, body in map(reference, (ana, missing))
        )
        assert theirs == nothings, what
        assert theirs[0] == NOT_THERE, what


def test_no_socket_opens_with_a_bad_credential(tenants: Tenants, clock: MovedClock) -> None:
    """The WebSocket is no route of the OpenAPI document; it takes the same credentials."""
    client: Any = tenants._client
    for kind in BAD:
        key = _bad_credential(tenants, kind, clock)
        with client.websocket_connect("/v1/ws") as socket:
            socket.send_json({"type": "auth", **({} if key is None else {"token": key})})
            with pytest.raises(WebSocketDisconnect) as closed:
                socket.receive_json()
        assert closed.value.code == CLOSED, kind
