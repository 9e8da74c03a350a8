"""JSON schemas in the form that providers accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema


def acceptable(schema: Mapping[str, Any]) -> Any:
    """The JSON schema of a tool's parameters with what providers require of every object and every array.

    References are written out, because some providers refuse them.

    >>> acceptable({"properties": {"names": {"type": "array"}}})
    {'properties': {'names': {'type': 'array', 'items': {}}}, 'type': 'object'}
    >>> acceptable({"properties": {"at": {"$ref": "#/$defs/Day"}}, "$defs": {"Day": {"type": "string"}}})
    {'properties': {'at': {'type': 'string'}}, 'type': 'object'}
    """
    return _acceptable(_without_references({**schema, "type": "object"}))


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an output in the form that providers enforce: each object has all of its members, no others.

    Its top level is an object, which may refer to itself. Titles, defaults and what stands next to a `$ref` are left
    out.

    >>> enforceable({"properties": {"at": {"default": None, "type": "null"}}, "title": "Order"})
    {'properties': {'at': {'type': 'null'}}, 'type': 'object', 'required': ['at'], 'additionalProperties': False}
    """
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    root = {**schema["$defs"][name], "$defs": schema["$defs"]} if name else schema
    return dict(_enforceable(_acceptable({**root, "type": "object"})))


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


def _without_references(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with what its references refer to in their place.

    A reference to nothing in the schema is left out, so that anything fits. The schema stays as it is if it refers to
    itself, or if it would become too large.
    """
    room = _MOST_WRITTEN_OUT

    def written_out(schema: Any, within: tuple[str, ...]) -> Any:
        nonlocal room
        if isinstance(schema, list):
            return [written_out(each, within) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        room -= bool(within)
        reference = schema.get("$ref")
        if room < 0 or reference in within:
            raise _Endless
        members = {
            name: {each: written_out(part, within) for each, part in value.items()}
            if name in _NAMED_SCHEMAS and isinstance(value, Mapping)
            else (value if name in _VALUES else written_out(value, within))
            for name, value in schema.items()
            if name not in _DEFINITIONS or within or schema is not root
        }
        if not isinstance(reference, str):
            return members
        del members["$ref"]
        target = written_out(_target(root, reference), (*within, reference))
        return {**target, **members} if isinstance(target, Mapping) else members

    try:
        found: Mapping[str, Any] = written_out(root, ())
    except _Endless:
        return root
    return found


class _Endless(Exception):
    """A schema refers to itself, or is too large."""


_MOST_WRITTEN_OUT = 1_000
"""Maximum objects of a schema in the place of its references."""
_DEFINITIONS = frozenset({"$defs", "definitions"})


def _target(root: Any, reference: str) -> Any:
    """What a reference such as `#/$defs/Day` refers to; `None` if it is not in the schema."""
    if not reference.startswith("#"):
        return None
    for name in reference.removeprefix("#").split("/")[1:]:
        found = root[int(name)] if isinstance(root, list) and name.isdecimal() and int(name) < len(root) else None
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else found
    return root


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
