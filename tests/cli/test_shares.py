"""What one user may hold open at a gateway: streams, sockets and requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import httpx2
import pytest
from pydantic import SecretStr
from starlette.types import Message
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_socket

from perdure.access.tenants import UserKey
from perdure.channels.http.limits.reading import Reader, Unread
from perdure.channels.http.limits.shares import Newcomers, Unsent
from perdure.cli.serve.connection_limits import Door
from perdure.errors import RateLimited
from perdure.runtime import Runtime
from perdure.settings import StreamSettings
from perdure.turns.inbox import accept
from perdure.turns.inbox.incoming import Incoming
from tests.cli.serving import PATIENCE_S, Served, connect, serving
from tests.processes.faults import wait_until

_KEY = "key-of-a-service"


@pytest.fixture
def served(runtime: Runtime) -> Iterator[Served]:
    """A gateway with a key, at which a user may have two of each."""
    changed = {"api_keys": (SecretStr(_KEY),), "stream": StreamSettings(max_open_per_user=2)}
    with serving(replace(runtime, settings=runtime.settings.model_copy(update=changed)), Door(100)) as made:
        yield made


def _token(served: Served, user: str) -> str:
    given = {"user_id": user, "ttl_s": 600}
    answer = httpx2.post(served.url("/v1/tokens"), json=given, headers={"authorization": f"Bearer {_KEY}"})
    token: str = answer.json()["token"]
    return token


def _turn(runtime: Runtime, user: str) -> str:
    return str(accept.accept(runtime, Incoming(user=UserKey(user), text="hello")).turn_id)


def _stream(stack: ExitStack, served: Served, key: str, turn_id: str) -> None:
    head = f"GET /v1/turns/{turn_id}/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
    client = stack.enter_context(connect(served.address, head.encode()))
    assert b" 200 " in client.recv(100)


def _socket(stack: ExitStack, served: Served, token: str) -> ClientConnection:
    url = served.url("/v1/ws").replace("http", "ws")
    made = stack.enter_context(connect_socket(url, open_timeout=PATIENCE_S))
    made.send(json.dumps({"type": "auth", "token": token}))
    return made


def test_one_user_does_not_take_all_streams(runtime: Runtime, served: Served) -> None:
    """The user's share counts for any key and any kind of stream. Another user's stream is not refused."""
    turn_id, other = _turn(runtime, "ann"), _turn(runtime, "ben")
    authorized = {"authorization": f"Bearer {_KEY}"}
    with ExitStack() as stack:
        for _ in range(2):
            _stream(stack, served, _KEY, turn_id)
        refused = httpx2.get(served.url(f"/v1/turns/{turn_id}/events"), headers=authorized)
        assert (refused.status_code, refused.json()["code"]) == (429, "RATE_LIMITED")
        completion = {"model": "", "stream": True, "user": "ann", "messages": [{"role": "user", "content": "hello"}]}
        refused = httpx2.post(served.url("/v1/chat/completions"), json=completion, headers=authorized)
        assert refused.status_code == 429
        socket = _socket(stack, served, _KEY)
        assert json.loads(socket.recv(PATIENCE_S))["type"] == "ready"
        socket.send(json.dumps({"type": "follow", "turn_id": turn_id}))
        answers = [json.loads(socket.recv(PATIENCE_S)) for _ in range(2)]
        assert [answer["code"] for answer in answers if answer["type"] == "error"] == ["RATE_LIMITED"]
        _stream(stack, served, _KEY, other)
    wait_until(lambda: not served.app.state.gateway._streams._held, "the streams end", PATIENCE_S)
    with ExitStack() as stack:
        _stream(stack, served, _KEY, turn_id)


def test_one_token_does_not_take_all_sockets(served: Served) -> None:
    """A token's sockets and requests have a share. Closed ones do not count, nor do those of another user."""
    ann, ben = _token(served, "ann"), _token(served, "ben")
    with ExitStack() as stack:
        for _ in range(2):
            assert json.loads(_socket(stack, served, ann).recv(PATIENCE_S))["type"] == "ready"
        with pytest.raises(ConnectionClosed) as closed:
            _socket(stack, served, ann).recv(PATIENCE_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
        sessions = served.url("/v1/sessions")
        assert httpx2.get(sessions, headers={"authorization": f"Bearer {ann}"}).status_code == 429
        assert httpx2.get(sessions, headers={"authorization": f"Bearer {ben}"}).status_code == 200
        assert json.loads(_socket(stack, served, ben).recv(PATIENCE_S))["type"] == "ready"
    wait_until(lambda: not served.app.state.gateway.requests._held, "the sockets end", PATIENCE_S)
    with ExitStack() as stack:
        assert json.loads(_socket(stack, served, ann).recv(PATIENCE_S))["type"] == "ready"


def test_a_share_is_at_most_half_of_all_streams() -> None:
    """If an operator lowers only `PERDURE_STREAM__MAX_OPEN`, one user still cannot take all of it."""
    assert [StreamSettings(max_open=most).user_share for most in (1, 2, 10, 1_000)] == [1, 1, 5, 100]


def test_newcomers_make_room_for_newer_ones() -> None:
    """The oldest newcomer of the address with the most ends early, so that others can still sign in."""
    ended: list[str] = []

    async def wait(newcomers: Newcomers, address: str, name: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S) as limit:
                with newcomers.taken(address, limit):
                    await asyncio.Event().wait()
        except TimeoutError:
            ended.append(name)

    async def main() -> None:
        newcomers = Newcomers(most=3)
        comers = [("1.1.1.1", "lone"), ("2.2.2.2", "first"), ("2.2.2.2", "second"), ("2.2.2.2", "third")]
        tasks = [asyncio.ensure_future(wait(newcomers, *comer)) for comer in comers]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert not newcomers._by_address

    asyncio.run(main())
    assert ended == ["first"]


def test_memory_for_responses_is_shared() -> None:
    """A user's response waits for the user's others, and all wait for the process's memory; then it is refused."""

    async def main() -> None:
        unsent = Unsent(wait_s=0.05, most=30, most_of_user=20)
        reader = Reader()
        release = await unsent.reserve(UserKey("ann"), 15, reader)
        with pytest.raises(RateLimited):
            await unsent.reserve(UserKey("ann"), 15, reader)
        waiting = asyncio.ensure_future(unsent.reserve(UserKey("ann"), 15, reader))
        release_of_other = await unsent.reserve(UserKey("ben"), 15, reader)
        release()
        release_again = await waiting
        with pytest.raises(RateLimited):
            await unsent.reserve(None, 1, reader)
        release_of_other()
        release_again()
        (await unsent.reserve(UserKey("ann"), 1_000, reader))()  # more than the whole memory: alone
        assert (unsent._in_all, unsent._reserved) == (0, {})

    asyncio.run(main())


async def _respond(unsent: Unsent, user: str, ended: asyncio.Queue[str], *, reads: bool) -> None:
    """Reserve memory, and send to a client that reads all or nothing, until the client is cut off."""

    async def send(message: Message) -> None:
        await (asyncio.sleep(0.01) if reads else asyncio.Event().wait())

    reader = Reader(PATIENCE_S)
    with suppress(Unread):
        async with unsent.reserved(UserKey(user), 10, reader):
            while True:
                await reader.send(send, {}, 10)
    ended.put_nowait(user)


@pytest.mark.long
def test_slow_users_do_not_take_the_memory_of_those_who_read() -> None:
    """If all memory is reserved, slow clients end, however many. Those that read do not."""

    async def main() -> None:
        ended: asyncio.Queue[str] = asyncio.Queue()
        unsent = Unsent(wait_s=PATIENCE_S, most=100, most_of_user=20, slow_s=0.1)
        slow = [asyncio.ensure_future(_respond(unsent, f"slow {n}", ended, reads=False)) for n in range(30)]
        reading = [asyncio.ensure_future(_respond(unsent, f"reading {n}", ended, reads=True)) for n in range(9)]
        async with asyncio.timeout(PATIENCE_S / 2):
            names = [await ended.get() for _ in range(29)]  # the last slow one has the last place
        assert all(name.startswith("slow") for name in names)
        assert sum(size for user, size in unsent._reserved.items() if "reading" in str(user)) == 90
        for task in (*slow, *reading):
            task.cancel()
        await asyncio.gather(*slow, *reading, return_exceptions=True)
        assert (unsent._in_all, unsent._reserved, unsent._places) == (0, {}, set())

    asyncio.run(main())
