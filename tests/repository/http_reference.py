"""Writes docs/http.md from the gateway's OpenAPI document. `make docs` runs this module.

`test_http_reference.py` compares the page with the document, and sends each example to a gateway.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.answer import FILE_ID, RUN_ID, SESSION_ID, TURN_ID
from perdure.channels.http.schemas.memory import MEMORY_ID
from perdure.channels.http.schemas.operating import DELIVERY_ID
from perdure.channels.http.schemas.schedules import SCHEDULE_ID
from perdure.settings import Settings
from tests.repository.source import ROOT

PAGE = ROOT / "docs" / "http.md"
OPENAI = "openai"
ADDRESS = "http://127.0.0.1:8080"

PATH = {
    "turn_id": TURN_ID,
    "session_id": SESSION_ID,
    "run_id": RUN_ID,
    "user_id": "ann",
    "conversation": "trip-to-rome",
    "case_id": "case-17",
    "schedule_id": SCHEDULE_ID,
    "file_id": FILE_ID,
    "memory_id": MEMORY_ID,
    "delivery_id": DELIVERY_ID,
    "name": "llm:openai:gpt-5",
}
"""The value of each path parameter in the examples."""

QUERY = {
    "user_id": "ann",
    "q": "reset the router",
    "wait": "30",
    "channel": "telegram",
    "external_id": "4711",
    "name": "cat.png",
}
"""The values of query parameters in the examples. The examples omit other query parameters."""

TITLES = {
    "messages": "Messages",
    "turns": "Turns",
    "sessions": "Sessions and conversations",
    "schedules": "Schedules",
    "files": "Files",
    "memory": "Memory",
    "users": "Users",
    "tokens": "Tokens",
    "links": "Links to other channels",
    "casebank": "CaseBank",
    "operating": "Operating",
    "breakers": "Circuit breakers",
    OPENAI: "OpenAI-compatible routes",
    "health": "Health",
}
"""The heading of each tag. An unlisted tag's heading is its name."""

HEAD = f"""\
# HTTP reference

`make docs` writes this page from the gateway's OpenAPI document, which a gateway serves at `/openapi.json`.

Bodies and answers are JSON. Each request needs a key, sent as `Authorization: Bearer KEY`
([keys](operating.md#keys)), except to a gateway on loopback that has no keys. The routes for CaseBank runs, for
restoring and sharing cases, and for circuit breakers take an admin key without a tenant. The gateway answers 404 for
another user's objects, as for objects that do not exist.

The examples use a gateway at `{ADDRESS}`. Errors are `application/problem+json` with a stable `code`; the
[error codes](errors.md) page explains each code. Each route lists the error statuses that it can return.
"""


@dataclass(frozen=True, slots=True)
class Example:
    """A request on the page, with the status and JSON of its response. `answer` is `None` if there is no JSON."""

    route: str
    method: str
    path: str
    body: Any
    status: int
    answer: Any


def document() -> dict[str, Any]:
    """The OpenAPI document of a gateway with an API key and otherwise default settings. No server is needed."""
    runtime = Mock(settings=Settings(_env_file=None, api_keys="a-key-of-the-page"))  # type: ignore[arg-type]
    made: dict[str, Any] = create_app(runtime, lambda: True).openapi()
    return made


def examples(described: dict[str, Any]) -> Iterator[Example]:
    """Each example on the page. The OpenAI-compatible routes have no example, because they have their own page."""
    for method, path, operation in _operations(described):
        if operation["tags"] != [OPENAI]:
            for body in _bodies(described, operation) or [None]:
                success = _success(operation)
                answer = _answer(described, operation["responses"][success])
                yield Example(f"{method} {path}", method, _url(path, operation), body, int(success), answer)


def page(described: dict[str, Any]) -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for tag, group in groupby(_operations(described), key=lambda each: each[2]["tags"][0]):
        parts.append(f"## {TITLES.get(tag, tag)}\n")
        if tag == OPENAI:
            parts.append("[OpenAI-compatible endpoints](openai.md) describes their requests, streams and errors.\n")
            parts.append(_table(["route", ""], [[f"`{m} {path}`", _sentence(o)] for m, path, o in group]))
        else:
            parts += [_route(described, *each) for each in group]
    return "\n".join(parts)


def _operations(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """The method, path and description of each route, grouped by tag in order of first occurrence."""
    found = [
        (method.upper(), path, each) for path, methods in described["paths"].items() for method, each in methods.items()
    ]
    tags = list(dict.fromkeys(each["tags"][0] for _, _, each in found))
    return sorted(found, key=lambda each: tags.index(each[2]["tags"][0]))


def _route(described: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    url, bodies, success = _url(path, operation), _bodies(described, operation), _success(operation)
    parts = [f"### {method} {path}\n", f"{operation['description'].strip()}\n"]
    parameters = [
        [f"`{each['name']}`", each["in"], _type(each["schema"]), _cell(each.get("description", ""))]
        for each in operation.get("parameters", ())
        if each["in"] != "path"
    ]
    if parameters:
        parts.append(_table(["parameter", "in", "type", "meaning"], parameters))
    parts.append(f"```sh\n{_curl(method, url, bodies[0] if bodies else None, operation)}\n```\n")
    if len(bodies) > 1:
        parts.append("Other bodies:\n")
        parts += [f"```json\n{_json(body)}\n```\n" for body in bodies[1:]]
    parts.append(f"`{success}`: {operation['responses'][success]['description']}\n")
    answer = _answer(described, operation["responses"][success])
    if answer is not None:
        parts.append(f"```json\n{_json(answer)}\n```\n")
    parts.append(_others(operation, success))
    return "\n".join(parts)


def _others(operation: dict[str, Any], success: str) -> str:
    """The statuses other than `success`. Errors have no reason phrase, because phrases depend on Python's version."""
    others = sorted(operation["responses"].keys() - {success})
    lines = [f"`{each}`: {operation['responses'][each]['description']}\n" for each in others if each < "3"]
    return "\n".join([*lines, f"[Errors](errors.md): {', '.join(each for each in others if each > '3')}.\n"])


def _success(operation: dict[str, Any]) -> str:
    """The operation's first success status. It is the status of the example's response."""
    statuses: list[str] = list(operation["responses"])
    return next(status for status in statuses if status.startswith("2"))


def _url(path: str, operation: dict[str, Any]) -> str:
    filled = path
    for name, value in PATH.items():
        filled = filled.replace(f"{{{name}}}", quote(value, safe=":"))
    queried = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
    pairs = [f"{name}={quote(QUERY[name])}" for name in queried if name in QUERY]
    return f"{filled}?{'&'.join(pairs)}" if pairs else filled


def _bodies(described: dict[str, Any], operation: dict[str, Any]) -> list[Any]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    shown = [each["value"] for each in content.get("examples", {}).values()]
    return shown or list(_resolved(described, content.get("schema", {})).get("examples", ()))


def _answer(described: dict[str, Any], response: dict[str, Any]) -> Any:
    """An example of the response's JSON; `None` if the response has no JSON."""
    content = response.get("content", {}).get("application/json", {})
    if "example" in content:
        return content["example"]
    return _example(described, content["schema"]) if "schema" in content else None


def _example(described: dict[str, Any], schema: dict[str, Any]) -> Any:
    if schema.get("type") == "array":
        return [_example(described, schema["items"])]
    resolved = _resolved(described, schema)
    if "examples" not in resolved:
        raise KeyError(
            f"The answer {resolved.get('title')} has no example: give its model one (`schemas.answer.examples`)."
        )
    return resolved["examples"][0]


def _resolved(described: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for option in (schema, *schema.get("anyOf", ())):
        if "$ref" in option:
            found: dict[str, Any] = described["components"]["schemas"][option["$ref"].rpartition("/")[2]]
            return found
    return schema


def _curl(method: str, url: str, body: Any, operation: dict[str, Any]) -> str:
    words = ["curl", *(["-N"] if "text/event-stream" in str(operation["responses"]) else [])]
    words += [] if method == "GET" else ["-X", method]
    words.append(shlex.quote(ADDRESS + url))
    lines = [" ".join(words)]
    if operation.get("security") != []:
        lines.append('-H "Authorization: Bearer $KEY"')
    if "*/*" in operation.get("requestBody", {}).get("content", {}):
        lines += ['-H "Content-Type: image/png"', "--data-binary @cat.png"]
    if body is not None:
        lines += ['-H "Content-Type: application/json"', f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"]
    return " \\\n  ".join(lines)


def _sentence(operation: dict[str, Any]) -> str:
    return _cell(operation["description"].split("\n\n")[0])


def _type(schema: dict[str, Any]) -> str:
    return f"{schema['type']} ({schema['format']})" if "format" in schema else str(schema.get("type", ""))


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    PAGE.write_text(page(document()), encoding="utf-8")
