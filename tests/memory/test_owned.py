"""A user sees, corrects and forgets what is remembered, and leaves conversations and messages out of memory."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from perdure.access.tenants import UserKey
from perdure.errors import Conflict, NotFound
from perdure.memory import owned
from perdure.memory.consolidation.consolidate import Consolidated, read_conversation
from perdure.memory.consolidation.merging import MergeCounts
from perdure.memory.recall.agent_memory import forget
from perdure.memory.recall.search import Layer
from perdure.sessions.conversations import change_conversation
from perdure.settings import Settings
from perdure.turns.lease.keeper import Keeper
from tests.memory.archive import HOME, LYON, PARIS, Archive, Echo, answer, memory
from tests.turns.harness import Harness
from tests.turns.scripted import Scripted

ANA = UserKey("ana")


@pytest.fixture
def archive(harness: Harness, settings: Settings) -> Archive:
    """An `Archive` that has no sessions yet."""
    harness.check = lambda: None  # type: ignore[method-assign]  # the check would fail: no turn ran
    return Archive(harness, Keeper(harness.database, harness.clock, settings.turn))


def _again(archive: Archive, session_id: UUID) -> None:
    """Make the session due again, as if its consolidation had been lost."""
    archive.harness.sql("UPDATE sessions SET consolidated_at = NULL WHERE session_id = %(id)s", id=session_id)


def _listed(archive: Archive) -> list[dict[str, Any]]:
    return owned.list_memories(archive.harness.database, ANA, 10)


def test_memories_are_listed_with_their_sources(archive: Archive) -> None:
    """The list has each memory with its attribute, its validity and its messages, the newest first, page by page."""
    session_id = archive.ended(LYON)
    archive.ended("I own a boat.")
    archive.consolidator(Echo()).batch()
    boat, home = _listed(archive)
    assert (home["content"], home["subject"], home["attribute"]) == (LYON, "user", "home")
    assert (home["type"], home["valid_until"], home["message_ids"]) == ("fact", None, [f"{session_id}:1"])
    assert owned.read_memory(archive.harness.database, home["id"]) == home
    [source] = owned.read_with_sources(archive.harness.database, home["id"])["sources"]
    assert (source["message_id"], source["text"], source["role"]) == (f"{session_id}:1", LYON, "user")
    assert source["said_at"] == home["valid_from"]
    assert owned.list_memories(archive.harness.database, ANA, 1) == [boat]
    assert owned.list_memories(archive.harness.database, ANA, 1, boat["id"]) == [home]
    assert owned.list_memories(archive.harness.database, UserKey("bo"), 9, boat["id"]) == []


def test_a_correction_supersedes(archive: Archive) -> None:
    """A corrected memory stays as history. A repeated correction finds the first; another one is refused."""
    archive.ended(LYON)
    archive.consolidator(Echo()).batch()
    [wrong] = _listed(archive)
    database, clock = archive.harness.database, archive.harness.clock
    right = owned.correct(database, clock, ANA, wrong["id"], " I live in  Nice. ")
    assert (right["content"], right["attribute"], right["valid_until"]) == ("I live in Nice.", "home", None)
    assert right["message_ids"] == wrong["message_ids"]
    assert owned.read_memory(database, wrong["id"])["valid_until"] == right["valid_from"]
    assert owned.correct(database, clock, ANA, wrong["id"], "I live in Nice.") == right
    assert owned.correct(database, clock, ANA, right["id"], "I live in Nice.") == right
    with pytest.raises(Conflict):
        owned.correct(database, clock, ANA, wrong["id"], "I live in Rome.")
    with pytest.raises(NotFound):
        owned.correct(database, clock, UserKey("bo"), right["id"], "I live in Rome.")
    assert len(_listed(archive)) == 2


def test_an_earlier_message_does_not_undo_a_correction(archive: Archive) -> None:
    """A session from before the correction, which is consolidated after it, becomes history."""
    archive.ended(LYON)
    archive.consolidator(Echo()).batch()
    archive.ended(PARIS)
    [wrong] = _listed(archive)
    owned.correct(archive.harness.database, archive.harness.clock, ANA, wrong["id"], "I live in Nice.")
    archive.consolidator(Echo()).batch()
    assert [each["content"] for each in _listed(archive) if each["valid_until"] is None] == ["I live in Nice."]


def test_what_is_forgotten_is_not_extracted_again(archive: Archive) -> None:
    """No memory is extracted again from the messages of a forgotten memory. Other messages may say the same."""
    session_id = archive.ended(LYON, "I own a boat.")
    archive.consolidator(Echo()).batch()
    home = next(each for each in _listed(archive) if each["content"] == LYON)
    assert not forget(archive.harness.database, UserKey("bo"), home["id"])
    assert forget(archive.harness.database, ANA, home["id"])
    _again(archive, session_id)
    assert archive.consolidator(Echo()).consolidate(session_id) == Consolidated(MergeCounts(duplicates_merged=1))
    assert [each["content"] for each in _listed(archive)] == ["I own a boat."]
    archive.ended(HOME)
    archive.consolidator(Echo()).batch()
    assert [each["content"] for each in _listed(archive)] == [HOME, "I own a boat."]


def test_what_is_forgotten_during_an_extraction_is_not_stored(archive: Archive) -> None:
    """The model has read a message already when the memory that a tool made of it is forgotten."""
    session_id = archive.ended(LYON)
    archive.consolidator(Echo()).batch()
    [home] = _listed(archive)
    _again(archive, session_id)
    worker = archive.consolidator(Echo(lambda: forget(archive.harness.database, ANA, home["id"])))
    assert worker.consolidate(session_id) == Consolidated()
    assert _listed(archive) == []


def _found(harness: Harness, query: str) -> list[str]:
    return [each.content for each in harness.runtime.recall.search(ANA, query, 10, [Layer.EPISODIC])]


def test_a_message_is_left_out_of_memory(harness: Harness) -> None:
    """No memory is extracted from a message with `remember: false`, and no search finds it or its reply."""
    sent = harness.ask("I live in Lyon.", user_id="ana")
    harness.ask("I own a secret castle.", user_id="ana", remember=False)
    said = read_conversation(harness.database, UUID(sent["session_id"]), 100)
    assert "I live in Lyon." in [each.content for each in said]
    assert not [each for each in said if "castle" in each.content]
    assert _found(harness, "Lyon")
    assert not [each for each in _found(harness, "secret castle") if "castle" in each]


def test_a_conversation_is_left_out_of_memory(harness: Harness) -> None:
    """What was said before in the conversation is left out, too. After a change of mind, later messages are remembered.

    A later session of the conversation is left out as well.
    """
    given = {"user_id": "ana", "conversation": "private"}
    first = harness.ask("I own a secret castle.", **given)
    assert _found(harness, "secret castle")

    def change(*, remember: bool) -> dict[str, Any]:
        return change_conversation(
            harness.database, harness.waker, ANA, "private", title=None, archived=None, remember=remember
        )

    assert change(remember=False)["remember"] is False
    assert _found(harness, "secret castle") == []
    harness.ask("I own a hidden palace.", **given)
    assert _found(harness, "hidden palace castle") == []
    assert read_conversation(harness.database, UUID(first["session_id"]), 100) == []
    harness.sql("UPDATE sessions SET routable = false, end_requested_at = perdure_now(), ended_at = perdure_now()")
    second = harness.ask("I own a lost cave.", **given)
    assert second["session_id"] != first["session_id"]
    assert _found(harness, "lost cave") == []
    assert change(remember=True)["remember"] is True
    harness.ask("I own an old mill.", **given)
    assert next(each for each in _found(harness, "old mill cave castle") if "own" in each) == "I own an old mill."
    assert not [each for each in _found(harness, "cave castle") if "cave" in each or "castle" in each]


@pytest.mark.parametrize(
    ("metadata", "default", "zone"),
    [
        ({"timezone": "Asia/Tokyo"}, "UTC", "Asia/Tokyo"),
        ({}, "Asia/Tokyo", "Asia/Tokyo"),
        ({"timezone": 9}, "UTC", "UTC"),
    ],
)
def test_dates_are_those_of_the_users_zone(
    harness: Harness, settings: Settings, metadata: dict[str, Any], default: str, zone: str
) -> None:
    """The model sees each message's date where the user is, and "since today" begins there at midnight.

    In Tokyo, the day after has begun. Elsewhere, that day lies ahead, so the memory holds since it was said.
    """
    now = harness.clock.now()
    harness.move(((now.replace(hour=20, minute=0) - now) % timedelta(days=1)).total_seconds())
    sent = harness.ask("I live in Lyon since today.", user_id="ana", metadata=metadata)
    harness.sql("UPDATE sessions SET routable = false, ended_at = perdure_now(), end_requested_at = perdure_now()")
    archive = Archive(harness, Keeper(harness.database, harness.clock, settings.turn))
    archive.limit(min_turns=0)
    said_at = harness.sql("SELECT created_at FROM messages WHERE role = 'user'")[0].created_at
    today = said_at.astimezone(ZoneInfo("Asia/Tokyo")).replace(hour=0, minute=0, second=0, microsecond=0)
    assert today.date() > said_at.astimezone(UTC).date()
    model = Scripted(answer(memory("The user lives in Lyon.", since=f"{today:%Y-%m-%d}", sources=[1])))
    outcome = archive.consolidator(model, timezone=default).consolidate(UUID(sent["session_id"]))
    assert outcome == Consolidated(MergeCounts(stored=1))
    in_tokyo = zone == "Asia/Tokyo"
    shown = today if in_tokyo else said_at.astimezone(UTC)
    assert f"[1, {shown:%Y-%m-%d}] user: I live in Lyon" in model.requests[0].messages[1].content
    [home] = _listed(archive)
    assert datetime.fromisoformat(home["valid_from"]) == (today if in_tokyo else said_at)
    harness.ask("Where in Lyon do I live?", user_id="ana", metadata={"timezone": "Asia/Tokyo"})
    assert f"{today:%Y-%m-%d}: The user lives in Lyon." in str(harness.model.requests[-1].messages)
