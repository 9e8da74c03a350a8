"""The summary model answers side requests: a front end's requests for titles and tags.

A side request begins no turn, and counts towards the user's rate limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.channels.http.openai.side_requests import is_side_request
from perdure.runtime import Runtime
from perdure.settings import GuardSettings
from tests.channels.conftest import BASE_URL


def _ask(client: TestClient, text: str, **more: Any) -> Any:
    body = {"model": "assistant", "user": "ann", "messages": [{"role": "user", "content": text}], **more}
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("headers", "text", "expected"),
    [
        ({"x-openwebui-task": "title_generation"}, "anything", True),
        ({"x-perdure-task": "tags"}, "anything", True),
        ({}, "### Task:\nGenerate a title.", True),
        ({}, "My task: ### Task:", False),
        ({"x-openwebui-task": ""}, "hello", False),
    ],
)
def test_side_requests_are_recognised(headers: dict[str, str], text: str, expected: bool) -> None:
    """A task header or the prefix `### Task:` marks a side request; `### Task:` later in the text does not."""
    assert is_side_request(headers, text) is expected


def test_side_requests_are_within_the_users_rates(runtime: Runtime) -> None:
    """A side request costs a model call, so it counts towards the user's rate limit and must name a user."""
    settings = runtime.settings.model_copy(update={"guard": GuardSettings(per_minute=1)})
    with TestClient(create_app(replace(runtime, settings=settings), lambda: True), base_url=BASE_URL) as client:
        assert _ask(client, "### Task:\nTitle").status_code == 200
        assert client.post("/v1/messages", json={"user_id": "ann", "text": "hello"}).status_code == 202
        refused = _ask(client, "### Task:\nTitle")
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        unnamed = _ask(client, "### Task:\nTitle", user=None)
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "user")


def test_a_streamed_title_is_one_piece(runtime: Runtime) -> None:
    """A streamed title is an event stream that ends with `[DONE]`."""
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as client:
        answer = _ask(client, "### Task:\nTitle", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
