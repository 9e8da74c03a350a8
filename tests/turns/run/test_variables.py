"""Tools read and set working variables. Each step commits the changes, and the next runner loads the variables."""

from __future__ import annotations

import json
import threading
from typing import Any
from uuid import UUID

import pytest

from perdure import ToolContext, tool
from perdure.errors import PerdureError, ToolError
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.tools.variables import VariableSet, WorkingVariables
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import Ran
from tests.turns.harness import PATIENCE_S, Harness
from tests.turns.scripted import calls, says

DECIDED_S = 31


@tool(effect="pure")
def put(name: str, value: Any, context: ToolContext) -> str:
    """Set a variable."""
    context.working_variables[name] = value
    return "set"


@tool(effect="pure")
def add(name: str, context: ToolContext) -> int:
    """Add one to a variable."""
    with context.working_variables as variables:
        variables[name] = variables.get(name, 0) + 1
        return int(variables[name])


@tool(effect="pure")
def get(context: ToolContext) -> dict[str, Any]:
    """Show the variables."""
    return dict(context.working_variables)


def variables(harness: Harness, session_id: UUID) -> Any:
    """The committed variables; `None` if none were ever committed."""
    found = PostgresSnapshots(harness.database).load(session_id)
    return None if found is None else dict(found.snapshot.memory.working_variables)


def _seen(harness: Harness) -> Any:
    """The variables that a tool reads in a new turn."""
    harness.script(calls(("get", {})), says("seen"))
    harness.ask("show them")
    return json.loads(harness.results()[-1])


@pytest.fixture(autouse=True)
def _equipped(harness: Harness) -> None:
    harness.equip(put, add, get)


def test_a_turn_reads_the_variables_of_the_previous_one(harness: Harness) -> None:
    """Each turn has a new runner, which loads the variables from the database."""
    put_file = ("put", {"name": "file", "value": {"path": "data/ü", "size": 1.0}})
    harness.script(calls(put_file), calls(("get", {})), says("set"))
    turn = harness.ask()
    assert variables(harness, UUID(turn["session_id"])) == {"file": {"path": "data/ü", "size": 1.0}}
    assert _seen(harness) == {"file": {"path": "data/ü", "size": 1.0}}
    row = harness.session(UUID(turn["session_id"]))
    assert (row.variables_tick, row.tick) == (2, 8), "no later step or turn writes them again"


@pytest.mark.parametrize(
    ("moment", "nth", "kept"), [("before", 2, None), ("after", 2, {"n": 1}), ("before", 3, {"n": 1})]
)
def test_a_crash_loses_a_change_and_its_result_together(harness: Harness, moment: Any, nth: int, kept: Any) -> None:
    """A call's result and its changes to variables are committed together."""
    harness.script(calls(("add", {"name": "n"})), calls(("add", {"name": "n"})), says("two"))
    sent = harness.send()
    with harness.crashing(moment, "turns.step", nth):
        harness.run(sent.session_id)
    assert variables(harness, sent.session_id) == kept
    harness.move(DECIDED_S)
    if moment == "before" and nth == 3:  # the model's second reply was not committed, so the model is asked again
        harness.script(calls(("add", {"name": "n"})), says("two"))
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.results() == ["1", "2"]
    assert variables(harness, sent.session_id) == {"n": 2}


def test_concurrent_calls_share_one_set(harness: Harness) -> None:
    """Twenty concurrent increments of one variable are all kept."""
    harness.script(calls(*[("add", {"name": "n"}) for _ in range(20)]), says("added"))
    turn = harness.ask()
    assert sorted(map(int, harness.results())) == list(range(1, 21))
    assert variables(harness, UUID(turn["session_id"])) == {"n": 20}


def _crashed_after_recording(harness: Harness) -> UUID:
    """A session whose runner died after recording two tool results and before committing the next step."""
    harness.script(calls(("add", {"name": "n"}), ("put", {"name": "b", "value": [1.0]})), says("both"))
    sent = harness.send()
    with harness.crashing("before", "turns.step", 2):
        harness.run(sent.session_id)
    assert variables(harness, sent.session_id) is None
    return sent.session_id


def test_changes_of_recorded_calls_survive_a_crash(harness: Harness) -> None:
    """A call with a recorded result is not run again, and its recorded changes to variables are applied."""
    session_id = _crashed_after_recording(harness)
    harness.move(DECIDED_S)
    assert harness.run(session_id) == Ran(1)
    assert harness.results() == ["1", "set"]
    assert variables(harness, session_id) == {"n": 1, "b": [1.0]}
    assert harness.sql("SELECT 1 FROM tool_effects WHERE variables IS NOT NULL") == []


@pytest.mark.parametrize("by", ["interrupt", "cancel"])
def test_ending_a_turn_commits_the_changes_of_its_closed_calls(harness: Harness, by: str) -> None:
    """If a turn is interrupted or cancelled, its finished calls' results and changes to variables are committed."""
    session_id = _crashed_after_recording(harness)
    harness.move(DECIDED_S)
    if by == "interrupt":
        harness.send("stop", on_busy="interrupt")
    else:
        cancel(harness.runtime, harness.sql("SELECT turn_id FROM turns")[0].turn_id)
        harness.run(session_id)
    assert variables(harness, session_id) == {"n": 1, "b": [1.0]}
    assert harness.results() == ["1", "set"]


def test_committed_changes_stay_when_the_turn_fails(harness: Harness) -> None:
    """A failed turn keeps the variables of its committed steps."""
    harness.script(calls(("add", {"name": "n"})), PerdureError("the model is gone"))
    turn = harness.ask()
    assert turn["status"] == "failed"
    assert _seen(harness) == {"n": 1}


def test_a_stale_runner_changes_nothing(harness: Harness) -> None:
    """A runner that has lost its lease cannot commit its changes to variables."""
    harness.set(tool_timeout_s=600)  # the time limit of the call is longer than the lease
    sent = harness.send()

    @tool(effect="pure")
    def lose(context: ToolContext) -> str:
        """Set a variable while another runner claims the session."""
        context.working_variables["stale"] = True
        harness.move(DECIDED_S)
        harness.claimed(sent.session_id)
        return "lost"

    harness.equip(lose)
    harness.script(calls(("lose", {})), says("never"))
    assert harness.run(sent.session_id) == Ran(0)
    assert variables(harness, sent.session_id) is None


def test_a_refused_change_is_reported_to_the_model(harness: Harness) -> None:
    """If a change exceeds the size limit, the call fails with the reason, and the variables do not change."""
    harness.script(
        calls(("add", {"name": "n"})),
        calls(("put", {"name": "big", "value": "x" * 70_000})),
        says("I see"),
    )
    turn = harness.ask()
    assert "at most 65,536 may be kept" in harness.results()[1]
    assert variables(harness, UUID(turn["session_id"])) == {"n": 1}


def test_an_overdue_call_cannot_set_variables(harness: Harness) -> None:
    """A call that has timed out cannot change variables, because its result already says: outcome unknown."""
    late, refused = threading.Event(), threading.Event()

    @tool(timeout_s=0.2)
    def slow(context: ToolContext) -> None:
        """Exit the `with` block of the working variables only after the time limit."""
        try:
            with context.working_variables as mine:
                mine["slow"] = 1
                assert late.wait(PATIENCE_S)
        except ToolError:
            refused.set()

    harness.equip(slow, add, get)
    harness.script(calls(("slow", {})), calls(("add", {"name": "n"})), says("went on"))
    assert harness.ask()["reply"]["text"] == "went on"
    late.set()
    assert refused.wait(PATIENCE_S)
    assert _seen(harness) == {"n": 1}


def test_each_settled_turn_has_its_tick(harness: Harness) -> None:
    """When a turn is settled, its row stores the session's tick, which counts the session's commits.

    The variables of earlier ticks stay in `snapshots`. A fork of the session at an earlier turn needs these variables.
    """
    for number in (1, 2):
        harness.script(calls(("put", {"name": "n", "value": number})), says("set"))
        turn = harness.ask()
    ticks = [row.settled_tick for row in harness.sql("SELECT settled_tick FROM turns ORDER BY seq")]
    assert ticks == [3, 6]
    assert harness.session(UUID(turn["session_id"])).tick == 6
    history = harness.sql("SELECT tick, variables::text AS text FROM snapshots ORDER BY tick")
    assert [tuple(row) for row in history] == [(2, '{"n":1}'), (5, '{"n":2}')]


def test_a_read_value_is_a_copy() -> None:
    """A tool reads a copy of a value. Changing a value in place takes effect only within a `with` block."""
    mine = WorkingVariables(VariableSet({"list": [1]}))
    mine["list"].append(2)
    assert mine == {"list": [1]}
    with mine as draft:
        draft["list"].append(2)
    assert mine == {"list": [1, 2]}
    assert (len(mine), list(mine), "list" in mine, repr(mine)) == (
        1,
        ["list"],
        True,
        "WorkingVariables({'list': [1, 2]})",
    )


def _set_and_raise(variables: WorkingVariables) -> None:
    with variables as draft:
        draft["a"] = 2
        variables["b"] = 1
        raise RuntimeError("half-way")


def test_a_block_that_raises_changes_nothing() -> None:
    """If a `with` block raises, none of its changes apply, and the variables can be changed again."""
    shared = VariableSet({"a": 1})
    mine = WorkingVariables(shared)
    with pytest.raises(RuntimeError, match="half-way"):
        _set_and_raise(mine)
    assert shared.changed() is None
    WorkingVariables(shared)["a"] = 3
    assert shared.changed() == {"a": 3}


def _change_and_raise(variables: WorkingVariables) -> None:
    with variables as inner:
        inner["a"].append(2)
        del inner["b"]
        variables["d"] = 1
        with variables as innermost:
            innermost["e"] = 1
        raise RuntimeError("half-way")


def test_a_block_within_a_block_that_raises_changes_nothing() -> None:
    """The outer block keeps its own changes, those before the inner block and those after it."""
    shared = VariableSet({"a": [1], "b": 1})
    mine = WorkingVariables(shared)
    with mine as outer:
        outer["c"] = 1
        with pytest.raises(RuntimeError, match="half-way"):
            _change_and_raise(mine)
        assert outer == {"a": [1], "b": 1, "c": 1}
        with mine as inner:
            inner["f"] = 1
        del mine["b"]
    assert shared.changed() == {"a": [1], "c": 1, "f": 1}


@pytest.mark.parametrize(
    ("value", "message"), [(float("nan"), "cannot be stored"), ({1, 2}, "cannot be stored"), ("\x00", "NUL")]
)
def test_a_value_that_is_not_json_is_refused(value: Any, message: str) -> None:
    """The assignment raises, so that the error appears in the tool and not at the commit."""
    mine = WorkingVariables()
    with pytest.raises(ToolError, match=message):
        mine["a"] = value
    assert mine == {}


def test_changes_are_replayed_in_the_order_they_were_made() -> None:
    """If two calls change one variable, a replay keeps the later change, whatever the order of the calls."""
    shared = VariableSet({"a": 0, "gone": 1})
    one, other = WorkingVariables(shared), WorkingVariables(shared)
    one["a"] = 1
    other["a"] = 2
    one["b"] = True
    one["b"] = 1
    del other["gone"]
    replayed = VariableSet({"a": 0, "gone": 1})
    replayed.replay(json.loads(json.dumps([*other.changes(), *one.changes()])))
    assert replayed.changed() == shared.changed() == {"a": 2, "b": 1}
    assert type(replayed.values()["b"]) is int
    WorkingVariables(replayed)["a"] = 3
    assert replayed.changed() == {"a": 3, "b": 1}


def test_a_replayed_change_beyond_the_limit_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A replay omits a change that exceeds the size limit, logs a warning, and applies the other changes."""
    shared = VariableSet({"old": "x" * 40_000})
    shared.replay([(1, "new", "y" * 40_000), (2, "small", 1)])
    assert shared.changed() == {"old": "x" * 40_000, "small": 1}
    assert "'new' is not changed" in caplog.text
