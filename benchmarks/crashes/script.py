"""The turn that all systems run, as a worker sees it: a model call, a tool call, a second model call, and the reply.

Each of these units reports to the recorder (`benchmarks.crashes.recorder`), in another process, before it happens, when
it has happened, and when the worker has its result. The recorder may answer a report with SIGKILL. The model is
scripted: its reply depends only on whether it is given a tool's result, so a repeated call gets the same reply.
"""

from __future__ import annotations

import json
import os
import re
from enum import StrEnum
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

RECORDER = "CRASHES_RECORDER"
"""The environment variable with the recorder's URL."""

READY = "ready."
"""What a worker prints when it takes turns."""
QUEUE, TASK = "turns", "answer"

TOOL, CALL_ID = "order", "call_1"
RESULT, ANSWER = "Ordered.", "The pencils are ordered."
INSTRUCTIONS = "You order what the user needs."

_TURN = re.compile(r"turn-[0-9a-f]{32}")


class Unit(StrEnum):
    """The units of a turn, in order."""

    FIRST_CALL = "first model call"
    TOOL = "tool"
    SECOND_CALL = "second model call"
    REPLY = "reply"


class Phase(StrEnum):
    """When a unit reports. The effect of a unit is there from `INSIDE` on."""

    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


def text_of(turn: str) -> str:
    """The user's message of a turn."""
    return f"Please order pencils ({turn})."


def turn_in(text: str) -> str | None:
    """The turn of which a prompt is; `None` if it is of none."""
    found = _TURN.findall(text)
    return found[-1] if found else None


def ask(turn: str, result: str | None = None) -> str | None:
    """A model call. `result` is the tool's, as the model reads it. Returns its text; `None` for a call of the tool."""
    _perform(Unit.FIRST_CALL if result is None else Unit.SECOND_CALL, turn, text=result)
    return None if result is None else ANSWER


def order(turn: str, key: str) -> str:
    """The tool. `key` is the idempotency key that the system gives it."""
    _perform(Unit.TOOL, turn, key=key)
    return RESULT


def reply(turn: str, text: str, key: str) -> None:
    """Send the reply to the user's URL. Here, the recorder notices the phases by itself."""
    _request("POST", f"/replies/{turn}", {"text": text}, {"Idempotency-Key": key})


def was_ordered(key: str) -> bool:
    """Whether the tool's effect with this key is recorded."""
    found: bool = _request("GET", f"/effects/{key}")["found"]
    return found


def next_turn() -> str:
    """The turn that the user waits for: the request to a system that has no queue. Waits until there is one."""
    found: str = _request("GET", "/requests")["turn"]
    return found


def answered(turn: str) -> None:
    """Answer the request of `next_turn`."""
    _request("POST", f"/requests/{turn}", {})


def _perform(unit: Unit, turn: str, **noted: str | None) -> None:
    for phase in Phase:
        _request("POST", "/units", {"turn": turn, "unit": unit, "phase": phase, **noted})


def _request(
    method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    address = urlsplit(os.environ[RECORDER])
    connection = HTTPConnection(address.hostname or "", address.port)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    finally:
        connection.close()
