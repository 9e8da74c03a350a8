"""A turn of the real runner is exported from the real database, and replayed without it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent

from perdure import (
    Agent,
    ModelRetry,
    ToolContext,
    ToolError,
    TurnContext,
    adapt,
    agent_tool,
    ask_user,
    celery_tool,
    external_tool,
    handoff,
    tool,
)
from perdure.agents import Agents
from perdure.errors import Conflict, NotFound, ProviderError, SettingsError
from perdure.sessions.ending import request_end
from perdure.testing import Scripted, call, recorded
from perdure.testing.scripted import ScriptExhausted
from perdure.tools.awaited.port import TaskEnded
from perdure.tools.memory import remember
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.calls.awaited import finish
from perdure.turns.calls.outside import answer, parse_result
from perdure.turns.recording import record, record_session
from tests.turns.broker import Broker
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says, spoken, system_text

FACT = "Ana drinks green tea only"
SAMPLE = Path(__file__).parent / "recorded_turn.json"

_looked_up: list[str] = []


class Offer(BaseModel):
    article: str
    euros: float


@tool(effect="pure")
def price(article: str, pieces: int = 1) -> float:
    """Look up a price.

    Args:
        article: Its name.
        pieces: How many.
    """
    _looked_up.append(article)
    if article == "gold":
        raise ToolError("Gold is not sold.")
    return 3.5 * pieces


@tool(requires_approval=True)
def order(article: str, context: ToolContext) -> str:
    """Order an article."""
    return f"ordered {article} as {context.effect_id}"


def _instructions(turn: TurnContext) -> str:
    return f"You sell tea to {turn.user_id}.\nIt is {turn.now:%A}."


def _agent(*tools: Any, **given: Any) -> Agent:
    declared = {"instructions": _instructions, "output": Offer, **given}
    return Agent("shop", tools=tools or (price, order, remember), **declared)


def _offer(article: str, euros: float) -> str:
    return json.dumps({"article": article, "euros": euros})


@pytest.fixture
def bundle(harness: Harness) -> dict[str, Any]:
    """The third turn of a conversation, with calls that were done, failed and denied, a memory, and an output."""
    harness.agents = Agents([_agent()])
    harness.script(calls(("remember", {"content": FACT})), says(_offer("tea", 1)))
    earlier = harness.ask(f"remember that {FACT}", channel="cli")
    request_end(harness.database, UUID(earlier["session_id"]), "enough")
    harness.move(3 * 86_400)
    harness.script(says(_offer("tea", 2)))
    harness.ask("what does green tea cost?", channel="web", metadata={"page": "/tea", "timezone": "Europe/Paris"})
    harness.script(
        calls(("price", {"article": "tea", "pieces": 2}), ("price", {"article": "gold"})),
        calls(("order", {"article": "gold"})),
        says(_offer("tea", 7)),
    )
    sent = harness.send("two green teas and gold", channel="web", metadata={"timezone": "Europe/Paris"})
    harness.run(sent.session_id)
    pending = harness.turn(sent.turn_id)["pending_approvals"]
    decide(harness.runtime, sent.turn_id, parse_decision({"call_id": pending[0]["call_id"], "decision": "deny"}))
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["data"] == {"article": "tea", "euros": 7.0}
    before = harness.sql("SELECT count(*) FROM memory_accesses")[0][0]
    found = record(harness.runtime, sent.turn_id)
    assert harness.sql("SELECT count(*) FROM memory_accesses")[0][0] == before, "an export is no access"
    bundle: dict[str, Any] = json.loads(json.dumps(found))
    return bundle


def test_an_unchanged_agent_has_no_difference(harness: Harness, bundle: dict[str, Any]) -> None:
    """No tool runs. The prompts have the memories, the history, the time and the instructions of the recording."""
    _looked_up.clear()
    replay = recorded(bundle).replay(_agent())
    assert not replay.difference, str(replay.difference)
    assert str(replay.difference) == "no difference"
    assert _looked_up == []
    assert replay.data == Offer(article="tea", euros=7)
    assert [(each.tool, each.status) for each in replay.answer.calls] == [
        ("price", "done"), ("price", "failed"), ("order", "denied"),
    ]  # fmt: skip
    # The same conversation as the model of the worker had, but for the marks of the quotations.
    real = harness.model.requests[-3:]
    assert [spoken(request) for request in replay.requests] == [spoken(request) for request in real]
    system, replayed = system_text(real[0]), system_text(replay.requests[0])
    assert FACT in replayed
    assert _without_codes(replayed) == _without_codes(system)


@pytest.mark.parametrize("kind", ["native", "adapted"])
def test_the_turns_of_a_conversation(harness: Harness, kind: str) -> None:
    """Each runs again after the recorded turns before it; a message that joined a turn is part of it."""
    bare = PydanticAgent(name="shop", instructions="You sell tea.")
    bare.tool_plain(name="price")(price.function)
    shop = Agent("shop", "You sell tea.", [price]) if kind == "native" else adapt(bare, name="shop")
    harness.agents = Agents([shop])
    harness.script(calls(("price", {"article": "tea"})), says("3.5 euros."))
    harness.ask("what does tea cost?")

    def steered(request: Any, call: Any) -> Any:
        harness.send("and gold?", on_busy="steer")
        return calls(("price", {"article": "tea", "pieces": 2}))

    harness.script(steered, says("7 euros, and no gold."))
    harness.ask("and two of them?")
    harness.script(says("You're welcome."))
    last = harness.ask("thanks")
    found = recorded(json.loads(json.dumps(record_session(harness.runtime, UUID(last["session_id"]), 100))))
    assert [each.text for each in found.turns] == ["what does tea cost?", "and two of them?\nand gold?", "thanks"]
    assert (found.text, found.reply) == ("thanks", "You're welcome.")
    replays = [each.replay(shop) for each in found.turns]
    assert [str(each.difference) for each in replays] == ["no difference"] * 3
    told = [each.content for each in spoken(replays[-1].requests[-1])]
    assert [each for each in told if each in {"3.5 euros.", "7 euros, and no gold."}] == [
        "3.5 euros.",
        "7 euros, and no gold.",
    ]
    assert [len(each.answer.calls) for each in replays] == [1, 1, 0]
    changed = [each.replay(shop, model=Scripted("No.")).difference for each in found.turns]
    assert [each.calls for each in changed] == [
        ('- price({"article": "tea"})',),
        ('- price({"article": "tea", "pieces": 2})',),
        (),
    ]
    newest = recorded(record_session(harness.runtime, UUID(last["session_id"]), 1))
    assert [each.text for each in newest.turns] == ["thanks"]
    with pytest.raises(NotFound):
        record_session(harness.runtime, UUID(int=1), 1)


def _without_codes(system: str) -> str:
    """What stands before the quotations, without the code of the installation's notes."""
    return re.sub(r"follows \(\w+\)", "follows", system.split("<", maxsplit=1)[0])


def test_a_changed_agent_has_a_readable_difference(bundle: dict[str, Any]) -> None:
    """Instructions, tools, calls, results, data and the reply are compared."""

    @tool(effect="pure", name="price")
    def other_price(article: str) -> float:
        """Look up a price."""
        return 1.0

    changed = _agent(other_price, order, instructions="You sell tea to ana.\nBe brief.")
    model = Scripted(
        call("price", article="tea", pieces=2), call("price", article="ink"), Offer(article="ink", euros=1)
    )
    replay = recorded(bundle).replay(changed, model=model)
    told = str(replay.difference)
    assert replay.difference.data == ({"article": "tea", "euros": 7.0}, {"article": "ink", "euros": 1.0})
    assert replay.difference.status is None
    assert '- order({"article": "gold"})' in replay.difference.calls
    assert '+ price({"article": "ink"})' in replay.difference.calls
    assert replay.difference.tools == ("- remember", "~ price")
    assert "+ Be brief." in replay.difference.instructions
    assert replay.not_recorded == ('price({"article": "ink"})',)
    assert replay.answer.calls[-1].result == 'Error: The recording has no call price({"article": "ink"}).'
    assert "calls:\n  - price" in told
    assert "data:" in told
    ink = (Offer(article="ink", euros=1),)
    real = recorded(bundle).replay(changed, model=Scripted(call("price", article="ink"), *ink), runs_missing=True)
    assert real.answer.calls[0].result == "1.0"
    with pytest.raises(ScriptExhausted, match="asks for another one"):
        recorded(bundle).replay(_agent(check_output=_never))


def _never(_: Offer) -> None:
    raise ModelRetry("Never.")


def test_an_evaluation_is_a_loop(bundle: dict[str, Any], tmp_path: Path) -> None:
    """Over files."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(bundle), encoding="utf-8")
    differences = {path.name: recorded(path).replay(_agent()).difference for path in sorted(tmp_path.glob("*.json"))}
    assert list(map(bool, differences.values())) == [False, False]


def test_tasks_external_tools_and_agents_of_pydantic_ai(harness: Harness) -> None:
    """Their results come from the recording, too."""
    bare = PydanticAgent(name="shop", instructions="You sell tea.")

    @bare.tool_plain
    def look(article: str) -> str:
        """Look."""
        if article == "gold":
            raise LookupError(article)
        _looked_up.append(article)
        return f"a {article}"

    adapted = adapt(bare)
    harness.agents = Agents([adapted])
    harness.script(calls(("look", {"article": "tea"})), says("A tea."))
    turn = harness.ask("what is it?")
    made = record(harness.runtime, UUID(turn["turn_id"]))
    _looked_up.clear()
    replay = recorded(made).replay(adapted)
    assert (replay.reply, str(replay.difference), _looked_up) == ("A tea.", "no difference", [])
    assert recorded(made).not_reproduced[-1].startswith("the instructions and tools of an agent of pydantic-ai")
    native = Agent("shop", "You sell tea.", [external_tool("ask", "Ask."), celery_tool("shop.pack")])
    replay = recorded(made).replay(native, model=Scripted([call("ask"), call("shop_pack")], "done"))
    assert replay.not_recorded == ("ask({})", "shop_pack({})")
    assert replay.reply == "done"


def test_the_users_answers_come_from_the_recording(harness: Harness) -> None:
    """A question gets the value that the user's answer had, without the user's tries."""
    agent = Agent("shop", "You sell tea.", [ask_user(bool, name="ask_milk")])
    harness.agents = Agents([agent])
    harness.script(calls(("ask_milk", {"question": "Milk?"})), says("Here."))
    turn = harness.ask("tea, please")
    for text in ("hm", "yes"):
        harness.send(text)
        harness.run(UUID(turn["session_id"]))
    replay = recorded(record(harness.runtime, UUID(turn["turn_id"]))).replay(agent)
    assert (replay.reply, str(replay.difference)) == ("Here.", "no difference")
    assert replay.answer.calls[0].result == "true"


def test_the_results_of_tasks_and_of_edited_calls(harness: Harness) -> None:
    """A task is not sent. A call that a person edited gets the result that the person's arguments had."""
    harness.calls = broker = Broker()
    pack = celery_tool("shop.pack", timeout_s=60)
    agent = Agent("shop", "You sell tea.", [pack, order, external_tool("ask", "Ask.")])
    harness.agents = Agents([agent])
    harness.script(
        calls(("shop_pack", {"box": 1}), ("shop_pack", {"box": 2}), ("ask", {})),
        calls(("order", {"article": "tea"})),
        says("done"),
    )
    sent = harness.send()
    harness.run(sent.session_id)
    for task, failed in zip(broker.sent, (False, True), strict=True):
        finish(harness.runtime, task.task_id, TaskEnded(failed=failed, value="no box" if failed else {"kg": 2}))
    [waiting] = harness.turn(sent.turn_id)["pending_calls"]
    answer(harness.runtime, sent.turn_id, parse_result({"call_id": waiting["call_id"], "result": "yes"}))
    harness.run(sent.session_id)
    [asked] = harness.turn(sent.turn_id)["pending_approvals"]
    edited = {"call_id": asked["call_id"], "decision": "approve", "arguments": {"article": "ink"}}
    decide(harness.runtime, sent.turn_id, parse_decision(edited))
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "done"
    replay = recorded(record(harness.runtime, sent.turn_id)).replay(agent)
    assert str(replay.difference) == "no difference"
    assert str(replay.answer.calls[3].result).startswith("ordered ink")
    assert len(broker.sent) == 2


def test_the_answers_of_other_agents_are_recorded(harness: Harness) -> None:
    """A replay asks no other agent, and follows a handoff."""
    expert, billing = Agent("expert", "You know teas."), Agent("billing", "You bill.", [price])
    shop = Agent("shop", "You sell.", [agent_tool("expert"), handoff(billing)])
    harness.agents, harness.calls = Agents([shop, expert]), Broker()
    harness.script(
        calls(("expert", {"task": "Which is best?"})), says("Green tea."),
        calls(("handoff_to_billing", {})), calls(("price", {"article": "tea"})), says("3.5 euros for green tea."),
    )  # fmt: skip
    turn = harness.ask()
    harness.run(UUID(turn["children"][0]["turn_id"]))
    harness.run(UUID(turn["session_id"]))
    made = json.loads(json.dumps(record(harness.runtime, UUID(turn["turn_id"]))))
    replay = recorded(made).replay(shop, agents=[expert])
    assert not replay.difference, str(replay.difference)
    assert [each.result for each in replay.answer.calls][::2] == ["Green tea.", "3.5"]
    other = Scripted(call("expert", task="Which is worst?"), "None.")
    replay = recorded(made).replay(shop, model=other, agents=[expert])
    assert replay.not_recorded == ('expert({"task": "Which is worst?"})',)


def test_a_failed_turn(harness: Harness) -> None:
    """It fails again with its error, and a changed answer shows."""
    agent = Agent("shop", "You sell tea.", [price])
    harness.agents = Agents([agent])
    harness.script(calls(("price", {"article": "tea"})), ProviderError("The provider failed."))
    turn = harness.ask()
    made = record(harness.runtime, UUID(turn["turn_id"]))
    assert str(recorded(made).replay(agent).difference) == "no difference"
    replay = recorded(made).replay(agent, model=Scripted(call("price", article="tea"), "3.5 euros."))
    assert replay.difference.status == ("failed", "done")


def test_what_cannot_be_exported_or_read(harness: Harness) -> None:
    """An unknown turn, one that is not settled, one that never began, and files of another kind or version."""
    with pytest.raises(NotFound):
        record(harness.runtime, UUID(int=0))
    sent = harness.send()
    with pytest.raises(Conflict, match="only a settled turn"):
        record(harness.runtime, sent.turn_id)
    harness.run(sent.session_id)
    made = record(harness.runtime, sent.turn_id)
    with pytest.raises(SettingsError, match="version 9"):
        recorded({**made, "version": 9})
    with pytest.raises(SettingsError, match="no recorded turn"):
        recorded({"turn_id": made["turn_id"]})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.encode()[:100], "no recorded turn"),
        (lambda _: b"", "no recorded turn"),
        (lambda _: b"\x80", "no recorded turn"),
        (lambda _: b"[]", "no recorded turn"),
        (lambda text: text.replace('"version"', '"edition"').encode(), "version None"),
        (lambda text: text.replace('"history"', '"past"').encode(), "lacks history"),
        (lambda text: text.replace("\n", "\r\n").encode(), None),
        (lambda text: text.encode("utf-8-sig"), None),
        (lambda text: text.encode("utf-16"), None),
    ],
    ids=["cut off", "empty", "bytes", "a list", "no version", "no history", "Windows", "byte order mark", "UTF-16"],
)
def test_a_file_that_a_shell_or_an_editor_has_changed(
    tmp_path: Path, spoil: Callable[[str], bytes], said: str | None
) -> None:
    """What is still JSON is read in each encoding that a shell writes; for another file, the error says so."""
    path = tmp_path / "turn.json"
    path.write_bytes(spoil(SAMPLE.read_text(encoding="utf-8")))
    if said is None:
        assert recorded(path).bundle == json.loads(SAMPLE.read_text(encoding="utf-8"))
        return
    with pytest.raises(SettingsError, match=said):
        recorded(path)


def test_the_bundle_of_an_earlier_release_is_read() -> None:
    """The file is in the form that this release writes, and stays readable."""
    bundle: Mapping[str, Any] = json.loads(SAMPLE.read_text(encoding="utf-8"))
    assert bundle["version"] == 1

    @tool(effect="pure", name="price")
    def cost(article: str) -> float:
        """Look up what an article costs, in euros."""
        raise AssertionError("the recording has the result")

    agent = Agent("assistant", "You sell office supplies.", [cost])
    assert str(recorded(SAMPLE).replay(agent).difference) == "no difference"
