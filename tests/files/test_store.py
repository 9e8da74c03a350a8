"""A content is stored once for each tenant, and deleted with its last file, in rows and in a directory."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from perdure import File, tool
from perdure.access.tenants import UserKey, user_key
from perdure.errors import Conflict, InvalidRequest, NotFound, TooLarge
from perdure.files.store import UNUSED_S, Owner, Stored
from perdure.retention import retain
from perdure.sessions.forking import fork
from perdure.settings import FileSettings, RetentionSettings
from perdure.users.export import export_user
from tests.files.contents import pdf, png
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says

Counting = Callable[[], dict[str, int]]
PDF = pdf(2, size=3 * 2**20 + 17)
ANA, BOB = UserKey("ana"), UserKey("bob")


def put(harness: Harness, content: bytes, owner: Owner | None = None, **given: Any) -> Stored:
    """Store a file of `ana`, or of `owner`."""
    with harness.runtime.files.spool() as spool:
        spool.write(content)
        return harness.runtime.files.put(spool, owner or Owner.of(ANA), **given)


def part(stored: Stored) -> dict[str, Any]:
    return {"type": "file", "file_id": str(stored.file_id)}


def send(harness: Harness, *parts: dict[str, Any], user: str = "ana", **given: Any) -> dict[str, Any]:
    """Send a message with these parts, and run its turn."""
    return harness.ask("", user_id=user, parts=parts, **given)


def read(harness: Harness, file_id: UUID) -> bytes:
    files = harness.runtime.files
    return files.read(files.rows([file_id])[file_id])


def erase(harness: Harness, user: UserKey) -> dict[str, int]:
    rows = harness.runtime.eraser.erase(user).rows
    return {name: rows[name] for name in ("files", "file_contents")}


def test_a_content_is_stored_once(harness: Harness, stored: Counting) -> None:
    """Two users have files with one content. Its bytes come back, whole or their beginning."""
    one, other = put(harness, PDF), put(harness, PDF, Owner.of(BOB))
    assert one.file_id != other.file_id
    assert one.sha256 == other.sha256
    assert read(harness, one.file_id) == read(harness, other.file_id) == PDF
    files = harness.runtime.files
    assert files.read(files.rows([one.file_id])[one.file_id], most=2**20 + 5) == PDF[: 2**20 + 5]
    count = stored()
    assert (count["files"], count["file_contents"]) == (2, 1)
    assert (count["file_chunks"], count["objects"]) in {(4, 0), (0, 1)}


@pytest.mark.long
def test_two_processes_store_one_content_at_once(harness: Harness, stored: Counting) -> None:
    """The one that is slower uses what the other has stored."""
    made = side_by_side(*[lambda user=user: put(harness, PDF, Owner.of(UserKey(str(user)))) for user in range(4)])
    assert all(isinstance(each, Stored) for each in made), made
    harness.move(3_601)
    harness.runtime.files.collect()
    count = stored()
    assert (count["files"], count["file_contents"]) == (4, 1)
    assert (count["file_chunks"], count["objects"]) in {(4, 0), (0, 1)}
    assert {read(harness, each.file_id) for each in made} == {PDF}


def test_tenants_share_no_content(harness: Harness, stored: Counting) -> None:
    """A tenant cannot tell whether another one has a content."""
    put(harness, PDF, Owner.of(user_key("acme", "ana")))
    put(harness, PDF, Owner.of(user_key("corp", "ana")))
    assert stored()["file_contents"] == 2


def test_the_last_user_takes_the_content_along(harness: Harness, stored: Counting) -> None:
    """An erasure deletes the user's files, and the bytes that no other user has."""
    send(harness, part(put(harness, PDF)), part(put(harness, png(padding=500))))
    kept = put(harness, PDF, Owner.of(BOB))
    send(harness, part(kept), user="bob")
    assert erase(harness, ANA) == {"files": 2, "file_contents": 1}
    assert stored()["file_contents"] == 1
    assert read(harness, kept.file_id) == PDF
    assert erase(harness, BOB) == {"files": 1, "file_contents": 1}
    assert set(stored().values()) == {0}


def test_a_file_of_no_user_becomes_that_of_each_user(harness: Harness, stored: Counting) -> None:
    """A service uploads a file once, and sends it to several users. Each erasure concerns one user's file."""
    shared = put(harness, PDF, Owner(None, None))
    turns = [send(harness, part(shared), user=user) for user in ("ana", "bob")]
    ids = [harness.messages(UUID(turn["session_id"]))[0]["parts"][0]["file_id"] for turn in turns]
    assert len({str(shared.file_id), *ids}) == 3
    assert erase(harness, ANA) == {"files": 1, "file_contents": 0}
    assert read(harness, UUID(ids[1])) == PDF
    with pytest.raises(NotFound, match="has no file"):
        harness.ask("", user_id=user_key("acme", "eve"), parts=[part(shared)])


def test_unused_files_are_deleted_after_a_day(harness: Harness, stored: Counting) -> None:
    """Files that a message has are kept."""
    put(harness, png(padding=500))
    send(harness, part(put(harness, PDF)))
    harness.move(UNUSED_S - 60)
    harness.runtime.files.collect()
    assert stored()["files"] == 2
    harness.move(120)
    harness.runtime.files.collect()
    harness.runtime.files.collect()
    count = stored()
    assert (count["files"], count["file_contents"], count["objects"] + count["file_chunks"]) in {(1, 1, 1), (1, 1, 4)}


def test_files_go_with_the_transcripts_that_have_them(harness: Harness, stored: Counting) -> None:
    """Those of messages and of tools, by `PERDURE_RETENTION__TRANSCRIPTS_DAYS`; a later session keeps what it uses."""

    @tool(effect="pure")
    def draw() -> File:
        """Draw."""
        return File(png(padding=600))

    harness.equip(draw)
    kept, gone = put(harness, PDF), put(harness, png(padding=500))
    harness.script(calls(("draw", {})), says("Drawn."))
    first = UUID(send(harness, part(kept), part(gone))["session_id"])
    second = UUID(send(harness, part(kept), conversation="another")["session_id"])
    assert stored()["files"] == 3
    harness.sql(
        "UPDATE sessions SET ended_at = perdure_now(), consolidated_at = perdure_now(), routable = false,"
        " state = 'ended' WHERE session_id = %(first)s",
        first=first,
    )
    harness.move(11 * 86_400)
    retain(harness.database, settings=RetentionSettings(transcripts_days=10))
    harness.runtime.files.collect()
    assert [tuple(row) for row in harness.sql("SELECT file_id, session_id FROM files")] == [(kept.file_id, second)]
    assert stored()["file_contents"] == 1
    assert read(harness, kept.file_id) == PDF


def test_a_message_refers_to_its_files(harness: Harness) -> None:
    """The commit that accepts it does. The transcript shows them, and the text without them."""
    image = base64.b64encode(png(40, 30)).decode()
    turn = send(
        harness,
        {"type": "text", "text": "Look:"},
        {"type": "image", "data": f"data:image/jpeg;base64,{image}", "name": "cat.jpg"},
        {"type": "text", "text": "and read this."},
        {"type": "file", "data": base64.b64encode(b"a,b").decode(), "media_type": "text/csv"},
    )
    asked = harness.messages(UUID(turn["session_id"]))[0]
    assert asked["content"] == "Look:\nand read this."
    shown = [
        {name: each.get(name) for name in ("type", "media_type", "name", "width", "size")} for each in asked["parts"]
    ]
    assert shown == [
        {"type": "image", "media_type": "image/png", "name": "cat.jpg", "width": 40, "size": len(png(40, 30))},
        {"type": "file", "media_type": "text/csv", "name": None, "width": None, "size": 3},
    ]
    assert harness.sql("SELECT count(*) FROM files WHERE used_at IS NULL")[0][0] == 0


def test_a_repeated_message_has_the_same_files(harness: Harness) -> None:
    """The same `message_id` with another file is another message."""
    given = {"type": "file", "data": base64.b64encode(PDF).decode()}
    first = harness.send("", parts=[given], message_id="m")
    assert harness.send("", parts=[given], message_id="m").turn_id == first.turn_id
    with pytest.raises(Conflict, match="other files"):
        harness.send("", parts=[{"type": "image", "data": base64.b64encode(png()).decode()}], message_id="m")


@pytest.mark.parametrize(
    ("parts", "refusal"),
    [
        ([{"type": "file", "file_id": "01931e72-77a1-7f3d-a5de-40c7b02d9e31"}], "has no file"),
        ([{"type": "file", "data": "?"}], "Base64"),
        ([{"type": "file", "data": "data:,"}], "empty"),
        ([{"type": "image", "data": base64.b64encode(png(10**6, 1)).decode()}], "1,000,000 by 1 pixels"),
        ([{"type": "file", "url": "http://127.0.0.1/"}], "not a public address"),
        ([{"type": "file", "url": "file:///etc/passwd"}], "refused"),
        ([{"type": "file", "url": "http://localhost/"}], "not a public host"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(harness: Harness, parts: list[dict[str, Any]], refusal: str) -> None:
    """Nothing is accepted."""
    with pytest.raises((InvalidRequest, NotFound), match=refusal):
        harness.send("", parts=parts)
    assert harness.counts()["turns"] == 0


def test_a_user_has_a_limited_number_of_bytes(harness: Harness, file_settings: FileSettings) -> None:
    limited = file_settings.model_copy(update={"user_bytes": len(PDF) + 10})
    harness.settings = harness.settings.model_copy(update={"files": limited})
    put(harness, PDF)
    with pytest.raises(TooLarge, match="PERDURE_FILES__USER_BYTES"):
        put(harness, png(padding=100))
    put(harness, png(padding=100), Owner.of(BOB))


def test_an_export_lists_the_files(harness: Harness) -> None:
    stored = put(harness, png(), name="cat.png")
    send(harness, part(stored))
    document = export_user(harness.database, harness.clock, None, ANA)
    [row] = document["tables"]["files"]
    assert (row["name"], row["sha256"], row["size"]) == ("cat.png", stored.sha256, stored.size)
    assert document["tables"]["messages"][0]["parts"][0]["file_id"] == row["file_id"]


def test_a_tool_stores_no_file_of_an_erased_user(harness: Harness, stored: Counting) -> None:
    """The user is erased while the tool works. Nothing of the file that it returns is stored."""

    @tool(effect="pure")
    def draw() -> File:
        """Draw a picture."""
        erase(harness, ANA)
        return File(png(padding=1_000), name="ana.png")

    harness.equip(draw)
    harness.script(calls(("draw", {})), says("Drawn."))
    harness.run(harness.send("draw me", user_id="ana").session_id)
    assert set(stored().values()) == {0}


def test_the_second_pass_deletes_files_that_were_being_stored(harness: Harness, stored: Counting) -> None:
    """An upload that began before the erasure may be committed after it. A later upload of the same user stays."""
    early = put(harness, png(padding=1_000))
    harness.move(1)
    erased = harness.runtime.eraser.erase(BOB)  # of a user without files: the erasure of ana commits before the upload
    assert erased.rows["files"] == 0
    harness.sql("UPDATE erasures SET user_id = 'ana' RETURNING 1")
    harness.move(1)
    late = put(harness, PDF)
    harness.move(harness.settings.turn.lease_s)
    harness.runtime.eraser.finish_due()
    assert set(harness.runtime.files.rows([early.file_id, late.file_id])) == {late.file_id}
    harness.runtime.files.collect()
    assert stored()["file_contents"] == 1


def test_the_second_pass_of_an_erasure_in_the_future_keeps_files(harness: Harness) -> None:
    """The clock was ahead during the erasure: the files that the user has stored since are older than it."""
    harness.move(86_400)
    erase(harness, ANA)
    harness.move(-86_400)
    kept = put(harness, PDF)
    harness.runtime.eraser.finish_due()
    assert kept.file_id in harness.runtime.files.rows([kept.file_id])


def test_files_stay_while_a_fork_of_a_fork_shows_them(harness: Harness) -> None:
    """The session and its fork have ended. The fork's fork is open, and its messages are copies of the session's."""
    kept = put(harness, PDF)
    source = UUID(send(harness, part(kept))["session_id"])
    first = fork(harness.database, harness.clock, source)
    second = fork(harness.database, harness.clock, first)
    end = (
        "UPDATE sessions SET ended_at = perdure_now(), consolidated_at = perdure_now(), routable = false,"
        " state = 'ended' WHERE session_id = ANY (%(ids)s)"
    )
    harness.sql(end, ids=[source, first])
    for ids, left in (([], True), ([second], False)):
        harness.sql(end, ids=ids)
        harness.move(11 * 86_400)
        retain(harness.database, settings=RetentionSettings(transcripts_days=10))
        harness.runtime.files.collect()
        assert bool(harness.runtime.files.rows([kept.file_id])) is left
