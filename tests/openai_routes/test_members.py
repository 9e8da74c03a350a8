"""Each member of OpenAI's requests works or is refused by its name, as the table of the documentation says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from perdure.models.settings import NAMES
from perdure.runtime import Runtime
from tests.turns.scripted import Scripted, says

DOCUMENT = Path(__file__).parents[2] / "docs" / "openai.md"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": SCHEMA}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}

WORKS: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "assistant", "messages": [{"role": "user", "content": "hello"}], "stream": True,
        "stream_options": {"include_usage": True}, "user": "ann", "safety_identifier": "ann", "prompt_cache_key": "k",
        "prompt_cache_retention": "24h", "metadata": {"a": "b"}, "store": True, "n": 1,
        "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": True,
        "response_format": CHAT_FORMAT, "temperature": 0.5, "top_p": 0.5, "max_tokens": 9, "max_completion_tokens": 9,
        "stop": ["END"], "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1},
        "reasoning_effort": "low", "service_tier": "auto", "modalities": ["text"], "logprobs": False,
        "verbosity": "medium",
    },
    "responses": {
        "model": "assistant", "input": "hello", "stream": True, "background": True, "user": "ann",
        "safety_identifier": "ann", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "metadata": {"a": "b"},
        "store": True, "previous_response_id": None, "conversation": "c", "instructions": "Be brief.",
        "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": True,
        "text": {"format": FORMAT, "verbosity": "medium"}, "temperature": 0.5, "top_p": 0.5, "max_output_tokens": 9,
        "reasoning": {"effort": "low", "summary": "auto"}, "service_tier": "auto", "truncation": "auto",
        "include": ["reasoning.encrypted_content"], "stream_options": {}, "top_logprobs": 0,
        "client_metadata": {"a": "b"},
    },
}  # fmt: skip
"""Each member that works, with a value."""

REFUSED: dict[str, dict[str, Any]] = {
    "chat": {
        "n": 2, "functions": [FUNCTION], "function_call": "auto", "modalities": ["text", "audio"], "audio": {},
        "prediction": {"type": "content", "content": "a"}, "web_search_options": {}, "logprobs": True,
        "top_logprobs": 3, "verbosity": "low", "tools": [{"type": "custom", "custom": {"name": "a"}}],
        "tool_choice": {"type": "custom", "custom": {"name": "a"}}, "response_format": {"type": "grammar"},
        "temperature": "hot", "stop": 5, "top_k": 5,
    },
    "responses": {
        "max_tool_calls": 3, "prompt": {"id": "p"}, "truncation": "sometimes", "top_logprobs": 3,
        "include": ["message.output_text.logprobs"], "text": {"verbosity": "low"}, "tools": [{"type": "web_search"}],
        "tool_choice": {"type": "web_search"}, "reasoning": {"effort": "utmost"}, "context_management": [{}],
    },
}  # fmt: skip
"""Values that are refused, by the member that has them."""

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses"}


@pytest.fixture
def model() -> Scripted:
    """A model that takes all settings and answers in JSON."""
    made = Scripted(*[says('{"a": "b"}')] * 3)
    made.supported_settings = frozenset(NAMES)  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("kind", PATHS)
def test_members_that_work(http: TestClient, kind: str) -> None:
    """All members of the table that work are accepted together, and so is each member that is null."""
    given = {**WORKS[kind], **dict.fromkeys(REFUSED[kind].keys() - WORKS[kind].keys())}
    answer = http.post(PATHS[kind], json=given)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text or '"error":null' in answer.text


@pytest.mark.parametrize(("kind", "member"), [(kind, member) for kind in PATHS for member in REFUSED[kind]])
def test_members_that_are_refused(http: TestClient, kind: str, member: str) -> None:
    """The answer is 400, and names the member."""
    plain = {name: WORKS[kind][name] for name in ("model", "messages" if kind == "chat" else "input")}
    answer = http.post(PATHS[kind], json={**plain, member: REFUSED[kind][member]})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert re.match(rf"{member}\b", error["param"])
    assert re.match(rf"{member}\b", error["message"])


_NESTED = {"type": "allowed_tools", "mode": "required", "tools": [{"function": "x"}]}
_UNHASHABLE = {"type": "allowed_tools", "mode": "required", "tools": [{"name": ["x"]}]}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("chat", {"messages": [{"role": ["user"], "content": "hello"}]}),
        ("chat", {"service_tier": {}}),
        ("chat", {"tool_choice": _NESTED}),
        ("chat", {"tool_choice": _UNHASHABLE}),
        ("chat", {"temperature": 10**400}),
        ("responses", {"input": [{"role": {"a": 1}, "content": "hello"}]}),
        ("responses", {"include": [{}]}),
        ("responses", {"text": {"verbosity": []}}),
    ],
)
def test_values_of_a_wrong_type_are_refused(http: TestClient, kind: str, wrong: dict[str, Any]) -> None:
    """Members without a declared type are compared with what is accepted, even if they cannot be hashed."""
    plain = {name: WORKS[kind][name] for name in ("model", "messages" if kind == "chat" else "input")}
    answer = http.post(PATHS[kind], json={**plain, **wrong})
    assert answer.status_code == 400, answer.text
    assert re.match(rf"{next(iter(wrong))}\b", answer.json()["error"]["param"])


@pytest.mark.parametrize("kind", PATHS)
def test_the_table_has_each_member(kind: str) -> None:
    """The documentation lists the members that work, and those that are refused."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text[text.index("## Members") : text.index("\n## ", text.index("## Members") + 1)]
    rows = [[each.strip() for each in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    column = {"chat": 1, "responses": 2}[kind]
    told = {row[0].strip("`"): row[column] for row in rows}
    works = {name for name, what in told.items() if what not in {"", "400"}}
    assert works == WORKS[kind].keys()
    assert {name for name, what in told.items() if "400" in what} == REFUSED[kind].keys() - {
        "top_k",
        "context_management",
    }


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_the_default_of_truncation_is_accepted(http: TestClient, truncation: str) -> None:
    """Some clients send it with each request."""
    answer = http.post(PATHS["responses"], json={"model": "assistant", "input": "hello", "truncation": truncation})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (None, {"type": "text"}),
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (FORMAT, {**FORMAT, "strict": None}),
        ({**FORMAT, "name": "n" * 100, "strict": True}, {**FORMAT, "name": "n" * 64, "strict": True}),
    ],
)
def test_a_response_has_its_format(http: TestClient, given: dict[str, Any] | None, returned: dict[str, Any]) -> None:
    """Typed clients read it: whole, in a stream, and later."""
    sent = {"model": "assistant", "input": "hello", **({} if given is None else {"text": {"format": given}})}
    answer = http.post(PATHS["responses"], json=sent).json()
    assert answer["text"] == {"format": returned}
    assert http.get(f"{PATHS['responses']}/{answer['id']}").json()["text"] == {"format": returned}
    stream = http.post(PATHS["responses"], json={**sent, "stream": True}).text
    [created] = [line for line in stream.splitlines() if '"type":"response.created"' in line]
    assert json.loads(created.removeprefix("data: "))["response"]["text"] == {"format": returned}


def test_what_the_model_lacks_is_refused(http: TestClient, model: Scripted) -> None:
    """A setting that the protocol of the agent's model lacks is refused, and names the member."""
    model.supported_settings = frozenset({"temperature"})  # type: ignore[attr-defined]
    body = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}]}
    assert http.post(PATHS["chat"], json={**body, "temperature": 1}).status_code == 200
    answer = http.post(PATHS["chat"], json={**body, "seed": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")


@pytest.mark.parametrize("given", [{"frequency_penalty": 0}, {"presence_penalty": 0.0}, {"logit_bias": {}}])
def test_what_asks_for_nothing_is_not_refused(http: TestClient, model: Scripted, given: dict[str, Any]) -> None:
    """Some clients send each setting with its default. A model whose protocol lacks the setting is not given it."""
    body = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}], **given}
    for known in (frozenset[str](), frozenset(NAMES)):
        model.supported_settings = known  # type: ignore[attr-defined]
        assert http.post(PATHS["chat"], json=body).status_code == 200
    assert [each.settings or {} for each in model.requests] == [{}, given]


@pytest.mark.parametrize("kind", PATHS)
def test_some_of_the_tools_are_allowed(http: TestClient, model: Scripted, kind: str) -> None:
    """The model is offered only those of the client's tools, and may answer without them."""
    functions: list[dict[str, Any]] = [{"type": "function", "name": each} for each in ("weather", "seats")]
    allowed: dict[str, Any] = {"mode": "auto", "tools": functions[:1]}
    if kind == "chat":
        functions = [{"type": "function", "function": {"name": each["name"]}} for each in functions]
        allowed = {"allowed_tools": {"mode": "auto", "tools": functions[:1]}}
    plain = {name: WORKS[kind][name] for name in ("model", "messages" if kind == "chat" else "input")}
    body = {**plain, "tools": functions, "tool_choice": {"type": "allowed_tools", **allowed}}
    assert http.post(PATHS[kind], json=body).status_code == 200
    [request] = model.requests
    offered = {each.name for each in request.tools}
    assert ("weather" in offered, "seats" in offered, request.settings["tool_choice"]) == (True, False, "auto")
    unknown = http.post(PATHS[kind], json={**body, "tools": functions[1:]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tool_choice")


def test_the_agents_tools_are_not_replaced(http: TestClient) -> None:
    """A client's tool may not have the name of one of the agent."""
    tool = {"type": "function", "function": {"name": "calculator"}}
    body = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}], "tools": [tool]}
    answer = http.post(PATHS["chat"], json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.name")


def test_history_does_not_refuse_a_request(http: TestClient, running: Runtime) -> None:
    """What a request has besides its newest message may be longer than a message, and unlike text that is stored."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_200_000}}
    odd = [{"type": "audio", "audio": {"data": "x"}}, {"type": "text", "text": "a\x00b\ud800"}]
    history = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, picture]},
        {"role": "assistant", "content": "seen\x00\ud83d"},
        {"role": "user", "content": odd},
        {"role": "assistant", "content": "x" * 12_000, "refusal": None, "thinking_blocks": [{"a": 1}]},
        {"role": "user", "content": "hello"},
    ]
    for kind, member in (("chat", "messages"), ("responses", "input")):
        answer = http.post(PATHS[kind], content=_escaped({"model": "assistant", member: history}))
        assert answer.status_code == 200, answer.text[:300]
    newest = [{"role": "user", "content": "a\x00b"}]
    assert http.post(PATHS["chat"], content=_escaped({"model": "assistant", "messages": newest})).status_code == 400
    long = [{"role": "user", "content": "x" * 12_000}]
    assert http.post(PATHS["chat"], json={"model": "assistant", "messages": long}).status_code == 413


def _escaped(body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize("path", ["embeddings", "audio/speech", "completions", "unheard-of"])
def test_unknown_routes_have_openais_shape_for_its_clients(http: TestClient, path: str) -> None:
    """Their SDKs name themselves in headers. Routes of OpenAI have its shape for every client."""
    sdk = http.post(f"/v1/{path}", json={}, headers={"X-Stainless-Lang": "python"})
    assert (sdk.status_code, sdk.json()["error"]["type"]) == (404, "invalid_request_error")
    other = http.post(f"/v1/{path}", json={})
    assert other.status_code == 404
    assert ("error" in other.json()) == (path in {"embeddings", "audio/speech", "completions"})


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("DELETE", "responses/resp_1", "GET"), ("POST", "conversations", "GET")]
)
def test_methods_that_only_openai_has(http: TestClient, method: str, path: str, allowed: str) -> None:
    """Its clients read the reason, and do not repeat the request."""
    refused = http.request(method, f"/v1/{path}", headers={"X-Stainless-Lang": "python"})
    assert (refused.status_code, refused.headers["Allow"]) == (405, allowed)
    assert method in refused.json()["error"]["message"]
