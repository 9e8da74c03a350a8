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
    ],
)
def test_odd_schemas_are_made_acceptable(given: dict[str, Any], sent: dict[str, Any]) -> None:
    """Servers of MCP write such schemas. None fails the turn."""
    assert acceptable(given) == sent
