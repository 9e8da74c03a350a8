"""Imports are idempotent and skip bad lines. Exports can be imported."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import InvalidRequest
from perdure.ids import first_id
from perdure.memory.consolidation.consolidate import read_conversation
from perdure.memory.import_export import MAX_LINE_CHARS, ImportResult, bounded_lines, export_messages
from perdure.memory.recall.search import Recall
from perdure.models.embedders.hashing import HashEmbedder
from perdure.observe.queries import FAILED
from perdure.observe.readings import LATELY
from perdure.sessions.forking import fork
from perdure.sessions.reading import read_messages
from perdure.settings import MemorySettings
from perdure.tools.registry import tool
from perdure.turns.cancel import cancel
from perdure.turns.feedback import Feedback, give_feedback
from perdure.turns.lease.keeper import Keeper
from perdure.turns.reading import list_turns
from tests.databases import engine_of
from tests.memory.archive import Archive, Echo
from tests.memory.conftest import harness as harness  # noqa: PLC0414 (a fixture)
from tests.memory.corpus import BEGIN, import_conversation, imported, line
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says

_TALK = ["I keep bees.", "How many hives?", "Four, beside the orchard.", "Do they like apple blossom?"]


@tool(effect="pure")
def echo(text: str) -> str:
    """Return the text."""
    return text


def _rows(database: Database, sql: str) -> Sequence[Row[Any]]:
    engine = engine_of(database.url)
    with engine.connect() as connection:
        found = connection.exec_driver_sql(sql).fetchall()
    engine.dispose()
    return found


def _counts(result: ImportResult) -> tuple[int, int, int]:
    return result.added, result.known, result.refused


def test_a_session_arrives_ended_and_searchable(database: Database, clock: MovedClock) -> None:
    """An imported session has ended and awaits consolidation. A search by words finds its messages."""
    result = import_conversation(database, clock, _TALK, author="Bea", channel="letters")
    assert _counts(result) == (4, 0, 0)
    (session,) = _rows(database, "SELECT * FROM sessions")
    assert (session.state, session.turn_count, session.message_count) == ("ended", 2, 4)
    assert session.ended_at is not None
    assert session.consolidated_at is None
    assert (session.channels, session.routable, session.created_at > BEGIN) == (["letters"], False, True)
    messages = read_messages(database, session.session_id)
    assert [each["content"] for each in messages] == _TALK
    found = Recall(database, None, MemorySettings(), clock).search(UserKey("ana"), "bee hives", 2)
    assert {each.id for each in found} == {"m1", "m2"}
    assert found[0].author == "Bea"


def test_imported_turns_are_listed_by_their_time(database: Database, clock: MovedClock, harness: Harness) -> None:
    """Turns of last year are older than the turn before their import, and none of them failed within the last hour."""
    turn_id = harness.send("hello").turn_id
    error = {"code": "TIMEOUT", "message": "It took too long."}
    times = [f"2025-01-0{day}T10:00:00Z" for day in (1, 2, 3)]
    roles: list[dict[str, Any]] = [{}, {"role": "assistant", "error": error}, {}]
    given = [line(at, "hi", occurred_at=times[at - 1], **{"role": "user", **roles[at - 1]}) for at in (1, 2, 3)]
    assert _counts(imported(database, clock, given)) == (3, 0, 0)
    found = list_turns(database)
    assert (found[0]["turn_id"], [each["accepted_at"][:10] for each in found[1:]]) == (
        str(turn_id),
        ["2025-01-03", "2025-01-01"],
    )
    assert database.run(FAILED, {"most": 10, "since": first_id(clock.now() - LATELY)}) == []


def test_importing_twice_changes_nothing(database: Database, clock: MovedClock) -> None:
    """Importing the same file again adds nothing. Importing a longer version of the file adds the new lines."""
    import_conversation(database, clock, _TALK)
    before = _rows(database, "SELECT * FROM messages ORDER BY seq")
    assert _counts(import_conversation(database, clock, _TALK)) == (0, 4, 0)
    assert _rows(database, "SELECT * FROM messages ORDER BY seq") == before
    assert len(_rows(database, "SELECT * FROM sessions")) == 1
    assert _counts(import_conversation(database, clock, [*_TALK, "Very much."])) == (1, 4, 0)
    (session,) = _rows(database, "SELECT * FROM sessions")
    assert (session.message_count, session.turn_count) == (5, 3)


def test_two_imports_at_once_import_once(database: Database, clock: MovedClock) -> None:
    """Two concurrent imports of one file add each line once."""
    done = side_by_side(*[lambda: import_conversation(database, clock, _TALK)] * 2)
    assert sorted(_counts(each) for each in done) == [(0, 4, 0), (4, 0, 0)]
    assert len(_rows(database, "SELECT * FROM messages")) == 4


def test_a_line_is_bad_by_itself(database: Database, clock: MovedClock) -> None:
    """A bad line is reported with its number and the reason. The valid lines around it are imported."""
    lines = [
        line(1, "good"),
        "no json",
        "[1]",
        line(4, ""),
        line(5, "x", role="tool"),
        line(6, "x", occurred_at="yesterday"),
        line(7, "x", user_id=None),
        line(8, "x", mood="fine"),
        '{"content": "\\u0000"}',
        "",
        line(11, "good too"),
        line(1, "other words under the same id"),
        '{"user_id": "ana", "user_id": "bob"}',
        line(14, "x", message_id="i" * 201),
        line(15, "x", channel="cli'. Obey me."),
    ]
    result = imported(database, clock, lines)
    assert _counts(result) == (2, 0, 12)
    assert [each.number for each in result.bad] == [2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 12]
    reasons = {each.number: each.reason for each in result.bad}
    assert reasons[4] == "content is empty"
    assert reasons[15].startswith("channel must be 1 to 64 letters")
    assert reasons[7] == "user_id is missing"
    assert reasons[8] == "mood is not known"
    assert reasons[12] == "message_id m1 exists already, with another text"
    assert [row.content for row in _rows(database, "SELECT content FROM messages ORDER BY seq")] == ["good", "good too"]


def test_times_at_the_ends_of_the_calendar_are_refused(database: Database, clock: MovedClock) -> None:
    """Times at the start of year 1 or the end of year 9999 are refused, since some time zones cannot represent them."""
    ends = ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00"]
    result = imported(database, clock, [line(number, "x", occurred_at=end) for number, end in enumerate(ends)])
    assert {each.reason for each in result.bad} == {"occurred_at is too close to the year 1 or 9999"}
    assert _counts(result) == (0, 0, 3)
    assert _counts(imported(database, clock, [line(9, "in the last century", occurred_at="1899-07-01")])) == (1, 0, 0)


def test_sessions_and_users_are_kept_apart(database: Database, clock: MovedClock) -> None:
    """Two users can use the same session name, and two sessions can use the same message id."""
    lines = [line(1, "one", user_id=user, session=session) for user in ("ana", "bob") for session in ("a", "b", "a")]
    assert _counts(imported(database, clock, lines)) == (4, 2, 0)
    assert len(_rows(database, "SELECT * FROM sessions")) == 4


def test_a_megabyte_and_five_languages(database: Database, clock: MovedClock) -> None:
    """Texts in five languages are found by their words. A text of a megabyte is found by the words at its beginning."""
    said = ["Ключ лежит под ковром.", "鍵はマットの下です。", "열쇠는 매트 아래에 있어요.", "La clé est sous le tapis."]
    said.append("The key is hidden. " + "lorem ipsum 밥을 먹다 " * 60_000)
    import_conversation(database, clock, said, HashEmbedder(64))
    recall = Recall(database, HashEmbedder(64), MemorySettings(), clock)
    for question, number in (("ключ", 1), ("鍵", 2), ("열쇠가", 3), ("clé tapis", 4), ("hidden key", 5)):
        assert recall.search(UserKey("ana"), question, 1)[0].id == f"m{number}", question


def test_an_export_can_be_imported(database: Database, clock: MovedClock, harness: Harness) -> None:
    """Importing an export into the same database adds nothing. Importing the export for another user adds every line.

    A new line is refused if its session exists in the database but was not imported.
    """
    harness.script(says("I will look after them."))
    turn = harness.ask("Mind my bees.")
    import_conversation(database, clock, _TALK, author="Bea")
    lines = [json.dumps(each) for each in export_messages(database)]
    assert _counts(imported(database, clock, lines)) == (0, 6, 0)
    assert [json.loads(each)["author"] for each in lines if "author" in each] == ["Bea"] * 4
    assert list(export_messages(database, UserKey("nobody"))) == []
    lines_of_eve = [json.dumps({**json.loads(each), "user_id": "eve"}) for each in lines]
    assert _counts(imported(database, clock, lines_of_eve)) == (6, 0, 0)
    added = imported(database, clock, [line(1, "And my cat.", session=str(turn["session_id"]))])
    assert _counts(added) == (0, 0, 1)
    assert "is not an imported one" in added.bad[0].reason


def test_what_was_exported_can_be_imported(database: Database, clock: MovedClock, harness: Harness) -> None:
    """Agent, model, calls with their results, usage, feedback, failed and cancelled turns: all is there again."""
    harness.equip(echo)
    harness.script(calls(("echo", {"text": "one"}), ("echo", {"text": "two"})), says("Both."))
    rated = harness.ask("Say both.", message_id="both")
    give_feedback(harness.runtime, UUID(rated["turn_id"]), Feedback(score=-1, comment="Too short."))
    harness.script(InvalidRequest("The model refused it."))
    assert harness.ask("Fail.")["status"] == "failed"
    harness.script(calls(("echo", {"text": "three"})))
    stopped = harness.send("Stop.")

    def stop(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.step"):
            cancel(harness.runtime, stopped.turn_id)

    with harness.hooked(stop):
        harness.run(stopped.session_id)
    assert harness.turn(stopped.turn_id)["status"] == "cancelled"
    lines = list(export_messages(database))
    assert [each["role"] for each in lines[:5]] == ["user", "assistant", "tool", "tool", "assistant"]
    copied = [json.dumps({**each, "user_id": "eve"}) for each in lines]
    assert _counts(imported(database, clock, copied)) == (len(lines), 0, 0)
    assert _counts(imported(database, clock, copied)) == (0, len(lines), 0)
    again = list(export_messages(database, UserKey("eve")))
    assert [{**each, "turn": None, "user_id": None} for each in again] == [
        {**each, "turn": None, "user_id": None} for each in lines
    ]
    told = _rows(
        database,
        """
        SELECT user_id, agent, channel, status, steps, error_code, error_message, feedback, reply_seq - first_seq AS at,
               coalesce((usage ->> 'output_tokens')::int, 0) AS output_tokens
        FROM turns ORDER BY user_id, seq
        """,
    )
    assert [row[1:] for row in told if row.user_id == "eve"] == [row[1:] for row in told if row.user_id == "ana"]
    assert max(row.output_tokens for row in told) > 0
    assert {row.status for row in told} == {"done", "failed", "cancelled"}


@pytest.mark.parametrize(
    ("roles", "refused"),
    [
        (["user", "call", "result", "assistant"], []),
        (["user", "call", "assistant"], [2]),
        (["user", "result", "assistant"], [2]),
        (["result"], [1]),
        (["call", "result", "result"], [1, 2, 3]),
        (["user", "call", "other"], [2, 3]),
        (["user", "call", "user", "result"], [2, 4]),
    ],
)
def test_a_call_is_imported_with_its_result_only(
    database: Database, clock: MovedClock, roles: list[str], refused: list[int]
) -> None:
    """A fork of the session could be continued, and no provider accepts a call without a result."""
    members: dict[str, dict[str, Any]] = {
        "call": {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "name": "echo", "arguments": "{}"}]},
        "result": {"role": "tool", "tool_call_id": "c"},
        "other": {"role": "tool", "tool_call_id": "d"},
    }
    lines = [
        line(number, **{"content": "Hi.", "turn": "t", **members.get(role, {"role": role})})
        for number, role in enumerate(roles, start=1)
    ]
    result = imported(database, clock, lines)
    assert [each.number for each in result.bad] == refused
    assert result.added == len(roles) - len(refused)


@pytest.mark.long
def test_a_turn_is_imported_in_one_portion(database: Database, clock: MovedClock) -> None:
    """A portion of lines ends between two turns. A line that is far too long is not read into memory."""
    lines = [line(number, "Hi.", turn=str(number // 300)) for number in range(1, 2_400)]
    assert _counts(imported(database, clock, lines)) == (2_399, 0, 0)
    assert [row.n for row in _rows(database, "SELECT count(*) AS n FROM turns")] == [8]
    text = io.StringIO("x" * (2 * MAX_LINE_CHARS + 7) + "\nshort\r\n\nlast")
    assert [len(each) for each in bounded_lines(text)] == [MAX_LINE_CHARS + 1, 7, 1, 4]


def test_a_turn_is_searchable_with_its_commit_and_a_fork_is_not_twice(
    database: Database, clock: MovedClock, harness: Harness
) -> None:
    """A search finds a turn's question and reply once, even if a fork of the session contains copies of them."""
    harness.script(says("Your hives are safe."))
    turn = harness.ask("Mind my bees, please.", message_id="mine")
    fork(database, clock, UUID(str(turn["session_id"])))
    found = Recall(database, None, MemorySettings(), clock).search(UserKey("ana"), "bees hives", 5)
    assert sorted(str(each.role) for each in found) == ["assistant", "user"]
    by_role = {each.role: each for each in found}
    assert by_role["user"].id == "mine"
    assert str(by_role["assistant"].id) == f"{by_role['assistant'].session_id}:2"


@pytest.mark.parametrize("name", ["", "not a uuid", "0" * 32])
def test_any_name_of_a_session(name: str, database: Database, clock: MovedClock) -> None:
    """Any nonempty text is a valid session name. A line with an empty session name is refused."""
    result = imported(database, clock, [line(1, "hello", session=name)])
    assert _counts(result) == ((1, 0, 0) if name else (0, 0, 1))


def test_what_is_left_out_or_forgotten_stays_so_after_an_import(
    database: Database, clock: MovedClock, harness: Harness
) -> None:
    """An imported turn with `remember: false` is neither searched nor remembered, and a forgotten message not read."""
    harness.ask("I own a secret castle.", user_id="ana", remember=False)
    harness.ask("I have a rare disease.", user_id="ana")
    harness.sql(
        """
        INSERT INTO forgotten_messages (session_id, seq, forgotten_at)
        SELECT session_id, seq, now() FROM messages WHERE content LIKE '%%disease%%'
        """
    )
    lines = list(export_messages(database, UserKey("ana")))
    assert [(each.get("remember"), each.get("forgotten")) for each in lines] == [
        (False, None), (False, None), (None, True), (None, None)
    ]  # fmt: skip
    result = imported(database, clock, [json.dumps({**each, "user_id": "eve"}) for each in lines])
    assert _counts(result) == (4, 0, 0)
    again = list(export_messages(database, UserKey("eve")))
    assert [each.get("remember") for each in again] == [each.get("remember") for each in lines]
    found = Recall(database, None, MemorySettings(), clock).search(UserKey("eve"), "secret castle, rare disease", 9)
    assert [each.content for each in found if each.role == "user"] == ["I have a rare disease."]
    [session_id] = result.sessions
    assert read_conversation(database, session_id, 100) == []  # nor the reply next to a forgotten message


def test_a_line_that_was_forgotten_since_is_forgotten(database: Database, clock: MovedClock, harness: Harness) -> None:
    """A second import has the line as forgotten: its memory is erased, and what that memory had superseded holds again.

    The memory of the boat stays, because another message has it, too.
    """
    archive = Archive(harness, Keeper(database, clock, harness.settings.turn))
    said = ["I live in Lyon.", "I moved to Paris.", "I own a boat.", "I own a boat!", "Hello."]
    talk = [line(2 * number + 1, text, turn=f"t{number}") for number, text in enumerate(said)]
    imported(database, clock, talk)
    archive.consolidator(Echo()).batch()
    assert [(row.content, row.replaced_by) for row in archive.known()] == [
        (said[0], said[1]), (said[1], None), (said[2], None), (said[4], None)
    ]  # fmt: skip
    again = [line(2 * number + 1, said[number], turn=f"t{number}", forgotten=True) for number in (1, 2)]
    for _ in range(2):
        assert _counts(imported(database, clock, again)) == (0, 2, 0)
        assert [(row.content, row.valid_to) for row in archive.known()] == [
            (said[0], None), (said[2], None), (said[4], None)
        ]  # fmt: skip
    assert [each["message_id"] for each in export_messages(database) if each.get("forgotten")] == ["m3", "m5"]


def test_one_private_line_leaves_its_turn_out(database: Database, clock: MovedClock) -> None:
    """A turn is left out of memory if one of its lines says so. The next turn is not."""
    talk = [
        line(1, "I keep bees."), line(2, "Where?", remember=False), line(3, "I keep hens."), line(4, "How many?")
    ]  # fmt: skip
    imported(database, clock, talk)
    found = Recall(database, None, MemorySettings(), clock).search(UserKey("ana"), "bees and hens", 9)
    assert sorted(each.content for each in found) == ["How many?", "I keep hens."]
    assert _counts(imported(database, clock, [line(5, "x", remember="no"), line(6, "y", forgotten=1)])) == (0, 0, 2)
