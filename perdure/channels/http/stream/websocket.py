"""The WebSocket `GET /v1/ws`: a client sends messages and receives the events of several turns on one connection.

The first frame contains the client's token, and must arrive within `AUTH_S` seconds. The token is in a frame because a
browser cannot send a header with the upgrade, and a token in the URL would be logged. If the application that mounts
the gateway authenticates its users, the cookie or header of the upgrade request authenticates the client instead. The
credentials are checked again with each frame. A connection from a page of another origin is refused.

Frames are JSON objects. The server answers each frame of the client with a frame that has the same `ref`. It also sends
events when they occur. uvicorn limits the size of a frame. It also sends pings, and closes a connection that does not
answer them. A client that does not read its frames, or reads them too slowly, is disconnected (`limits.reading`).

A user token's open sockets count against its share. Sockets that wait for their first frame are limited in all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect, status
from pydantic import BaseModel, ConfigDict, ValidationError

from perdure.access.tenants import user_of
from perdure.channels import WEB
from perdure.channels.activity import PRESENCE, TYPING, note_activity
from perdure.channels.http.auditing import recorded
from perdure.channels.http.auth import Caller
from perdure.channels.http.dependencies import Users, decide_as, require_turn
from perdure.channels.http.errors import problem_of
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.limits.reading import Unread
from perdure.channels.http.schemas.turns import Incoming
from perdure.errors import Conflict, InvalidRequest, NotFound, PerdureError, RateLimited, Unauthorized, Unavailable
from perdure.events.event import EventId
from perdure.text.untrusted import load_object
from perdure.turns.calls.approvals import parse_decision
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import parse_submitted

log = logging.getLogger(__name__)

router = APIRouter()

AUTH_S = 5.0
MAX_FRAME_BYTES = 2**17
"""The longest frame that uvicorn reads; a longer one closes the connection with 1009."""
MOST_FOLLOWED = 50
"""The most turns that one connection follows at once."""
PING_S = 20.0

UNAUTHORIZED, LATE, STOPPING, NO_ROOM = 4401, 4408, status.WS_1012_SERVICE_RESTART, status.WS_1013_TRY_AGAIN_LATER
_PAUSE_S = 60.0
_MESSAGE = frozenset(Incoming.model_fields) - {"channel", "reply_to"}
"""The members of the frame `send`: the fields of `POST /v1/messages`. A socket's channel is `web`."""


class _Frame(BaseModel):
    """The members of all frames. Further members depend on the frame's type."""

    model_config = ConfigDict(extra="allow")

    type: str
    ref: str | int | None = None


@router.websocket("/v1/ws")
async def socket(connection: WebSocket) -> None:
    """Authenticate one client, then answer its frames until it disconnects or the gateway stops."""
    gateway: Gateway = connection.app.state.gateway
    if not _same_origin(connection):
        await connection.close(status.WS_1008_POLICY_VIOLATION, "another origin")
        return
    try:
        gateway.require_room()
    except Unavailable as error:
        if "websocket.http.response" in connection.scope.get("extensions", {}):
            await connection.send_denial_response(problem_of(error))
        else:
            await connection.close(NO_ROOM)
        return
    await connection.accept()
    with suppress(WebSocketDisconnect):
        signed_in = await _authenticated(connection, gateway)
        if signed_in is None:
            return
        try:
            with gateway.requests.taken(signed_in[0].user):
                await _Client(connection, gateway, *signed_in).serve()
        except RateLimited as error:
            await connection.close(NO_ROOM, error.message[:100])


async def _authenticated(connection: WebSocket, gateway: Gateway) -> tuple[Caller, Request] | None:
    """The caller, and the request that authenticates the caller.

    Returns `None` if the client's first frame is late, or the client cannot be authenticated.

    Raises:
        WebSocketDisconnect: the client has disconnected.
    """
    try:
        request = _own_request(connection) if gateway.authenticate else await _signed_request(connection, gateway)
        caller = await gateway.caller(request)
    except TimeoutError:
        await connection.close(LATE, f"no auth frame within {AUTH_S:g} s")
    except PerdureError as error:
        await connection.close(UNAUTHORIZED, error.message[:100])
    else:
        return caller, request
    return None


class _Client:
    """One authenticated connection."""

    def __init__(self, connection: WebSocket, gateway: Gateway, caller: Caller, signed: Request) -> None:
        self._connection = connection
        self._gateway = gateway
        self._caller = caller
        self._signed = signed
        self._users = Users(caller, caller.tenant, all_users=caller.is_operator)
        self._sending = asyncio.Lock()
        self._unread: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._followed: dict[UUID, asyncio.Task[None]] = {}
        self._actions: dict[str, Callable[[_Frame], Awaitable[dict[str, Any]]]] = {
            "send": self._send,
            "follow": self._follow,
            "unfollow": self._unfollow,
            "cancel": self._cancel,
            "approve": self._decide,
            "deny": self._decide,
            "typing": self._typing,
        }

    async def serve(self) -> None:
        """Answer frames until the client disconnects or the gateway stops."""
        stopping = asyncio.ensure_future(self._gateway.stopped())
        try:
            user = None if self._caller.user is None else user_of(self._caller.user)
            await self._write({"type": "ready", "user_id": user})
            await self._note_presence()
            while True:
                receiving = asyncio.ensure_future(_received(self._connection))
                await asyncio.wait((receiving, stopping, self._unread), return_when=asyncio.FIRST_COMPLETED)
                if stopping.done() or self._unread.done():
                    receiving.cancel()
                    if stopping.done():
                        await self._connection.close(STOPPING, "the gateway is shutting down")
                    return
                text = receiving.result()
                try:
                    await self._gateway.caller(self._signed)  # the token may have expired, or the key may be revoked
                except PerdureError as error:
                    await self._connection.close(UNAUTHORIZED, error.message[:100])
                    return
                await self._answer(text)
        finally:
            stopping.cancel()
            for task in self._followed.values():
                task.cancel()
            await self._note_presence()

    async def _answer(self, text: str) -> None:
        ref: str | int | None = None
        try:
            frame = _parsed(text)
            ref = frame.ref
            action = self._actions.get(frame.type)
            if action is None:
                raise InvalidRequest(f"type: accepted are {', '.join(self._actions)}.")
            await self._write({"type": "ok", "ref": ref, **await action(frame)})
        except PerdureError as error:
            await self._write({"type": "error", "ref": ref, "code": error.code, "message": error.message})

    async def _send(self, frame: _Frame) -> dict[str, Any]:
        """Accept a message, and follow its turn."""
        self._gateway.admit()
        self._require_room()  # before `accept`: otherwise a turn could run although its client gets an error
        if unknown := _members(frame).keys() - _MESSAGE:
            raise InvalidRequest(f"{min(unknown)}: accepted fields are {', '.join(sorted(_MESSAGE))}.")
        given = {**_members(frame), "user_id": self._user_id(frame), "channel": WEB}
        message = self._users.address(parse_submitted(given))
        accepted = await self._gateway.in_thread(partial(accept, self._gateway.runtime, message))
        await self._begin(accepted.turn_id, None)
        return {
            "turn_id": str(accepted.turn_id),
            "session_id": str(accepted.session_id),
            "status": accepted.status,
            "duplicate": accepted.duplicate,
        }

    async def _typing(self, frame: _Frame) -> dict[str, Any]:
        """Record a typing event of the user."""
        user = self._users.key(str(self._user_id(frame)))
        await self._gateway.in_thread(partial(note_activity, self._gateway.runtime, user, WEB, TYPING))
        return {}

    async def _note_presence(self) -> None:
        """Record a presence event, if the caller is a user. Called when the connection opens and when it closes."""
        user = self._caller.user
        if user is not None:
            await self._gateway.in_thread(partial(note_activity, self._gateway.runtime, user, WEB, PRESENCE))

    def _user_id(self, frame: _Frame) -> object:
        own = None if self._caller.user is None else user_of(self._caller.user)
        given = _members(frame).get("user_id")
        return (own or "local") if given is None else given

    async def _follow(self, frame: _Frame) -> dict[str, Any]:
        turn_id = await self._turn(frame)
        last = _members(frame).get("last_event_id")
        await self._begin(turn_id, None if last is None else EventId.parse(str(last)))
        return {"turn_id": str(turn_id)}

    async def _unfollow(self, frame: _Frame) -> dict[str, Any]:
        turn_id = await self._turn(frame)
        task = self._followed.pop(turn_id, None)
        if task is not None:
            task.cancel()
        return {"turn_id": str(turn_id)}

    async def _cancel(self, frame: _Frame) -> dict[str, Any]:
        named = _turn_id(frame)
        async with recorded(self._gateway, self._caller, "turns.cancel", str(named)):
            turn_id = await self._turn(frame)
            await self._gateway.in_thread(partial(cancel, self._gateway.runtime, turn_id))
        return {"turn_id": str(turn_id)}

    async def _decide(self, frame: _Frame) -> dict[str, Any]:
        members = _members(frame)
        given: dict[str, Any] = {name: members[name] for name in ("call_id", "arguments") if name in members}
        decision = parse_decision(given | {"decision": frame.type})
        named = _turn_id(frame)
        async with recorded(self._gateway, self._caller, "turns.decide", str(named)) as action:
            if action is not None:
                action.note = f"{decision.decision} {decision.call_id}"
            turn_id, _ = await decide_as(self._gateway, self._caller, named, decision)
        return {"turn_id": str(turn_id)}

    async def _turn(self, frame: _Frame) -> UUID:
        return await self._gateway.in_thread(partial(require_turn, self._gateway, self._caller, _turn_id(frame)))

    async def _begin(self, turn_id: UUID, last: EventId | None) -> None:
        """Follow a turn after the position `last`. If the turn is already followed, replace its stream."""
        former = self._followed.pop(turn_id, None)
        if former is not None:
            former.cancel()
        self._require_room()
        task = asyncio.ensure_future(self._pass_on(turn_id, last))
        self._followed[turn_id] = task
        task.add_done_callback(partial(self._forget, turn_id))

    def _require_room(self) -> None:
        if len(self._followed) >= MOST_FOLLOWED:
            raise Conflict(f"This connection follows {MOST_FOLLOWED} turns; unfollow one.")

    def _forget(self, turn_id: UUID, task: asyncio.Task[None]) -> None:
        if self._followed.get(turn_id) is task:
            del self._followed[turn_id]

    async def _pass_on(self, turn_id: UUID, last: EventId | None) -> None:
        """Send the events of a turn after the position `last`, until the turn is settled."""
        head = {"type": "event", "turn_id": str(turn_id)}
        try:
            async with aclosing(self._gateway.events(self._connection, turn_id, last, _PAUSE_S)) as events:
                async for event in events:
                    if event is not None:
                        await self._write({**head, "id": str(event.id), "event": event.kind, "data": event.data})
        except PerdureError as error:
            await self._write({"type": "error", "turn_id": str(turn_id), "code": error.code, "message": error.message})
        except (WebSocketDisconnect, RuntimeError):  # starlette raises `RuntimeError` if the connection is closed
            log.debug("the client of turn %s has disconnected", turn_id)

    async def _write(self, frame: dict[str, Any]) -> None:
        """Send a frame.

        Raises:
            WebSocketDisconnect: the client has disconnected, or does not read.
        """
        async with self._sending:
            if self._unread.done():
                raise WebSocketDisconnect(status.WS_1006_ABNORMAL_CLOSURE)
            try:
                await self._connection.send_text(json.dumps(frame, ensure_ascii=False, separators=(",", ":")))
            except Unread:
                self._unread.set_result(None)
                raise WebSocketDisconnect(status.WS_1006_ABNORMAL_CLOSURE) from None


async def _received(connection: WebSocket) -> str:
    """The next frame's text; empty for a binary frame, which `_parsed` then rejects.

    Raises:
        WebSocketDisconnect: the client has disconnected.
    """
    message = await connection.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", status.WS_1000_NORMAL_CLOSURE), message.get("reason"))
    return message.get("text") or ""


def _parsed(text: str) -> _Frame:
    """Parse a client's frame.

    Raises:
        InvalidRequest: the frame is not a JSON object with a `type`.
    """
    try:
        return _Frame.model_validate(load_object(text))
    except (ValidationError, ValueError):
        raise InvalidRequest("A frame must be a JSON object with a type, and a ref that is text or a number.") from None


def _turn_id(frame: _Frame) -> UUID:
    try:
        return UUID(str(_members(frame).get("turn_id")))
    except ValueError:
        raise NotFound("There is no such turn.") from None


def _members(frame: _Frame) -> dict[str, Any]:
    return frame.model_extra or {}


async def _signed_request(connection: WebSocket, gateway: Gateway) -> Request:
    """The connection as a request whose `Authorization` header has the token of the first frame.

    Raises:
        TimeoutError: the frame is late, or too many sockets wait for theirs.
        Unauthorized, InvalidRequest: the frame is not an `auth` frame.
        WebSocketDisconnect: the client has disconnected.
    """
    address = connection.client.host if connection.client else ""
    async with asyncio.timeout(AUTH_S) as limit:
        with gateway.newcomers.taken(address, limit):
            frame = _parsed(await _received(connection))
    if frame.type != "auth":
        raise Unauthorized('The first frame must be {"type": "auth", "token": "…"}.')
    token = getattr(frame, "token", None)
    headers = [header for header in connection.scope["headers"] if header[0] != b"authorization"]
    if isinstance(token, str) and token.isascii() and token:
        headers.append((b"authorization", f"Bearer {token}".encode()))
    return _own_request(connection, headers)


def _own_request(connection: WebSocket, headers: list[tuple[bytes, bytes]] | None = None) -> Request:
    """The connection as a request with `headers`, by default the headers of the upgrade request."""
    scheme = "https" if connection.scope["scheme"] == "wss" else "http"
    scope = {**connection.scope, "type": "http", "method": "GET", "scheme": scheme}
    return Request(scope if headers is None else {**scope, "headers": headers})


def _same_origin(connection: WebSocket) -> bool:
    """Whether the `Origin` header names the gateway's host or is absent. Usually only browsers send this header."""
    origin = connection.headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == connection.headers.get("host", "").lower()
