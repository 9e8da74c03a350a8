"""JSON schemas in the form that providers accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def acceptable(schema: Mapping[str, Any]) -> Any:
    """The JSON schema of a tool's parameters with what providers require of every object and every array.

    >>> acceptable({"properties": {"names": {"type": "array"}}})
    {'properties': {'names': {'type': 'array', 'items': {}}}, 'type': 'object'}
    """
    return _acceptable({**schema, "type": "object"})


def _acceptable(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_acceptable(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    accepted = {
        name: {each: _ANYTHING if part is True else _acceptable(part) for each, part in value.items()}
        if name in _NAMED_SCHEMAS and isinstance(value, Mapping)
        else (value if name in _VALUES else _acceptable(value))
        for name, value in schema.items()
    }
    types = accepted.get("type")
    is_of = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    if "object" in is_of and not isinstance(accepted.get("properties"), Mapping):
        accepted["properties"] = {}
    if "array" in is_of or "prefixItems" in accepted:
        items = accepted.get("items")
        positions = accepted.pop("prefixItems", None) or items
        if isinstance(positions, list) and positions:
            distinct = [each for at, each in enumerate(positions) if each not in positions[:at]]
            accepted["items"] = distinct[0] if len(distinct) == 1 else {"anyOf": distinct}
        elif not isinstance(items, Mapping):
            accepted["items"] = {}
    return accepted


_ANYTHING: Mapping[str, Any] = {}
"""In place of the schema `true`, which providers refuse."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "default", "examples", "required"})
