"""JSON schemas in the form that providers accept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from perdure.models.protocol import ToolSchema

_MOST_WRITTEN_OUT = 1_000
"""Maximum objects of a schema in the place of its references."""


def acceptable(schema: Mapping[str, Any]) -> Any:
    """The JSON schema of a tool's parameters with what providers require of every object and every array.

    References are written out, because some providers refuse them.

    >>> acceptable({"properties": {"names": {"type": "array"}}})
    {'properties': {'names': {'type': 'array', 'items': {}}}, 'type': 'object'}
    >>> acceptable({"properties": {"at": {"$ref": "#/$defs/Day"}}, "$defs": {"Day": {"type": "string"}}})
    {'properties': {'at': {'type': 'string'}}, 'type': 'object'}
    """
    root = {**schema, "type": "object"}
    try:
        return _acceptable(_without_references(root))
    except RecursionError:
        return _acceptable(root)


def offerable(tool: ToolSchema, longest: int | None = None) -> ToolSchema:
    """The tool in the form that providers accept: its schema is `acceptable`, and has no union at its top level.

    The members of the union's branches become members of the top level, and the description states which of them belong
    together. A description longer than `longest` characters ends in `…`, and goes on in the description of the schema.

    >>> either = {"oneOf": [{"required": ["id"]}, {"required": ["slug"]}], "properties": {"id": {}, "slug": {}}}
    >>> tool = offerable(ToolSchema("find", "Find a page.", either))
    >>> tool.description
    'Find a page. Pass exactly one of these sets of arguments: id; slug.'
    >>> tool.parameters
    {'properties': {'id': {}, 'slug': {}}, 'type': 'object'}
    """
    schema = acceptable(tool.parameters)
    flat = _Flattening(schema).flat(schema)
    rules = _beginning(" ".join(flat.rules), _LONGEST_RULES)
    description = f"{tool.description} {rules}".strip()
    if longest is not None and len(description) > longest:
        kept = _beginning(tool.description, longest - len(rules) - bool(rules))
        rest = f"…{tool.description[len(kept) - 1 :]}"
        description = f"{kept} {rules}".strip()
        flat.members["description"] = " ".join(filter(None, (flat.members.get("description"), rest)))
    return ToolSchema(tool.name, description, flat.members)


def _beginning(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


@dataclass(frozen=True, slots=True)
class _Flat:
    """An object's schema without the members that providers refuse at the top level, and what these said, in words."""

    members: dict[str, Any]
    rules: list[str] = field(default_factory=list)

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.members.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> list[str]:
        found = self.members.get("required")
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


@dataclass(slots=True)
class _Flattening:
    """Flattens the top level of the schema `root`, whose branches may refer to parts of it."""

    root: Mapping[str, Any]
    room: int = _MOST_WRITTEN_OUT

    def flat(self, schema: Mapping[str, Any], within: tuple[str, ...] = ()) -> _Flat:
        """The schema of an object in one piece. `within` are the references, or empty texts, that lead to it."""
        found = _Flat({name: each for name, each in schema.items() if name not in _REFUSED_AT_TOP})
        if len(within) == _DEEPEST:
            return found
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in within:
            for each in self._branches([_target(self.root, reference)], (*within, reference)):
                _join(found, each)
        for name in ("allOf", *_CHOICES):
            branches = self._branches(schema.get(name), (*within, ""))
            is_choice = name in _CHOICES and len(branches) > 1
            for each in [_joint(branches, _CHOICES[name])] if is_choice else branches:
                _join(found, each)
        for name in ("enum", "not"):
            if name in schema and len(text := json.dumps({name: schema[name]}, ensure_ascii=False)) <= _LONGEST_QUOTED:
                found.rules.append(f"The arguments must fit this JSON schema: {text}.")
        return found

    def _branches(self, given: Any, within: tuple[str, ...]) -> list[_Flat]:
        """The branches of a union that an object can fit, as far as there is room for them."""
        schemas = [{} if each is True else each for each in given] if isinstance(given, list) else []
        fitting = [each for each in schemas if isinstance(each, Mapping) and _may_be_object(each)]
        found = []
        for each in fitting:
            self.room -= 1
            if self.room >= 0:
                found.append(self.flat(each, within))
        return found


_CHOICES = {
    "anyOf": "Pass at least one of these sets of arguments: ",
    "oneOf": "Pass exactly one of these sets of arguments: ",
}
_REFUSED_AT_TOP = frozenset({"$ref", "allOf", *_CHOICES, "enum", "not"})
_DEEPEST = 32
"""Maximum references and unions that lead to a branch."""
_LONGEST_RULES = 400
"""Maximum characters of the sentences about what is refused at the top level."""
_LONGEST_QUOTED = 200


def _may_be_object(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "object")
    return types == "object" or (isinstance(types, list) and "object" in types)


def _join(found: _Flat, more: _Flat) -> None:
    """Add to `found` what an object must fit, too. Its own members decide."""
    properties = {name: _both(found.properties.get(name, {}), each) for name, each in more.properties.items()}
    required = dict.fromkeys((*found.required, *more.required))
    for name, each in more.members.items():
        if name not in _OF_BRANCHES:
            found.members.setdefault(name, each)
    if properties or "properties" not in found.members:
        found.members["properties"] = {**found.properties, **properties}
    if required:
        found.members["required"] = [*required]
    found.rules.extend(more.rules)


_OF_BRANCHES = frozenset({"properties", "required", "additionalProperties", "unevaluatedProperties"})
"""The members of a branch that are joined, or that would exclude the properties of the other branches."""


def _both(one: Any, other: Any) -> Any:
    return {**other, **one} if isinstance(one, Mapping) and isinstance(other, Mapping) else one or other


def _joint(branches: Sequence[_Flat], words: str) -> _Flat:
    """What objects that fit one of several branches have in common, with all their properties."""
    schemas: dict[str, list[Any]] = {}
    for branch in branches:
        for name, each in branch.properties.items():
            if each not in (given := schemas.setdefault(name, [])):
                given.append(each)
    properties = {name: given[0] if len(given) == 1 else {"anyOf": given} for name, given in schemas.items()}
    required = [name for name in branches[0].required if all(name in each.required for each in branches)]
    members: dict[str, Any] = {"properties": properties, **({"required": required} if required else {})}
    sets = [_needs(each, required) for each in branches]
    sets = sets if all(sets) else [", ".join(each.properties) for each in branches]
    distinct = [*dict.fromkeys(sets)]
    is_rule = all(sets) and len(distinct) > 1
    return _Flat(members, [f"{words}{'; '.join(distinct)}."] if is_rule else [])


def _needs(branch: _Flat, common: Iterable[str]) -> str:
    """The arguments that a branch requires and others do not, and those for which it has one value only."""
    constants = {
        name: f"{name}={json.dumps(each['const'], ensure_ascii=False)}"
        for name, each in branch.properties.items()
        if isinstance(each, Mapping) and "const" in each
    }
    names = dict.fromkeys((*constants, *(each for each in branch.required if each not in common)))
    return ", ".join(constants.get(name, name) for name in names)


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


_DEFINITIONS = frozenset({"$defs", "definitions"})


def _target(root: Any, reference: str) -> Any:
    """What a reference such as `#/$defs/Day` refers to; `None` if it is not in the schema."""
    if not reference.startswith("#"):
        return None
    for name in reference.removeprefix("#").split("/")[1:]:
        found = root[int(name)] if isinstance(root, list) and name.isdecimal() and int(name) < len(root) else None
        root = root.get(_unescaped(name)) if isinstance(root, Mapping) else found
    return root


def _unescaped(name: str) -> str:
    return name.replace("~1", "/").replace("~0", "~")


def keys_in(schema: Any) -> Iterator[str]:
    """The keys of the properties that a schema names, at every depth."""
    if isinstance(schema, list):
        for each in schema:
            yield from keys_in(each)
    elif isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in _NAMED_SCHEMAS and isinstance(value, Mapping):
                yield from value if name == "properties" else ()
                for each in value.values():
                    yield from keys_in(each)
            elif name not in _VALUES:
                yield from keys_in(value)


def with_keys(schema: Any, keys: Mapping[str, str]) -> Any:
    """The schema with these `keys` in place of others. The description of such a property ends with its own key.

    >>> with_keys({"properties": {"$top": {"type": "integer"}}, "required": ["$top"]}, {"$top": "_top"})
    {'properties': {'_top': {'type': 'integer', 'description': '($top)'}}, 'required': ['_top']}
    """
    if isinstance(schema, list):
        return [with_keys(each, keys) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {name: _with_keys(name, value, keys) for name, value in schema.items()}


def _with_keys(name: str, value: Any, keys: Mapping[str, str]) -> Any:
    """The member `name` of a schema."""
    if name in _BY_KEY and isinstance(value, Mapping):
        parts = {key: _keys(part, keys) if _is_keys(part) else with_keys(part, keys) for key, part in value.items()}
        named = name == "properties"
        return {keys.get(key, key): _noted(part, key) if named and key in keys else part for key, part in parts.items()}
    if name in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {key: with_keys(part, keys) for key, part in value.items()}
    if name == "required" and _is_keys(value):
        return _keys(value, keys)
    if name == "$ref" and isinstance(value, str):
        steps = value.split("/")
        return "/".join(
            keys.get(_unescaped(step), step) if before in _BY_KEY else step
            for before, step in zip(["", *steps], steps, strict=False)
        )
    return value if name in _VALUES else with_keys(value, keys)


_BY_KEY = frozenset({"properties", "dependentSchemas", "dependentRequired", "dependencies"})
"""The members of a schema whose own members have the keys of properties."""


def _is_keys(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _keys(given: Iterable[str], keys: Mapping[str, str]) -> list[str]:
    return [keys.get(each, each) for each in given]


def _noted(schema: Any, key: str) -> Any:
    """The schema of a property, with the property's own key for the model: descriptions of tools may name it."""
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        return schema
    return {**schema, "description": f"{schema.get('description', '')} ({key})".strip()}


def applied(schemas: Iterable[Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas, and those that they apply to the same value: what they refer to, and the branches of their unions.

    `root` is the schema with what they refer to.
    """
    found: dict[int, Mapping[str, Any]] = {}
    waiting = [*schemas]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, list):
            waiting += schema
        elif isinstance(schema, Mapping) and id(schema) not in found:
            found[id(schema)] = schema
            waiting += [schema[name] for name in _APPLIED if name in schema]
            waiting += [*dependent.values()] if isinstance(dependent := schema.get("dependentSchemas"), Mapping) else []
            waiting += [_target(root, reference)] if isinstance(reference := schema.get("$ref"), str) else []
    return [*found.values()]


_APPLIED = ("allOf", "anyOf", "oneOf", "if", "then", "else")


def of_member(schemas: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """The schemas of the member `key` of an object that `schemas` describe."""
    found: list[Any] = []
    for schema in schemas:
        if isinstance(named := schema.get("properties"), Mapping) and key in named:
            found.append(named[key])
        else:
            found += [*others.values()] if isinstance(others := schema.get("patternProperties"), Mapping) else []
            found.append(schema.get("additionalProperties"))
    return found


def of_items(schemas: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The schemas of the items of a list that `schemas` describe."""
    return [
        schema[name] for schema in schemas for name in ("items", "prefixItems", "additionalItems") if name in schema
    ]


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

    _is_optional = False
    """Whether the schema is one of a value that may be left out."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 (as the parent declares it)

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 (the parent's signature)
        return False

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        """The schema of a `Literal`.

        Raises:
            PydanticUserError: it requires a member of an `Enum` that pydantic cannot read from JSON.
        """
        unread = [each for each in schema["expected"] if isinstance(each, Enum) and not isinstance(each, str | int)]
        if unread and not self._is_optional:
            kind = type(unread[0]).__name__
            reason = f"pydantic reads {unread[0]} in a Literal from no JSON; make {kind} a StrEnum or an IntEnum"
            raise PydanticUserError(reason, code=None)
        return super().literal_schema(schema)

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """The schema of a value that may be left out."""
        before, self._is_optional = self._is_optional, True
        try:
            return super().default_schema(schema)
        finally:
            self._is_optional = before

    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        """The schema, without NaN and infinities, such as the default `float("inf")`. They are not JSON."""
        return dict(_finite(super().generate(schema, mode)))


def _finite(schema: Any) -> Any:
    """The schema without the members whose value has NaN or an infinity."""
    if isinstance(schema, dict):
        return {name: _finite(each) for name, each in schema.items() if not _is_infinite(each)}
    return [_finite(each) for each in schema] if isinstance(schema, list) else schema


def _is_infinite(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_infinite, value))
    return isinstance(value, float) and not math.isfinite(value)
