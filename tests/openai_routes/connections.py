"""A client's connection to a gateway, which a test closes at any moment."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from typing import Any

from anyio.from_thread import BlockingPortal
from starlette.testclient import TestClient


class Connection:
    """A request with a JSON body. `is_stalled`: the client reads nothing of the response.

    `status` and `body` are what the client has received.
    """

    def __init__(
        self, http: TestClient, path: str, body: Any, headers: dict[str, str] | None = None, *, is_stalled: bool = False
    ) -> None:
        assert http.portal is not None
        self.status: int | None = None
        self.body = b""
        self._portal: BlockingPortal = http.portal
        self._is_stalled = is_stalled
        self._received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._closed = asyncio.Event()
        self.has_begun = asyncio.Event()
        named = {"host": "127.0.0.1:8080", **(headers or {})}
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "server": ("127.0.0.1", 8080), "client": ("127.0.0.1", 1), "state": {}, "extensions": {},
            "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        }  # fmt: skip
        self._ended: Future[None] = self._portal.start_task_soon(self._run, http.app)

    def close(self) -> None:
        """Close the connection. Returns when the gateway's request has ended."""
        self._portal.call(self._closed.set)
        self._ended.result(20)

    def abandon(self) -> None:
        """Close the connection, if it is open, whatever has become of the request."""
        self._portal.call(self._closed.set)
        self._ended.exception(20)

    def read(self) -> str:
        """The whole response."""
        self._ended.result(20)
        return self.body.decode()

    async def _run(self, app: Any) -> None:
        await app(self._scope, self._receive, self._send)

    async def _receive(self) -> Any:
        if self._received:
            return self._received.pop()
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.has_begun.set()
        if self._is_stalled:
            await asyncio.Event().wait()
        self.body += message.get("body", b"")
