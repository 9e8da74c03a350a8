"""JSON schemas in the form that providers accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema


def acceptable(schema: Mapping[str, Any]) -> Any:
    """The JSON schema of a tool's parameters with what providers require of every object and every array.

    >>> acceptable({"properties": {"names": {"type": "array"}}})
    {'properties': {'names': {'type': 'array', 'items': {}}}, 'type': 'object'}
    """
    return _acceptable({**schema, "type": "object"})


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an output in the form that providers enforce: each object has all of its members, no others.

    Its top level is an object, which may refer to itself. Titles, defaults and what stands next to a `$ref` are left
    out.

    >>> enforceable({"properties": {"at": {"default": None, "type": "null"}}, "title": "Order"})
    {'properties': {'at': {'type': 'null'}}, 'type': 'object', 'required': ['at'], 'additionalProperties': False}
    """
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    root = {**schema["$defs"][name], "$defs": schema["$defs"]} if name else schema
    return dict(_enforceable(acceptable(root)))


def _enforceable(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_enforceable(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema:
        return {"$ref": schema["$ref"]}
    kept = {_UNIONS.get(name, name): each for name, each in schema.items() if name not in _LEFT_OUT}
    found = {
        name: {each: _enforceable(part) for each, part in value.items()}
        if name in _NAMED_SCHEMAS and isinstance(value, Mapping)
        else (value if name in _VALUES else _enforceable(value))
        for name, value in kept.items()
    }
    if found.get("type") == "object" and "additionalProperties" not in found:
        found |= {"required": [*found["properties"]], "additionalProperties": False}
    return found


_LEFT_OUT = frozenset({"title", "default", "discriminator", "examples"})
_UNIONS = {"oneOf": "anyOf"}


def without_limits(schema: Any) -> Any:
    """The JSON schema with the limits of its values in the descriptions, for a provider that refuses such limits.

    >>> without_limits({"type": "integer", "minimum": 1, "description": "How many."})
    {'type': 'integer', 'description': 'How many. (minimum: 1)'}
    """
    if isinstance(schema, list):
        return [without_limits(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        name: {each: without_limits(part) for each, part in value.items()}
        if name in _NAMED_SCHEMAS and isinstance(value, Mapping)
        else (value if name in _VALUES else without_limits(value))
        for name, value in schema.items()
        if name not in _LIMITS
    }
    if limits := ", ".join(f"{name}: {schema[name]}" for name in schema if name in _LIMITS):
        found["description"] = f"{schema.get('description', '')} ({limits})".strip()
    return found


_LIMITS = frozenset({
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
    "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties",
})  # fmt: skip


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


class WithoutTitles(GenerateJsonSchema):
    """Generates JSON schemas without titles. Titles would repeat the names, and cost tokens in every prompt."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 (as the parent declares it)

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 (the parent's signature)
        return False
