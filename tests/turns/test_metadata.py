"""The metadata of a message reaches the agent's tools and hooks, and is returned with the turn."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, ToolCalled, ToolCalling, ToolContext, TurnEnding, TurnStarted, tool
from perdure.errors import InvalidRequest
from perdure.testing import Scripted, ask
from perdure.turns.inbox.incoming import MAX_METADATA_CHARS, parse_incoming
from tests.turns.awaiting import ask_and_wait
from tests.turns.broker import Broker
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

METADATA = {"page": "/cart", "flags": ["beta", 3], "shop": {"id": 7}}


class Seen:
    """Records the metadata that each kind of function receives."""

    def __init__(self) -> None:
        self.by: dict[str, list[Any]] = {}

    def note(self, where: str, metadata: Any) -> None:
        """Record the metadata."""
        self.by.setdefault(where, []).append({**metadata})

    def tool(self) -> Any:
        """A tool that records."""

        @tool
        def look(context: ToolContext) -> str:
            """Look, and change the metadata: no other function may see the change."""
            metadata: Any = context.metadata
            self.note("tool", metadata)
            metadata["shop"] = "changed"
            return "seen"

        return look

    @property
    def hooks(self) -> dict[str, Any]:
        """Hooks of every kind that record."""

        def started(turn: TurnStarted) -> None:
            self.note("before_turn", turn.metadata)

        def ending(ended: TurnEnding) -> None:
            self.note("after_turn", ended.turn.metadata)

        def calling(call: ToolCalling) -> None:
            self.note("before_tool", call.metadata)

        def called(done: ToolCalled) -> None:
            self.note("after_tool", done.call.metadata)

        return {"before_turn": [started], "after_turn": [ending], "before_tool": [calling], "after_tool": [called]}


def test_tools_and_hooks_receive_the_metadata(harness: Harness) -> None:
    """A tool that changes its copy changes no other. The turn's body has the metadata, if there is any."""
    seen = Seen()
    harness.equip(seen.tool(), **seen.hooks)
    harness.script(calls(("look", {})), says("done"), calls(("look", {})), says("done"))
    assert harness.ask("go", metadata=METADATA)["metadata"] == METADATA
    assert set(seen.by) == {"tool", "before_turn", "after_turn", "before_tool", "after_tool"}
    assert all(found == METADATA for each in seen.by.values() for found in each)
    seen.by.clear()
    assert "metadata" not in harness.ask("again")
    assert all(found == {} for each in seen.by.values() for found in each)


def test_hooks_around_a_task_receive_the_metadata(harness: Harness, broker: Broker) -> None:
    """The hooks around a Celery tool's task get the metadata, too."""
    seen = Seen()
    hooks = {"before_tool": seen.hooks["before_tool"]}
    harness.equip(*harness.agents.default.tool_list, **hooks)
    ask_and_wait(harness, metadata=METADATA)
    assert seen.by == {"before_tool": [METADATA]}


def test_a_successor_has_the_metadata(harness: Harness) -> None:
    """The metadata is in the turn's row, so a worker that takes the turn over passes it on."""
    seen = Seen()
    harness.equip(seen.tool())
    harness.script(calls(("look", {})), says("done"))
    sent = harness.send("go", metadata=METADATA)
    with harness.crashing("before", "turns.step"):
        harness.run(sent.session_id)
    harness.move(60)
    harness.script(calls(("look", {})), says("done"))
    harness.run(sent.session_id)
    assert seen.by == {"tool": [METADATA]}


def test_merged_messages_add_their_metadata(harness: Harness) -> None:
    """A message that joins a turn adds its members. The newest value of a member counts."""
    first = harness.send("one", metadata={"page": "/cart", "a": 1})
    harness.send("two", on_busy="merge")
    harness.send("three", on_busy="merge", metadata={"page": "/pay"})
    assert harness.turn(first.turn_id)["metadata"] == {"page": "/pay", "a": 1}
    plain = harness.send("one", user_id="ben")
    harness.send("two", user_id="ben", on_busy="merge", metadata={"b": 2})
    assert harness.turn(plain.turn_id)["metadata"] == {"b": 2}


def test_unreadable_metadata_is_left_out(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """If another program stored metadata that this release cannot parse, the turn runs without it."""
    seen = Seen()
    harness.equip(seen.tool())
    harness.script(calls(("look", {})), says("done"))
    sent = harness.send("go")
    harness.sql("UPDATE turns SET metadata = '[1]' WHERE turn_id = %(id)s", id=sent.turn_id)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert seen.by == {"tool": [{}]}
    assert "without its metadata" in caplog.text


def test_metadata_is_limited() -> None:
    """Metadata is a JSON object of limited size, whatever the channel."""
    for wrong in ({"a": "x" * MAX_METADATA_CHARS}, ["a"], {"a": float("nan")}, {"a": "\x00"}):
        with pytest.raises(InvalidRequest, match="metadata"):
            parse_incoming({"user_id": "ana", "text": "hi", "metadata": wrong}, channel="celery")


def test_a_test_of_an_agent_gives_metadata() -> None:
    """`perdure.testing` passes metadata, and the language in it, as the engine does."""
    seen = Seen()
    agent = Agent("shop", "You help.", [seen.tool()])
    answer = ask(agent, "go", model=Scripted(calls(("look", {})), "done"), metadata=METADATA, language="de")
    assert answer.reply == "done"
    assert seen.by == {"tool": [{**METADATA, "language": "de"}]}
