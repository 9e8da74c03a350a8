"""Makes the JSON schemas of tools acceptable to all providers: `properties` in objects, and `items` in arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def acceptable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema in the form that all providers accept."""
    return {"type": "object", "properties": {}, **_completed(schema)}


def _completed(schema: Mapping[str, Any]) -> dict[str, Any]:
    completed = {name: _member(name, value) for name, value in schema.items()}
    kinds = completed.get("type")
    if "array" in (kinds if isinstance(kinds, list) else [kinds]):
        if "prefixItems" in completed or isinstance(completed.get("items"), list):
            members = completed.pop("prefixItems", None) or completed.pop("items")
            completed["items"] = {"anyOf": members} if members else {}
        completed.setdefault("items", {})
    return completed


def _member(name: str, value: Any) -> Any:
    """The value of a schema's member, with the schemas in it completed."""
    if name in {"properties", "$defs", "definitions", "patternProperties"} and isinstance(value, dict):
        return {key: _completed(each) if isinstance(each, dict) else each for key, each in value.items()}
    if name in {"items", "additionalProperties", "not", "if", "then", "else"} and isinstance(value, dict):
        return _completed(value)
    if name in {"anyOf", "oneOf", "allOf", "prefixItems", "items"} and isinstance(value, list):
        return [_completed(each) if isinstance(each, dict) else each for each in value]
    return value
