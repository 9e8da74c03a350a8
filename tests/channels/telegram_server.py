"""A fake Telegram on loopback: the parts of the Bot API that a bot needs.

The server records the bot's calls, and returns the failures that a test requests.
"""

from __future__ import annotations

import email
import json
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

TOKEN, SECRET = "1:of-the-tests", "the-secret-token-of-the-tests"
_POLL_S = 0.05
"""Seconds until a poll without updates returns. The real Telegram waits longer."""

CHAT = {"id": 21, "type": "private"}


class TelegramServer:
    """A server that runs in its own threads until `close`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, str]]] = []
        self.failures: list[tuple[str, int, dict[str, Any]]] = []
        self.updates: list[dict[str, Any]] = []
        self.shown: dict[str, str] = {}
        """The texts of the messages that the chats show, by `message_id`."""
        self.deleted: set[str] = set()
        self.files: dict[str, bytes] = {}
        """The contents of files, by `file_id`."""
        self.received: list[tuple[str, str, bytes]] = []
        """The files that the bot has sent: the method, the name and the content."""
        self.reads = threading.Event()
        """While it is not set, the server reads no body."""
        self.reads.set()
        self.cut = threading.Event()
        """Set when a connection has ended within a body."""
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    def fail(self, method: str, status: int, times: int = 1, **answer: Any) -> None:
        """Answer the next `times` calls of `method` with `status`."""
        body = {"ok": False, "error_code": status, "description": "failed", **answer}
        self.failures += [(method, status, body)] * times

    def given(self, method: str) -> list[dict[str, str]]:
        """The fields of each successful call of `method`."""
        return [fields for name, fields in self.calls if name == method]

    def answer(self, method: str, fields: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """Record a call. Returns the status and the body of its response."""
        with self._lock:
            failure = next((each for each in self.failures if each[0] == method), None)
            if failure is not None:
                self.failures.remove(failure)
                return failure[1], failure[2]
            self.calls.append((method, fields))
            if method == "getUpdates":
                after = int(fields.get("offset", 0))
                if not any(each["update_id"] >= after for each in self.updates):
                    time.sleep(_POLL_S)
                return 200, {"ok": True, "result": [each for each in self.updates if each["update_id"] >= after]}
            if method == "getMe":
                return 200, {"ok": True, "result": {"id": 7, "is_bot": True, "first_name": "Bot", "username": "My_Bot"}}
            if method == "getFile":
                file_id = fields["file_id"]
                found = {"file_id": file_id, "file_unique_id": file_id, "file_path": f"documents/{file_id}"}
                return 200, {"ok": True, "result": found}
            if method in {"sendMessage", "editMessageText", "deleteMessage", "sendPhoto", "sendDocument"}:
                return self._message(method, fields)
            return 200, {"ok": True, "result": True}

    def _message(self, method: str, fields: dict[str, str]) -> tuple[int, dict[str, Any]]:
        message_id = fields.get("message_id", str(len(self.calls)))
        if message_id in self.deleted:
            return 400, {"ok": False, "error_code": 400, "description": "Bad Request: message not found"}
        if method == "deleteMessage":
            self.deleted.add(message_id)
            self.shown.pop(message_id, None)
            return 200, {"ok": True, "result": True}
        if method in {"sendPhoto", "sendDocument"}:
            return 200, {"ok": True, "result": {"message_id": len(self.calls), "date": 1, "chat": CHAT}}
        if self.shown.get(message_id) == fields["text"]:
            return 400, {"ok": False, "error_code": 400, "description": "Bad Request: message is not modified"}
        self.shown[message_id] = fields["text"]
        message = {"message_id": int(message_id), "date": 1, "chat": CHAT, "text": fields["text"]}
        return 200, {"ok": True, "result": message}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server.reads.wait()
                length, content = int(self.headers.get("Content-Length", 0)), b""
                with suppress(ConnectionError):
                    content = self.rfile.read(length)
                if len(content) < length:
                    server.cut.set()
                    return
                method, kind = self.path.rpartition("/")[2], str(self.headers.get("Content-Type", ""))
                if kind.startswith("multipart/form-data"):
                    fields, sent = _form(kind, content)
                else:
                    fields, sent = {name: values[0] for name, values in parse_qs(content.decode()).items()}, []
                status, answer = server.answer(method, fields)
                if status == HTTPStatus.OK:
                    server.received += [(method, *each) for each in sent]
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                found = server.files.get(self.path.rpartition("/")[2])
                known = found is not None and self.path.startswith(f"/file/bot{TOKEN}/documents/")
                self.send_response(200 if known else 404)
                self.send_header("Content-Length", str(len(found or b"")))
                self.end_headers()
                self.wfile.write(found or b"")

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        return Handler


def _form(kind: str, content: bytes) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
    """The fields of a `multipart/form-data` body, and the names and contents of its files."""
    fields, files = dict[str, str](), list[tuple[str, bytes]]()
    whole = email.message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + content)
    for part in whole.walk():
        data = part.get_payload(decode=True)
        if not isinstance(data, bytes):
            continue
        if (name := part.get_filename()) is not None:
            files.append((name, data))
        else:
            fields[str(part.get_param("name", header="content-disposition"))] = data.decode()
    return fields, files
