"""Hooks that give schemathesis existing ids, allowed names and messages that an agent can answer.

schemathesis loads them in its own process (see schemathesis.toml).
"""

from __future__ import annotations

import base64
import re
from typing import Any

import schemathesis
from pydantic import JsonValue
from schemathesis import Case, HookContext
from schemathesis.core.transport import Response

from perdure.events.event import EventId
from tests.files.contents import png

AGENT = "assistant"
TASK = "reports.take"
IMAGE = base64.b64encode(png(1, 1)).decode()

_ASKED_IN: dict[str, dict[str, JsonValue]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
}
_OF_A_USER = ("/v1/messages", "/v1/memory/search", "/v1/schedules", "/v1/links", "/v1/casebank/search")
_KEPT = ("stream", "stream_options", "background", "prompt_cache_key", "safety_identifier")

_IDS = ("turn_id", "session_id", "run_id", "schedule_id")
_known: dict[str, str] = {}


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Set all waits to 0. Put existing ids and names into each valid request, because random ones would get a 404."""
    if case.query.get("wait", 1) and "wait" in {parameter.name for parameter in case.operation.query}:
        _wait_no_time(case)
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    last = case.headers.get("last-event-id") if case.headers else None
    if last is not None and re.search(EventId.PATTERN, str(last)) is None:
        del case.headers["last-event-id"]  # the coverage phase sends "0", which does not match the pattern
    for name in case.path_parameters.keys() & _known.keys():
        case.path_parameters[name] = _known[name]
    _name_whose(case, case.body if isinstance(case.body, dict) else case.query)
    if isinstance(case.body, dict):
        _name_what_exists(case, case.body)


@schemathesis.hook
def after_call(context: HookContext, case: Case[Any], response: Response) -> None:
    """Remember the ids in successful responses."""
    if response.status_code in {200, 201, 202} and "json" in str(response.headers.get("content-type")):
        answer = response.json()
        if isinstance(answer, dict):
            _known.update({name: answer[name] for name in _IDS if isinstance(answer.get(name), str)})


def _name_whose(case: Case[Any], named: dict[str, Any]) -> None:
    if case.operation.path in _OF_A_USER and named.get("user_id") is None:
        named["user_id"] = "ann"  # optional for users' tokens, but the key of these tests acts for any user
    if case.operation.path == "/v1/pauses":
        named["agent"] = "another"  # so that no other request waits, and each request names something


def _name_what_exists(case: Case[Any], body: dict[str, Any]) -> None:
    if case.operation.path == "/v1/messages":
        # A JSON schema cannot say that no text within the metadata may have a NUL.
        allowed: dict[str, JsonValue] = {"agent": AGENT, "reply_to": {"task": TASK}, "metadata": {"page": "/"}}
        if body.get("session_id") is not None:
            body.pop("conversation", None)  # a message may not have both a session and a conversation
        for part in body.get("parts") or ():
            if part["type"] != "text":
                part |= {"data": IMAGE, "file_id": None, "url": None}
        body |= {name: allowed[name] for name in allowed if body.get(name) is not None}
    if case.operation.path == "/v1/schedules":
        _set_moment(body)
    if case.operation.path in _ASKED_IN:
        kept = {name: body[name] for name in _KEPT if name in body}
        body.clear()
        body |= {**kept, "model": AGENT, "user": "ann", **_ASKED_IN[case.operation.path]}


def _set_moment(body: dict[str, Any]) -> None:
    """Give a schedule either a time or a cron expression, and a known time zone."""
    body |= {name: value for name, value in (("timezone", "UTC"), ("agent", AGENT)) if body.get(name) is not None}
    if body.get("cron") is None:
        body["at"] = "2099-05-02T09:30"
    else:
        body |= {"cron": "30 7 * * MON-FRI", "at": None}


def _wait_no_time(case: Case[Any]) -> None:
    try:
        valid = float(case.query.get("wait", 1)) >= 0
    except (TypeError, ValueError):
        return
    if valid:
        case.query["wait"] = 0
