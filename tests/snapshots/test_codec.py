"""Snapshots as JSON text: valid documents are parsed, and invalid documents are refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.database.tables import SESSION_STATES
from perdure.errors import InvalidRequest, TooLarge
from perdure.snapshots.codec import checked_events, checked_variables, dump, events_of, parse
from perdure.snapshots.snapshot import MAX_VARIABLES_BYTES, Event, Status
from perdure.snapshots.store import Version, parse_stored
from perdure.testing.suites.snapshots import EVENTS, VARIABLES, snapshot_of

AGENT = UUID("018cd1a2-7c00-7000-8000-000000000001")
DOCUMENT: dict[str, Any] = json.loads(dump(snapshot_of(AGENT, 42)))


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """The JSON text of `DOCUMENT` after `change`."""
    document = json.loads(json.dumps(DOCUMENT))
    change(document)
    return json.dumps(document)


def test_the_keys_are_the_documented_ones() -> None:
    """Other programs read exported snapshots, so the names and the nesting of the keys are fixed."""
    assert DOCUMENT.keys() == {
        "schema_version",
        "agent_id",
        "tick_index",
        "timestamp",
        "status",
        "memory",
        "event_queue_backup",
    }
    assert DOCUMENT["memory"].keys() == {"short_term_history", "working_variables"}
    assert DOCUMENT["memory"]["short_term_history"][0] == {"role": "user", "content": "Où en est le rapport ?"}
    assert DOCUMENT["event_queue_backup"][0] == {"source": "mcp", "type": "task", "payload": {"id": 7}}
    assert (DOCUMENT["agent_id"], DOCUMENT["tick_index"], DOCUMENT["status"]) == (str(AGENT), 42, "WAITING_FOR_EVENT")


@pytest.mark.parametrize("state", SESSION_STATES)
def test_every_state_of_a_session_is_a_status(state: str) -> None:
    """If a session's state had no snapshot status, the session could not be saved."""
    assert Status.of(state) == ("WAITING_FOR_EVENT" if state == "active" else state.upper())


@given(variables=VARIABLES, events=EVENTS, indent=st.sampled_from([None, 2]))
def test_a_dumped_snapshot_is_parsed_unchanged(variables: Any, events: Any, indent: int | None) -> None:
    """Every export can be imported."""
    snapshot = snapshot_of(AGENT, 1, variables, events)
    assert parse(dump(snapshot, indent=indent), AGENT) == snapshot


@given(variables=VARIABLES, events=EVENTS)
def test_checked_variables_and_events_stay_unchanged(variables: Any, events: tuple[Event, ...]) -> None:
    """The check leaves JSON values unchanged, so that a tool sees the same variables before and after a crash."""
    assert checked_variables(variables) == variables
    assert events_of(checked_events(events)) == events


def test_a_tuple_becomes_a_list_at_once() -> None:
    """Variables have their JSON types at once, not only after a restart of the process."""
    assert checked_variables({"pair": (1, 2), "by_number": {1: "one"}}) == {"pair": [1, 2], "by_number": {"1": "one"}}


def test_checked_variables_are_a_copy() -> None:
    """A tool that later changes its own list must not change the saved variables."""
    mine = {"list": [1]}
    checked = checked_variables(mine)
    mine["list"].append(2)
    assert checked == {"list": [1]}


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (["a"], "must be a JSON object"),
        (None, "must be a JSON object"),
        ({"a": float("inf")}, "cannot be stored"),
        ({"a": {1, 2}}, "set is not JSON serializable"),
        ({1: "a", "1": "b"}, "given twice"),
        ({"a": 10**5000}, "digits"),
    ],
)
def test_variables_that_are_no_json_are_refused(variables: Any, reason: str) -> None:
    """Variables that JSON cannot represent are refused, and the error states the reason."""
    with pytest.raises(InvalidRequest, match=reason):
        checked_variables(variables)


def test_variables_nested_too_deep_for_the_whole_document_are_refused_when_they_are_set() -> None:
    """The error is raised when the tool sets the variables. An error at the save would come too late."""
    deepest = checked_variables({"v": nested(60)})
    assert parse(dump(snapshot_of(AGENT, 1, deepest))).memory.working_variables == deepest
    with pytest.raises(InvalidRequest, match="nested"):
        checked_variables({"v": nested(61)})


def nested(levels: int) -> Any:
    """A list nested `levels` deep."""
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    """Variables that contain themselves."""
    variables: dict[str, Any] = {}
    variables["self"] = variables
    return variables


def test_cyclic_variables_are_refused() -> None:
    """Cyclic variables have no JSON form."""
    with pytest.raises(InvalidRequest, match=r"(?i)circular"):
        checked_variables(cyclic())


@pytest.mark.parametrize("cut", range(0, len(dump(snapshot_of(AGENT, 42)).encode()), 7))
def test_a_truncated_snapshot_is_refused(cut: int) -> None:
    """A truncated snapshot, for example after a full disk or a broken download, must not be read as complete."""
    data = dump(snapshot_of(AGENT, 42)).encode()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        parse_stored(data[:cut], AGENT, Version(1, 42))


def test_bytes_that_are_no_text_are_refused() -> None:
    """Bytes that are not valid UTF-8, for example from a damaged disk, are refused."""
    with pytest.raises(InvalidRequest, match="not UTF-8 at byte 1"):
        parse_stored(b"{\xff}", AGENT, Version(1, 42))


def test_a_snapshot_under_another_tick_is_refused() -> None:
    """A snapshot is refused if its content has another tick than the one under which it is stored."""
    with pytest.raises(InvalidRequest, match="of tick 42 and stored as one of tick 43"):
        parse_stored(dump(snapshot_of(AGENT, 42)).encode(), AGENT, Version(1, 43))


def test_a_snapshot_of_another_agent_is_refused() -> None:
    """A snapshot with an unexpected agent id is refused, so that no session gets another user's messages."""
    other = uuid4()
    with pytest.raises(InvalidRequest) as caught:
        parse(dump(snapshot_of(AGENT)), other)
    assert str(AGENT) in caught.value.message
    assert str(other) in caught.value.message


@pytest.mark.parametrize("version", [0, 2, 1.5, "1", None, True, {"a": 1}])
def test_an_unknown_schema_version_is_refused_before_anything_else(version: Any) -> None:
    """A snapshot of a later release may have the same keys with another meaning, so its version is checked first."""
    with pytest.raises(InvalidRequest, match=r"schema version .*; this release reads version 1"):
        parse(changed(lambda document: document.update(schema_version=version, memory="new shape")))


MISSING = object()
HISTORY = ("memory", "short_term_history")


def put(path: tuple[Any, ...], value: Any) -> str:
    """The JSON text of `DOCUMENT` with `value` at `path`. If `value` is `MISSING`, the key at `path` is removed."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        if value is MISSING:
            del document[path[-1]]
        else:
            document[path[-1]] = value

    return changed(change)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("schema_version",), MISSING, "field required"),
        (("event_queue_backup",), MISSING, "field required"),
        (("agent_id",), "../../etc/passwd", "string should match"),
        (("agent_id",), str(AGENT).upper(), "string should match"),
        (("agent_id",), f"{AGENT}\n", "string should match"),
        (("tick_index",), "42", "input should be a valid integer"),
        (("tick_index",), -1, "input should be greater"),
        (("tick_index",), True, "input should be a valid integer"),
        (("tick_index",), 42.0, "input should be a valid integer"),
        (("timestamp",), 2**53, "input should be less"),
        (("status",), "active", "input should be"),
        (("status",), 1, "input should be"),
        (("memory", "working_variables"), [], "input should be a valid dict"),
        ((*HISTORY,), {}, "input should be a valid list"),
        ((*HISTORY, 1, "role"), "system", "input should be 'user'"),
        ((*HISTORY, 0, "content"), MISSING, "field required"),
        ((*HISTORY, 0, "content"), None, "input should be a valid string"),
        ((*HISTORY, 1, "tool_calls", 0, "arguments"), {}, "input should be a valid string"),
        (("event_queue_backup", 1, "payload"), MISSING, "field required"),
    ],
)
def test_a_wrong_type_or_key_is_refused_with_its_path(path: tuple[Any, ...], value: Any, reason: str) -> None:
    """The error names the path of the fault, so that the author of an edited file can find it."""
    with pytest.raises(InvalidRequest) as caught:
        parse(put(path, value))
    assert f"{'.'.join(map(str, path))}: {reason}" in caught.value.message


@pytest.mark.parametrize("text", ["", "  \n", "null", "[]", '"snapshot"', "{", '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_a_document_that_is_no_json_object_is_refused(text: str) -> None:
    """The error message says why the document is refused."""
    with pytest.raises(InvalidRequest, match=r"The snapshot cannot be read: \w"):
        parse(text)


def test_an_error_does_not_quote_the_conversation() -> None:
    """The error may be logged, so it must not contain a conversation's text."""
    with pytest.raises(InvalidRequest) as caught:
        parse(changed(lambda d: d["memory"]["short_term_history"][0].update(content=["my secret"])))
    assert "secret" not in caught.value.message


def test_an_import_with_variables_over_the_limit_is_refused() -> None:
    """The limit for variables set by tools also applies to imports."""
    with pytest.raises(TooLarge, match="65,536"):
        parse(changed(lambda d: d["memory"].update(working_variables={"v": "x" * MAX_VARIABLES_BYTES})))
