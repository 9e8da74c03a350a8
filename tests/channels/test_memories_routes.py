"""A user sees, corrects and forgets memories over HTTP, and sends messages that are not remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.testclient import TestClient

from perdure.access.tenants import UserKey
from perdure.channels.http.schemas.memory import Memory
from perdure.runtime import Runtime
from tests.memory.remembering import add_memory

MEMORIES = "/v1/memories"


def _listed(client: TestClient, **query: Any) -> list[Memory]:
    answer = client.get(MEMORIES, params={"user_id": "ann", **query})
    assert answer.status_code == 200, answer.text
    return [Memory.model_validate(each) for each in answer.json()]


def test_a_memory_is_seen_corrected_and_forgotten(
    client: TestClient, runtime: Runtime, say: Callable[..., dict[str, Any]], run: Callable[[str], None]
) -> None:
    """A correction answers with the new memory. What is forgotten is gone, and so is an unknown id."""
    run(say("hello")["session_id"])
    wrong = add_memory(runtime, UserKey("ann"), "The user lives in Lyon.")
    assert [str(each.id) for each in _listed(client)] == [wrong]
    answer = client.patch(f"{MEMORIES}/{wrong}", json={"content": "The user lives in Nice."})
    assert answer.status_code == 200, answer.text
    right = Memory.model_validate(answer.json())
    assert (right.content, right.attribute, right.valid_until) == ("The user lives in Nice.", "home", None)
    read = client.get(f"{MEMORIES}/{wrong}").json()
    assert read.pop("sources") == [], "the tool that stored it named none"
    assert read.pop("used_in") == []
    former = Memory.model_validate(read)
    assert (former.content, former.valid_until) == ("The user lives in Lyon.", right.valid_from)
    again = client.patch(f"{MEMORIES}/{wrong}", json={"content": "The user lives in Rome."})
    assert (again.status_code, again.json()["code"]) == (409, "CONFLICT")
    assert _listed(client, limit=1) == [right]
    assert _listed(client, after=right.id) == [former]
    assert client.delete(f"{MEMORIES}/{right.id}").status_code == 204
    assert _listed(client) == [former]
    for method in ("GET", "DELETE"):
        for gone in (right.id, uuid4(), "here"):
            assert client.request(method, f"{MEMORIES}/{gone}").status_code == 404


def test_a_correction_must_say_something(client: TestClient, runtime: Runtime, say: Callable[..., Any]) -> None:
    """A correction has text of at most 1,000 characters, and nothing else."""
    say("hello")
    memory_id = add_memory(runtime, UserKey("ann"), "The user lives in Lyon.")
    for body in ({}, {"content": " "}, {"content": "x" * 1_001}, {"content": "a", "type": "fact"}, {"content": 5}):
        assert client.patch(f"{MEMORIES}/{memory_id}", json=body).status_code == 400, body
    assert client.get(MEMORIES, params={"user_id": "ann", "after": "x"}).status_code == 400


def test_a_message_and_a_conversation_are_left_out(
    client: TestClient, say: Callable[..., dict[str, Any]], run: Callable[[str], None]
) -> None:
    """No search finds a message with `remember: false`, or the messages of a conversation that is left out."""

    def found(query: str) -> str:
        return client.post("/v1/memory/search", json={"user_id": "ann", "query": query}).text

    run(say("my castle is secret", remember=False)["session_id"])
    assert "castle" not in found("secret castle")
    run(say("my palace is hidden", conversation="private")["session_id"])
    assert "palace" in found("hidden palace")
    answer = client.patch("/v1/conversations/private?user_id=ann", json={"remember": False})
    assert (answer.status_code, answer.json()["remember"]) == (200, False)
    run(say("my cave is lost", conversation="private")["session_id"])
    assert "palace" not in found("hidden palace")
    assert "cave" not in found("lost cave")


def test_a_memory_leads_to_the_turns_that_had_it(
    client: TestClient, runtime: Runtime, say: Callable[..., dict[str, Any]], run: Callable[[str], None]
) -> None:
    """And each of them to the memory: what a wrong memory did can be seen."""
    run(say("hello")["session_id"])
    known = add_memory(runtime, UserKey("ann"), "The user lives in Lyon.")
    said = say("Where do I live? In Lyon?")
    run(said["session_id"])
    [use] = client.get(f"{MEMORIES}/{known}").json()["used_in"]
    assert use["turn_id"] == said["turn_id"]
    [step] = client.get(f"/v1/turns/{use['turn_id']}/prompt").json()["steps"]
    assert known in [each for part in step["parts"] if part["kind"] == "memory" for each in part.get("ids", ())]
