"""What turns used, added up by user, tenant, agent, model or day."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from perdure import Agent, agent_tool
from perdure.access.tenants import user_key
from perdure.agents import Agents
from perdure.memory.import_export import export_messages, import_messages
from perdure.models.prices import cost
from perdure.models.protocol import ModelReply, ToolCall, Usage
from perdure.sessions.forking import fork
from perdure.settings import Settings
from perdure.turns import costs
from perdure.turns.costs import BY, Used, cost_of, usage
from perdure.turns.queries import USAGE, USAGE_PART
from tests.plans import outline, plans, rows_read
from tests.turns.harness import Harness

CHEAP, OWN = "openai:gpt-5-mini", "vllm:qwen"
LARGE, SMALL, UNPRICED = Usage(1_000_001, 10, 400_000), Usage(1_001, 11), Usage(7, 3)


def _used(harness: Harness, by: str, **ago: float) -> dict[tuple[str | None, str | None], Used]:
    since = harness.clock.now() - timedelta(**(ago or {"days": 1}))
    return usage(harness.database, harness.settings, harness.agents, since=since, by=by)


@pytest.fixture
def turns(harness: Harness) -> Harness:
    """Of two days, three turns of two users with two agents, one of whose models has no price."""
    harness.agents = Agents([Agent("cheap", "You help.", model=CHEAP), Agent("own", "You help.", model=OWN)])
    harness.send("never run", user_id="carl", agent="cheap")
    for key, agent, used, after_s in (
        (user_key("acme", "ann"), "cheap", LARGE, 86_400),
        (user_key("acme", "ann"), "cheap", SMALL, 0),
        ("bob", "own", UNPRICED, 0),
    ):
        harness.script(ModelReply("yes", (), used, f"{agent}-2026"))
        assert harness.ask("hello", user_id=key, agent=agent)["status"] == "done"
        harness.move(after_s)
    return harness


def _price(*used: Usage) -> Decimal:
    prices = [cost(CHEAP, each, Settings()) for each in used]
    return sum((each for each in prices if each is not None), Decimal())


@pytest.mark.parametrize(
    ("by", "ann", "bob"),
    [
        ("user", ("ann", "acme"), ("bob", None)),
        ("tenant", (None, "acme"), (None, None)),
        ("agent", ("cheap", None), ("own", None)),
        ("model", ("cheap-2026", None), ("own-2026", None)),
    ],
)
def test_each_reply_is_counted_once(turns: Harness, by: str, ann: Any, bob: Any) -> None:
    """Replies without a known price count in `unpriced`, not as free."""
    assert _used(turns, by, days=2) == {
        ann: Used(2, 1_001_002, 400_000, 21, _price(LARGE, SMALL)),
        bob: Used(1, 7, None, 3, Decimal(), 1),
    }


def test_what_no_reply_reports_is_unknown(harness: Harness) -> None:
    """A server that reports no usage has used an unknown number of tokens, and a reported 0 is 0."""
    harness.agents = Agents([Agent("silent", "You help.", model=OWN), Agent("fresh", "You help.", model=OWN)])
    for agent, used in (("silent", None), ("fresh", Usage(7, 3, 0)), ("fresh", Usage(1, 1))):
        harness.script(ModelReply("yes", (), used, "m"))
        assert harness.ask("hello", agent=agent)["usage"] == (used and used.to_dict())
    assert _used(harness, "agent") == {
        ("silent", None): Used(1, None, None, None, Decimal(), 1),
        ("fresh", None): Used(2, 8, 0, 4, Decimal(), 2),
    }


def test_only_turns_of_the_time_count(turns: Harness) -> None:
    """The time is that at which a turn was accepted. Days are those of the time zone of the installation."""
    assert _used(turns, "agent", hours=1)["cheap", None].replies == 1
    days = _used(turns, "day", days=2)
    today = turns.clock.now().date()
    assert {key: used.replies for key, used in days.items()} == {
        (str(today - timedelta(days=1)), None): 1,
        (str(today), None): 2,
    }


def test_a_day_begins_at_midnight_of_summer_time(harness: Harness) -> None:
    """Also in a zone whose name is, to PostgreSQL, an abbreviation of its winter time."""
    harness.settings = harness.settings.model_copy(update={"timezone": "CET"})
    now = harness.clock.now()
    evening = now.replace(year=now.year + 1, month=7, day=15, hour=22, minute=30)
    harness.move((evening - now).total_seconds())
    harness.script(ModelReply("yes", (), SMALL, "own-2026"))
    harness.ask("hello")
    assert list(_used(harness, "day")) == [(str(evening.date() + timedelta(days=1)), None)]


@pytest.mark.parametrize("by", BY)
def test_parts_add_up_to_the_whole(turns: Harness, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """A long time is read in parts, none of which takes long. Each turn is in one of them."""
    whole = _used(turns, by, days=2)
    for most in (1, 2, 3):
        monkeypatch.setattr(costs, "PART", most)
        assert _used(turns, by, days=2) == whole


def test_what_a_fork_copies_is_not_counted_again(turns: Harness) -> None:
    """Each reply was paid once. A later reply in the fork counts, as one of its own."""
    before = _used(turns, "agent", days=2)
    session_id = turns.sql("SELECT session_id FROM turns WHERE user_id LIKE %(u)s ORDER BY turn_id", u="%ann")[0][0]
    forked = fork(turns.database, turns.clock, session_id)
    assert _used(turns, "agent", days=2) == before
    turns.script(ModelReply("yes", (), SMALL, "m"))
    turns.run(turns.send("go on", user_id=user_key("acme", "ann"), session_id=forked).session_id)
    assert _used(turns, "agent", days=2)["cheap", None].replies == before["cheap", None].replies + 1


def test_imported_turns_count_when_they_were_accepted(turns: Harness) -> None:
    """An import gives new ids to old turns."""
    exported = [json.dumps({**each, "user_id": "dora"}) for each in export_messages(turns.database)]
    [imported] = import_messages(turns.database, turns.clock, "cheap", exported)
    assert imported.added == 6
    for given, replies in ({"hours": 1}, 2), ({"days": 2}, 3):
        found = _used(turns, "user", **given)
        assert sum(used.replies for (user, _), used in found.items() if user == "dora") == replies


def test_an_agent_that_answered_a_call_is_not_counted_twice(harness: Harness) -> None:
    """The call's result carries the usage of the other agent's turn, which counts by itself."""
    searcher = Agent("searcher", "You search.", model=CHEAP)
    harness.agents = Agents([Agent("boss", "You help.", [agent_tool(searcher, name="ask")], model=CHEAP), searcher])
    harness.script(
        ModelReply("", (ToolCall("c", "ask", '{"task": "look"}'),), Usage(100, 1), "m"),
        ModelReply("found", (), Usage(200, 2), "m"),
        ModelReply("done", (), Usage(300, 3), "m"),
    )
    sent = harness.send(agent="boss")
    harness.run(sent.session_id)
    while harness.turn(sent.turn_id)["status"] != "done":
        harness.run(harness.waker.sessions.pop())
    found = _used(harness, "agent")
    assert {key[0]: used.input_tokens for key, used in found.items()} == {"boss": 400, "searcher": 200}
    whole = cost_of(harness.database, sent.turn_id, harness.settings, harness.agents)
    assert sum(used.cost for used in found.values()) == whole


def test_unreported_usage_has_no_price(harness: Harness) -> None:
    """A server that reports no usage does not make its replies free."""
    harness.agents = Agents([Agent("assistant", "You help.", model=CHEAP)])
    harness.script(ModelReply("yes", (), None, "m"))
    harness.ask()
    [used] = _used(harness, "user").values()
    assert (used.replies, used.unpriced, used.cost) == (1, 1, Decimal())


def test_it_reads_the_messages_of_each_turn_once(harness: Harness) -> None:
    """Not the later messages of a long session again for each turn."""
    count = 400
    session_id = harness.send().session_id
    harness.sql(
        "INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, first_seq,"
        " accepted_at, settled_at)"
        " SELECT ('f' || substr(gen_random_uuid()::text, 2))::uuid, %(id)s, n, 'ana', 'assistant', 'http', 5, 'done',"
        " 2 * n - 3, now(), now()"
        " FROM generate_series(2, %(count)s) AS n RETURNING 1",
        id=session_id,
        count=count,
    )
    harness.sql(
        "INSERT INTO messages (session_id, seq, turn_id, role, content, channel, token_count, model, created_at)"
        " SELECT session_id, first_seq + n, turn_id, CASE n WHEN 0 THEN 'user' ELSE 'assistant' END, 'a', 'http', 1,"
        " CASE n WHEN 1 THEN 'm' END, now() FROM turns, generate_series(0, 1) AS n WHERE first_seq IS NOT NULL"
        " RETURNING 1"
    )
    harness.sql(
        "UPDATE sessions SET turn_count = %(count)s - 1, last_turn_seq = %(count)s, message_count = 2 * %(count)s - 2"
        " RETURNING 1",
        count=count,
    )
    given = {"by": "agent", "since": datetime(2020, 1, 1, tzinfo=UTC), "first_id": UUID(int=0), "zone": "UTC"}
    for nodes in plans(harness.database, USAGE, {**given, "until_id": UUID(int=2**128 - 1)}):
        assert rows_read(nodes) <= 5 * count, outline(nodes)
    [part] = harness.database.run(USAGE_PART, {"first_id": UUID(int=0), "most": 20})
    for nodes in plans(harness.database, USAGE, {**given, "until_id": part.turn_id}):
        assert rows_read(nodes) <= 5 * 20, outline(nodes)
    for nodes in plans(harness.database, USAGE_PART, {"first_id": UUID(int=0), "most": 20}):
        assert rows_read(nodes) <= 21, outline(nodes)
    assert _used(harness, "agent", days=9_999)["assistant", None].replies == count - 1
