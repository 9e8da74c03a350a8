"""The memory in which long bodies are parsed: what reserves it, and when it is released."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.channels.http.body import MAX_BODY_BYTES
from perdure.channels.http.limits.shares import Unsent
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.runtime import Runtime
from tests.channels.conftest import BASE_URL
from tests.turns.scripted import says


def _body(*, is_long: bool) -> bytes:
    history = [{"role": "assistant", "content": "x" * MAX_BODY_BYTES}] if is_long else []
    body = {"user": "ann", "background": True, "input": [*history, {"role": "user", "content": "hello"}]}
    return json.dumps(body).encode()


def _pieces(body: bytes) -> Iterator[bytes]:
    """A body whose length the client does not name."""
    for at in range(0, len(body), 2**16):
        yield body[at : at + 2**16]


def test_a_short_body_of_unknown_length_reserves_nothing(client: TestClient) -> None:
    """So clients that send slowly do not keep others waiting. A long body waits for memory, and its error says so."""
    client.app.state.gateway._bodies = Unsent(0.05, most=1, most_of_user=2, refusal="no room for bodies")  # type: ignore[attr-defined]
    for content in (_body(is_long=False), _pieces(_body(is_long=False))):
        assert client.post("/v1/responses", content=content).status_code == 200
    for content in (_body(is_long=True), _pieces(_body(is_long=True))):
        refused = client.post("/v1/responses", content=content)
        assert (refused.status_code, refused.json()["error"]["message"]) == (429, "no room for bodies")


def test_a_long_body_of_unknown_length_is_read(client: TestClient) -> None:
    """Its memory is reserved while it is read, and released."""
    assert client.post("/v1/responses", content=_pieces(_body(is_long=True))).status_code == 200
    bodies = client.app.state.gateway._bodies  # type: ignore[attr-defined]
    assert (bodies._in_all, "long bodies" in bodies._refusal) == (0, True)


def test_a_side_request_releases_its_body(runtime: Runtime) -> None:
    """While the model writes a title, the history of the chat takes no memory."""
    held: list[int] = []

    class Titles:
        """A model that records the reserved memory."""

        name = "titles"

        def respond(self, _request: ModelRequest, _call: ModelCall) -> ModelReply:
            """Record it."""
            held.append(app.state.gateway._bodies._in_all)
            return says("A title")

    titles = Titles()
    app = create_app(replace(runtime, models=lambda _name: titles), lambda: True)
    history = [{"role": "assistant", "content": "x" * MAX_BODY_BYTES}, {"role": "user", "content": "A title, please"}]
    with TestClient(app, base_url=BASE_URL) as client:
        body = {"model": "assistant", "user": "ann", "messages": history}
        answer = client.post("/v1/chat/completions", json=body, headers={"X-OpenWebUI-Task": "title_generation"})
    assert answer.status_code == 200, answer.text
    assert held == [0]
