"""Memory over HTTP: search, consolidation on request, export and erasure of a user's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.memory import ConsolidationRequested, SearchResults
from perdure.channels.http.schemas.users import Erased, Export
from perdure.runtime import Runtime
from perdure.settings import Settings
from tests.channels.conftest import ADMIN_KEY, BASE_URL, SERVICE_KEY
from tests.conftest import RecordingWaker

SEARCH = "/v1/memory/search"


@pytest.fixture
def talked(say: Callable[..., dict[str, Any]], run: Callable[[str], None]) -> dict[str, Any]:
    """Runs a turn of Ann and a turn of Bob, who each mention a dog; returns the response to Bob's message."""
    run(say("my dog is called Waffle", message_id="of the dog")["session_id"])
    answer = say("my dog is called Rex", user_id="bob")
    run(answer["session_id"])
    return answer


@pytest.mark.usefixtures("talked")
def test_a_search_finds_one_users_messages_only(client: TestClient) -> None:
    """A search finds only the user's own messages. Each result has the message's id and a score."""
    answer = client.post(SEARCH, json={"user_id": "ann", "query": "what is the dog called?"})
    assert answer.status_code == 200
    found = SearchResults.model_validate(answer.json()).results
    assert ("episodic", "of the dog", ["of the dog"]) in [(each.layer, each.id, each.message_ids) for each in found]
    assert 0 < found[0].score <= 1
    assert "Rex" not in answer.text
    assert client.post(SEARCH, json={"user_id": "eve", "query": "dog"}).json() == {"results": []}


@pytest.mark.usefixtures("talked")
def test_k_counts_results_and_layers_are_chosen(client: TestClient) -> None:
    """`k` limits the number of results. `layers` selects messages or memories; this user has no memories yet."""

    def found(**more: Any) -> int:
        return len(client.post(SEARCH, json={"user_id": "ann", "query": "dog called Waffle", **more}).json()["results"])

    assert found() == 2
    assert found(k=1) == 1
    assert found(layers=["episodic"]) == 2
    assert found(layers=["semantic"]) == 0


@pytest.mark.usefixtures("talked")
def test_a_memory_that_has_ended_says_until_when_it_held(client: TestClient, runtime: Runtime) -> None:
    """`valid_until` is null for messages and for memories that hold."""
    with runtime.database.engine.connect() as connection:
        connection.exec_driver_sql(
            """
            INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                                  valid_from, valid_to)
            SELECT gen_random_uuid(), 'ann', 'fact', name || ' is the name of the dog', 1, 1, '{}', 'tool', now(),
                   '2025-01-01Z', CASE WHEN name = 'Rex' THEN '2025-06-01Z'::timestamptz END
            FROM unnest(ARRAY['Rex', 'Waffle']) AS name
            """
        )
    answer = client.post(SEARCH, json={"user_id": "ann", "query": "What is the name of the dog?"})
    found = {each.content: each.valid_until for each in SearchResults.model_validate(answer.json()).results}
    ended = found.pop("Rex is the name of the dog")
    assert ended is not None
    assert datetime.fromisoformat(ended) == datetime(2025, 6, 1, tzinfo=UTC)
    assert "Waffle is the name of the dog" in found
    assert set(found.values()) == {None}


@pytest.mark.usefixtures("talked")
@pytest.mark.parametrize(
    "query", ["", "the of and", "'; DROP TABLE memories; --", "& | ! ( ) :*", "x" * 10_000, "가" * 3_000]
)
def test_any_text_is_a_query(client: TestClient, query: str) -> None:
    """Any text is a valid query, even an empty text, stop words, SQL or ten thousand characters."""
    assert client.post(SEARCH, json={"user_id": "ann", "query": query}).status_code == 200


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"query": "x"}, "user_id"),
        ({"user_id": "ann"}, "query"),
        ({"user_id": "", "query": "x"}, "user_id"),
        ({"user_id": "ann", "query": 7}, "query"),
        ({"user_id": "ann", "query": "\x00"}, "NUL"),
        ({"user_id": "ann", "query": "x", "k": 0}, "k"),
        ({"user_id": "ann", "query": "x", "k": 101}, "k"),
        ({"user_id": "ann", "query": "x", "k": "10"}, "k"),
        ({"user_id": "ann", "query": "x", "layers": []}, "layers"),
        ({"user_id": "ann", "query": "x", "layers": ["procedural"]}, "layers"),
        ({"user_id": "ann", "query": "x", "depth": 2}, "depth"),
    ],
)
def test_a_bad_search_is_refused(client: TestClient, given: dict[str, Any], named: str) -> None:
    """An invalid search gets 400, and the error's detail names the invalid member."""
    answer = client.post(SEARCH, json=given)
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST")
    assert named in answer.json()["detail"]


def test_consolidation_is_requested(client: TestClient, waker: RecordingWaker, talked: dict[str, Any]) -> None:
    """A request consolidates one session or all pending sessions. An unknown session gets 404."""
    answer = client.post("/v1/memory/consolidate", json={"session_id": talked["session_id"]})
    assert answer.status_code == 202
    assert str(ConsolidationRequested.model_validate(answer.json()).session_id) == talked["session_id"]
    assert client.post("/v1/memory/consolidate").status_code == 202
    assert waker.consolidations == [UUID(talked["session_id"]), None]
    assert client.post("/v1/memory/consolidate", json={"session_id": str(uuid4())}).status_code == 404
    assert client.post("/v1/memory/consolidate", json={"session_id": "none"}).status_code == 404
    assert client.post("/v1/memory/consolidate", json={"user_id": "ann"}).status_code == 400
    assert len(waker.consolidations) == 2


def test_an_abandoned_consolidation_is_retried_on_request(
    client: TestClient, runtime: Runtime, talked: dict[str, Any]
) -> None:
    """A request makes an abandoned consolidation due again and resets its count of attempts to 0."""
    session_id = talked["session_id"]
    with runtime.database.engine.connect() as connection:
        connection.exec_driver_sql(
            "UPDATE sessions SET ended_at = perdure_now(), consolidation_attempts = 5,"
            " consolidation_given_up_at = perdure_now() WHERE session_id = %s",
            (session_id,),
        )
    shown = client.get(f"/v1/sessions/{session_id}").json()["consolidation"]
    assert (shown["status"], shown["runs"]) == ("given_up", 5)
    assert client.post("/v1/memory/consolidate", json={"session_id": session_id}).status_code == 202
    shown = client.get(f"/v1/sessions/{session_id}").json()["consolidation"]
    assert (shown["status"], shown["runs"]) == ("waiting", 0)


@pytest.mark.usefixtures("talked")
def test_a_user_is_exported_and_erased(client: TestClient) -> None:
    """An export contains all data of a user. An erasure removes this data and keeps other users' data."""
    exported = client.get("/v1/users/ann/export")
    assert exported.status_code == 200
    tables = Export.model_validate(exported.json()).tables
    assert tables["messages"][0]["content"] == "my dog is called Waffle"
    assert "Rex" not in exported.text
    erased = Erased.model_validate(client.delete("/v1/users/ann").json())
    assert {table: count for table, count in erased.rows.items() if count} == {
        table: len(rows) for table, rows in tables.items() if rows
    }
    assert client.get("/v1/users/ann/export").status_code == 404
    again = client.delete("/v1/users/ann")
    assert (again.status_code, set(again.json()["rows"].values())) == (200, {0})
    assert client.get("/v1/users/bob/export").status_code == 200


def test_an_id_may_hold_any_character(client: TestClient, say: Callable[..., dict[str, Any]]) -> None:
    """A user id may contain a slash, or text that looks like a route or an escape."""
    for user_id in ("telegram/7", "a b&c=d", "x/export", "한국", "50%", "a%2Fb", "/" * 200):
        say(user_id=user_id)
        quoted = quote(user_id, safe="")
        assert client.get(f"/v1/users/{quoted}/export").json()["user_id"] == user_id
        assert client.delete(f"/v1/users/{quoted}").json()["rows"]["users"] == 1


def test_an_id_is_one_segment_of_the_path(client: TestClient, say: Callable[..., dict[str, Any]]) -> None:
    """A user id is one path segment: `DELETE /v1/users/0/export` must not erase the user `0/export`."""
    say(user_id="0/export")

    for path in ("/v1/users/0/export", "/v1/users/0%2Fexport/more", "/v1/users/"):
        assert client.delete(path).status_code in {404, 405}
    assert client.get("/v1/users/0%2Fexport/export").status_code == 200
    assert client.get(f"/v1/users/{'x' * 201}/export").status_code == 400


@pytest.fixture
def keyless(runtime: Runtime) -> Iterator[TestClient]:
    """A client without a key, of a gateway that requires keys."""
    guarded = Settings(_env_file=None, api_keys=(SecretStr(SERVICE_KEY),), admin_keys=(SecretStr(ADMIN_KEY),))
    object.__setattr__(runtime, "settings", guarded)
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as made:
        yield made


def test_memory_routes_need_a_key(keyless: TestClient) -> None:
    """The routes need a key, and a service key may act for any user."""
    for method, path in (
        ("POST", SEARCH),
        ("POST", "/v1/memory/consolidate"),
        ("GET", "/v1/users/ann/export"),
        ("DELETE", "/v1/users/ann"),
    ):
        assert keyless.request(method, path, json={}).status_code == 401
    known = {"Authorization": f"Bearer {SERVICE_KEY}"}
    assert keyless.post(SEARCH, json={"user_id": "ann", "query": "x"}, headers=known).status_code == 200
    assert keyless.delete("/v1/users/ann", headers=known).status_code == 200
