"""A fake Discord on loopback: the parts of the REST API and of the gateway's WebSocket that a bot needs.

The gateway speaks `zlib-stream`. It supports HELLO, IDENTIFY, READY, HEARTBEAT, HEARTBEAT ACK, RESUME and events. After
a RESUME, it sends the missed events. The REST API records the bot's messages, edits and typing indicators, and returns
the failures that a test requests.
"""

from __future__ import annotations

import itertools
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from tests.channels.loop_server import LoopServer

BOT_ID = "900000000000000001"
BOT = {"id": BOT_ID, "username": "agent", "discriminator": "0", "avatar": None, "global_name": None, "bot": True}
TOKEN = "OTAwMDAwMDAwMDAwMDAwMDAx.Gateway.of-the-tests"

_HELLO, _IDENTIFY, _RESUME, _INVALID_SESSION, _HEARTBEAT, _ACK, _DISPATCH = 10, 2, 6, 9, 1, 11, 0


@dataclass
class Failure:
    """A failure response to the next `times` requests whose path contains `path`."""

    path: str
    status: int
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1


class _Socket:
    """One connection of a bot to the gateway."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._deflate = zlib.compressobj()

    async def send(self, payload: dict[str, Any]) -> None:
        """Send one payload as a frame of the connection's zlib stream."""
        text = json.dumps(payload).encode()
        await self._socket.send_bytes(self._deflate.compress(text) + self._deflate.flush(zlib.Z_SYNC_FLUSH))

    async def close(self, code: int) -> None:
        """Close the connection."""
        await self._socket.close(code=code)


class DiscordServer(LoopServer):
    """A server that runs in its own thread until `close`."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.edited: list[dict[str, Any]] = []
        self.shown: dict[str, str] = {}
        """The texts of the messages that the channels show, by id."""
        self.received: list[tuple[str, str, bytes]] = []
        """The files that the bot has sent: the channel or the interaction's token, the name and the content."""
        self.deleted: set[str] = set()
        self.typing: list[str] = []
        self.written: list[dict[str, Any]] = []
        """Messages that people wrote. A channel's history returns them."""
        self.answered: list[dict[str, Any]] = []
        self.refused: list[str] = []
        """The tokens of interactions whose answer came before their deferred answer."""
        self._acknowledged: set[str] = set()
        self.identified: list[dict[str, Any]] = []
        self.resumed: list[dict[str, Any]] = []
        self.failures: list[Failure] = []
        self._ids = itertools.count(1_100_000_000_000_000_000)
        self._events: list[dict[str, Any]] = []
        self._sockets: list[_Socket] = []
        self._nonces: dict[str, dict[str, Any]] = {}
        super().__init__(self._application())
        self.url = f"http://127.0.0.1:{self.port}/api/v10"

    def new_id(self) -> str:
        """A fresh snowflake."""
        return str(next(self._ids))

    def acknowledge(self, token: str) -> None:
        """Accept answers to an interaction: the response to its webhook request, a deferred answer, has arrived."""
        self._acknowledged.add(token)

    def dispatch(self, name: str, data: dict[str, Any]) -> None:
        """Send an event to the bot. If the bot is not connected, the server sends the event when the bot resumes."""
        self.do(self._dispatch(name, data))

    def drop(self, code: int = 4000) -> None:
        """Close the gateway's connections with `code`. After 4000, a bot resumes its session."""

        async def close_all() -> None:
            sockets, self._sockets = self._sockets, []
            for socket in sockets:
                await socket.close(code)

        self.do(close_all())

    def fail(self, path: str, status: int, body: dict[str, Any] | None = None, times: int = 1, **headers: str) -> None:
        """Answer the next `times` requests for `path` with a failure."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.failures.append(Failure(path, status, body or {}, named, times))

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard])
        api = "/api/v10"
        application.add_routes(
            [
                web.get("/gateway/", self._gateway),
                web.get("/gateway", self._gateway),
                web.get(f"{api}/gateway/bot", self._gateway_bot),
                web.get(f"{api}/users/@me", self._me),
                web.post(f"{api}/channels/{{channel}}/messages", self._create),
                web.get(f"{api}/channels/{{channel}}", self._channel),
                web.get(f"{api}/channels/{{channel}}/messages", self._history),
                web.patch(f"{api}/channels/{{channel}}/messages/{{message}}", self._edit),
                web.delete(f"{api}/channels/{{channel}}/messages/{{message}}", self._delete),
                web.post(f"{api}/channels/{{channel}}/typing", self._typing),
                web.post(f"{api}/interactions/{{id}}/{{token}}/callback", self._callback),
                web.patch(f"{api}/webhooks/{{application}}/{{token}}/messages/@original", self._original),
            ]
        )
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        for failure in self.failures:
            if failure.path in request.path and failure.times:
                failure.times -= 1
                return web.json_response(failure.body, status=failure.status, headers=failure.headers)
        open_paths = ("/gateway", "/api/v10/interactions/", "/api/v10/webhooks/")
        if not request.path.startswith(open_paths) and request.headers.get("Authorization") != f"Bot {TOKEN}":
            return web.json_response({"message": "401: Unauthorized", "code": 0}, status=401)
        return await handler(request)  # type: ignore[no-any-return]

    async def _gateway_bot(self, _request: web.Request) -> web.Response:
        limit = {"total": 1000, "remaining": 999, "reset_after": 14_400_000, "max_concurrency": 1}
        url = f"ws://127.0.0.1:{self.port}/gateway"
        return web.json_response({"url": url, "shards": 1, "session_start_limit": limit})

    async def _me(self, _request: web.Request) -> web.Response:
        return web.json_response(BOT)

    async def _create(self, request: web.Request) -> web.Response:
        body, files = await _read(request)
        if not (files or body.get("content")) or len(body.get("content", "")) > 2_000:
            return web.json_response({"code": 50035, "message": "Invalid Form Body", "errors": {}}, status=400)
        nonce = str(body.get("nonce") or "")
        if body.get("enforce_nonce") and nonce in self._nonces:
            return web.json_response(self._nonces[nonce])
        message = self._message(request.match_info["channel"], self.new_id(), body)
        if nonce:
            self._nonces[nonce] = message
        self.shown[message["id"]] = body.get("content", "")
        self.received += [(request.match_info["channel"], *each) for each in files]
        self._note(self.sent, {"content": "", "channel": request.match_info["channel"], "id": message["id"], **body})
        return web.json_response(message)

    async def _channel(self, request: web.Request) -> web.Response:
        """Respond that the requested channel is a private chat."""
        recipients = [{**BOT, "id": "11", "username": "ana", "bot": False}]
        return web.json_response(
            {"id": request.match_info["channel"], "type": 1, "last_message_id": None, "recipients": recipients}
        )

    async def _history(self, request: web.Request) -> web.Response:
        """Respond with the first `limit` messages after the id `after`, sorted newest first."""
        channel, after = request.match_info["channel"], int(request.query["after"])
        found = [each for each in self.written if each["channel_id"] == channel and int(each["id"]) > after]
        page = sorted(found, key=lambda each: int(each["id"]))[: int(request.query["limit"])]
        blank = self._message(channel, "0", {})
        return web.json_response([{**blank, **each} for each in reversed(page)])

    async def _edit(self, request: web.Request) -> web.Response:
        body = await request.json()
        channel, message = request.match_info["channel"], request.match_info["message"]
        if message in self.deleted:
            return web.json_response({"message": "Unknown Message", "code": 10008}, status=404)
        if len(body["content"]) > 2_000:
            return web.json_response({"code": 50035, "message": "Invalid Form Body", "errors": {}}, status=400)
        self.shown[message] = body["content"]
        self._note(self.edited, {"channel": channel, "id": message, **body})
        return web.json_response(self._message(channel, message, body))

    async def _delete(self, request: web.Request) -> web.Response:
        message = request.match_info["message"]
        if message in self.deleted:
            return web.json_response({"message": "Unknown Message", "code": 10008}, status=404)
        self.deleted.add(message)
        self.shown.pop(message, None)
        return web.Response(status=204)

    async def _typing(self, request: web.Request) -> web.Response:
        self._note(self.typing, request.match_info["channel"])
        return web.Response(status=204)

    async def _callback(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.acknowledge(request.match_info["token"])
        self._note(self.answered, {**request.match_info, **body})
        return web.Response(status=204)

    async def _original(self, request: web.Request) -> web.Response:
        body, files = await _read(request)
        if (token := request.match_info["token"]) not in self._acknowledged:
            self._note(self.refused, token)
            return web.json_response({"message": "Unknown Webhook", "code": 10015}, status=404)
        self.received += [(token, *each) for each in files]
        self._note(self.edited, {"original": token, **body})
        return web.json_response(self._message("1", self.new_id(), body))

    def _message(self, channel: str, message: str, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": message,
            "channel_id": channel,
            "author": BOT,
            "content": body.get("content", ""),
            "timestamp": "2026-11-23T09:00:00+00:00",
            "edited_timestamp": None,
            "tts": False,
            "mention_everyone": False,
            "mentions": [],
            "mention_roles": [],
            "attachments": [],
            "embeds": [],
            "pinned": False,
            "type": 0,
            "flags": 0,
            "nonce": body.get("nonce"),
        }

    async def _gateway(self, request: web.Request) -> web.WebSocketResponse:
        assert request.query["compress"] == "zlib-stream"
        response = web.WebSocketResponse()
        await response.prepare(request)
        socket = _Socket(response)
        await socket.send({"op": _HELLO, "d": {"heartbeat_interval": 41_250}, "s": None, "t": None})
        async for frame in response:
            if frame.type not in {WSMsgType.BINARY, WSMsgType.TEXT}:
                break
            await self._receive(socket, json.loads(frame.data))
        if socket in self._sockets:
            self._sockets.remove(socket)
        return response

    async def _receive(self, socket: _Socket, payload: dict[str, Any]) -> None:
        if payload["op"] == _HEARTBEAT:
            await socket.send({"op": _ACK, "d": None, "s": None, "t": None})
        elif payload["op"] == _IDENTIFY:
            if payload["d"]["token"] != TOKEN:
                await socket.close(4004)
                return
            self._events = []
            await self._join(socket)
            await self._dispatch("READY", self._ready())
            self._note(self.identified, payload["d"])
        elif payload["op"] == _RESUME:
            seq = payload["d"]["seq"]
            for event in self._events[seq:]:
                await socket.send(event)
            await self._join(socket)
            await self._dispatch("RESUMED", {})
            self._note(self.resumed, payload["d"])

    async def _join(self, socket: _Socket) -> None:
        self._sockets.append(socket)

    async def _dispatch(self, name: str, data: dict[str, Any]) -> None:
        event = {"op": _DISPATCH, "t": name, "s": len(self._events) + 1, "d": data}
        self._events.append(event)
        for socket in list(self._sockets):
            await socket.send(event)

    def _ready(self) -> dict[str, Any]:
        return {
            "v": 10,
            "user": BOT,
            "guilds": [],
            "session_id": "the session of the tests",
            "resume_gateway_url": f"ws://127.0.0.1:{self.port}/gateway",
            "shard": [0, 1],
            "application": {"id": BOT_ID, "flags": 0},
        }


async def _read(request: web.Request) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """The body of a message, and the names and contents of its files."""
    if request.content_type != "multipart/form-data":
        return await request.json(), []
    form = await request.post()
    files = [(each.filename, each.file.read()) for each in form.values() if isinstance(each, web.FileField)]
    said: Any = form["payload_json"]
    return json.loads(said), files
