"""The harness of the turn tests: one process of perdure, its scripted model, its clock and its database."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError

from perdure import Agent
from perdure.access.tenants import UserKey
from perdure.agents import Agents, OwnTool
from perdure.clock import MovedClock
from perdure.database.engine import Database, Moment
from perdure.database.fencing import Fence
from perdure.events.writer import EventWriter
from perdure.memory.redis.memory import RedisMemory
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Embedder
from perdure.models.protocol import ForeignModel, Message, Model, ModelRequest, Role, ToolCall
from perdure.models.providers.chat_wire import request_body
from perdure.models.windows import LearnedWindows
from perdure.observe.traces import OFF, Traces
from perdure.runtime import Runtime
from perdure.sessions.reading import read_messages
from perdure.settings import Settings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.snapshots.store import SnapshotStore
from perdure.tools.awaited.port import TaskCalls
from perdure.tools.mcp.connections import Connections
from perdure.tools.mcp.server import McpServer
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.lease.claim import Ran, Refusal, claim
from perdure.turns.lease.tenure import Tenure, TurnRow
from perdure.turns.reading import read_turn
from perdure.turns.run.loop import Runner
from tests.conftest import RecordingWaker
from tests.models.openai_server import validate_transcript
from tests.turns.scripted import Line, Scripted

PATIENCE_S = 20.0
"""Seconds that a test waits for an event before it fails."""

TABLES = ("users", "sessions", "turns", "inbox", "messages", "tool_effects", "deliveries")

KILL_THE_OTHERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


class Crash(BaseException):
    """Simulates the death of the process. Perdure's code must not catch this exception."""


_ROWS_OF_OTHERS = " UNION ALL ".join(
    f"(SELECT x::text FROM {table} AS x {joined} WHERE user_id <> %(user_id)s ORDER BY 1)"  # noqa: S608 (constants)
    for table, joined in (
        ("sessions", ""), ("turns", ""), ("inbox", ""), ("deliveries", ""),
        ("messages", "JOIN (SELECT session_id, user_id FROM sessions) AS s USING (session_id)"),
        ("tool_effects", "JOIN (SELECT turn_id, user_id FROM turns) AS t USING (turn_id)"),
    )
)  # fmt: skip


class Harness:
    """One process of perdure whose model, clock and database the test controls."""

    def __init__(self, settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> None:
        self.settings = settings
        self.clock = clock
        self.database = database
        self.waker = waker
        self.model = Scripted()
        self.agents = Agents([Agent("assistant", "You help.")])
        self.snapshots: SnapshotStore = PostgresSnapshots(database)
        self.redis_memory: RedisMemory | None = None
        self.embedder: Embedder = HashEmbedder(384)
        self.quoting_key = b"of the test"
        self.connections: Connections | None = None
        self.events: EventWriter | None = None
        self.redis_url: str | None = None
        self.calls: TaskCalls | None = None
        self.traces: Traces = OFF
        self.windows = LearnedWindows(database, clock)
        self.any_model: Model | None = None
        """Replaces the scripted model, if set."""

    @property
    def runtime(self) -> Runtime:
        """A runtime built from the harness's current attributes."""
        made = Runtime(
            self.settings,
            self.clock,
            self.database,
            self.agents,
            self._model,
            self.waker,
            self.snapshots,
            self.redis_memory,
            self.embedder,
            connections=self.connections,
            quoting_key=self.quoting_key,
            redis_url=self.redis_url,
            events=self.events,
            calls=self.calls,
            traces=self.traces,
        )
        vars(made)["windows"] = self.windows  # as in a process, which has one runtime
        return made

    def _model(self, name: str | ForeignModel) -> Model:
        return self.any_model or self.model

    def script(self, *lines: Line) -> None:
        """Set the model's next replies. After the last reply, the model replies `ok`."""
        self.model.lines = list(lines)

    def equip(self, *tools: OwnTool | McpServer, **limits: Any) -> None:
        """Give the default agent these tools and limits."""
        self.agents = Agents([Agent("assistant", "You help.", tools, **limits), Agent("other", "You do not.")])

    def set(self, **changed: Any) -> None:
        """Change settings of the group `turn`."""
        turn = type(self.settings.turn)(**{**self.settings.turn.model_dump(), **changed})
        self.settings = self.settings.model_copy(update={"turn": turn})

    def send(self, text: str = "hello", user_id: str = "ana", **given: Any) -> Accepted:
        """Accept a message."""
        words = {} if "parts" in given else {"text": text}
        return accept(self.runtime, Incoming.model_validate({"user": UserKey(user_id), **words, **given}))

    def run_with(self, runtime: Runtime, text: str) -> dict[str, Any]:
        """Send a message of `ana`, and run its turn with `runtime`. Returns the turn."""
        accepted = accept(runtime, Incoming(user=UserKey("ana"), text=text))
        Runner(runtime, "harness").run(accepted.session_id)
        return self.turn(accepted.turn_id)

    def run(self, session_id: UUID, *, alone: bool = False) -> Ran | Refusal:
        """Run the session's turns with a new runner. No thread renews the session's lease.

        `alone` tells the runner that its process runs no other session.
        """
        return Runner(self.runtime, "harness").run(session_id, alone=alone)

    def claimed(self, session_id: UUID) -> Tenure:
        """Claim the session without a runner."""
        found = claim(self.runtime, session_id, "by hand")
        assert isinstance(found, Tenure)
        return found

    def tenure(self, session_id: UUID, turn: TurnRow, token: int = 1) -> Tenure:
        """A tenure that no claim has made."""
        return Tenure(session_id, Fence(token, UUID(int=0)), self.clock, self.settings.turn.lease_s, turn=turn)

    def tenure_of(self, turn_id: UUID, fence: Fence | None = None) -> Tenure:
        """A tenure of a turn in the database that no claim has made; by default under the session's present fence."""
        row = self.sql("SELECT * FROM turns WHERE turn_id = %(id)s", id=turn_id)[0]
        present = self.session(row.session_id)
        fence = fence or Fence(present.token, present.nonce)
        turn = TurnRow.begun(row.session_id, row)
        return Tenure(row.session_id, fence, self.clock, self.settings.turn.lease_s, turn=turn, tick=present.tick)

    def ask(self, text: str = "hello", **given: Any) -> dict[str, Any]:
        """Accept a message, run its session, and return the message's turn."""
        accepted = self.send(text, **given)
        self.run(accepted.session_id)
        return self.turn(accepted.turn_id)

    def turn(self, turn_id: UUID) -> dict[str, Any]:
        """The turn as the API returns it."""
        return read_turn(self.database, turn_id)

    def resume(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Run the turn's session, and return the turn."""
        self.run(UUID(turn["session_id"]))
        return self.turn(UUID(turn["turn_id"]))

    def results(self, turn: Mapping[str, Any] | None = None) -> list[str]:
        """The results of all tool calls, or of those of the turn's session, as the model reads them."""
        if turn is not None:
            return [text for role, text in self.lines(UUID(turn["session_id"])) if role == "tool"]
        return [row.content for row in self.sql("SELECT content FROM messages WHERE role = 'tool' ORDER BY seq")]

    def messages(self, session_id: UUID) -> list[dict[str, Any]]:
        """The session's committed transcript."""
        return read_messages(self.database, session_id)

    def lines(self, session_id: UUID) -> list[tuple[str, str]]:
        """The session's committed transcript as `(role, content)`."""
        return [(each["role"], each["content"]) for each in self.messages(session_id)]

    def move(self, seconds: float) -> None:
        """Advance the clocks of the process and of the database."""
        self.clock.advance(timedelta(seconds=seconds))

    def sql(self, text: str, **parameters: Any) -> Sequence[Row[Any]]:
        """Run a statement. If its pooled connection was terminated, repeat the statement once."""
        try:
            return self._sql(text, parameters)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
        return self._sql(text, parameters)  # the test has terminated the pooled connections

    def _sql(self, text: str, parameters: dict[str, Any]) -> Sequence[Row[Any]]:
        with self.database.engine.connect() as connection:
            result = connection.exec_driver_sql(text, parameters)
            return result.fetchall() if result.returns_rows else ()

    def counts(self) -> dict[str, int]:
        """The number of rows in each of `TABLES`."""
        return {table: self.sql(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}  # noqa: S608 (constants)

    def session(self, session_id: UUID) -> Row[Any]:
        """The session's row."""
        return self.sql("SELECT * FROM sessions WHERE session_id = %(id)s", id=session_id)[0]

    @contextmanager
    def affecting(self, user_id: str) -> Iterator[None]:
        """Check that the block changes no row of another user."""
        before = self.sql(_ROWS_OF_OTHERS, user_id=user_id)
        yield
        assert self.sql(_ROWS_OF_OTHERS, user_id=user_id) == before

    def check(self) -> None:
        """Check the invariants: a provider accepts each transcript, and the sessions' counters match the rows."""
        assert self.model.problems == []
        for row in self.sql("SELECT session_id, unsettled, last_turn_seq, message_count, turn_count FROM sessions"):
            session_id = row.session_id
            assert self.provider_problems(session_id) == []
            turns = self.sql("SELECT * FROM turns WHERE session_id = %(id)s ORDER BY seq", id=session_id)
            assert row.unsettled == sum(turn.settled_at is None for turn in turns)
            assert row.turn_count == len(turns) - row.unsettled
            joined = self.sql(
                "SELECT FROM unrouted AS u JOIN turns AS t ON t.turn_id = u.routed_to"
                " WHERE t.session_id = %(id)s AND u.message ? 'message_id'",
                id=session_id,
            )
            assert len(turns) + len(joined) == row.last_turn_seq, "only turns that joined another leave a gap"
            seqs = [message["seq"] for message in self.messages(session_id)]
            assert seqs == list(range(1, row.message_count + 1))

    def provider_problems(self, session_id: UUID) -> list[str]:
        """The faults for which a provider would reject the transcript. Calls of an unsettled turn may lack results."""
        rows = self.sql("SELECT * FROM messages WHERE session_id = %(id)s ORDER BY seq", id=session_id)
        messages = [
            Message(
                Role(row.role),
                row.content,
                tuple(ToolCall.from_dict(c) for c in row.tool_calls or ()),
                row.tool_call_id,
            )
            for row in rows
        ]
        if rows and rows[-1].tool_calls:
            newest = self.turn(rows[-1].turn_id)
            if newest["settled_at"] is None:
                messages.pop()
        if not messages:
            return []
        return validate_transcript(request_body("scripted", ModelRequest(tuple(messages)))["messages"])

    @contextmanager
    def crashing(self, moment: Moment, name: str, nth: int = 1) -> Iterator[None]:
        """Crash the block before or after the `nth` commit called `name`. Fail if the block has fewer such commits."""
        seen = itertools.count(1)

        def observe(at: Moment, statement: str) -> None:
            if (at, statement) == (moment, name) and next(seen) == nth:
                raise Crash(f"{moment} {name}")

        self.database.observe = observe
        try:
            yield
        except Crash:
            return
        finally:
            self.database.observe = None
        raise AssertionError(f"nothing reached {moment} {name} number {nth}")

    @contextmanager
    def hooked(self, hook: Callable[[Moment, str], None]) -> Iterator[None]:
        """Call `hook` before and after each commit within the block."""
        self.database.observe = hook
        try:
            yield
        finally:
            self.database.observe = None


def side_by_side(*works: Callable[[], Any]) -> list[Any]:
    """Run each of `works` in its own thread, concurrently; returns their results or exceptions, in order."""
    barrier = threading.Barrier(len(works))
    found: list[Any] = [None] * len(works)

    def go(number: int, work: Callable[[], Any]) -> None:
        barrier.wait(PATIENCE_S)
        try:
            found[number] = work()
        except Exception as error:  # noqa: BLE001 (returned)
            found[number] = error

    threads = [threading.Thread(target=go, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S * 2)
        assert not thread.is_alive()
    return found


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds; fail after `PATIENCE_S`."""
    pulse = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        pulse.wait(0.01)
    raise AssertionError(f"did not happen in time: {what}")
