"""The record of a prompt says what the model received, as long as the rows that the prompt was made of are there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, adapt, effect, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.casebank import cases
from perdure.casebank.cases import NewCase
from perdure.errors import NotFound
from perdure.memory.owned import correct
from perdure.memory.recall.agent_memory import forget
from perdure.models.protocol import ModelRequest, Role
from perdure.sessions.ending import request_end
from perdure.text.patterns import compiled
from perdure.tools.memory import remember
from perdure.turns.prompts import read_prompts
from perdure.users.erase import Eraser
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says
from tests.turns.test_cost import counted

_OPENS = compiled(r"<[a-z_]+ [0-9a-f]{16}>\n")
FACT = "The user's dog is called Waffle and was born in Lyon"
ANA = UserKey("ana")


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen"


def _steps(harness: Harness, turn: dict[str, Any], **given: Any) -> list[dict[str, Any]]:
    found = read_prompts(harness.database, harness.settings, harness.agents, UUID(turn["turn_id"]), **given)
    steps: list[dict[str, Any]] = json.loads(json.dumps(found, default=str))["steps"]
    return steps


def _check(step: dict[str, Any], request: ModelRequest) -> None:
    """The step has what the request had, in its order: each quotation, and each message of the conversation."""
    assert step["settings"] == request.settings
    for kind, texts in (("said", _said(request)), ("quoted", _system(request))):
        parts = [each for each in step["parts"] if ("role" in each) == (kind == "said") and each["kind"] != "tools"]
        assert all("note" not in each for each in parts), parts
        if kind == "said":
            assert [(each["role"], each["text"]) for each in parts] == texts
            continue
        whole, at = "\n\n".join(texts), 0
        for each in parts:
            at = whole.index(each["text"], at) + len(each["text"])
        quoted = [each for each in parts if each["kind"] != "instructions"]
        assert len(_OPENS.findall(whole)) == len(quoted)
    tools = [each["ids"] for each in step["parts"] if each["kind"] == "tools"]
    assert tools == ([[each.name for each in request.tools]] if request.tools else [])


def _said(request: ModelRequest) -> list[Any]:
    return [(each.role.value, each.content) for each in request.messages if each.role is not Role.SYSTEM]


def _system(request: ModelRequest) -> list[Any]:
    return [each.content for each in request.messages if each.role is Role.SYSTEM]


@pytest.fixture
def knowing(harness: Harness) -> Harness:
    """A harness with a memory, a hot memory, a case, and two earlier sessions of Ana, one of them without a summary."""
    for number, summary in enumerate(["They talked of a dog.", None]):
        harness.equip(remember)
        harness.script(calls(("remember", {"content": FACT})) if not number else says("hm"), says("noted"))
        turn = harness.ask(f"please remember my dog Waffle, she comes from Lyon, {number}", channel="cli")
        request_end(harness.database, UUID(turn["session_id"]), "enough")
        harness.sql("UPDATE sessions SET summary = %(s)s WHERE session_id = %(id)s", s=summary, id=turn["session_id"])
        harness.move(60)
    harness.sql("INSERT INTO hot_memories SELECT 'ana', 1, memory_id, 1, now() FROM memories")
    settings = {"temperature": 0.2, "extra_body": {"k": 1}}
    harness.agents = Agents([Agent("assistant", "You help with dogs.", [look], settings=settings)])
    return harness


def test_the_record_equals_what_the_model_received(knowing: Harness) -> None:
    """For each step of two turns of a session, with memories, summaries, history and tools."""
    harness = knowing
    harness.model.requests.clear()
    harness.script(calls(("look", {})), says("A dog."), says("Waffle."))
    first = harness.ask("what is my dog Waffle from Lyon called?", channel="telegram")
    second = harness.ask("again: what is my dog Waffle called?", channel="http")
    found = [*_steps(harness, first), *_steps(harness, second)]
    assert [each["step"] for each in found] == [1, 2, 1]
    for step, request in zip(found, harness.model.requests, strict=True):
        _check(step, replace(request, settings={**request.settings, "extra_body": None}))
    kinds = [each["kind"] for each in found[0]["parts"]]
    assert kinds.count("memory") == 2  # a hot one, and what was recalled
    assert {"instructions", "summary", "history", "memory", "message", "tools"} == set(kinds)
    recalled = next(each for each in found[0]["parts"] if "scores" in each)
    assert len(recalled["ids"]) == len(recalled["scores"]) > 0
    assert all(0 < score <= 1 for score in recalled["scores"])
    assert {each["fingerprint"] for each in found} == {harness.agents.default.fingerprint}
    assert [each["step"] for each in _steps(harness, first, step=2)] == [2]
    with pytest.raises(NotFound):
        _steps(harness, first, step=3)


def test_a_case_is_in_the_record(harness: Harness) -> None:
    """With its similarity."""
    vector = harness.embedder.embed(["How tall is the tower?"])[0]
    given: dict[str, Any] = {"query_vector": vector, "embedder": harness.embedder.name, "success_rate": 80.0}
    cases.add(harness.database, NewCase("c1", "How tall is the tower?", "330 m.", **given), now=harness.clock.now())
    turn = harness.ask("How tall is the tower?")
    [step] = _steps(harness, turn)
    _check(step, harness.model.requests[-1])
    [case] = [each for each in step["parts"] if each["kind"] == "case"]
    assert case["ids"] == ["c1"]
    assert case["scores"][0] > 0.9


def test_a_record_costs_no_statement_and_few_bytes(knowing: Harness) -> None:
    """A later step stores only what differs."""
    harness = knowing
    harness.script(*[calls(("look", {}))] * 2, says("A dog."))
    with counted(harness.database) as (statements, commits):
        turn = harness.ask("what is my dog Waffle from Lyon called?")
    assert commits.count("turns.step") == 4
    assert not any("prompts." in each for each in statements)
    sizes = harness.sql(
        "SELECT pg_column_size(prompt) AS size FROM messages"
        " WHERE turn_id = %(id)s AND role = 'assistant' ORDER BY seq",
        id=turn["turn_id"],
    )
    assert sizes[0].size < 1_500
    assert sizes[1].size < 100
    assert sizes[2].size < 100


def test_what_is_forgotten_or_corrected_is_marked(knowing: Harness) -> None:
    """The record has no text of its own. A corrected memory is marked as changed, and a forgotten one is gone."""
    harness = knowing
    harness.sql("DELETE FROM hot_memories")
    turn = harness.ask("what is my dog Waffle from Lyon called?")
    [memory] = harness.sql("SELECT memory_id FROM memories")
    correct(harness.database, harness.clock, ANA, memory.memory_id, "The dog is called Wuffel")
    [step] = _steps(harness, turn)
    changed = [each for each in step["parts"] if str(memory.memory_id) in each.get("ids", ())]
    assert [each["note"] for each in changed] == ["changed since"]
    assert f", until {harness.clock.now():%Y-%m-%d} only: {FACT}" in changed[0]["text"]
    forget(harness.database, ANA, memory.memory_id)
    [step] = _steps(harness, turn)
    gone = [each for each in step["parts"] if str(memory.memory_id) in each.get("ids", ())]
    assert ["erased, forgotten or replaced since" in each["note"] for each in gone] == [True]
    assert FACT not in json.dumps(gone)
    stored = harness.sql("SELECT prompt::text FROM messages WHERE prompt IS NOT NULL")
    assert not any("Waffle" in row.prompt for row in stored)


def test_changed_instructions_are_not_shown(harness: Harness) -> None:
    """Their hash tells that the agent was another. Those that a function made are stored with the turn."""
    turn = harness.ask()
    [step] = _steps(harness, turn)
    assert step["parts"][0]["text"] == "You help."
    harness.agents = Agents([Agent("assistant", "You do not help.")])
    [later] = _steps(harness, turn)
    assert later["instructions_hash"] == step["instructions_hash"]
    assert (later["parts"][0]["text"], later["parts"][0]["note"][:13]) == (None, "changed since")
    assert harness.agents.default.fingerprint != step["fingerprint"]
    harness.agents = Agents([Agent("assistant", lambda turn: f"You help {turn.user_id}.")])
    [made] = _steps(harness, harness.ask())
    assert made["parts"][0]["text"] == "You help ana."


def test_an_erasure_leaves_no_record(knowing: Harness) -> None:
    """The turn is gone, and its prompts with it."""
    harness = knowing
    turn = harness.ask("what is my dog Waffle called?")
    Eraser(harness.database, harness.clock, harness.snapshots, None, 30, harness.runtime.files).erase(ANA)
    with pytest.raises(NotFound):
        _steps(harness, turn)
    assert harness.sql("SELECT FROM messages WHERE prompt IS NOT NULL") == []


def test_the_running_summary_is_known_until_it_is_replaced(harness: Harness) -> None:
    """A record refers to it by the last message that it covers."""
    memory = harness.settings.memory.model_copy(update={"working_turns": 4})
    harness.settings = harness.settings.model_copy(update={"memory": memory})
    turns = [harness.ask(f"question {number}") for number in range(12)]
    [step] = _steps(harness, turns[-1])
    _check(step, harness.model.requests[-1])
    [summary] = [each for each in step["parts"] if each["kind"] == "summary"]
    for number in range(8):
        harness.ask(f"more {number}")
    [step] = _steps(harness, turns[-1])
    [later] = [each for each in step["parts"] if each["kind"] == "summary"]
    assert (later["ids"], later["text"]) == (summary["ids"], None)
    assert "replaced since" in later["note"]


def test_of_an_adapted_agent_all_but_the_instructions_is_known(knowing: Harness) -> None:
    """What pydantic-ai makes of its agent's instructions is only a hash. A crash between the steps loses nothing."""
    harness = knowing
    bare = PydanticAgent(name="assistant", instructions="You help.", model_settings={"max_tokens": 50})
    bare.tool_plain(metadata=effect("pure"))(look.function)
    harness.agents = Agents([adapt(bare)])
    harness.model.requests.clear()
    harness.script(calls(("look", {})), says("Waffle."))
    sent = harness.send("what is my dog Waffle from Lyon called?")
    with harness.crashing("after", "turns.step", 2):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    steps = _steps(harness, harness.turn(sent.turn_id))
    assert [each["step"] for each in steps] == [1, 2]
    for step, request in zip(steps, harness.model.requests, strict=True):
        instructions = step["parts"].pop(0)
        assert instructions["text"] is None
        assert "pydantic-ai" in instructions["note"]
        assert step["settings"]["max_tokens"] == 50
        _check({**step, "settings": request.settings}, request)
    assert len({each["instructions_hash"] for each in steps}) == 1


def test_a_reply_without_a_record_says_so(harness: Harness) -> None:
    """Such as one of an older release."""
    turn = harness.ask()
    harness.sql("UPDATE messages SET prompt = NULL")
    assert _steps(harness, turn) == [
        {"step": 1, "model": None, "settings": None, "instructions_hash": None, "parts": []}
    ]
