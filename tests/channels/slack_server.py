"""A fake Slack on loopback: the parts of the Web API and of Socket Mode's WebSocket that a bot needs.

The server records the bot's messages, edits, and responses to interactions. It returns the failures that a test
requests. `signed` signs webhook requests as Slack does.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from tests.channels.loop_server import LoopServer

BOT_USER = "U0BOT"
TOKEN, APP_TOKEN, SIGNING_SECRET = "xoxb-of-the-tests", "xapp-of-the-tests", "the signing secret of the tests"


def signed(body: bytes, at: float, secret: str = SIGNING_SECRET) -> dict[str, str]:
    """The headers of a webhook request from Slack with this `body`, signed at the Unix time `at`."""
    stamp = str(int(at))
    digest = hmac.new(secret.encode(), f"v0:{stamp}:".encode() + body, hashlib.sha256).hexdigest()
    return {"X-Slack-Request-Timestamp": stamp, "X-Slack-Signature": f"v0={digest}"}


@dataclass
class Failure:
    """A failure response to the next `times` calls of `method`. An `error` is Slack's error code in the body."""

    method: str
    status: int
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1


class SlackServer(LoopServer):
    """A server that runs in its own thread until `close`."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.edited: list[dict[str, Any]] = []
        self.shown: dict[str, str] = {}
        """The texts of the messages that the channels show, by `ts`."""
        self.received: list[tuple[str, str, bytes]] = []
        """The files that the bot has shared: the channel, the name and the content."""
        self._uploads: dict[str, tuple[str, bytes]] = {}
        self.deleted: set[str] = set()
        self.responses: list[dict[str, Any]] = []
        self.acknowledged: list[str] = []
        self.connected: list[int] = []
        self.failures: list[Failure] = []
        self.names = {"U1": "Ana", "U2": "Bo"}
        self.shares: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._sockets: list[web.WebSocketResponse] = []
        super().__init__(self._application())
        self.url = f"http://127.0.0.1:{self.port}/api/"
        self.response_url = f"http://127.0.0.1:{self.port}/response/1"

    def new_ts(self) -> str:
        """The id of a new message."""
        return f"1763888400.{next(self._numbers):06d}"

    def dispatch(self, kind: str, payload: dict[str, Any]) -> str:
        """Send an envelope over Socket Mode. Returns the envelope's id."""
        envelope = f"envelope-{next(self._numbers)}"
        text = json.dumps(
            {"type": kind, "envelope_id": envelope, "payload": payload, "accepts_response_payload": False}
        )

        async def send() -> None:
            for socket in list(self._sockets):
                await socket.send_str(text)

        self.do(send())
        return envelope

    def fail(self, method: str, status: int, error: str = "", times: int = 1, **headers: str) -> None:
        """Answer the next `times` calls of `method` with a failure."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.failures.append(Failure(method, status, error, named, times))

    def _application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [
                web.post("/api/{method}", self._call),
                web.get("/api/{method}", self._call),
                web.post("/upload/{id}", self._upload),
                web.post("/response/{id}", self._respond),
                web.get("/link/", self._socket),
            ]
        )
        return application

    async def _call(self, request: web.Request) -> web.Response:
        method = request.match_info["method"]
        for failure in self.failures:
            if failure.method == method and failure.times:
                failure.times -= 1
                body = {"ok": False, "error": failure.error} if failure.error else {}
                return web.json_response(body, status=failure.status, headers=failure.headers)
        wanted = APP_TOKEN if method == "apps.connections.open" else TOKEN
        if request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"ok": False, "error": "invalid_auth"})
        if request.content_type == "application/json":
            given: dict[str, Any] = {**request.query, **json.loads(await request.text() or "{}")}
        else:
            given = {**request.query, **await request.post()}
        if method in {"chat.update", "chat.delete"} and given["ts"] in self.deleted:
            return web.json_response({"ok": False, "error": "message_not_found"})
        answer = self._share if method.startswith("files.") else self._answer
        return web.json_response({"ok": True, **answer(method, given)})

    def _answer(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        match method:
            case "chat.postMessage":
                ts = self.new_ts()
                self.shown[ts] = given.get("text", "")
                self._note(self.sent, {"ts": ts, **given})
                return {"channel": given["channel"], "ts": ts, "message": {"text": given.get("text", "")}}
            case "chat.delete":
                self.shown.pop(given["ts"], None)
                self.deleted.add(given["ts"])
                return {"channel": given["channel"], "ts": given["ts"]}
            case "chat.update":
                self.shown[given["ts"]] = given.get("text", "")
                self._note(self.edited, given)
                return {"channel": given["channel"], "ts": given["ts"], "text": given.get("text", "")}
            case "auth.test":
                return {"user_id": BOT_USER, "team_id": "T1", "bot_id": "B0BOT", "url": "https://team.slack.com/"}
            case "users.info":
                name = self.names.get(given["user"], "")
                return {"user": {"id": given["user"], "name": name.lower(), "profile": {"display_name": name}}}
            case "apps.connections.open":
                return {"url": f"ws://127.0.0.1:{self.port}/link/?ticket=1"}
            case _:
                raise web.HTTPNotFound

    def _share(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        """Before an upload, its URL. After it, share the files."""
        if method == "files.getUploadURLExternal":
            file_id = f"F{next(self._numbers)}"
            self._uploads[file_id] = given["filename"], b""
            return {"upload_url": f"http://127.0.0.1:{self.port}/upload/{file_id}", "file_id": file_id}
        shared = [each["id"] for each in json.loads(given["files"])]
        self._note(self.shares, given)
        self.received += [(given["channel_id"], *self._uploads.pop(each)) for each in shared]
        return {"files": [{"id": each} for each in shared]}

    async def _upload(self, request: web.Request) -> web.Response:
        for failure in self.failures:
            if failure.method == "upload" and failure.times:
                failure.times -= 1
                return web.Response(status=failure.status)
        name, _ = self._uploads[request.match_info["id"]]
        self._uploads[request.match_info["id"]] = name, await request.read()
        return web.Response(text="OK")

    async def _respond(self, request: web.Request) -> web.Response:
        self._note(self.responses, await request.json())
        return web.Response(text="ok")

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse()
        await response.prepare(request)
        await response.send_str(
            json.dumps({"type": "hello", "num_connections": 1, "connection_info": {"app_id": "A1"}})
        )
        self._sockets.append(response)
        self._note(self.connected, len(self._sockets))
        async for frame in response:
            if frame.type is WSMsgType.TEXT and frame.data.startswith("{"):
                self._note(self.acknowledged, json.loads(frame.data)["envelope_id"])
        self._sockets.remove(response)
        return response
