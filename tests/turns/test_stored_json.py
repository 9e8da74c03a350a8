"""This release can read JSON that a newer release stored, and keeps unknown members when it rewrites the JSON.

`READERS` has a check for each place that reads stored JSON. `COLUMNS` maps each JSON column to the name of its check,
or to the reason why the column needs no check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import JSON

from perdure import ToolContext, celery_tool, tool
from perdure.access.tenants import UserKey
from perdure.casebank.reflection import reflect
from perdure.database.engine import as_json
from perdure.database.fencing import Fence
from perdure.database.tables import metadata
from perdure.memory.redis.flush import Flushed, flush
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import StreamEvent, StreamEventKind
from perdure.models.protocol import Role
from perdure.settings import MemorySettings
from perdure.snapshots.codec import dump, parse
from perdure.snapshots.exchange import read, restore
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.tools.awaited.port import TaskEnded
from perdure.turns.additions import Additions
from perdure.turns.calls.awaited import finish
from perdure.turns.inbox.route_unrouted import route_user
from perdure.turns.lease.claim import Ran
from perdure.turns.outbox import Delivered, deliver
from perdure.turns.prompts import read_prompts
from perdure.turns.run.verdict import Verdict
from perdure.turns.transcript import Transcript
from tests.casebank.bank import put
from tests.memory.conftest import line
from tests.turns.broker import Broker
from tests.turns.harness import Harness
from tests.turns.scripted import UNREPORTED, calls, says

PART = {"type": "image", "file_id": str(UUID(int=1)), "media_type": "image/png", "size": 1, "at": 0, "tokens": 40}
OPAQUE = {"endpoint": "openai", "family": "gpt-5", "parts": {"reasoning_content": "Hm."}}
NEWER = {"of_a_newer_release": {"deep": [1]}}
CALL = {"id": "call_0", "name": "count", "arguments": "{}"}


@tool(effect="pure")
def count(context: ToolContext) -> str:
    """Set the variable `n` to 1."""
    context.working_variables["n"] = 1
    return "counted"


def _talked(harness: Harness) -> UUID:
    """Run a turn with one tool call and a reply; returns the session's id."""
    harness.equip(count)
    harness.script(calls(("count", {})), says("done"))
    session_id: str = harness.ask("count")["session_id"]
    return UUID(session_id)


def _extend(harness: Harness, table: str, column: str) -> None:
    """Add the members of `NEWER` to each object in a JSON column, which stores objects or arrays of objects."""
    for row in harness.sql(f"SELECT ctid::text AS ctid, {column} AS value FROM {table} WHERE {column} IS NOT NULL"):  # noqa: S608 (constants)
        value = [each | NEWER for each in row.value] if isinstance(row.value, list) else row.value | NEWER
        changed = f"UPDATE {table} SET {column} = %(value)s WHERE ctid = %(ctid)s::tid"  # noqa: S608 (constants)
        harness.sql(changed, value=as_json(value), ctid=row.ctid)


def the_transcript(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """The transcript keeps unknown members of stored JSON, but sends none of them to the model."""
    _talked(harness)
    harness.sql("UPDATE messages SET opaque = %(opaque)s WHERE role = 'assistant'", opaque=json.dumps(OPAQUE))
    _extend(harness, "messages", "tool_calls")
    _extend(harness, "messages", "usage")
    _extend(harness, "messages", "opaque")
    harness.sql("UPDATE messages SET parts = %(parts)s WHERE role = 'user'", parts=json.dumps([PART | NEWER]))
    newest = harness.sql("SELECT turn_id FROM turns ORDER BY seq DESC LIMIT 1")[0]
    transcript = Transcript.load(harness.database, harness.tenure_of(newest.turn_id).at_hand)
    asking = transcript.present[1].to_dict(1)
    assert asking["tool_calls"] == [CALL | NEWER]
    assert asking["usage"].items() >= NEWER.items()
    assert asking["opaque"] == OPAQUE | NEWER
    assert transcript.present[0].to_dict(1)["parts"] == [PART | NEWER]
    assert harness.ask("and now?")["status"] == "done"
    assert not any("of_a_newer_release" in str(request) for request in harness.model.requests)


def a_held_ending(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """A turn is settled with the ending in `turns.unsaved`. Tool calls and usage of the ending keep unknown members."""
    sent = harness.send("hello")
    asking = {"position": 2, "role": "assistant", "content": "", "token_count": 1, "tool_calls": [CALL | NEWER]}
    messages = [
        {"position": 1, "role": "user", "content": "hello", "token_count": 1},
        asking | {"usage": {"input_tokens": 1, "output_tokens": 1} | NEWER} | NEWER,
        {"position": 3, "role": "tool", "content": "counted", "token_count": 1, "tool_call_id": "call_0"},
        {"position": 4, "role": "assistant", "content": "held", "token_count": 1},
    ]
    held = Verdict("done", messages, True, 2, {"input_tokens": 1} | NEWER, None, None, None, extra=NEWER)
    assert Verdict.from_json(held.to_json()) == held
    assert json.loads(held.to_json()).items() >= NEWER.items()
    harness.sql("UPDATE turns SET unsaved = %(held)s", held=held.to_json())
    harness.redis_memory = redis_memory
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "held"
    kept = harness.sql("SELECT tool_calls, usage FROM messages WHERE seq = 2")[0]
    assert kept.tool_calls == [CALL | NEWER]
    assert kept.usage.items() >= NEWER.items()
    remembered = redis_memory.working.read(sent.session_id)
    assert json.loads(remembered[0].model_dump_json())["messages"][1]["tool_calls"] == [CALL | NEWER]


def the_changes_of_a_call(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """`tool_effects.variables` stores each change as an array. This array may have an additional element."""
    harness.equip(count, count_again)
    harness.script(calls(("count", {}), ("count_again", {})))
    sent = harness.send()
    with harness.crashing("before", "turns.step", 2):
        harness.run(sent.session_id)
    harness.sql("""UPDATE tool_effects SET variables = '[[1, "n", 1, {"newer": true}]]' WHERE variables IS NOT NULL""")
    harness.move(61)
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.sql("SELECT variables FROM snapshots")[0].variables == {"n": 1}


@tool(effect="pure")
def count_again() -> str:
    """Return `again`."""
    return "again"


def a_snapshot(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """A snapshot that is parsed and saved keeps unknown members at every level."""
    document = {
        "schema_version": 1, "agent_id": str(UUID(int=7)), "tick_index": 3, "timestamp": 5,
        "status": "WAITING_FOR_EVENT",
        "memory": {
            "short_term_history": [
                {"role": "assistant", "content": "", "tool_calls": [CALL | NEWER]} | NEWER,
                {"role": "tool", "content": "counted", "tool_call_id": "call_0"},
            ],
            "working_variables": {"n": 1},
        } | NEWER,
        "event_queue_backup": [{"source": "http", "type": "message", "payload": {"text": "hi"}} | NEWER],
    } | NEWER  # fmt: skip
    snapshot = parse(json.dumps(document))
    assert json.loads(dump(snapshot)) == document
    store = FileSnapshots(path)
    store.save(snapshot, 1)
    stored = store.load(snapshot.agent_id)
    assert stored is not None
    assert json.loads(dump(stored.snapshot)) == document


def an_imported_snapshot(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """An export keeps unknown members of tool calls. A file store keeps unknown members of an imported snapshot."""
    session_id = _talked(harness)
    document = json.loads(dump(read(harness.database, session_id)))
    document["event_queue_backup"] = [{"source": "http", "type": "message", "payload": 1} | NEWER]
    restore(harness.database, PostgresSnapshots(harness.database), parse(json.dumps(document | NEWER)), 30)
    _extend(harness, "messages", "tool_calls")
    history = json.loads(dump(read(harness.database, session_id)))["memory"]["short_term_history"]
    assert history[1]["tool_calls"] == [CALL | NEWER]
    restore(harness.database, FileSnapshots(path), parse(json.dumps(document | NEWER)), 30)
    stored = FileSnapshots(path).load(session_id)
    assert stored is not None
    assert json.loads(dump(stored.snapshot)).items() >= NEWER.items()


def a_remembered_turn(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """Flushing a turn from Redis to PostgreSQL keeps unknown members of the turn's tool calls and usage."""
    session_id = harness.send("hello").session_id
    harness.run(session_id)
    spent = {"input_tokens": 1, "output_tokens": 2} | NEWER
    messages = [
        line(Role.USER, "hello again", message_id="m2"),
        line(Role.ASSISTANT, tool_calls=[CALL | NEWER], usage=spent),
        line(Role.TOOL, "counted", tool_call_id="call_0"),
        line(Role.ASSISTANT, "done"),
    ]
    entry = {
        "turn_id": str(UUID(int=9)), "seq": 2, "token": 1, "agent": "assistant", "channel": "http", "status": "done",
        "settled_at": harness.clock.now().isoformat(),
        "messages": [json.loads(each.model_dump_json(exclude_none=True)) | NEWER for each in messages],
    } | NEWER  # fmt: skip
    redis_memory.cache.require(lambda client: client.rpush(f"perdure:working:{session_id}", json.dumps(entry)))
    row = harness.session(session_id)
    fence = Fence(row.token, row.nonce)
    assert flush(harness.database, redis_memory.working, session_id, fence) == Flushed(1)
    kept = harness.sql("SELECT tool_calls, usage FROM messages WHERE tool_calls IS NOT NULL")[0]
    assert (kept.tool_calls, kept.usage) == ([CALL | NEWER], UNREPORTED | spent)


def an_event(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """An event in the Redis stream may have an unknown field."""
    fields = {"kind": "typing", "channel": "http", "at": 1_000, "newer": "field"}
    redis_memory.cache.require(lambda client: client.xadd("perdure:stream:ana", fields))
    found = redis_memory.stream.recent(UserKey("ana"), 5)
    assert [(each.kind, each.channel) for each in found] == [(StreamEventKind.TYPING, "http")]
    assert isinstance(found[0], StreamEvent)


def a_delivery(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """A delivery succeeds although its target has an unknown member."""
    harness.ask("hello", reply_to={"url": "https://a.example"})
    _extend(harness, "deliveries", "target")
    _extend(harness, "turns", "reply_to")
    carried: list[Any] = []

    class Carrier:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            carried.append(target["url"])

    delivery_id = harness.sql("SELECT delivery_id FROM deliveries")[0].delivery_id
    assert deliver(harness.database, {"url": Carrier()}, delivery_id) == Delivered()
    assert carried == ["https://a.example"]


def the_turn_itself(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """A turn's usage, metadata and feedback may have unknown members."""
    turn = harness.ask("hello", metadata={"language": "en"})
    harness.sql("UPDATE turns SET feedback = '{\"score\": 1}'")
    for column in ("usage", "metadata", "feedback"):
        _extend(harness, "turns", column)
    assert harness.turn(UUID(turn["turn_id"]))["usage"].items() >= NEWER.items()
    assert harness.ask("again")["status"] == "done"


def what_a_client_adds(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """Unknown members of what a client adds to an agent are kept when a later request replaces the known ones."""
    stored = {"tools": [{"name": "look", "description": "Look.", "parameters": {}}], "names": ["look"]} | NEWER
    before = Additions.from_dict(stored)
    assert (before.to_dict() or {}).items() >= NEWER.items()
    after = Additions(instructions="Be brief.").after(before).to_dict() or {}
    assert after == {"instructions": "Be brief.", "names": ["look"]} | NEWER


def the_review_of_a_case(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """When `reflect` rewrites a case's review, the review keeps its unknown members."""
    put(harness.database, "case 1")
    harness.sql("UPDATE cases SET review = %(review)s", review=as_json({"errors": [], "suggestion": "shorter"} | NEWER))
    harness.sql(
        "INSERT INTO case_executions (case_id, turn_id, succeeded, error, executed_at) "
        "VALUES ('case 1', gen_random_uuid(), false, 'TIMEOUT', perdure_now())"
    )
    assert reflect(harness.database).flagged == ["case 1"]
    review = harness.sql("SELECT review FROM cases")[0].review
    assert review.items() >= ({"suggestion": "shorter"} | NEWER).items()
    assert review["errors"] == [{"error": "TIMEOUT", "count": 1}]


def an_unrouted_message(harness: Harness, redis_memory: RedisMemory, tmp_path: Path) -> None:
    """When a message is moved from `unrouted` to the inbox, unknown members of the message are dropped."""
    harness.sql(
        "INSERT INTO unrouted (turn_id, user_id, message) VALUES (gen_random_uuid(), 'ana', %(message)s)",
        message=as_json({"text": "hello", "mood": "merry"}),
    )
    route_user(harness.runtime, UserKey("ana"))
    assert [row.text for row in harness.sql("SELECT text FROM inbox")] == ["hello"]


def the_parts_of_a_call(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """When one of a call's Celery tasks ends, the call's `parts` keep elements that a newer release added."""
    broker = Broker()
    harness.calls = broker
    harness.equip(celery_tool("shop.export", name="many", max_parallel=2))
    harness.script(calls(("many", {"calls": [{}, {}]})))
    harness.ask()
    harness.sql("""UPDATE tool_effects SET parts = '[["sent", null, {"newer": 1}], ["sent", null, {"newer": 2}]]'""")
    finish(harness.runtime, broker.sent[0].effect_id, TaskEnded(failed=False, value="made"), 0)
    [row] = harness.sql("SELECT parts FROM tool_effects")
    assert row.parts == [["done", "made", {"newer": 1}], ["sent", None, {"newer": 2}]]


def the_prompt_of_a_reply(harness: Harness, redis_memory: RedisMemory, path: Path) -> None:
    """Members and parts that this release does not know are left out of what is shown."""
    _talked(harness)
    shown = [read_prompts(harness.database, harness.settings, harness.agents, _newest(harness))]
    _extend(harness, "messages", "prompt")
    harness.sql("""UPDATE messages SET prompt = jsonb_set(prompt, '{parts}', '[{"name": "newer", "tokens": 1}]')
                   WHERE prompt ? 'parts'""")
    shown.append(read_prompts(harness.database, harness.settings, harness.agents, _newest(harness)))
    assert len(shown[0]["steps"]) == 2
    assert shown[0] == shown[1]


def _newest(harness: Harness) -> UUID:
    turn_id: UUID = harness.sql("SELECT turn_id FROM turns ORDER BY accepted_at DESC LIMIT 1")[0].turn_id
    return turn_id


READERS: dict[str, Callable[[Harness, RedisMemory, Path], None]] = {
    reader.__name__: reader
    for reader in (
        the_transcript, a_held_ending, the_changes_of_a_call, a_snapshot, an_imported_snapshot, a_remembered_turn,
        an_event, a_delivery, the_turn_itself, what_a_client_adds, the_review_of_a_case, an_unrouted_message,
        the_parts_of_a_call, the_prompt_of_a_reply,
    )
}  # fmt: skip

COLUMNS = {
    "messages.tool_calls": "the_transcript", "messages.usage": "the_transcript", "messages.opaque": "the_transcript",
    "messages.parts": "the_transcript", "messages.prompt": "the_prompt_of_a_reply", "inbox.parts": "is copied as it is",
    "turns.unsaved": "a_held_ending",
    "tool_effects.variables": "the_changes_of_a_call", "tool_effects.parts": "the_parts_of_a_call",
    "tool_effects.payload": "is read by pydantic-ai: see tests/adapters", "turns.data": "is shown as it is",
    "snapshots.events": "an_imported_snapshot",
    "deliveries.target": "a_delivery", "turns.reply_to": "a_delivery", "turns.usage": "the_turn_itself",
    "turns.tools_left_out": "is shown as it is", "turns.takeovers": "is shown as it is",
    "turns.additions": "what_a_client_adds",
    "turns.metadata": "the_turn_itself", "turns.feedback": "the_turn_itself", "cases.review": "the_review_of_a_case",
    "snapshots.variables": "any JSON object is valid",
    "sessions.consolidation": "is shown to operators as it is", "case_history.details": "is shown as it is",
    "case_archive.review": "is copied as it is", "unrouted.message": "an_unrouted_message",
    "reminders.reply_to": "is copied as it is", "metered_requests.usage": "is exported as it is",
    "sweeps.paces": "a round that cannot parse it begins anew",
}  # fmt: skip


@pytest.fixture
def redis_memory(harness: Harness, redis_url: str) -> Iterator[RedisMemory]:
    """Memory layers in an empty Redis database."""
    made = RedisMemory.at(redis_url, MemorySettings(), harness.clock)
    yield made
    made.close()


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_member_of_a_newer_release_is_ignored_and_kept(
    harness: Harness, redis_memory: RedisMemory, tmp_path: Path, reader: Callable[[Harness, RedisMemory, Path], None]
) -> None:
    """During an upgrade, workers of the older release read JSON that the newer release stored."""
    reader(harness, redis_memory, tmp_path)


def test_every_column_of_json_has_its_reader() -> None:
    """A new JSON column without an entry in `COLUMNS` fails this test."""
    columns = {
        f"{table.name}.{column.name}"
        for table in metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, JSON)
    }
    assert columns == set(COLUMNS)
    assert {name for name in COLUMNS.values() if " " not in name} <= set(READERS)
