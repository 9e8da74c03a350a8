"""The memory tools act only for the turn's user, store a memory once per call, and quote recalled memories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest

from perdure.access.tenants import UserKey
from perdure.errors import ProviderError, ToolError
from perdure.memory.embedding import embed_missing
from perdure.memory.recall.search import Layer
from perdure.models.embedders.protocol import Vector
from perdure.models.protocol import ModelCall
from perdure.text.quoting import without_quotations
from perdure.tools.memory import forget, recall, remember
from perdure.tools.registry import Effect, Tool, ToolContext
from perdure.turns.calls.execute import memory_of_call
from tests.turns.conftest import harness
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

__all__ = ["harness"]


def _context(harness: Harness, user_id: str = "ana", text: str = "hello", **given: Any) -> ToolContext:
    """The context of a tool call in a new turn of `user_id`."""
    accepted = harness.send(text, user_id=user_id, **given)
    hold = harness.claimed(accepted.session_id)
    effect_id = uuid4()
    return ToolContext(
        user_id=user_id,
        session_id=accepted.session_id,
        turn_id=accepted.turn_id,
        effect_id=effect_id,
        channel="http",
        cancelled=hold.unwanted,
        memory=memory_of_call(harness.runtime, hold.at_hand, effect_id),
    )


def _again(harness: Harness, context: ToolContext) -> ToolContext:
    """The context of another tool call in the turn of `context`."""
    assert context.memory is not None
    effect_id = uuid4()
    return replace(context, effect_id=effect_id, memory=replace(context.memory, effect_id=effect_id))


def _call(tool: Tool, context: ToolContext, **arguments: object) -> str:
    return tool.call(tool.parse(json.dumps(arguments)), context)


def _contents(harness: Harness) -> list[str]:
    rows = harness.sql("SELECT content FROM memories WHERE valid_to IS NULL ORDER BY created_at")
    return [row.content for row in rows]


def test_the_tools_effects_are_declared() -> None:
    """The tools are pure or idempotent, so that the engine can repeat a call after a crash."""
    assert [each.effect for each in (remember, recall, forget)] == [
        Effect.IDEMPOTENT,
        Effect.PURE,
        Effect.IDEMPOTENT,
    ]


def test_a_call_that_is_repeated_remembers_once(harness: Harness) -> None:
    """If a call is repeated, only one memory is stored. The memory's id is the call's effect id."""
    context = _context(harness)
    first = _call(remember, context, content="Ana lives in Lyon", kind="fact", importance=0.9)
    assert _call(remember, context, content="Ana lives in Lyon", kind="fact", importance=0.9) == first
    assert str(context.effect_id) in first
    assert _contents(harness) == ["Ana lives in Lyon"]


def test_repeated_statements_are_stored_once_and_contradictions_supersede(harness: Harness) -> None:
    """A repeated statement is stored once. A contradicting statement supersedes it."""
    limits = type(harness.settings.consolidation)(similarity=0.8)  # fits the built-in embedder
    harness.settings = harness.settings.model_copy(update={"consolidation": limits})
    context = _context(harness)
    gym = "pays {} euros a month for the gym in the old harbour street where the trainers are kind"
    first = _call(remember, context, content=f"Ana {gym.format(30)}")
    embed_missing(harness.database, harness.embedder)
    assert _call(remember, _again(harness, context), content=f"ana {gym.format(30)}") == first
    harness.move(60)
    _call(remember, _again(harness, context), content=f"Ana {gym.format(40)}")
    assert _contents(harness) == [f"Ana {gym.format(40)}"]
    history = harness.sql("SELECT content FROM memories WHERE superseded_by IS NOT NULL")
    assert [row.content for row in history] == [f"Ana {gym.format(30)}"]


class _Lost:
    """An embedder whose server does not answer."""

    name = "openai:lost"
    dimensions = 384

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        raise ProviderError("The connection to the model's server failed.")


def test_statements_are_compared_while_the_embedder_is_unavailable(harness: Harness) -> None:
    """A repeated statement and a contradicting one are found by their words and topic; vectors are made later."""
    context = _context(harness)
    assert context.memory is not None
    recall_ = replace(context.memory.means.recall, embedder=_Lost())
    context = replace(context, memory=replace(context.memory, means=replace(context.memory.means, recall=recall_)))
    first = _call(remember, context, content="The user lives in Lyon.")
    assert _call(remember, _again(harness, context), content="the user lives in Lyon") == first
    harness.move(60)
    _call(remember, _again(harness, context), content="The user lives in Paris.")
    assert _contents(harness) == ["The user lives in Paris."]


def test_a_memorys_source_is_the_turns_message(harness: Harness) -> None:
    """A memory's source is the user's message of the same turn, which is committed before a tool runs."""
    harness.equip(remember)
    harness.script(calls(("remember", {"content": "Ana's cat is called Miso"})), says("noted"))
    harness.ask("my cat is Miso, remember that", message_id="the message")
    found = harness.runtime.recall.search(UserKey("ana"), "what is the cat called?", layers=[Layer.SEMANTIC])
    assert [each.content for each in found] == ["Ana's cat is called Miso"]
    assert found[0].message_ids == ("the message",)


def test_what_is_recalled_is_the_users_own_and_quoted(harness: Harness) -> None:
    """`recall` returns only the user's own memories, as quotations, so that they are not stored as new memories."""
    ana, bob = _context(harness), _context(harness, "bob")
    _call(remember, ana, content="The secret number of Ana is 7")
    _call(remember, bob, content="The secret number of Bob is 8")
    result = _call(recall, _again(harness, ana), query="what is the secret number?", k=5)
    assert "The secret number of Ana is 7" in result
    assert "Bob" not in result
    assert "Ana is 7" not in without_quotations(result)
    assert _call(recall, _context(harness, "eve"), query="what is the secret number?") == "Nothing was found."


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Niue"])
def test_dates_are_the_users(harness: Harness, zone: str) -> None:
    """The dates are those of the zone of the turn's message, as in the prompt: one of the two is not that of UTC."""
    context = _context(harness, metadata={"timezone": zone})
    began_at = harness.clock.now()
    _call(remember, context, content="The user lives in Lyon.")
    harness.move(60)
    _call(remember, _again(harness, context), content="The user lives in Paris.")
    result = _call(recall, _again(harness, context), query="Where does the user live?")
    [lyon] = [line for line in result.splitlines() if "in Lyon." in line]
    began, ended = (f"{at.astimezone(ZoneInfo(zone)):%Y-%m-%d}" for at in (began_at, harness.clock.now()))
    assert lyon.endswith(f", {began}, until {ended} only] The user lives in Lyon.")


def test_what_no_longer_holds_is_marked(harness: Harness) -> None:
    """`recall` says until when a superseded memory held, and nothing of the kind of the one that holds."""
    context = _context(harness)
    _call(remember, context, content="The user lives in Lyon.")
    harness.move(60)
    _call(remember, _again(harness, context), content="The user lives in Paris.")
    result = _call(recall, _again(harness, context), query="Where does the user live?")
    [lyon], [paris] = ([line for line in result.splitlines() if f"in {each}." in line] for each in ("Lyon", "Paris"))
    today = f"{harness.clock.now():%Y-%m-%d}"
    assert f", until {today} only] The user lives in Lyon." in lyon
    assert "until" not in paris


def test_one_memory_is_forgotten_with_all_that_only_it_named(harness: Harness) -> None:
    """`forget` deletes a memory of the user, and the entities that only this memory mentions.

    A second call, and a call for another user, report that the memory does not exist.
    """
    ana, bob = _context(harness), _context(harness, "bob")
    memory_id = _call(remember, ana, content="Ana's boss is Zoltan").split()[-1].rstrip(".")
    harness.sql(
        """
        WITH entity AS (
            INSERT INTO entities (entity_id, user_id, name, key, created_at)
            VALUES (gen_random_uuid(), 'ana', 'Zoltan', 'zoltan', now()) RETURNING entity_id)
        INSERT INTO entity_mentions SELECT entity_id, %(id)s FROM entity
        """,
        id=memory_id,
    )
    assert "no such memory" in _call(forget, bob, memory_id=memory_id)
    assert _contents(harness) == ["Ana's boss is Zoltan"]
    assert _call(forget, ana, memory_id=memory_id) == "It is forgotten."
    assert "no such memory" in _call(forget, ana, memory_id=memory_id)
    assert _contents(harness) == []
    assert harness.sql("SELECT count(*) FROM entities")[0][0] == 0


def test_nothing_is_stored_for_an_erased_user(harness: Harness) -> None:
    """A tool that still runs after the erasure of its user stores nothing, even if the user has a new session."""
    context = _context(harness)
    harness.runtime.eraser.erase(UserKey("ana"))
    with pytest.raises(ToolError, match="was erased"):
        _call(remember, context, content="Ana lives in Lyon")
    harness.send("I am back")
    with pytest.raises(ToolError, match="was erased"):
        _call(remember, context, content="Ana lives in Lyon")
    assert _contents(harness) == []


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (remember, {"content": ""}),
        (remember, {"content": " \n"}),
        (remember, {"content": "x" * 1_001}),
        (remember, {"content": "x", "importance": 7}),
        (remember, {"content": "x", "kind": "conversation"}),
        (recall, {"query": ""}),
        (recall, {"query": "x", "k": 0}),
        (forget, {"memory_id": "all"}),
    ],
)
def test_bad_arguments_are_refused_with_a_reason(tool: Tool, arguments: dict[str, object]) -> None:
    """Invalid arguments are refused before the tool runs."""
    with pytest.raises(ToolError, match="refused"):
        tool.parse(json.dumps(arguments))


def test_without_a_memory_the_tools_fail(harness: Harness) -> None:
    """If the context has no memory, the tools fail with a message."""
    context = replace(_context(harness), memory=None)
    with pytest.raises(ToolError, match="no memory"):
        _call(recall, context, query="x")


def test_nothing_is_stored_for_a_message_that_is_left_out(harness: Harness) -> None:
    """In a turn with `remember: false`, `remember` stores nothing and says so, whatever the model asks for.

    The same holds for an agent to which such a turn has delegated: its turn has the id of the call.
    """
    context = _context(harness)
    harness.sql("UPDATE turns SET additions = '{\"remember\": false}' WHERE turn_id = %(id)s", id=context.turn_id)
    with pytest.raises(ToolError, match="Nothing was stored"):
        _call(remember, context, content="Ana owns a secret castle")
    call_id = uuid4()
    harness.sql(
        """
        INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status,
                                  intended_at, decide_at)
        SELECT %(call_id)s, turn_id, 1, 0, 'butler', '{}', 'idempotent', 'intended', now(), now() FROM turns
        WHERE turn_id = %(id)s
        """,
        call_id=call_id,
        id=context.turn_id,
    )
    assert context.memory is not None
    with pytest.raises(ToolError, match="Nothing was stored"):
        _call(remember, replace(context, memory=replace(context.memory, turn_id=call_id)), content="Ana has a castle")
    assert _contents(harness) == []
