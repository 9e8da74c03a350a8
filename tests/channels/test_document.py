"""/openapi.json describes the gateway correctly: errors, keys, examples, and the limits of texts and numbers."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.turns import Accepted, Turn
from perdure.errors import PerdureError
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.text.untrusted import NOT_BLANK_PATTERN, STORABLE_PATTERN, is_storable
from tests.channels.conftest import BASE_URL

OPENAI = ["openai"]
"""The tags of routes whose errors have OpenAI's format."""

Say = Callable[..., dict[str, Any]]


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    """The OpenAPI document that the gateway serves."""
    served: dict[str, Any] = client.get("/openapi.json").json()
    return served


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def _codes(error: type[PerdureError] = PerdureError) -> set[str]:
    return {error.code}.union(*(_codes(each) for each in error.__subclasses__()))


def test_every_error_is_a_problem_with_a_stable_code(document: dict[str, Any]) -> None:
    """Every error response is `application/problem+json`. The document lists all error codes for generated clients."""
    operations = [(name, operation) for name, operation in _operations(document) if operation["tags"] != OPENAI]
    wrong = [
        (name, status)
        for name, operation in operations
        for status, response in operation["responses"].items()
        if status[0] != "2" and list(response["content"]) != ["application/problem+json"]
    ]
    codes = document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]

    assert wrong == []
    assert set(codes) == _codes()
    assert all(
        {"401", "403", "500", "503"} <= operation["responses"].keys()
        for name, operation in operations
        if " /v1/" in name
    )


def _body_examples(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    yield from (each["value"] for each in content.get("examples", {}).values())
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    yield from document["components"]["schemas"].get(name, {}).get("examples", ())


def test_the_gateway_accepts_the_examples_of_bodies(client: TestClient, document: dict[str, Any], say: Say) -> None:
    """The gateway accepts every example of a request body.

    404 and 409 are allowed, because the ids in the examples are made up.
    """
    named = defaultdict(lambda: "x", say(conversation="a"), conversation="a?user_id=ann")
    statuses = {
        (name, str(example)): client.request(*name.format_map(named).split(), json=example).status_code
        for name, operation in _operations(document)
        if operation["tags"] != OPENAI  # these wait for a worker; see tests/processes/test_openai.py
        for example in _body_examples(document, operation)
    }

    assert {name.rpartition("/")[2] for name, _ in statuses} >= {"messages", "approval", "feedback", "search", "fork"}
    assert {each: status for each, status in statuses.items() if status not in {200, 201, 202, 404, 409}} == {}


@pytest.mark.parametrize("model", [Accepted, Turn])
def test_the_examples_of_responses_are_complete(document: dict[str, Any], model: type[BaseModel]) -> None:
    """The examples of responses have every member that the gateway sends, including members that are `null`."""
    examples = document["components"]["schemas"][model.__name__]["examples"]
    members = [set(model.model_validate(each).model_dump(mode="json")) for each in examples]

    sometimes = {"tools_left_out", "parent_turn_id", "children"}  # missing if all tools fit, and without delegation
    assert [each - sometimes for each in members] == [set(examples[0])]


def test_no_query_parameter_is_null(document: dict[str, Any]) -> None:
    """No query parameter is nullable, because a query string cannot express `null`."""
    schemas = {
        (name, parameter["name"]): parameter["schema"]
        for name, operation in _operations(document)
        for parameter in operation.get("parameters", ())
    }

    assert schemas["GET /v1/turns/{turn_id}", "wait"]["type"] == "number"
    assert schemas["GET /v1/turns/{turn_id}", "turn_id"]["format"] == "uuid"
    assert [place for place, schema in schemas.items() if "type" not in schema] == []


@pytest.mark.long
def test_security_is_as_configured(document: dict[str, Any], runtime: Runtime) -> None:
    """If keys are configured, the document requires a key on every route except the health checks.

    The document states the configured limit on the length of a message.
    """
    settings = Settings(_env_file=None, api_keys="a-service-key-of-the-tests", guard={"max_chars": 77})  # type: ignore[arg-type]
    with TestClient(create_app(replace(runtime, settings=settings), lambda: True), base_url=BASE_URL) as guarded:
        keyed = guarded.get("/openapi.json").json()

    assert (document["security"], keyed["security"]) == ([], [{"key": []}])
    assert [name for name, operation in _operations(keyed) if operation.get("security") == []] == [
        "GET /healthz",
        "GET /readyz",
    ]
    longest = [
        each["components"]["schemas"]["Incoming"]["properties"]["text"]["maxLength"] for each in (document, keyed)
    ]
    assert longest == [10_000, 77]


@pytest.mark.exhaustive
def test_the_patterns_mean_what_the_gateway_checks() -> None:
    """The patterns in the document accept the same characters as the gateway's checks.

    JSON Schema and Python define blank characters differently.
    """
    not_blank, storable = re.compile(NOT_BLANK_PATTERN), re.compile(STORABLE_PATTERN)
    characters = [chr(number) for number in range(sys.maxunicode + 1) if not 0xD800 <= number < 0xE000]

    assert [
        each for each in characters if bool(not_blank.search(each)) != (is_storable(each) and each.strip() != "")
    ] == []
    assert [each for each in characters if bool(storable.search(each)) != is_storable(each)] == []


INTEGERS = [
    ("/v1/messages", {"user_id": "ann", "text": "hello", "priority": 7}, 202),
    ("/v1/memory/search", {"user_id": "ann", "query": "hello", "k": 7}, 200),
    ("/v1/sessions/{session_id}/fork", {"tick": 7}, 409),
]


@pytest.mark.parametrize(("path", "body", "status"), INTEGERS)
def test_a_number_without_a_fraction_is_an_integer(
    client: TestClient, say: Say, path: str, body: dict[str, Any], status: int
) -> None:
    """The gateway accepts 7.0 as an integer, as JSON Schema does. Some languages write all numbers with a fraction."""
    url, member = path.format(**say()), list(body)[-1]

    def status_of(value: object) -> int:
        return client.post(url, json={**body, member: value}).status_code

    refused: list[object] = [7.5, True, "7", [7], -1.0]
    assert [status_of(value) for value in (7, 7.0)] == [status, status]
    assert [status_of(value) for value in refused] == [400] * len(refused)


def test_a_session_id_of_another_type_is_refused(client: TestClient) -> None:
    """A session id that is not a string is refused. `null` counts as a missing id."""
    given: list[object] = [7, [], {}, True, None]
    answers = [client.post("/v1/memory/consolidate", json={"session_id": value}) for value in given]

    assert [answer.status_code for answer in answers] == [400, 400, 400, 400, 202]


@pytest.mark.parametrize(
    "url", [" http://example.com/", "\thttp://example.com/", "ftp://example.com/", "http:example.com", "//example.com/"]
)
def test_a_url_begins_with_its_scheme(client: TestClient, url: str) -> None:
    """A URL must begin with `http://` or `https://`. Leading blanks are refused, as in the document's pattern."""
    body = {"user_id": "ann", "text": "hello", "reply_to": {"url": url}}

    assert client.post("/v1/messages", json=body).status_code == 400


def test_a_question_with_nul_is_refused(client: TestClient) -> None:
    """A question that contains NUL is refused, because no stored case can contain NUL."""
    assert client.get("/v1/casebank/search", params={"q": "a\x00b"}).status_code == 400


UNKNOWN = [
    ("GET", "/nothing", None),
    ("GET", "/v1", None),
    ("GET", "/v1/messages/", None),
    ("DELETE", "/v1/users/0/export", "GET"),
    ("DELETE", "/v1/users/a%2Fb/export", "GET"),
    ("POST", "/v1/users/0/export", "GET"),
    ("PUT", "/v1/messages", "POST"),
    ("OPTIONS", "/v1/messages", "POST"),
    ("PUT", "/v1/schedules", "GET, POST"),
    ("PUT", "/v1/memories/x", "DELETE, GET, PATCH"),
    ("TRACE", "/healthz", "GET, HEAD"),
    ("DELETE", "/", "GET, HEAD"),
    ("POST", "/console", "GET, HEAD"),
    ("PUT", "/console/session", "DELETE, GET, HEAD, POST"),
    ("BREW", "/v1/turns/x", "GET"),
    ("POST", "/openapi.json", "GET, HEAD"),
    ("GET", "/docs", None),
    ("GET", "/docs/oauth2-redirect", None),
    ("GET", "/redoc", None),
]


@pytest.mark.parametrize(("method", "path", "allowed"), UNKNOWN)
def test_an_unknown_route_or_method_is_a_problem(
    client: TestClient, method: str, path: str, allowed: str | None
) -> None:
    """An unknown route or method gets a problem; a 405 lists the allowed methods."""
    response = client.request(method, path)

    status = 404 if allowed is None else 405
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    assert response.json()["code"] == {404: "NOT_FOUND", 405: "INVALID_REQUEST"}[status]
    assert response.headers.get("allow") == allowed


@pytest.mark.parametrize("path", ["/", "/chat/chat.js", "/console", "/console/console.js"])
def test_the_pages_answer_head(client: TestClient, path: str) -> None:
    """Monitors and link checkers ask for the head only."""
    whole, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers == whole.headers
