"""Derives a value from a JSON schema: the arguments of a tool that no scenario calls, and the answer of an agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_FORMATS = {
    "date": "2026-01-05",
    "date-time": "2026-01-05T09:00:00Z",
    "time": "09:00:00",
    "duration": "PT1H",
    "email": "certify@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000001",
    "ipv4": "192.0.2.1",
}
_DEEPEST = 20


class NotDerived(ValueError):
    """No value can be derived from the schema. The message names the member."""


def derive(schema: Mapping[str, Any], rest: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """A small value that fits `schema`: its example or default, if it has one. `rest` has the definitions.

    >>> derive({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]})
    {'n': 3}
    >>> derive({"anyOf": [{"type": "null"}, {"type": "string"}]})
    'text'

    Raises:
        NotDerived: the schema has a pattern, or refers to itself.
    """
    rest = schema if rest is None else rest
    if depth > _DEEPEST:
        raise NotDerived("it refers to itself")
    for member in ("examples", "enum"):
        if schema.get(member):
            return schema[member][0]
    for member in ("const", "default"):
        if member in schema:
            return schema[member]
    other = _other(schema, rest)
    return _of_type(schema, rest, depth) if other is None else derive(other, rest, depth + 1)


def _other(schema: Mapping[str, Any], rest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema to which `schema` refers, or one of several that it offers; `None` if it has a type itself."""
    if "$ref" in schema:
        return _definition(schema["$ref"], rest)
    if "allOf" in schema:
        return {name: value for each in schema["allOf"] for name, value in each.items()}
    offered = schema.get("anyOf") or schema.get("oneOf")
    return next((each for each in offered if each.get("type") != "null"), offered[0]) if offered else None


def _of_type(schema: Mapping[str, Any], rest: Mapping[str, Any], depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            members = schema.get("properties", {})
            return {
                name: derive(members[name], rest, depth + 1) for name in schema.get("required", ()) if name in members
            }
        case "array":
            items = schema.get("prefixItems") or [schema.get("items", {})] * schema.get("minItems", 0)
            return [derive(each, rest, depth + 1) for each in items]
        case "integer" | "number" as number:
            return _number(schema, whole=number == "integer")
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return _text(schema)


def _number(schema: Mapping[str, Any], *, whole: bool) -> float:
    step = schema.get("multipleOf", 1 if whole else 0.5)
    least = schema.get("minimum", schema.get("exclusiveMinimum", 1))
    found = -(-least // step) * step
    if found <= schema.get("exclusiveMinimum", float("-inf")):
        found += step
    most = schema.get("maximum", schema.get("exclusiveMaximum", found))
    return int(min(found, most)) if whole else float(min(found, most))


def _text(schema: Mapping[str, Any]) -> str:
    if "pattern" in schema:
        raise NotDerived(f"it must match {schema['pattern']!r}")
    found = _FORMATS.get(schema.get("format", ""), "text")
    least, most = schema.get("minLength", 0), schema.get("maxLength", len(found))
    return found.ljust(least, "x") if "format" in schema else found[:most].ljust(least, "x")


def _definition(reference: str, rest: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = rest
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise NotDerived(f"{reference} is not in the schema")
    return found


def arguments_of(parameters: Mapping[str, Any]) -> str:
    """The JSON of derived arguments.

    Raises:
        NotDerived: none can be derived.
    """
    members, found = parameters.get("properties", {}), {}
    for name in parameters.get("required", ()):
        try:
            found[name] = derive(members.get(name, {}), parameters)
        except NotDerived as error:
            raise NotDerived(f"no value of {name} can be derived: {error}") from None
    return json.dumps(found)
