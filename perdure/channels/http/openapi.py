"""/openapi.json: the routes with their parameters, bodies, answers and errors, and which key they need.

The routes declare most of it (`schema`). Bodies are parsed by the domain, not by FastAPI, so their schemas are added
here; so is what depends on the settings: whether keys are needed, and how long a text may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from perdure.channels.http.schema import Problem, Search
from perdure.settings import Settings
from perdure.turns.calls.approvals import Decision
from perdure.turns.feedback import Feedback
from perdure.turns.inbox.incoming import Incoming

_TEMPLATE = "#/components/schemas/{model}"
_BODIES = (Incoming, Search, Decision, Feedback)
_IDS = frozenset({"turn_id", "session_id", "run_id"})
"""Parameters that are UUIDs: the routes take them as text, so that a malformed one is 404 as an unknown one is."""

_FASTAPIS_ERRORS = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """The OpenAPI document of `app`, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for operation in _operations(made):
            operation["responses"].pop("422", None)  # FastAPI's own form of an error: `problems` answers 400 instead
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _sendable(parameter["schema"])
                if parameter["name"] in _IDS:
                    parameter["schema"]["format"] = "uuid"
        made["components"] = {
            "schemas": _schemas(made["components"]["schemas"], settings),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        made["security"] = [{"key": []}] if settings.api_keys or settings.admin_keys else []
        app.openapi_schema = made
    return app.openapi_schema


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in document["paths"].values():
        yield from methods.values()


def _sendable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter without `null`, which no query can hold: a parameter is left out instead."""
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) != 1:
        return schema
    return {**options[0], **{key: value for key, value in schema.items() if key != "anyOf"}}


def _schemas(answers: dict[str, Any], settings: Settings) -> dict[str, Any]:
    _, made = models_json_schema(
        [*((body, "validation") for body in _BODIES), (Problem, "serialization")], ref_template=_TEMPLATE
    )
    bodies: dict[str, Any] = made["$defs"]
    bodies["Incoming"]["properties"]["text"]["maxLength"] = settings.guard.max_chars
    return {name: answers[name] for name in answers if name not in _FASTAPIS_ERRORS} | bodies
