"""JSON schemas in the form that providers accept."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.models.schemas import acceptable


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
