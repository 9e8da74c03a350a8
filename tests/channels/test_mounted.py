"""The gateway mounted in another application, which authenticates its own users."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import perdure
from perdure.application import gateway as opening
from perdure.application.gateway import MountedGateway
from perdure.errors import SettingsError, Unavailable
from perdure.runtime import Runtime
from perdure.workers import opened
from perdure.workers.opened import OpenGateway
from perdure.workers.publish.background import BackgroundWaker
from tests.turns.harness import PATIENCE_S

BASE_URL = "http://shop.example"


async def visitor(request: Request) -> str | None:
    """The user of a request: the value of the `session` cookie, or `None`. The value `expired` raises a 401."""
    if request.cookies.get("session") == "expired":
        raise HTTPException(401, "Sign in again.")
    return request.cookies.get("session")


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[TestClient]:
    """An application with the gateway mounted at /agents."""
    agents = perdure.gateway(
        authenticate=visitor, database_url=database_url, redis_url=redis_url, model="offline", _env_file=None
    )
    app = FastAPI(lifespan=lambda _: agents.running())
    app.mount("/agents", agents)
    with TestClient(app, base_url=BASE_URL) as made:
        yield made


def _send(shop: TestClient, user: str, **options: Any) -> Any:
    return shop.post("/agents/v1/messages", json={"user_id": user, "text": "hello"}, **options)


def test_the_application_decides_who_the_user_is(shop: TestClient) -> None:
    """An authenticated user has the rights of a user token. A request for another user's data gets 404."""
    assert _send(shop, "ana").status_code == 401
    assert _send(shop, "ana", headers={"authorization": "Bearer any"}).status_code == 401
    shop.cookies.set("session", "ana")
    sent = _send(shop, "ana")
    assert sent.status_code == 202
    turn = f"/agents/v1/turns/{sent.json()['turn_id']}"
    assert shop.get(turn).status_code == 200
    assert _send(shop, "ben").status_code == 404
    assert shop.get("/agents/v1/breakers").status_code == 403
    assert shop.post("/agents/v1/tokens", json={"user_id": "ana", "ttl_s": 60}).status_code == 403
    shop.cookies.set("session", "ben")
    assert shop.get(turn).status_code == 404


def test_an_error_of_the_applications_dependency_is_answered(shop: TestClient) -> None:
    """If `authenticate` raises an `HTTPException`, the response has its status and the gateway's error format."""
    shop.cookies.set("session", "expired")
    answer = _send(shop, "ana")
    assert (answer.status_code, answer.json()["detail"]) == (401, "Sign in again.")


def test_a_page_of_another_origin_is_refused(shop: TestClient) -> None:
    """Requests from other origins are refused, because a browser sends the application's cookie with these requests."""
    shop.cookies.set("session", "ana")
    assert _send(shop, "ana", headers={"origin": "https://evil.example"}).status_code == 403
    assert _send(shop, "ana", headers={"origin": BASE_URL}).status_code == 202
    with (
        pytest.raises(WebSocketDisconnect),
        shop.websocket_connect("/agents/v1/ws", headers={"origin": "https://evil.example"}) as socket,
    ):
        socket.receive_json()


def test_the_socket_knows_the_user_by_the_upgrade(shop: TestClient) -> None:
    """The WebSocket's user comes from the cookie of the upgrade request; no `auth` frame is needed."""
    shop.cookies.set("session", "ana")
    with shop.websocket_connect("/agents/v1/ws") as socket:
        assert socket.receive_json() == {"type": "ready", "user_id": "ana"}
    shop.cookies.clear()
    with pytest.raises(WebSocketDisconnect), shop.websocket_connect("/agents/v1/ws") as socket:
        socket.receive_json()


@pytest.mark.long
def test_paths_are_relative_to_the_mount(shop: TestClient) -> None:
    """File URLs, the OpenAPI document's server URL and the OpenAI routes' error format are correct below the mount."""
    shop.cookies.set("session", '"><script>')
    page = shop.get("/agents").text
    assert page == shop.get("/agents/").text
    assert 'src="chat/chat.js"' in page
    assert '<meta name="user" content="&quot;&gt;&lt;script&gt;">' in page
    assert shop.get("/agents/chat/chat.js").status_code == 200
    assert shop.get("/agents/openapi.json").json()["servers"] == [{"url": "/agents"}]
    shop.cookies.clear()
    assert shop.get("/agents/v1/models").json().keys() == {"error"}
    shop.cookies.set("session", "a/b")
    assert shop.get("/agents/v1/conversations?user_id=a%2Fb").status_code == 200
    assert shop.get("/agents/v1/users/a%2Fb/export").json()["detail"] == "There is no data about that user."


def test_a_mount_without_authentication_is_refused(database_url: str, redis_url: str) -> None:
    """A mounted gateway needs keys or the application's authentication, because the application may be public."""
    with pytest.raises(SettingsError, match="pass `authenticate`, or set PERDURE_API_KEYS"):
        perdure.gateway(database_url=database_url, redis_url=redis_url, _env_file=None)


def test_a_gateway_without_a_lifespan_opens_with_the_first_request(database_url: str, redis_url: str) -> None:
    """A mounted application gets no lifespan events, so the gateway opens its connections at the first request."""
    agents = perdure.gateway(
        authenticate=visitor, database_url=database_url, redis_url=redis_url, model="offline", _env_file=None
    )
    app = FastAPI()
    app.mount("/agents", agents)
    with TestClient(app, base_url=BASE_URL, cookies={"session": "ana"}) as client:
        assert agents._openings == {}
        assert client.get("/agents/readyz").status_code == 200
        assert client.portal is not None
        client.portal.call(agents.close)
    with TestClient(agents, base_url=BASE_URL, cookies={"session": "ana"}) as client:
        assert client.get("/readyz").status_code == 200, "an unmounted gateway opens with the server's lifespan"


@pytest.fixture
def agents(database_url: str, redis_url: str) -> MountedGateway:
    """A gateway that no lifespan opens."""
    return perdure.gateway(
        authenticate=visitor, database_url=database_url, redis_url=redis_url, model="offline", _env_file=None
    )


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each gateway that was opened, whether its connections were closed."""
    found: list[bool] = []
    really = opening._open

    def counted(*given: Any) -> OpenGateway:
        made, number = really(*given), len(found)
        found.append(False)

        def close() -> None:
            found[number] = True
            made.close()

        return OpenGateway(made.app, close)

    monkeypatch.setattr(opening, "_open", counted)
    return found


async def _ask(agents: MountedGateway, count: int = 2) -> list[int]:
    transport = httpx.ASGITransport(agents, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=BASE_URL, cookies={"session": "ana"}) as client:
        answers = await asyncio.gather(*(client.get("/v1/sessions") for _ in range(count)))
    return [each.status_code for each in answers]


async def _ask_and_close(agents: MountedGateway) -> list[int]:
    try:
        return await _ask(agents)
    finally:
        await agents.close()


def test_each_event_loop_has_a_gateway_of_its_own(agents: MountedGateway, closed: list[bool]) -> None:
    """One after the other, as in an application's tests, and at once, as in two threads of a process."""
    for _ in range(3):
        assert asyncio.run(_ask(agents)) == [200, 200]
    assert closed == [True, True, False], "the next loop closes the connections of one that has ended"

    async def serve() -> list[list[int]]:
        async with agents.running():
            before = await _ask(agents)
            other = await asyncio.to_thread(asyncio.run, _ask_and_close(agents))
            return [before, other, await _ask(agents)]

    assert asyncio.run(serve()) == [[200, 200]] * 3
    assert closed == [True] * 5


def test_a_request_that_is_cancelled_does_not_leave_connections_behind(
    agents: MountedGateway, closed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that it began to open answers the next request, or is closed if none comes."""
    may_open, really = threading.Event(), opening._open

    def slowly(*given: Any) -> OpenGateway:
        assert may_open.wait(PATIENCE_S)
        return really(*given)

    async def cancel(*, ask_again: bool) -> list[int]:
        may_open.clear()
        request = asyncio.create_task(_ask(agents))
        while not agents._openings:  # noqa: ASYNC110 (a test's own poll)
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        may_open.set()
        if ask_again:
            return await _ask_and_close(agents)
        await agents.close()
        return []

    monkeypatch.setattr(opening, "_open", slowly)
    assert asyncio.run(cancel(ask_again=True)) == [200, 200]
    assert closed == [True]
    assert asyncio.run(cancel(ask_again=False)) == []
    assert closed == [True, True]


def test_an_opening_that_fails_is_tried_again(
    agents: MountedGateway, closed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests that wait for it fail with it; the next one opens the gateway."""
    really = opening._open

    def fail(*_: Any) -> OpenGateway:
        monkeypatch.setattr(opening, "_open", really)
        raise Unavailable("down")

    async def ask_twice() -> list[int]:
        return [*await _ask(agents), *await _ask_and_close(agents)]

    monkeypatch.setattr(opening, "_open", fail)
    assert asyncio.run(ask_twice()) == [500, 500, 200, 200]
    assert closed == [True]


def test_an_opening_that_fails_leaves_nothing_open(agents: MountedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections to the broker, which may be the application's own, are closed with the rest."""
    left: list[str] = []

    def fail(*_: Any) -> Runtime:
        raise Unavailable("down")

    monkeypatch.setattr(opened, "assemble", fail)
    monkeypatch.setattr(BackgroundWaker, "close", lambda waker: left.append(type(waker).__name__))
    assert asyncio.run(_ask(agents, 1)) == [500]
    assert left == ["BackgroundWaker"]
