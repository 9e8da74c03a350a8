"""Erasing a user deletes all of that user's data and no other user's."""

from __future__ import annotations

import base64
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from perdure import Agent, ToolContext, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.database import engine, paging
from perdure.database.engine import Database
from perdure.database.tables import metadata
from perdure.errors import NotFound, Unavailable
from perdure.memory.consolidation.consolidate import ConsolidationCounts
from perdure.memory.embedding import embed_missing
from perdure.memory.redis.event_streams import stream_key, streams_key
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import StreamEvent, StreamEventKind
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Vector
from perdure.models.protocol import ModelCall
from perdure.settings import REDIS_PREFIX
from perdure.snapshots.redis import RedisSnapshots
from perdure.turns.lease.keeper import Keeper
from perdure.turns.run.loop import Runner
from perdure.users.erase import Eraser, ErasureResult
from perdure.users.export import export_user
from perdure.users.statistics import forget_samples
from perdure.users.tables import ERASURE_TABLES, SHARED_TABLES, TABLES_WITHOUT_USER_DATA, USER_TABLES
from tests.memory.archive import Archive, Echo
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

DAY_S = 86_400.0

MARKER = UserKey("zyxomma")
"""A word that occurs in every text of the erased user and in the user's id."""

OTHER = "quokka"

_KNOWN = """
    WITH made AS (
        INSERT INTO embedders (name, dimensions, created_at) VALUES (md5(%(word)s), 3, now()) RETURNING embedder_id
    ), source AS (
        SELECT session_id, seq FROM message_words WHERE user_id = %(user)s LIMIT 1
    ), memory AS (
        INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                              valid_from)
        VALUES (gen_random_uuid(), %(user)s, 'fact', 'is called ' || %(word)s, 0.5, 0.5, '{cli}', 'tool', now(), now())
        RETURNING memory_id
    ), entity AS (
        INSERT INTO entities (entity_id, user_id, name, key, created_at)
        SELECT gen_random_uuid(), %(user)s, name || %(word)s, name || %(word)s, now()
        FROM unnest('{one,other}'::text[]) AS name
        RETURNING entity_id
    ), vector AS (
        INSERT INTO memory_vectors SELECT memory_id, embedder_id, %(user)s, '[1,0,0]' FROM memory, made
    ), said AS (
        INSERT INTO message_vectors SELECT session_id, seq, embedder_id, %(user)s, '[1,0,0]' FROM source, made
    ), drawn AS (
        INSERT INTO memory_sources SELECT memory_id, session_id, seq FROM memory, source
    ), forgotten AS (
        INSERT INTO forgotten_messages SELECT session_id, seq, now() FROM source
    ), mentioned AS (
        INSERT INTO entity_mentions SELECT entity_id, memory_id FROM entity, memory
    ), related AS (
        INSERT INTO relations
        SELECT min(entity_id::text)::uuid, %(word)s, max(entity_id::text)::uuid, memory_id, %(user)s, now()
        FROM entity, memory GROUP BY memory_id
    ), accessed AS (
        INSERT INTO memory_accesses SELECT memory_id, now(), gen_random_uuid(), %(user)s FROM memory
    ), learnt AS (
        INSERT INTO cases (case_id, query, response_text, created_at, user_id, query_vector, embedder)
        VALUES ('of ' || %(word)s, 'who am I', 'you are ' || %(word)s, now(), %(user)s, '[1,0,0]', 'three')
        RETURNING *
    ), used AS (
        INSERT INTO case_executions (case_id, turn_id, succeeded, error, executed_at)
        SELECT case_id, gen_random_uuid(), false, 'no such ' || %(word)s, now() FROM learnt
    ), archived AS (
        INSERT INTO case_archive (case_id, query, response_text, query_vector, embedder, created_at, user_id,
                                  archived_at, archived_reason)
        SELECT case_id, query, response_text, query_vector, embedder, created_at, user_id, now(), 'asleep' FROM learnt
    ), happened AS (
        INSERT INTO case_history (case_id, event, reason, at) SELECT case_id, 'added', 'learnt', now() FROM learnt
    ), run AS (
        INSERT INTO case_runs (run_id, phase, started_at, finished_at)
        VALUES (gen_random_uuid(), 'done', now(), now()) RETURNING run_id
    ), planned AS (
        INSERT INTO case_run_items (run_id, position, action, case_id, rule, reason, keeper_id, usage_count)
        SELECT run_id, 1, 'spare', 'somebody else''s', 'guard', 'they differ in a name: ' || %(word)s, case_id, 0
        FROM run, learnt
    ), audited AS (
        INSERT INTO audit (audit_id, via, actor, action, user_id, note, began_at)
        VALUES (gen_random_uuid(), 'api', 'tests', 'turns.approve', %(user)s, 'as ' || %(word)s || ' wished', now())
    )
    INSERT INTO hot_memories SELECT %(user)s, 1, memory_id, 1, now() FROM memory
"""


def _stream(session_id: UUID, turn_id: UUID, word: str, client: Any) -> None:
    """Write an event that contains the word to the turn's stream, as a worker does."""
    client.sadd(streams_key(REDIS_PREFIX, session_id), str(turn_id))
    client.xadd(stream_key(REDIS_PREFIX, turn_id), {"kind": "delta", "data": f"I know of {word}"})


@pytest.fixture
def everything(database: Database, client: Any) -> Callable[[str], dict[str, int]]:
    """A function that searches all tables and Redis for a word.

    It returns the number of matching rows for each table that has some, and `True` for each matching Redis key.
    """

    def count(word: str) -> dict[str, int]:
        found = {}
        with database.engine.connect() as connection:
            for name in metadata.tables:
                counting = text(f"SELECT count(*) FROM {name} AS t WHERE t::text LIKE '%' || :word || '%'")  # noqa: S608 (our own tables)
                found[name] = connection.execute(counting, {"word": word}).scalar_one()
        for key in client.scan_iter():
            kept = {"string": client.get, "hash": client.hgetall, "stream": client.xrange, "set": client.smembers}
            value = kept.get(client.type(key), lambda it: client.lrange(it, 0, -1))(key)
            found[key] = word in f"{key} {value}"
        return {name: number for name, number in found.items() if number}

    return count


def _live(harness: Harness, redis_memory: RedisMemory, word: str) -> None:
    """Make a user whose id contains the word.

    The user has a session whose end is requested, a live session, and rows in every table with users' data.
    """

    @tool(effect="idempotent")
    def note(what: str, context: ToolContext) -> str:
        """Note it."""
        context.working_variables["noted"] = what
        return f"noted {what}"

    harness.agents = Agents([Agent("assistant", "You help.", [note])])
    user, encoded = f"user {word}", base64.b64encode(f"file of {word}".encode()).decode()
    for number in range(2):
        harness.script(calls(("note", {"what": f"{word} thing"})), says(f"I know of {word}"))
        sent = harness.send(
            parts=[{"type": "text", "text": f"my name is {word}"}, {"type": "file", "data": encoded, "name": word}],
            user_id=user,
            reply_to={"url": f"https://a.example/{word}"},
            metadata={"of": word},
            message_id=f"{word} {number}",
            conversation=f"{word} {number}",
        )
        harness.run(sent.session_id)
        harness.sql(
            "UPDATE sessions SET summary = %(summary)s, end_requested_at = CASE WHEN %(n)s = 0 THEN now() END, "
            "routable = %(n)s <> 0 WHERE session_id = %(id)s",
            summary=f"They are {word}",
            id=sent.session_id,
            n=number,
        )
    harness.sql(
        "INSERT INTO identities VALUES ('telegram', %(external)s, %(user)s, now())", external=f"@{word}", user=user
    )
    harness.sql(
        "INSERT INTO conversations (user_id, conversation, title, created_at) VALUES (%(user)s, 'a', %(word)s, now())",
        user=user,
        word=word,
    )
    harness.sql(
        "INSERT INTO running_summaries (session_id, from_seq, to_seq, summary, extractive)"
        " SELECT session_id, 1, 1, %(word)s, false FROM sessions WHERE user_id = %(user)s LIMIT 1",
        word=word, user=user,
    )  # fmt: skip
    harness.sql("INSERT INTO pauses VALUES (gen_random_uuid(), NULL, %(user)s, %(word)s, now())", user=user, word=word)
    harness.sql("INSERT INTO day_spendings VALUES ('user', %(user)s, now()::date, 1)", user=user)
    harness.sql(
        "INSERT INTO turn_spendings SELECT turn_id, turn_id, now()::date, 0, 1, 1 FROM turns WHERE user_id = %(user)s",
        user=user,
    )
    harness.sql("INSERT INTO link_codes VALUES (%(user)s, %(user)s::bytea, now())", user=user)
    harness.sql("INSERT INTO link_attempts VALUES ('', 'telegram', %(external)s, 1, now())", external=f"@{word}")
    redis_memory.stream.append(
        UserKey(user), StreamEvent(StreamEventKind.TYPING, f"channel {word}", harness.clock.now())
    )
    harness.sql(
        "INSERT INTO chat_places VALUES (%(user)s, 'discord', %(word)s, '', %(word)s, '1', now())", user=user, word=word
    )
    harness.sql(
        "INSERT INTO answered_requests VALUES (%(user)s, %(word)s, %(turn_id)s, now())",
        user=user,
        word=word,
        turn_id=sent.turn_id,
    )
    harness.sql(
        "INSERT INTO metered_requests VALUES (%(turn_id)s, %(user)s, 'fork', now())", user=user, turn_id=sent.turn_id
    )
    harness.sql(
        "INSERT INTO reminders (schedule_id, user_id, text, cron, timezone, channel, created_at, next_due) "
        "VALUES (%(id)s, %(user)s, %(word)s, '0 7 1 1 *', 'UTC', 'http', now(), now() + interval '9 years')",
        id=uuid4(),
        user=user,
        word=word,
    )
    harness.sql(
        "INSERT INTO unrouted (turn_id, user_id, message, error_code, settled_at) "
        "VALUES (%(id)s, %(user)s, jsonb_build_object('text', %(word)s::text), 'CONFLICT', now())",
        id=uuid4(),
        user=user,
        word=word,
    )
    redis_memory.cache.require(partial(_stream, sent.session_id, sent.turn_id, word))
    harness.sql(_KNOWN, user=user, word=word)


@pytest.fixture
def lived(harness: Harness, redis_memory: RedisMemory, redis_url: str) -> Harness:
    """Two users with the same kinds of rows and with snapshots in Redis."""
    harness.redis_memory = redis_memory
    harness.snapshots = RedisSnapshots(redis_url)
    for word in (MARKER, OTHER):
        _live(harness, redis_memory, word)
    return harness


def _eraser(harness: Harness, redis_memory: RedisMemory | None) -> Eraser:
    lease_s, files = harness.settings.turn.lease_s, harness.runtime.files
    return Eraser(harness.database, harness.clock, harness.snapshots, redis_memory, lease_s, files)


def test_every_table_is_personal_or_not() -> None:
    """Each table must be in one of three lists: with users' data, without users' data, or with records of erasures."""
    named = [holding.table for holding in USER_TABLES]
    assert len(named) == len(set(named))
    assert {*named, *SHARED_TABLES, *TABLES_WITHOUT_USER_DATA, *ERASURE_TABLES} == set(metadata.tables)
    assert not TABLES_WITHOUT_USER_DATA & {*named}
    for table in metadata.tables.values():  # a referencing table is erased before the referenced one
        for key in table.foreign_keys:
            referred = key.column.table.name
            if {table.name, referred} <= {*named} and referred != table.name:
                assert named.index(table.name) < named.index(referred), (table.name, referred)


def test_a_user_is_erased_and_others_are_not(
    lived: Harness, redis_memory: RedisMemory, everything: Callable[[str], dict[str, int]]
) -> None:
    """After an erasure, no table and no Redis key contains the erased user's word. The other user's data remains."""
    before, others = everything(MARKER), everything(OTHER)
    assert {"users", "identities", "sessions", "turns", "inbox", "messages", "tool_effects"} <= before.keys()
    assert {"snapshots", "deliveries", "memories", "entities", "relations", "message_words"} <= before.keys()
    assert len([key for key in before if key.startswith("perdure:")]) >= 4
    erased = _eraser(lived, redis_memory).erase(UserKey(f"user {MARKER}"))
    assert erased.everywhere
    assert [name for name, gone in erased.rows.items() if not gone] == []
    assert everything(MARKER).keys() == {"erasures"}
    lived.move(lived.settings.turn.lease_s + 10)
    lived.runtime.eraser.finish_due()
    assert everything(MARKER) == {}
    assert everything(OTHER) == others
    assert _eraser(lived, redis_memory).erase(UserKey(f"user {MARKER}")) == ErasureResult(
        dict.fromkeys(erased.rows, 0), everywhere=True
    )


@pytest.mark.long
@pytest.mark.parametrize("alone", [False, True])
def test_the_planners_samples_are_forgotten(lived: Harness, redis_memory: RedisMemory, alone: bool) -> None:
    """An erasure removes the user's texts from `pg_stats`, which could otherwise keep them as samples for ever."""
    if alone:
        _eraser(lived, redis_memory).erase(UserKey(f"user {OTHER}"))
    sampled = "SELECT tablename FROM pg_stats AS s WHERE s::text LIKE %(like)s"
    _analyze(lived)
    assert {"messages", "inbox", "memories"} <= {row.tablename for row in lived.sql(sampled, like=f"%{MARKER}%")}
    _eraser(lived, redis_memory).erase(UserKey(f"user {MARKER}"))
    lived.move(lived.settings.turn.lease_s + 10)
    assert _eraser(lived, redis_memory).finish_due() == (2 if alone else 1)
    assert forget_samples(lived.database) == len(USER_TABLES) + len(SHARED_TABLES)
    assert lived.sql(sampled, like=f"%{MARKER}%") == []
    assert lived.sql("SELECT * FROM stale_statistics") == []


def _analyze(harness: Harness) -> None:
    with harness.database.engine.connect() as connection:
        connection.exec_driver_sql("ANALYZE")


class _File:
    """An append-only file whose rewrite the test controls."""

    def __init__(self) -> None:
        self.begun = 0
        self.done = False
        self.unreachable = False

    def rewrite(self) -> None:
        self.begun += 1
        if self.unreachable:
            raise Unavailable("Redis is unavailable.")

    def rewritten(self, erasures: Collection[UUID]) -> Collection[UUID]:
        if self.unreachable:
            raise Unavailable("Redis is unavailable.")
        return erasures if self.done else ()


def test_an_erasure_is_complete_once_redis_file_is_rewritten(lived: Harness, redis_memory: RedisMemory) -> None:
    """The erasure starts a rewrite of Redis's append-only file. After the rewrite the sweeper completes the erasure."""
    file = _File()
    eraser = replace(_eraser(lived, redis_memory), file=file)
    assert eraser.erase(UserKey(f"user {MARKER}")).everywhere
    assert file.begun == 1
    for file.unreachable, file.done, over in ((True, True, 0), (False, False, 0), (False, True, 1)):
        lived.move(lived.settings.turn.lease_s + 10)
        assert eraser.finish_due() == over
    file.unreachable = True
    assert not eraser.erase(UserKey(f"user {OTHER}")).everywhere


def test_writes_of_a_paused_process_are_erased_later(
    lived: Harness, redis_memory: RedisMemory, everything: Callable[[str], dict[str, int]]
) -> None:
    """The second pass deletes data that a paused process wrote to Redis after the erasure.

    It keeps an event that a new session of the user wrote after the erasure.
    """
    user = f"user {MARKER}"
    rows = lived.sql("SELECT session_id FROM sessions WHERE user_id = %(user)s", user=user)
    remembered = [redis_memory.working.read(row.session_id) for row in rows]
    late = lived.clock.now()
    _eraser(lived, redis_memory).erase(UserKey(user))
    for row, turns in zip(rows, remembered, strict=True):
        redis_memory.working.remember_turn(row.session_id, turns[0])
    redis_memory.stream.append(UserKey(user), StreamEvent(StreamEventKind.TYPING, MARKER, late))
    lived.move(1)
    redis_memory.stream.append(UserKey(user), StreamEvent(StreamEventKind.PRESENCE, "since", lived.clock.now()))
    assert _eraser(lived, redis_memory).finish_due() == 0  # not due: a paused process may still hold its lease
    lived.move(lived.settings.turn.lease_s)
    assert _eraser(lived, redis_memory).finish_due() == 1
    assert everything(MARKER).keys() == {f"perdure:stream:{user}"}  # from the user's new session
    assert [each.channel for each in redis_memory.stream.recent(UserKey(user), 9)] == ["since"]


def test_a_second_pass_postponed_by_a_clock_that_was_ahead_is_due(lived: Harness, redis_memory: RedisMemory) -> None:
    """A second pass that was scheduled while the clock was ahead is due once the clock is corrected."""
    lived.move(DAY_S)
    _eraser(lived, redis_memory).erase(UserKey(f"user {MARKER}"))
    lived.move(-DAY_S)
    assert _eraser(lived, redis_memory).finish_due() == 1


def test_without_redis_rows_are_deleted_and_the_rest_follows(
    lived: Harness, redis_memory: RedisMemory, unreachable: RedisMemory, everything: Callable[[str], dict[str, int]]
) -> None:
    """Without Redis, an erasure deletes the rows and is incomplete. A second pass with Redis completes the erasure."""
    assert not _eraser(lived, unreachable).erase(UserKey(f"user {MARKER}")).everywhere
    lived.move(lived.settings.turn.lease_s + 10)
    assert _eraser(lived, unreachable).finish_due() == 0
    assert _eraser(lived, None).finish_due() == 0
    lived.move(lived.settings.turn.lease_s + 10)
    assert _eraser(lived, redis_memory).finish_due() == 1
    assert everything(MARKER) == {}


def test_a_store_that_raises_holds_up_nothing_else(
    lived: Harness, redis_memory: RedisMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a third party's snapshot store raises for one user, other erasures end, and the sweeper's other duties run."""
    sessions = lived.sql("SELECT session_id FROM sessions WHERE user_id = %(user)s", user=f"user {MARKER}")
    broken, delete = {row.session_id for row in sessions}, RedisSnapshots.delete

    def raising(self: RedisSnapshots, session_id: UUID) -> None:
        if session_id in broken:
            raise OSError("a bug of the store")
        delete(self, session_id)

    monkeypatch.setattr(RedisSnapshots, "delete", raising)
    runtime = lived.runtime
    assert not runtime.eraser.erase(UserKey(f"user {MARKER}")).everywhere
    assert runtime.eraser.erase(UserKey(f"user {OTHER}")).everywhere
    lived.move(lived.settings.turn.lease_s + 10)
    assert runtime.eraser.finish_due() == 1
    assert [row.user_id for row in lived.sql("SELECT user_id FROM erasures")] == [f"user {MARKER}"]


def test_a_turn_that_runs_during_the_erasure_writes_nothing(
    harness: Harness, redis_memory: RedisMemory, everything: Callable[[str], dict[str, int]]
) -> None:
    """If an erasure runs during a turn's model call, the turn writes nothing afterwards."""
    harness.redis_memory = redis_memory
    sent = harness.send(f"I am {MARKER}", user_id=MARKER)

    def answered(*_given: Any) -> Any:
        _eraser(harness, redis_memory).erase(MARKER)
        return says(f"hello {MARKER}")

    harness.script(answered)
    Runner(harness.runtime, "harness").run(sent.session_id)
    assert everything(MARKER).keys() == {"erasures"}


def test_an_erasure_takes_nothing_from_another_users_turn(harness: Harness, redis_memory: RedisMemory) -> None:
    """A turn that runs meanwhile goes on, and is not run twice."""
    harness.redis_memory = redis_memory
    harness.script(says("hello"))
    harness.ask(user_id=MARKER)

    def answered(*_given: Any) -> Any:
        _eraser(harness, redis_memory).erase(MARKER)
        return says("hello")

    harness.script(answered)
    turn = harness.ask()
    assert (turn["status"], turn["attempts"]) == ("done", 1)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", ["consolidation", "erasure"])
def test_erased_while_consolidated_at_every_statement(
    harness: Harness,
    redis_memory: RedisMemory,
    everything: Callable[[str], dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    first: str,
) -> None:
    """The erasure of a user may start at any statement of a consolidation, and vice versa.

    Neither operation fails, and no data of the user remains that a second erasure would find.
    """
    harness.check = lambda: None  # type: ignore[method-assign]  # the check would fail: no turn ran
    harness.redis_memory = redis_memory
    archive = Archive(harness, Keeper(harness.database, harness.clock, harness.settings.turn))
    eraser = _eraser(harness, redis_memory)
    for number in itertools.count():
        session_id = archive.ended(f"I live in {MARKER}.", f"My dog is called {MARKER}.", user_id=MARKER)
        consolidate = partial(archive.consolidator(Echo()).consolidate, session_id)
        erase = partial(eraser.erase, MARKER)
        begun, other = (consolidate, erase) if first == "consolidation" else (erase, consolidate)
        intruder = _Intruder(harness.database, other)
        with monkeypatch.context() as patched:
            patched.setattr("perdure.database.engine._rows", intruder.before(number))
            begun()
        if not intruder.thread.ident:
            break
        intruder.finish()
        assert everything(MARKER).keys() == {"erasures"}, number
        assert archive.consolidator(Echo()).batch() == ConsolidationCounts()
        harness.move(harness.settings.turn.lease_s + 10)
        harness.runtime.eraser.finish_due()
        assert everything(MARKER) == {}, number
    assert number >= 10


_UNEMBEDDED = """
    WITH memory AS (
        INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                              valid_from)
        VALUES (gen_random_uuid(), %(user)s, 'fact', 'lives', 0.5, 0.5, '{cli}', 'tool', now(), now())
        RETURNING memory_id
    )
    INSERT INTO unembedded (kind, id, seq, user_id, due_at) SELECT 'memory', memory_id, 0, %(user)s, now() FROM memory
"""


class _Slow(HashEmbedder):
    """An embedder that waits for the test."""

    def __init__(self) -> None:
        super().__init__(64)
        self.arrived, self.released = threading.Event(), threading.Event()

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """The vectors, when the test permits."""
        self.arrived.set()
        assert self.released.wait(60)
        return super().embed(texts, call)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_vectors_are_stored_at_every_statement_of_an_erasure(
    harness: Harness, redis_memory: RedisMemory, everything: Callable[[str], dict[str, int]], monkeypatch: Any
) -> None:
    """Neither fails, and nothing of the user remains."""
    harness.check = lambda: None  # type: ignore[method-assign]  # the check would fail: no turn ran
    archive = Archive(harness, Keeper(harness.database, harness.clock, harness.settings.turn))
    eraser = _eraser(harness, redis_memory)
    for number in itertools.count():
        archive.ended(f"I live in {MARKER}.", f"My dog is called {MARKER}.", user_id=MARKER)
        harness.sql(_UNEMBEDDED, user=MARKER)
        embedder = _Slow()
        with ThreadPoolExecutor(1) as executor, monkeypatch.context() as patched:
            embedded = executor.submit(embed_missing, harness.database, embedder)
            assert embedder.arrived.wait(60)

            def store(slow: _Slow = embedder, result: Future[Any] = embedded) -> None:
                slow.released.set()
                result.result(60)

            intruder = _Intruder(harness.database, store)
            patched.setattr("perdure.database.engine._rows", intruder.before(number))
            eraser.erase(MARKER)
            embedder.released.set()
        if not intruder.thread.ident:
            break
        intruder.finish()
        assert everything(MARKER).keys() <= {"erasures", "embedders"}, number
        harness.sql("DELETE FROM erasures")
    assert number >= len(USER_TABLES)


class _Intruder:
    """Runs `work` in another thread, which starts just before one SQL statement of the calling thread."""

    def __init__(self, database: Database, work: Callable[[], object]) -> None:
        self._database = database
        self._work = work
        self._raised: list[Exception] = []
        self.thread = threading.Thread(target=self._go, daemon=True)

    def before(self, number: int) -> Callable[..., Any]:
        """A replacement for `engine._rows` that counts the calling thread's statements from 0.

        Before statement `number`, the replacement starts the work. The statement runs when the work has ended or waits
        for a lock.
        """
        rows, caller, counted = engine._rows, threading.get_ident(), itertools.count()

        def run(*given: Any, **named: Any) -> Any:
            if threading.get_ident() == caller and next(counted) == number:
                self.thread.start()
                self._until_done_or_waiting()
            return rows(*given, **named)

        return run

    def finish(self) -> None:
        """Wait for the work to end. Fails if the work raised an exception."""
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert not self._raised, self._raised

    def _go(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            self._raised.append(error)

    def _until_done_or_waiting(self) -> None:
        waiting = text(
            "SELECT EXISTS (SELECT FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock')"
        )
        with self._database.engine.connect() as connection:
            while self.thread.is_alive() and not connection.execute(waiting).scalar_one():
                self.thread.join(0.01)


def test_an_export_has_all_data_of_one_user_only(lived: Harness, redis_memory: RedisMemory) -> None:
    """An export contains each row of the user once, and nothing of another user."""
    made = export_user(lived.database, lived.clock, redis_memory, UserKey(f"user {MARKER}"))
    assert OTHER not in str(made)
    counted = lived.sql("SELECT count(*) FROM messages")[0][0]
    assert len(made["tables"]["messages"]) == counted / 2
    assert [each["user_id"] for each in made["tables"]["users"]] == [f"user {MARKER}"]
    assert [each["kind"] for each in made["stream"]] == ["typing"]
    assert made["tables"].keys() == {holding.table for holding in USER_TABLES}
    with pytest.raises(NotFound):
        export_user(lived.database, lived.clock, redis_memory, UserKey("nobody"))


@pytest.mark.parametrize("limit", ["PAGE_ROWS", "PAGE_BYTES"])
def test_an_export_is_read_page_by_page(
    lived: Harness, redis_memory: RedisMemory, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Pages of one row, in each table and for each type of primary key, have the same rows as one page."""
    whole = export_user(lived.database, lived.clock, redis_memory, UserKey(f"user {MARKER}"))
    monkeypatch.setattr(paging, limit, 1)
    paged = export_user(lived.database, lived.clock, redis_memory, UserKey(f"user {MARKER}"))
    assert paged["tables"] == whole["tables"]


def test_a_store_that_hangs_holds_up_its_own_erasures_only(harness: Harness, redis_memory: RedisMemory) -> None:
    """The second pass of an erasure calls a third party's store. Meanwhile, no other worker takes that erasure."""
    hanging, going_on = threading.Event(), threading.Event()

    def hang(session_id: UUID) -> None:
        hanging.set()
        assert going_on.wait(30)

    eraser = _eraser(harness, redis_memory)
    harness.ask(user_id="ana")
    eraser.erase(UserKey("ana"))
    harness.move(harness.settings.turn.lease_s + 10)
    stuck = replace(eraser, snapshots=SimpleNamespace(delete=hang))
    with ThreadPoolExecutor(1) as worker:
        first = worker.submit(stuck.finish_due)
        assert hanging.wait(10)
        assert eraser.finish_due() == 0
        going_on.set()
        assert first.result(30) == 1
