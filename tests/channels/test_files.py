"""Files over HTTP: `/v1/files`, and the parts of `POST /v1/messages`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.runtime import Runtime
from perdure.settings import FileSettings, Settings
from tests.bombs import peak
from tests.channels.conftest import BASE_URL, SERVICE_KEY
from tests.files.contents import BOMBS, pdf, png

PDF = pdf(2, size=20 * 2**20)
IMAGE = png(4_000, 4_000, padding=3 * 2**20)


def upload(client: TestClient, content: bytes, **given: Any) -> dict[str, Any]:
    """Upload a file, and return its description."""
    response = client.post("/v1/files", content=content, **given)
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.long
def test_a_file_is_uploaded_and_read(client: TestClient) -> None:
    """20 MB of PDF. The type is that of the content."""
    headers = {"Content-Type": "image/png"}
    found = upload(client, PDF, params={"user_id": "ann", "name": "très.pdf"}, headers=headers)
    assert {**found, "file_id": ""} == {
        "file_id": "",
        "media_type": "application/pdf",
        "size": len(PDF),
        "sha256": hashlib.sha256(PDF).hexdigest(),
    }
    answer = client.get(f"/v1/files/{found['file_id']}/content")
    assert answer.content == PDF
    assert answer.headers["content-type"] == "application/pdf"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''tr%C3%A8s.pdf"


@pytest.mark.long
def test_an_upload_takes_little_memory(runtime: Runtime) -> None:
    """The gateway keeps the body in a temporary file, and stores it piece by piece."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(PDF), 2**16):
            yield PDF[at : at + 2**16]

    async def send() -> int:
        app = create_app(runtime, lambda: True)
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=BASE_URL)
        async with app.router.lifespan_context(app), client:
            return (await client.post("/v1/files", content=pieces())).status_code

    with peak() as used:
        assert asyncio.run(send()) == 201
    assert used.mib < 12


@pytest.mark.parametrize("kind", ["file_id", pytest.param("data", marks=pytest.mark.exhaustive)])
def test_a_message_has_files(
    kind: str, client: TestClient, run: Callable[[str], None], rows: Callable[[], dict[str, int]]
) -> None:
    """20 MB of PDF and an image of 4,000 pixels, uploaded before or in the message; stored once."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    for content, part in ((PDF, "file"), (IMAGE, "image")):
        encoded = base64.b64encode(content).decode() if kind == "data" else ""
        given = encoded or upload(client, content, params={"user_id": "ann"})["file_id"]
        parts.append({"type": part, kind: given})
    for number in range(2):
        accepted = client.post("/v1/messages", json={"user_id": "ann", "parts": parts, "message_id": f"m{number}"})
        assert accepted.status_code == 202, accepted.text
    run(accepted.json()["session_id"])
    asked = client.get(f"/v1/sessions/{accepted.json()['session_id']}/messages").json()[0]
    assert asked["content"] == "What is this?"
    assert [(each["type"], each["size"]) for each in asked["parts"]] == [("file", len(PDF)), ("image", len(IMAGE))]
    assert rows()["file_contents"] == 2
    assert client.delete("/v1/users/ann").status_code == 200
    assert {rows()[table] for table in ("files", "file_contents", "file_chunks", "inbox", "messages")} == {0}


@pytest.mark.long
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_in_a_sentence(bomb: str, client: TestClient, rows: Callable[[], dict[str, int]]) -> None:
    """Nothing is stored."""
    refused = client.post("/v1/files", content=BOMBS[bomb])
    assert refused.status_code == 400
    assert refused.json()["detail"].endswith(".")
    assert rows()["files"] == 0


def test_a_file_that_is_too_long_is_refused(runtime: Runtime, settings: Settings) -> None:
    """With 413, by upload and in a message; the limit is a setting."""
    small = settings.model_copy(update={"files": FileSettings(max_bytes=1_000)})
    with TestClient(
        create_app(Runtime(**{**vars(runtime), "settings": small}), lambda: True), base_url=BASE_URL
    ) as client:
        assert client.post("/v1/files", content=png(padding=2_000)).status_code == 413
        data = base64.b64encode(png(padding=2_000)).decode()
        message = {"user_id": "ann", "parts": [{"type": "image", "data": data}]}
        refused = client.post("/v1/messages", json=message)
        assert (refused.status_code, refused.json()["code"]) == (413, "TOO_LARGE")
        assert client.post("/v1/messages", content=b" " * 2**21).status_code == 413


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({}, "text: is missing"),
        ({"text": "a", "parts": [{"type": "text", "text": "b"}]}, "not both"),
        ({"parts": []}, "parts: is empty"),
        ({"parts": [{"type": "text", "text": " "}]}, "text: is empty"),
        ({"parts": [{"type": "image"}]}, "one of file_id, url and data"),
        ({"parts": [{"type": "image", "data": "", "url": "http://a.example"}]}, "parts"),
        ({"parts": [{"type": "audio", "data": "AA=="}]}, "parts"),
        ({"parts": [{"type": "image", "url": "http://169.254.169.254/latest/"}]}, "not a public address"),
        ({"parts": [{"type": "image", "data": "AA=="}] * 21}, "more than 20 files"),
    ],
)
def test_unusable_parts_are_refused(message: dict[str, Any], said: str, client: TestClient) -> None:
    """The error names the member."""
    refused = client.post("/v1/messages", json={"user_id": "ann", **message})
    assert refused.status_code == 400
    assert said in refused.json()["detail"]


@pytest.fixture
def keyed(runtime: Runtime, settings: Settings) -> Iterator[TestClient]:
    """A client of a gateway with a service key."""
    given = settings.model_copy(update={"api_keys": (SecretStr(SERVICE_KEY),)})
    with TestClient(
        create_app(Runtime(**{**vars(runtime), "settings": given}), lambda: True), base_url=BASE_URL
    ) as made:
        yield made


def test_a_user_reaches_only_own_files(keyed: TestClient) -> None:
    """A token's files are its user's. Another user's file is unknown, by id and in a message."""
    service = {"Authorization": f"Bearer {SERVICE_KEY}"}

    def token(user: str) -> dict[str, str]:
        made = keyed.post("/v1/tokens", json={"user_id": user, "ttl_s": 60}, headers=service).json()
        return {"Authorization": f"Bearer {made['token']}"}

    ann, eve = token("ann"), token("eve")
    assert keyed.post("/v1/files", content=png()).status_code == 401
    file_id = upload(keyed, png(), headers=ann)["file_id"]
    path = f"/v1/files/{file_id}/content"
    assert [keyed.get(path, headers=each).status_code for each in (ann, eve, service)] == [200, 404, 200]
    assert keyed.post("/v1/files?user_id=ann", content=png(), headers=eve).status_code == 404
    message = {"parts": [{"type": "image", "file_id": file_id}]}
    assert keyed.post("/v1/messages", json=message, headers=eve).status_code == 404
    assert keyed.post("/v1/messages", json=message, headers=ann).status_code == 202
