"""JSON schemas in the form that providers accept."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.models.protocol import ToolSchema
from perdure.models.schemas import acceptable, offerable


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        pytest.param({"properties": None}, {"type": "object", "properties": {}}, id="properties of null"),
        pytest.param(
            {"properties": {"x": True}}, {"type": "object", "properties": {"x": {}}}, id="anything, as Rust writes it"
        ),
        pytest.param(
            {"properties": {"x": {"type": [{}]}}}, {"type": "object", "properties": {"x": {"type": [{}]}}}, id="a type"
        ),
        pytest.param(
            {"properties": {"x": {"type": "array", "prefixItems": {"a": 1}}}},
            {"type": "object", "properties": {"x": {"type": "array", "items": {}}}},
            id="positions",
        ),
        pytest.param(
            {"properties": {"x": {"$ref": "https://elsewhere", "title": "X"}, "y": {"$ref": "#/$defs/None"}}},
            {"type": "object", "properties": {"x": {"title": "X"}, "y": {}}},
            id="references to nothing",
        ),
        pytest.param(
            {"properties": {"$ref": {"type": "string"}, "default": {"$ref": "#/properties/$ref"}}},
            {"type": "object", "properties": {"$ref": {"type": "string"}, "default": {"type": "string"}}},
            id="a property with the name of a reference",
        ),
        pytest.param(
            {"properties": {"x": {"$ref": "#/allOf/0/a~1b"}}, "allOf": [{"a/b": {"type": "string"}}]},
            {"type": "object", "properties": {"x": {"type": "string"}}, "allOf": [{"a/b": {"type": "string"}}]},
            id="a reference into an array",
        ),
    ],
)
def test_odd_schemas_are_made_acceptable(given: dict[str, Any], sent: dict[str, Any]) -> None:
    """Servers of MCP write such schemas. None fails the turn."""
    assert acceptable(given) == sent


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            {
                "properties": {"x": {"$ref": "#/$defs/Tree"}},
                "$defs": {"Tree": {"title": "T", "not": {"$ref": "#/$defs/Tree"}}},
            },
            id="itself",
        ),
        pytest.param({"properties": {"x": {"$ref": "#"}}}, id="the whole"),
        pytest.param(
            {
                "properties": {"x": {"$ref": "#/$defs/d0"}},
                "$defs": {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(60)},
            },
            id="twice the next, sixty times",
        ),
    ],
)
def test_references_without_end_stay(given: dict[str, Any]) -> None:
    """A schema that refers to itself, or that would grow without measure, is sent as it came."""
    assert acceptable(given) == {**given, "type": "object"}


A: dict[str, Any] = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
B: dict[str, Any] = {"properties": {"b": {"type": "string"}}, "required": ["b"]}
BOTH = {"a": {"type": "string"}, "b": {"type": "string"}}


@pytest.mark.parametrize(
    ("given", "sent", "rule"),
    [
        pytest.param(
            {"oneOf": [A, B]},
            {"properties": BOTH},
            "Pass exactly one of these sets of arguments: a; b.",
            id="one of two",
        ),
        pytest.param(
            {"properties": BOTH, "required": ["c"], "anyOf": [{"required": ["a", "b"]}, {"required": ["a"]}]},
            {"properties": BOTH, "required": ["c", "a"]},
            "",
            id="what every branch requires",
        ),
        pytest.param(
            {"oneOf": [{**A, "properties": {"a": {"const": 1}}}, {**A, "properties": {"a": {"const": 2}, "b": {}}}]},
            {"properties": {"a": {"anyOf": [{"const": 1}, {"const": 2}]}, "b": {}}, "required": ["a"]},
            "Pass exactly one of these sets of arguments: a=1; a=2.",
            id="told apart by a value",
        ),
        pytest.param(
            {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"properties": {"a": {}, "b": {}}},
            "Pass at least one of these sets of arguments: a; b.",
            id="nothing is required",
        ),
        pytest.param(
            {"allOf": [A, {"$ref": "#/$defs/B"}], "$defs": {"B": {**B, "description": "A b."}}},
            {"properties": BOTH, "required": ["a", "b"], "description": "A b."},
            "",
            id="all of two",
        ),
        pytest.param(
            {"properties": {"a": {"minLength": 1}}, "allOf": [A]},
            {"properties": {"a": {"type": "string", "minLength": 1}}, "required": ["a"]},
            "",
            id="two schemas of one property",
        ),
        pytest.param(
            {"allOf": [{"anyOf": [A, {"type": "null"}]}, True, False, "odd"]},
            {"properties": A["properties"], "required": ["a"]},
            "",
            id="what no object fits",
        ),
        pytest.param(
            {"properties": BOTH, "not": {"required": ["a", "b"]}},
            {"properties": BOTH},
            'The arguments must fit this JSON schema: {"not": {"required": ["a", "b"]}}.',
            id="not",
        ),
        pytest.param({"properties": BOTH, "enum": ["x" * 300]}, {"properties": BOTH}, "", id="too long to quote"),
        pytest.param({"anyOf": None, "oneOf": {"a": 1}}, {"properties": {}}, "", id="malformed"),
    ],
)
def test_a_union_at_the_top_level_is_flattened(given: dict[str, Any], sent: dict[str, Any], rule: str) -> None:
    """Anthropic and OpenAI refuse each prompt with such a tool. The tool's description keeps the rule."""
    tool = offerable(ToolSchema("find", "Find it.", given))
    assert tool == ToolSchema("find", f"Find it. {rule}".strip(), {"type": "object", **sent})


def test_a_union_of_references_to_itself_is_flattened() -> None:
    """Its properties may go on referring to it."""
    tree = {"properties": {"a": {"$ref": "#/$defs/Tree"}}, "oneOf": [{"required": ["a"]}, {"$ref": "#/$defs/Tree"}]}
    tool = offerable(ToolSchema("find", "", {"$ref": "#/$defs/Tree", "$defs": {"Tree": tree}}))
    assert tool.parameters["properties"] == {"a": {"$ref": "#/$defs/Tree"}}
    assert not tool.parameters.keys() & {"$ref", "oneOf"}


def test_flattening_a_union_ends() -> None:
    """Each branch refers twice to the next."""
    definitions = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(60)}
    tool = offerable(ToolSchema("find", "", {"anyOf": [{"$ref": "#/$defs/d0"}, A], "$defs": definitions}))
    assert tool.parameters["type"] == "object"
    assert "anyOf" not in tool.parameters


@pytest.mark.parametrize("union", ["allOf", "properties"])
@pytest.mark.parametrize("levels", [1, 20])
def test_long_chains_of_references_end(union: str, levels: int) -> None:
    """A schema whose references cannot be followed is sent as far as it can be."""
    definitions: dict[str, Any] = {"d600": {"properties": {"a": {"$ref": "#/$defs/d600"}}}}
    for at in range(600):
        inner: dict[str, Any] = {"$ref": f"#/$defs/d{at + 1}"}
        for _ in range(levels):
            inner = {"allOf": [inner]}
        definitions[f"d{at}"] = inner
    first: Any = {"$ref": "#/$defs/d0"}
    schema = {union: [first] if union == "allOf" else {"x": first}, "$defs": definitions}
    assert offerable(ToolSchema("find", "Find it.", schema)).parameters["type"] == "object"


def test_a_cut_description_keeps_its_rule() -> None:
    """The rule stands after the cut, and the rest in the schema."""
    tool = offerable(ToolSchema("find", "x" * 200, {"oneOf": [A, B], "description": "Its own."}), 100)
    assert len(tool.description) == 100
    assert tool.description.endswith("x… Pass exactly one of these sets of arguments: a; b.")
    assert tool.parameters["description"].startswith("Its own. …x")
    assert tool.description.count("x") + tool.parameters["description"].count("x") == 200 + 1  # "exactly"
