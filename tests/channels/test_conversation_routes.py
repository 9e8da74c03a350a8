"""The HTTP routes of conversations. A conversation's key is one path segment and may contain any characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient


@pytest.mark.parametrize("key", ["trip", "a/b", "/", "50%", "ключ", "a b"])
def test_any_key_is_found_by_its_path(client: TestClient, say: Callable[..., dict[str, Any]], key: str) -> None:
    """A conversation can be renamed, archived and filtered by its key, whatever characters the key contains."""
    say("Plan the trip.", conversation=key)
    where = f"/v1/conversations/{quote(key, safe='')}?user_id=ann"
    changed = client.patch(where, json={"title": "Rome", "archived": True})
    assert (changed.status_code, changed.json()["title"], changed.json()["archived"]) == (200, "Rome", True)
    [listed] = client.get("/v1/conversations?user_id=ann&archived=true").json()
    assert (listed["conversation"], listed["title"]) == (key, "Rome")
    [session] = client.get("/v1/sessions", params={"user_id": "ann", "conversation": key}).json()
    assert (session["conversation"], session["title"]) == (key, "Rome")


def test_turns_that_are_not_settled_are_named(
    client: TestClient, say: Callable[..., dict[str, Any]], run: Callable[[str], None]
) -> None:
    """A list of conversations has the ids of each conversation's unsettled turns, oldest first."""
    sent = [say(text, conversation="trip") for text in ("Plan the trip.", "And back.")]
    [listed] = client.get("/v1/conversations?user_id=ann").json()
    assert listed["unsettled_turns"] == [each["turn_id"] for each in sent]
    run(sent[0]["session_id"])
    run(sent[0]["session_id"])
    [listed] = client.get("/v1/conversations?user_id=ann").json()
    assert listed["unsettled_turns"] == []


def test_what_names_no_conversation_is_found(
    client: TestClient, say: Callable[..., dict[str, Any]], run: Callable[[str], None]
) -> None:
    """The sessions of the default conversation are listed by a channel that reaches it, without those with a key."""
    sent = say("what is 12*7?", channel="cli")
    say("Plan the trip.", conversation="trip")
    where = {"user_id": "ann", "channel": "web"}
    [session] = client.get("/v1/sessions", params=where).json()
    assert (session["session_id"], session["conversation"]) == (sent["session_id"], None)
    run(sent["session_id"])
    assert len(client.get("/v1/sessions", params=where).json()) == 1
    assert client.get("/v1/sessions", params={**where, "user_id": "bea"}).json() == []


def test_the_queue_has_the_messages_that_wait(
    client: TestClient, say: Callable[..., dict[str, Any]], run: Callable[[str], None]
) -> None:
    """The queue has each unsettled turn with its text, its files and its sender's id. A settled turn leaves it."""
    stored = client.post(
        "/v1/files?user_id=ann&name=note.txt", content=b"hello", headers={"content-type": "text/plain"}
    )
    part = {"type": "file", "file_id": stored.json()["file_id"], "name": "note.txt"}
    first = say("Plan the trip.", message_id="m-1")
    parts = [{"type": "text", "text": "Read it"}, part]
    second = client.post("/v1/messages", json={"user_id": "ann", "parts": parts, "message_id": "m-2"}).json()
    queue = client.get(f"/v1/sessions/{first['session_id']}/queue").json()
    assert [(each["turn_id"], each["seq"], each["status"], each["message_id"]) for each in queue] == [
        (first["turn_id"], 1, "accepted", "m-1"),
        (second["turn_id"], 2, "accepted", "m-2"),
    ]
    assert [each["text"] for each in queue] == ["Plan the trip.", "Read it"]
    assert [[each["name"] for each in turn["parts"]] for turn in queue] == [[], ["note.txt"]]
    assert len(client.get(f"/v1/sessions/{first['session_id']}/queue?limit=1").json()) == 1
    run(first["session_id"])
    run(first["session_id"])
    assert client.get(f"/v1/sessions/{first['session_id']}/queue").json() == []
    said = client.get(f"/v1/sessions/{first['session_id']}/messages").json()
    assert [each["message_id"] for each in said if each["role"] == "user"] == ["m-1", "m-2"]


def test_merged_messages_are_one_text_of_the_queue(client: TestClient, say: Callable[..., dict[str, Any]]) -> None:
    """Messages that were merged into a waiting turn are shown with it, in their order."""
    first = say("Plan the trip.")
    say("To Rome.", on_busy="merge")
    [queued] = client.get(f"/v1/sessions/{first['session_id']}/queue").json()
    assert queued["text"] == "Plan the trip.\n\nTo Rome."


def test_the_queue_of_an_unknown_session_is_not_found(client: TestClient) -> None:
    """An id of no session gets 404, not an empty queue."""
    assert client.get("/v1/sessions/01931e6f-5d69-7b80-8f0c-2c9d8c1b7a55/queue").status_code == 404
