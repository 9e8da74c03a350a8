"""Authentication: plain keys, hashed keys, key files that change, and requests from pages of other origins."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.channels.http.auth import KeyKind, Keys
from perdure.channels.http.limits.throttle import MAX_ADDRESSES, MAX_WRONG_KEYS, WINDOW_S, WrongKeys
from perdure.clock import MovedClock
from perdure.errors import RateLimited, SettingsError, Unauthorized
from perdure.runtime import Runtime
from perdure.settings import Settings
from tests.channels.conftest import BASE_URL


def fingerprint(key: str) -> str:
    """The SHA-256 hash of `key` in hexadecimal, as in `sha256:HEX`."""
    return hashlib.sha256(key.encode()).hexdigest()


SERVICE, HASHED, FILED, ADMIN = "key-of-a-service", "key-of-the-digest", "key-in-the-file!", "key-of-the-admin"
FRESH, OTHER = "a-fresh-key-0001", "another-key-0001"
PATH = "/v1/sessions?user_id=ann"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with a comment and one key."""
    file = tmp_path / "keys"
    file.write_text(f"# of the other team\n\n{FILED}\n")
    return file


@contextmanager
def gateway(runtime: Runtime, **given: str) -> Iterator[TestClient]:
    """Yields a client of a gateway with the given settings."""
    settings = Settings(_env_file=None, **given)  # type: ignore[arg-type]
    with TestClient(create_app(replace(runtime, settings=settings), lambda: True), base_url=BASE_URL) as client:
        yield client


@pytest.fixture
def guarded(runtime: Runtime, key_file: Path) -> Iterator[TestClient]:
    """A client of a gateway with a plain key, a hashed key, a key in a file and an admin key."""
    keys = f"{SERVICE}, sha256:{fingerprint(HASHED).upper()}, file:{key_file}"
    with gateway(runtime, api_keys=keys, admin_keys=ADMIN) as client:
        yield client


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_known_key_is_accepted(guarded: TestClient, scheme: str) -> None:
    """Each form of a key is accepted, and the authentication scheme is case-insensitive."""
    for key in (SERVICE, HASHED, FILED, ADMIN):
        assert guarded.get(PATH, headers={"Authorization": f"{scheme} {key}"}).status_code == 200, key


def test_the_body_of_a_request_without_a_key_is_not_read(guarded: TestClient) -> None:
    """The key is checked before the body is read, so a client without a key cannot fill the memory."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        pytest.fail("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "query_string": b"", "headers": []}
    asyncio.run(guarded.app(scope, receive, send))  # type: ignore[arg-type]

    assert sent[0]["status"] == 401


def test_the_key_is_checked_before_the_body(guarded: TestClient) -> None:
    """A missing key gets 401, and a service key on an admin route gets 403, even if the body is invalid."""
    wrong = {"Authorization": f"Bearer {SERVICE}"}
    statuses = [
        guarded.post("/v1/messages", content=b"[").status_code,
        guarded.post("/v1/consolidation/run", content=b"[", headers=wrong).status_code,
        guarded.post("/v1/messages", content=b"[", headers=wrong).status_code,
    ]

    assert statuses == [401, 403, 400]


INVALID_HEADERS = [
    "",
    "Bearer",
    "Bearer ",
    SERVICE,
    f"Basic {SERVICE}",
    f"Bearer {SERVICE}x",
    f"Bearer {SERVICE[:-1]}",
    f"Bearer sha256:{fingerprint(HASHED)}",
    f"Bearer {fingerprint(HASHED)}",
    "Bearer # of the other team",
    "Bearer file:keys",
    f"Bearer {SERVICE},{ADMIN}",
    "Bearer \x7f",
]


def test_unknown_keys_are_refused(guarded: TestClient) -> None:
    """An unknown key gets 401 and `WWW-Authenticate`. A hash or file name from the settings is not a key."""
    for headers in ({}, *({"Authorization": header} for header in INVALID_HEADERS)):
        response = guarded.get(PATH, headers=headers)

        assert (response.status_code, response.json()["code"]) == (401, "UNAUTHORIZED"), headers
        assert response.headers["www-authenticate"].startswith("Bearer")


ROUTES = [
    ("POST", "/v1/messages"),
    ("GET", "/v1/turns/here"),
    ("GET", "/v1/turns/here/events"),
    ("GET", "/v1/turns/here/prompt"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/here"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("GET", "/v1/conversations?user_id=a"),
    ("GET", "/v1/schedules?user_id=a"),
    ("POST", "/v1/schedules"),
    ("PATCH", "/v1/schedules/here"),
    ("DELETE", "/v1/schedules/here"),
    ("GET", "/v1/memories?user_id=a"),
    ("GET", "/v1/memories/here"),
    ("PATCH", "/v1/memories/here"),
    ("DELETE", "/v1/memories/here"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/here/content"),
    ("PATCH", "/v1/conversations/here?user_id=a"),
    ("POST", "/v1/turns/here/cancel"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/here"),
    ("GET", "/v1/sessions/here/messages"),
    ("GET", "/v1/sessions/here/queue"),
    ("POST", "/v1/sessions/here/end"),
    ("POST", "/v1/sessions/here/fork"),
    ("POST", "/v1/turns/here/approval"),
    ("POST", "/v1/turns/here/results"),
    ("POST", "/v1/memory/search"),
    ("POST", "/v1/memory/consolidate"),
    ("GET", "/v1/users/here/export"),
    ("DELETE", "/v1/users/here"),
    ("POST", "/v1/tokens"),
    ("POST", "/v1/links"),
    ("GET", "/v1/links"),
    ("DELETE", "/v1/links"),
    ("GET", "/v1/breakers"),
    ("POST", "/v1/breakers/here/reset"),
    ("POST", "/v1/turns/here/feedback"),
    ("GET", "/v1/casebank/search"),
    ("POST", "/v1/casebank/cases/here/share"),
    ("DELETE", "/v1/casebank/cases/here/share"),
    ("POST", "/v1/consolidation/run"),
    ("POST", "/v1/consolidation/dry-run"),
    ("GET", "/v1/consolidation/runs"),
    ("GET", "/v1/approvals"),
    ("GET", "/v1/consolidation/runs/here"),
    ("POST", "/v1/consolidation/runs/here/approve"),
    ("POST", "/v1/consolidation/runs/here/reject"),
    ("POST", "/v1/consolidation/restore/here"),
    ("GET", "/v1/consolidation/runs/here/report"),
    ("GET", "/v1/audit"),
    ("GET", "/v1/status"),
    ("GET", "/v1/usage"),
    ("GET", "/v1/turns"),
    ("GET", "/v1/turns/here/timeline"),
    ("POST", "/v1/turns/here/retry"),
    ("GET", "/v1/sessions/live"),
    ("GET", "/v1/pauses"),
    ("POST", "/v1/pauses"),
    ("DELETE", "/v1/pauses"),
    ("GET", "/v1/deliveries"),
    ("POST", "/v1/deliveries/resend"),
    ("POST", "/v1/deliveries/here/resend"),
    ("GET", "/v1/schedule-entries"),
]


def test_every_route_is_guarded(guarded: TestClient) -> None:
    """Every `/v1` route of the OpenAPI document is in `ROUTES`. Each route checks the key before the body."""
    app: Any = guarded.app
    described = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if path.startswith("/v1")
    }

    for method, path in ROUTES:
        assert guarded.request(method, path, content=b"x" * 2**21).status_code == 401, path
    asked = {(method, path.partition("?")[0]) for method, path in ROUTES}
    unlisted = [each for each in described if not any(_is_of(each, route) for route in asked)]
    assert (unlisted, len(ROUTES)) == ([], len(described))


def _is_of(described: tuple[str, str], route: tuple[str, str]) -> bool:
    pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(described[1]))
    return described[0] == route[0] and re.fullmatch(pattern, route[1]) is not None


@pytest.mark.long
def test_health_is_open(guarded: TestClient) -> None:
    """Health routes need no key, because a load balancer has none."""
    assert [guarded.get(path).status_code for path in ("/healthz", "/readyz", "/openapi.json")] == [200] * 3


def test_only_an_admin_lists_all_sessions(guarded: TestClient) -> None:
    """With a service key, a request for sessions must name a user. Only an admin key can list all sessions."""
    as_service = guarded.get("/v1/sessions", headers={"Authorization": f"Bearer {SERVICE}"})
    as_admin = guarded.get("/v1/sessions", headers={"Authorization": f"Bearer {ADMIN}"})

    assert (as_service.status_code, as_service.json()["code"]) == (403, "FORBIDDEN")
    assert as_admin.status_code == 200


def test_a_key_file_is_read_again_when_it_changes(guarded: TestClient, key_file: Path) -> None:
    """A running gateway reads a changed key file again. The keys of a deleted file are refused."""

    def status(key: str) -> int:
        return guarded.get(PATH, headers={"Authorization": f"Bearer {key}"}).status_code

    assert (status(FILED), status(FRESH)) == (200, 401)
    key_file.write_text(f"{FRESH}\n")
    assert (status(FILED), status(FRESH)) == (401, 200)
    before = key_file.stat()
    key_file.write_text(f"{OTHER}\n")  # same length, later modification time
    os.utime(key_file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert (status(FRESH), status(OTHER)) == (401, 200)
    key_file.unlink()
    assert (status(OTHER), status(SERVICE)) == (401, 200)
    key_file.write_text(f"{OTHER}\n")
    assert status(OTHER) == 200


def test_an_empty_key_file_refuses_every_request(runtime: Runtime, tmp_path: Path) -> None:
    """An empty key file does not make the gateway public: every request is refused."""
    (tmp_path / "keys").touch()
    with gateway(runtime, api_keys=f"file:{tmp_path / 'keys'}") as client:
        assert client.get(PATH).status_code == 401


def test_a_key_file_that_cannot_be_read_stops_the_start(runtime: Runtime) -> None:
    """A gateway with an unreadable key file does not start. The error names the environment variable."""
    with pytest.raises(SettingsError, match="PERDURE_ADMIN_KEYS"), gateway(runtime, admin_keys="file:/nowhere/keys"):
        pass


def test_without_keys_this_machine_is_served(client: TestClient) -> None:
    """Without keys, requests to a loopback host name are served."""
    hosts = ["localhost", "localhost:8080", "127.0.0.1", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080", "LOCALHOST"]

    assert {host: client.get(PATH, headers={"Host": host}).status_code for host in hosts} == dict.fromkeys(hosts, 200)


def test_without_keys_other_host_names_are_refused(client: TestClient, rows: Callable[[], dict[str, int]]) -> None:
    """Without keys, only loopback host names are served, because any name can resolve to loopback (DNS rebinding)."""
    before = rows()
    message = {"user_id": "ann", "text": "hi"}
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "10.0.0.1"):
        response = client.post("/v1/messages", json=message, headers={"Host": host})

        assert (response.status_code, response.json()["code"]) == (403, "FORBIDDEN"), host
    assert rows() == before


def test_without_keys_no_page_of_another_origin_is_served(client: TestClient) -> None:
    """Without keys, a request from a page of another origin gets 403. Otherwise any website could send messages."""
    message = {"user_id": "ann", "text": "hi"}

    def status(origin: str) -> int:
        return client.post("/v1/messages", json=message, headers={"Origin": origin}).status_code

    assert status(BASE_URL) == 202
    for origin in ("http://evil.example", "null", "https://127.0.0.1:8080", "http://127.0.0.1:9999"):
        assert status(origin) == 403, origin


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site"])
def test_without_keys_no_request_from_another_site_is_served(
    client: TestClient, rows: Callable[[], dict[str, int]], site: str
) -> None:
    """A browser sends some requests of foreign pages without an `Origin`, such as that of an image, but says so."""
    before = rows()
    for method, path, body in (
        ("GET", "/v1/sessions", None),
        ("GET", "/v1/users/ann/export", None),
        ("POST", "/v1/messages", {"user_id": "ann", "text": "hi"}),
    ):
        answer = client.request(method, path, json=body, headers={"Sec-Fetch-Site": site})
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), path
    assert rows() == before
    for own in ("same-origin", "none"):
        assert client.get("/v1/sessions", headers={"Sec-Fetch-Site": own}).status_code == 200, own


def test_with_keys_any_name_is_served(guarded: TestClient) -> None:
    """With keys, requests to any host name are served, because a proxy may have a public name."""
    headers = {"Host": "agents.example", "Authorization": f"Bearer {SERVICE}"}

    assert guarded.get(PATH, headers=headers).status_code == 200


def _as(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_caller_has_the_tenant_of_its_key(runtime: Runtime, tmp_path: Path) -> None:
    """A plain or hashed key, in the settings or in a file, can have a tenant (`TENANT=KEY`).

    If the text before `=` is not a valid tenant, that text is part of the key.
    """
    (tmp_path / "keys").write_text(f"bolt={FILED}\nbolt=sha256:{fingerprint(FRESH)}\n")
    keys = f"acme={SERVICE},acme=sha256:{fingerprint(HASHED)},file:{tmp_path / 'keys'},Not-A-Tenant={OTHER}"
    settings = Settings(_env_file=None, api_keys=keys, admin_keys=f"acme={ADMIN}")  # type: ignore[arg-type]
    made = Keys(settings, runtime.clock)

    def caller(key: str) -> tuple[KeyKind, str | None]:
        found = made.caller(Request({"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]}))
        return found.kind, found.tenant

    assert {caller(key) for key in (SERVICE, HASHED)} == {(KeyKind.SERVICE, "acme")}
    assert {caller(key) for key in (FILED, FRESH)} == {(KeyKind.SERVICE, "bolt")}
    assert caller(f"Not-A-Tenant={OTHER}") == (KeyKind.SERVICE, None)
    assert caller(ADMIN) == (KeyKind.ADMIN, "acme")
    for text in (f"acme={SERVICE}", OTHER, "acme="):
        with pytest.raises(Unauthorized):
            caller(text)


def test_a_key_of_two_tenants_stops_the_start(runtime: Runtime, tmp_path: Path) -> None:
    """A gateway with one key for two tenants does not start. The error does not show the key."""
    (tmp_path / "keys").write_text(f"bolt={SERVICE}\n")
    for keys in (f"acme={SERVICE},{SERVICE}", f"acme={SERVICE},file:{tmp_path / 'keys'}"):
        with pytest.raises(SettingsError, match="one key for two tenants") as caught, gateway(runtime, api_keys=keys):
            pass
        assert SERVICE not in str(caught.value)


def test_a_short_key_that_is_added_later_is_refused(
    guarded: TestClient, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a changed key file has a short key, a running gateway refuses this key and accepts the file's other keys.

    The gateway logs the number of the short key's line once.
    """
    key_file.write_text(f"{FRESH}\nshort\nacme=short\n")
    status = {key: guarded.get(PATH, headers=_as(key)).status_code for key in (FRESH, "short", FILED)}

    assert status == {FRESH: 200, "short": 401, FILED: 401}
    logged = [each.getMessage() for each in caplog.records if "the line is skipped" in each.getMessage()]
    assert len(logged) == 2
    assert "line 2 has a key of fewer than 16 characters" in logged[0]
    assert "line 3 has a key of fewer than 16 characters after TENANT=" in logged[1]


def test_wrong_keys_are_throttled(guarded: TestClient, clock: MovedClock) -> None:
    """Wrong keys beyond the limit get 429 with `Retry-After`. Valid keys and requests without a key are not limited."""
    answers = [guarded.get(PATH, headers=_as(f"wrong {number}")) for number in range(MAX_WRONG_KEYS + 2)]

    assert [each.status_code for each in answers] == [401] * MAX_WRONG_KEYS + [429] * 2
    assert answers[-1].json()["code"] == "RATE_LIMITED"
    assert 0 < int(answers[-1].headers["retry-after"]) <= WINDOW_S
    assert guarded.get(PATH, headers=_as(SERVICE)).status_code == 200
    assert guarded.get(PATH).status_code == 401
    clock.advance(timedelta(seconds=WINDOW_S / 2))
    assert int(guarded.get(PATH, headers=_as("wrong")).headers["retry-after"]) == WINDOW_S / 2
    clock.advance(timedelta(seconds=WINDOW_S / 2))
    assert guarded.get(PATH, headers=_as("wrong")).status_code == 401


def test_wrong_keys_are_counted_by_address(clock: MovedClock) -> None:
    """Wrong keys are counted per IPv4 address or IPv6 network, so that one client cannot block another."""
    wrong = WrongKeys(clock)
    for number in range(MAX_WRONG_KEYS):
        wrong.count("192.0.2.1")
        wrong.count(f"2001:db8::{number}")
    wrong.count("192.0.2.2")
    wrong.count("2001:db8:0:1::")
    for address in ("192.0.2.1", "2001:db8::ffff"):
        with pytest.raises(RateLimited):
            wrong.count(address)


def test_wrong_keys_take_bounded_memory(clock: MovedClock) -> None:
    """The number of counted addresses is bounded. The most recently used addresses are kept."""
    wrong = WrongKeys(clock)
    for number in range(MAX_ADDRESSES + 100):
        wrong.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
        if number % 1_000 == 0 and number < 1_000 * MAX_WRONG_KEYS:
            wrong.count("192.0.2.1")

    assert len(wrong) == MAX_ADDRESSES
    with pytest.raises(RateLimited):
        wrong.count("192.0.2.1")
