"""Files over the routes in OpenAI's form: each shape of a part, in Chat Completions and in Responses."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from perdure.channels.http.openai.wire import newest_user_message
from perdure.database.engine import Database
from tests.channels.conftest import BASE_URL
from tests.channels.test_files import IMAGE, PDF, upload
from tests.files.contents import pdf, png
from tests.turns.harness import until


def data_url(content: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


CHAT = [
    {"type": "text", "text": "What are these?"},
    {"type": "image_url", "image_url": {"url": data_url(IMAGE, "image/png"), "detail": "high"}},
    {"type": "file", "file": {"filename": "bill.pdf", "file_data": data_url(PDF, "application/pdf")}},
]
RESPONSES = [
    {"type": "input_text", "text": "What are these?"},
    {"type": "input_image", "image_url": data_url(IMAGE, "image/png"), "detail": "auto"},
    {"type": "input_file", "filename": "bill.pdf", "file_data": data_url(PDF, "application/pdf")},
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": CHAT}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": RESPONSES}]}),
    ],
)
def test_a_request_has_files(
    path: str,
    body: dict[str, Any],
    *,
    client: TestClient,
    database: Database,
    run: Callable[[str], None],
    rows: Callable[[], dict[str, int]],
) -> None:
    """20 MB of PDF and an image of 4,000 pixels, in Base64. A second request stores them no second time."""
    with ThreadPoolExecutor(1) as threads:
        for number in (1, 2):
            answer = threads.submit(client.post, path, json={"model": "assistant", "user": "ann", **body})
            until(partial(_has_turns, rows, number), "a turn")
            with database.engine.connect() as connection:
                session_id = connection.exec_driver_sql("SELECT session_id FROM sessions").scalar_one()
            run(str(session_id))
            assert answer.result(60).status_code == 200, answer.result().text
    asked = [each for each in client.get(f"/v1/sessions/{session_id}/messages").json() if each["role"] == "user"]
    for each in asked:
        assert each["content"] == "What are these?"
        assert [(part["type"], part.get("name"), part["size"]) for part in each["parts"]] == [
            ("image", None, len(IMAGE)),
            ("file", "bill.pdf", len(PDF)),
        ]
    assert (len(asked), rows()["file_contents"]) == (2, 2)


def _has_turns(rows: Callable[[], dict[str, int]], number: int) -> bool:
    return rows()["turns"] == number


def test_a_file_that_was_uploaded(client: TestClient, rows: Callable[[], dict[str, int]]) -> None:
    """By its id; an unknown or foreign id is refused in OpenAI's shape."""
    file_id = upload(client, png(), params={"user_id": "ann"})["file_id"]
    for part in ({"type": "input_image", "file_id": file_id}, {"type": "input_file", "file_id": file_id}):
        body = {"user": "ann", "background": True, "input": [{"role": "user", "content": [part]}]}
        assert client.post("/v1/responses", json=body).status_code == 200
        assert client.post("/v1/responses", json={**body, "user": "eve"}).status_code == 404
    unknown = {"role": "user", "content": [{"type": "input_file", "file_id": "file-abc"}]}
    refused = client.post("/v1/responses", json={"user": "ann", "background": True, "input": [unknown]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].content[0]")
    assert rows()["turns"] == 2


def test_urls_are_sources() -> None:
    """What is no `data:` URL is read by perdure, under its rules for URLs."""
    url = "https://a.example/x.png"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
    ]
    found = newest_user_message([{"role": "user", "content": content}], "messages")
    assert found == {"parts": [{"type": kind, "url": url} for kind in ("image", "image", "file")]}


@pytest.mark.parametrize(("name", "content"), [("bill.pdf", pdf(1)), ("très.csv", b"a,b\n1,2\n")])
def test_a_file_that_the_sdk_uploads(client: TestClient, name: str, content: bytes) -> None:
    """The file is the part of the form, with its name and type, and its `id` is that of a message's part."""
    sdk = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", http_client=client, max_retries=0)
    made = sdk.files.create(file=(name, content), purpose="assistants")
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(content), name, "assistants")
    assert made.created_at > 0
    stored = client.get(f"/v1/files/{made.id}/content")
    assert stored.content == content
    assert stored.headers["content-type"].partition(";")[0] == mimetypes.guess_type(name)[0]
    part = {"type": "input_file", "file_id": made.id}
    body = {"user": "ann", "background": True, "input": [{"role": "user", "content": [part]}]}
    assert client.post("/v1/responses", json=body).status_code == 200


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"files": {"other": ("a.txt", b"text")}}, 400),
        ({"files": {"file": ("a.txt", b"")}}, 400),
        ({"files": [("file", ("a.txt", b"a")), ("file", ("b.txt", b"b"))]}, 400),
        ({"content": b"text", "headers": {"Content-Type": "multipart/form-data"}}, 400),
        ({"content": b"--x\r\n\r\n", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400),
        ({"files": {"file": ("a.txt", b"a" * (33 * 2**20))}}, 413),
    ],
    ids=["no file", "empty", "two", "no boundary", "cut off", "too long"],
)
def test_a_form_without_a_usable_file(
    client: TestClient, rows: Callable[[], dict[str, int]], given: dict[str, Any], status: int
) -> None:
    """The answer says what is wrong, and nothing is stored."""
    answer = client.post("/v1/files", **given)
    assert answer.status_code == status, answer.text
    assert rows()["files"] == 0
