"""/openapi.json: FastAPI's document, changed to describe the gateway's errors, authentication and limits.

FastAPI makes the document from the routes. This module adds whether a key is required and the maximum length of a text,
which depend on the settings. It replaces FastAPI's error schemas with `Problem`, the format of the gateway's errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from perdure.channels.http.schemas.answer import Answer, Problem
from perdure.settings import Settings

NO_KEY: dict[str, Any] = {"security": []}
"""`openapi_extra` of a route that needs no key."""

_FASTAPIS_ERRORS = ("HTTPValidationError", "ValidationError")


def document(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """The OpenAPI document of `app`. The first call makes the document, and later calls return the same one."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for operation in _operations(made):
            operation["responses"].pop("422", None)  # FastAPI's validation error: `errors` answers with 400
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _without_null(parameter["schema"])
        made["components"] = {
            "schemas": _schemas(made["components"]["schemas"], settings),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        made["security"] = [{"key": []}] if settings.api_keys or settings.admin_keys else []
        app.openapi_schema = made
    return app.openapi_schema


def _operations(made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in made["paths"].values():
        yield from methods.values()


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema without `null`, which a query cannot contain: a client omits the parameter instead."""
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) != 1:
        return schema
    return {**options[0], **{key: value for key, value in schema.items() if key != "anyOf"}}


def _schemas(of_routes: dict[str, Any], settings: Settings) -> dict[str, Any]:
    # FastAPI adds no schema for `Problem`, because it is no response model, and removes each null from the examples.
    _, made = models_json_schema([(Problem, "serialization")], ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = {
        name: schema for name, schema in of_routes.items() if name not in _FASTAPIS_ERRORS
    } | made["$defs"]
    schemas["Incoming"]["properties"]["text"]["maxLength"] = settings.guard.max_chars
    for each in _answers():
        extra = each.model_config.get("json_schema_extra")
        if each.__name__ in schemas and isinstance(extra, dict):
            schemas[each.__name__].update(extra)
    return schemas


def _answers() -> Iterator[type[Answer]]:
    found = [Answer]
    for each in found:
        found += each.__subclasses__()
        yield each
