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
