"""Tool names, call ids and keys of arguments are translated to those that a provider accepts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.models.providers.wire_names import (
    MAX_ID,
    MAX_KEY,
    MAX_NAME,
    PLAIN_CHARACTERS,
    WireIds,
    WireKeys,
    WireNames,
)
from perdure.models.schemas import keys_in

TOOLS = st.lists(st.text(st.sampled_from("ab_:.é "), min_size=1, max_size=80), max_size=6, unique=True)


@given(TOOLS)
def test_each_tool_gets_a_valid_name_that_maps_back(tools: list[str]) -> None:
    """Each tool gets a distinct name that the provider accepts. The name maps back to the tool."""
    names = WireNames(tools)
    wire = [names.to_wire(each) for each in tools]
    assert all(re.fullmatch(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}", each) for each in wire)
    assert len(set(wire)) == len(tools)
    assert [names.from_wire(each) for each in wire] == tools


def test_a_name_that_is_accepted_stays_as_it_is() -> None:
    """A valid name stays unchanged, whatever other tools exist."""
    names = WireNames(["weather:today", "weather_today"])
    assert names.to_wire("weather_today") == "weather_today"
    assert names.to_wire("weather:today") == "weather_today_2"


def test_unknown_tools_have_names_too() -> None:
    """Names of unknown tools are translated, because a transcript may contain calls of removed tools."""
    names = WireNames(["clock"])
    assert names.to_wire("gone:for_good") == "gone_for_good"
    assert names.to_wire("") == "unknown"
    assert names.from_wire("made_up") == "made_up"


@given(st.lists(st.lists(st.sampled_from(["call_1", "call 1", "x" * 60, ""]), unique=True, max_size=3), max_size=4))
def test_ids_are_unique_over_a_prompt_and_results_find_their_calls(replies: list[list[str]]) -> None:
    """Call ids are made unique within a prompt, because replies may repeat ids and providers refuse repeated ids."""
    ids = WireIds(PLAIN_CHARACTERS)
    seen: list[str] = []
    for given_ids in replies:
        assigned = [ids.assign(each) for each in given_ids]
        assert [ids.of_result(each) for each in given_ids] == assigned
        seen += assigned
    assert len(set(seen)) == len(seen)
    assert all(re.fullmatch(rf"[a-zA-Z0-9_-]{{1,{MAX_ID}}}", each) for each in seen)


KEYS = st.text(st.sampled_from("ab_.$[é"), max_size=70)
SCHEMAS = st.recursive(
    st.just({"type": "string"}),
    lambda inner: st.builds(
        lambda members, items: {"properties": members, "items": items}, st.dictionaries(KEYS, inner, max_size=4), inner
    ),
    max_leaves=12,
)


def written(schema: dict[str, Any]) -> Any:
    """Arguments with all properties that a schema names."""
    if "properties" not in schema:
        return "x"
    return {**{key: written(each) for key, each in schema["properties"].items()}} or [written(schema["items"])]


@given(SCHEMAS)
def test_keys_of_arguments_are_accepted_and_map_back(schema: dict[str, Any]) -> None:
    """Whatever the keys are, no two become one, and the tool gets its own."""
    given_schema = {"properties": {"root": schema}}
    keys = WireKeys(given_schema)
    accepted = [*keys_in(keys.schema)]
    assert all(re.fullmatch(rf"[a-zA-Z0-9_.-]{{1,{MAX_KEY}}}", key) for key in accepted)
    assert len({*accepted}) == len({*keys_in(given_schema)})
    sent = written(dict(keys.schema))
    assert keys.from_wire(sent) == written(given_schema)


def test_accepted_keys_stay_as_they_are() -> None:
    """The schema of most tools is not changed at all."""
    schema = {"properties": {"a.b-c": {"type": "object"}}, "required": ["a.b-c"]}
    assert WireKeys(schema).schema is schema


def test_keys_are_translated_wherever_a_schema_names_them() -> None:
    """A key has one translation in the branches of unions, behind references, and in lists of keys."""
    schema = {
        "properties": {"$a": True, "list": {"type": "array", "items": {"$ref": "#/$defs/Item"}}},
        "anyOf": [{"required": ["$a"]}, {"properties": {"$b": {"$ref": "#/properties/$a"}, "$never": False}}],
        "dependentRequired": {"$a": ["$b"]},
        "$defs": {"Item": {"properties": {"a/b": {"$ref": "#/$defs/Item"}}, "additionalProperties": {"$ref": "#"}}},
    }
    keys = WireKeys(schema)
    assert keys.schema == {
        "properties": {"_a": {"description": "($a)"}, "list": {"type": "array", "items": {"$ref": "#/$defs/Item"}}},
        "anyOf": [
            {"required": ["_a"]},
            {"properties": {"_b": {"$ref": "#/properties/_a", "description": "($b)"}, "_never": False}},
        ],
        "dependentRequired": {"_a": ["_b"]},
        "$defs": {
            "Item": {
                "properties": {"a_b": {"$ref": "#/$defs/Item", "description": "(a/b)"}},
                "additionalProperties": {"$ref": "#"},
            }
        },
    }
    sent = {"_a": {"_a": 1}, "_b": 2, "list": [{"a_b": {"a_b": {}}, "x": {"_b": 3}}]}
    assert keys.from_wire(sent) == {"$a": {"_a": 1}, "$b": 2, "list": [{"a/b": {"a/b": {}}, "x": {"$b": 3}}]}


def test_a_key_in_both_forms_is_refused() -> None:
    """One of the two values would be lost. The own form alone is accepted: a model may know the tool."""
    keys = WireKeys({"properties": {"$top": {}}})
    assert keys.from_wire({"$top": 1}) == {"$top": 1}
    with pytest.raises(ValueError, match="'\\$top' appears twice"):
        keys.from_wire({"_top": 1, "$top": 2})
