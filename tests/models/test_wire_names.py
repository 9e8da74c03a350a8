"""Tool names and call ids are translated to names and ids that a provider accepts."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from perdure.models.providers.wire_names import MAX_ID, MAX_NAME, PLAIN_CHARACTERS, WireIds, WireNames

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
