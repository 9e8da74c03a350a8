"""Recall finds a user's relevant messages and memories by words, vectors and time, in English and Korean."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from zoneinfo import ZoneInfo

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import InvalidRequest, ProviderError
from perdure.memory.recall import search
from perdure.memory.recall.search import Layer, PromptWindow, Recall, Recalled
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Vector
from perdure.models.protocol import ModelCall
from perdure.settings import MemorySettings
from perdure.tools.memory import recall as recall_tool
from tests.databases import engine_of
from tests.memory.conftest import harness as harness  # noqa: PLC0414 (a fixture)
from tests.memory.corpus import BEGIN, import_conversation, imported, know, line
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

_EMBEDDER = HashEmbedder(128)

_TALK = (
    "Hello there!",
    "Good morning. What is on your mind?",
    "My sister Marta has moved to Lisbon for a new job.",
    "How lovely. What does she do there?",
    "She restores old tiles in a small workshop.",
    "That sounds like patient work.",
    "By the way, I am allergic to peanuts.",
    "I will keep that in mind.",
    "저는 부산에서 태어났어요.",
    "바다가 가까워서 좋았겠네요.",
)


class UnavailableEmbedder:
    """An embedder whose server cannot be reached."""

    name = "hash:128"
    dimensions = 128

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        raise ProviderError("The server of the embedder cannot be reached.", transient=True)


@pytest.fixture
def recall(database: Database, clock: MovedClock) -> Recall:
    """A `Recall` that uses the built-in embedder."""
    return Recall(database, _EMBEDDER, MemorySettings(), clock)


def _contents(found: Sequence[Recalled]) -> list[str]:
    return [each.content for each in found]


_know = partial(know, embedder=_EMBEDDER)


def test_a_message_is_found_by_its_words(database: Database, clock: MovedClock, recall: Recall) -> None:
    """The line that answers a question ranks first. The result has that line's message id, role, channel and time."""
    import_conversation(database, clock, _TALK, _EMBEDDER)
    found = recall.search(UserKey("ana"), "Where does Marta live now, in Lisbon?", 3)
    assert found[0].content == _TALK[2]
    assert (found[0].layer, found[0].id, found[0].message_ids) == (Layer.EPISODIC, "m3", ("m3",))
    assert (found[0].role, found[0].channel, found[0].occurred_at) == ("user", "import", BEGIN + timedelta(minutes=3))
    assert 0 < found[-1].score <= found[0].score <= 1
    assert {_TALK[1], _TALK[3]} & set(_contents(found)) or _TALK[4] in _contents(found)


def test_inflected_words_are_the_same_words(database: Database, clock: MovedClock, recall: Recall) -> None:
    """A search finds inflected forms of English words, and Korean nouns with any particle."""
    import_conversation(database, clock, _TALK)  # without vectors, so the search uses only words
    assert _contents(recall.search(UserKey("ana"), "who is restoring a tile", 1)) == [_TALK[4]]
    assert _contents(recall.search(UserKey("ana"), "부산은 어떤 곳이야?", 1)) == [_TALK[8]]
    assert _contents(recall.search(UserKey("ana"), "바다를", 1)) == [_TALK[9]]


def test_a_neighbour_lends_its_score(database: Database, clock: MovedClock) -> None:
    """An answer that shares no word with the question gets a share of the score of the message before it."""
    talk = [f"Nothing of note, part {number}." for number in range(6)]
    talk[2:4] = ["Which instrument did you learn as a child?", "The oboe."]
    import_conversation(database, clock, talk)
    lending = Recall(database, None, MemorySettings(recall_neighbours=0.4), clock)
    assert _contents(lending.search(UserKey("ana"), "learned an instrument", 2)) == talk[2:4]
    strict = Recall(database, None, MemorySettings(recall_neighbours=0), clock)
    second = strict.search(UserKey("ana"), "learned an instrument", 2)[1]
    assert second.score == 0


def test_neighbours_among_many_that_match(database: Database, clock: MovedClock) -> None:
    """The best match's neighbour ranks before a hundred weaker matches, and each message appears once."""
    import_conversation(database, clock, [f"The harbour, part {number}." for number in range(100)], _EMBEDDER)
    pair = ["Which lighthouse stands at the harbour?", "The white one."]
    lines = [line(number, content, session="second") for number, content in enumerate(pair, start=1_001)]
    imported(database, clock, lines, _EMBEDDER)
    recall = Recall(database, _EMBEDDER, MemorySettings(recall_neighbours=0.4), clock)
    for k in (2, 100):
        found = recall.search(UserKey("ana"), "the lighthouse at the harbour", k)
        assert _contents(found[:2]) == pair
        assert len({each.id for each in found}) == len(found) == k


def test_nothing_is_lent_over_a_gap(database: Database, clock: MovedClock) -> None:
    """Two weak matches do not raise each other's score if other lines are between them."""
    talk = [f"Nothing of note, part {number}." for number in range(10)]
    talk[2] = talk[7] = "Somebody mentioned the harbour once."
    import_conversation(database, clock, talk)
    best = [line(number, "The harbour.", session=f"session {number}") for number in range(1_001, 1_026)]
    imported(database, clock, best)
    recall = Recall(database, None, MemorySettings(recall_neighbours=0.4), clock)
    assert _contents(recall.search(UserKey("ana"), "harbour", 10)) == ["The harbour."] * 10


def test_rarity_counts_the_messages_in_the_prompt(database: Database, clock: MovedClock, recall: Recall) -> None:
    """Messages in the prompt count towards word frequencies.

    A rare word outweighs two words that are frequent in the prompt.
    """
    older = ["The oboe stands in the attic.", "Fine weather today."]
    import_conversation(database, clock, older, session="then")
    newest = [f"The weather is fine today, part {number}." for number in range(510)]
    lines = [line(number, content, session="now") for number, content in enumerate(newest, start=1_001)]
    imported(database, clock, lines)
    now = recall.search(UserKey("ana"), "part 1", 1)[0].session_id
    assert now is not None
    found = recall.search(UserKey("ana"), "is the oboe fine today", 2, in_prompt=PromptWindow(now))
    assert _contents(found) == older


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, 5),  # all terms at once find everything
        ({"_MOST_FOUND": 3}, 3),  # all terms at once find too many rows, so the terms are looked up one after the other
        ({"_MOST_FOUND": 3, "_MOST_AT_ONCE": 0}, 3),
        ({"_MOST_AT_ONCE": 0}, 5),  # as for a user with many rows
    ],
)
def test_older_messages_are_found_at_once_or_term_by_term(
    database: Database, clock: MovedClock, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], most: int
) -> None:
    """Those with two words of the question first, if there are too many."""
    older = [
        "One oboe's sound.", "Two oboes here.", "An oboe in the attic.", "An attic with an oboe.", "The attic is full.",
    ]  # fmt: skip
    import_conversation(database, clock, [*older, *(f"Nothing of note, part {number}." for number in range(230))])
    for name, value in limits.items():
        monkeypatch.setattr(search, name, value)
    recall = Recall(database, None, MemorySettings(recall_neighbours=0, recall_related=0), clock)
    found = [each.content for each in recall.search(UserKey("ana"), "the oboe and the attic", 10) if each.score]
    assert len(found) == most
    assert {*found[:2]} == {*older[2:4]}
    assert {*found} <= {*older}


@pytest.mark.parametrize("at_once", [0, 2_000], ids=["term by term", "at once"])
def test_older_rows_that_do_not_count_are_not_found(
    database: Database, clock: MovedClock, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Among rows that the index finds: of excluded sessions, in the prompt, of other users, and archived."""
    monkeypatch.setattr(search, "_MOST_AT_ONCE", at_once)
    for session in ("excluded", "prompt", "right"):
        import_conversation(database, clock, [f"The oboe of {session}."], session=session)
    import_conversation(database, clock, ["The oboe of Bob."], user_id="bob")
    recall = Recall(database, None, MemorySettings(recall_neighbours=0, recall_related=0), clock)
    excluded, prompt = (recall.search(UserKey("ana"), each, 1)[0].session_id for each in ("excluded", "prompt"))
    assert excluded is not None
    assert prompt is not None
    for number in range(210):
        _know(database, "ana", f"Nothing of note, part {number}.")
    newest = [line(number, f"Nothing of note, part {number}.", session="now") for number in range(1_001, 1_231)]
    imported(database, clock, newest)
    archived = _know(database, "ana", "The oboe of the archive.", valid_from=BEGIN - timedelta(days=9))
    kept = _know(database, "ana", "The oboe of the memory.", valid_from=BEGIN - timedelta(days=9))
    engine = engine_of(database.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("UPDATE memories SET archived_at = now() WHERE memory_id = %(id)s", {"id": archived})
    found = recall.search(
        UserKey("ana"), "oboe", 20, in_prompt=PromptWindow(prompt), exclude_sessions=[excluded], record=False
    )
    assert {each.content for each in found if each.score} == {"The oboe of right.", "The oboe of the memory."}
    assert kept in {each.id for each in found}


def test_other_users_are_not_found(database: Database, clock: MovedClock, recall: Recall) -> None:
    """Another user's messages and memories are never found."""
    import_conversation(database, clock, _TALK, _EMBEDDER, user_id="bob")
    _know(database, "bob", "Bob's sister Marta lives in Lisbon.")
    import_conversation(database, clock, ["Marta"], _EMBEDDER)
    assert _contents(recall.search(UserKey("ana"), "Marta Lisbon sister", 10)) == ["Marta"]
    assert recall.search(UserKey("eve"), "Marta Lisbon sister", 10) == []


def test_layers_are_searched_together_or_apart(database: Database, clock: MovedClock, recall: Recall) -> None:
    """A search covers messages, memories or both. A found memory lists the message ids of its source messages."""
    import_conversation(database, clock, _TALK, _EMBEDDER)
    memory_id = _know(database, "ana", "Marta, the user's sister, lives in Lisbon.")
    engine = engine_of(database.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO memory_sources SELECT %s, session_id, seq FROM messages WHERE seq IN (3, 5)", (memory_id,)
        )
    engine.dispose()
    together = recall.search(UserKey("ana"), "Marta in Lisbon", 5)
    assert {each.layer for each in together} == set(Layer)
    (known,) = recall.search(UserKey("ana"), "Marta in Lisbon", 5, [Layer.SEMANTIC])
    assert (known.id, known.message_ids, known.kind) == (memory_id, ("m3", "m5"), "fact")
    assert {each.layer for each in recall.search(UserKey("ana"), "Marta in Lisbon", 5, [Layer.EPISODIC])} == {
        Layer.EPISODIC
    }
    assert recall.search(UserKey("ana"), "Marta in Lisbon", 5, []) == []
    assert json.dumps(known.as_json())


def test_superseded_memories_rank_after_valid_ones(database: Database, clock: MovedClock, recall: Recall) -> None:
    """A superseded memory is found and has a `valid_to`. An archived memory is not found."""
    now = _know(database, "ana", "The user lives in Porto.", valid_from=BEGIN + timedelta(days=9))
    _know(database, "ana", "The user lives in Porto Novo.", valid_to=BEGIN + timedelta(days=9), superseded_by=now)
    _know(database, "ana", "The user lives in Portland.", archived_at=BEGIN)
    found = recall.search(UserKey("ana"), "lives in Porto", 10)
    assert [(each.content, each.valid_to is None) for each in found] == [
        ("The user lives in Porto.", True),
        ("The user lives in Porto Novo.", False),
    ]


def test_time_words_narrow_the_search(database: Database, clock: MovedClock, recall: Recall) -> None:
    """Among similar lines, the line from the time that the question names ranks first."""
    moved = MovedClock()
    moved.advance(datetime(2024, 3, 20, 12, tzinfo=UTC) - moved.now())
    recall = replace(recall, clock=moved)
    days = [datetime(2024, month, 13, 9, tzinfo=UTC) for month in (1, 2, 3)]
    lines = [
        line(number, f"We went to the market, trip {number}.", session=f"s{number}", occurred_at=day.isoformat())
        for number, day in enumerate(days, start=1)
    ]
    imported(database, clock, lines, _EMBEDDER)
    assert recall.search(UserKey("ana"), "the market last week", 1)[0].id == "m3"
    assert recall.search(UserKey("ana"), "which market in February", 1)[0].id == "m2"
    assert recall.search(UserKey("ana"), "시장 2024년 1월 13일", 1)[0].id == "m1"
    assert recall.search(UserKey("ana"), "what was there last month", 1)[0].id == "m2"


@pytest.mark.parametrize("zone", ["Etc/GMT-14", "Etc/GMT+12"])
def test_yesterday_is_that_of_the_messages_zone(harness: Harness, zone: str) -> None:
    """The prompt and the tool search in the zone of the turn's message. At 11 UTC, their days do not overlap."""
    now = harness.clock.now()
    harness.clock.advance((now + timedelta(days=1)).replace(hour=11) - now)
    lines = []
    for number, each in enumerate(("Etc/GMT-14", "Etc/GMT+12"), start=1):
        noon = harness.clock.now().astimezone(ZoneInfo(each)).replace(hour=12) - timedelta(days=1)
        said = f"We went to the market of {each}."
        lines.append(line(2 * number + 1, said, session=f"s{number}", occurred_at=noon.isoformat()))
    imported(harness.database, harness.clock, lines, _EMBEDDER)
    harness.equip(recall_tool)
    harness.script(calls(("recall", {"query": "the market yesterday"})), says("There."))
    harness.ask("Which market was it yesterday?", user_id="ana", metadata={"timezone": zone})
    asked, answered = harness.model.requests[-2:]
    for told in ("\n".join(each.content for each in asked.messages), answered.messages[-1].content):
        assert re.findall(r"the market of ([^.]+)\.", told)[0] == zone


def test_messages_in_the_prompt_are_not_recalled(database: Database, clock: MovedClock, recall: Recall) -> None:
    """A message in the prompt is recalled neither as a match nor as a neighbour."""
    (session_id,) = import_conversation(database, clock, _TALK, _EMBEDDER).sessions
    found = recall.search(UserKey("ana"), "Marta Lisbon tiles", 10, in_prompt=PromptWindow(session_id, 4))
    assert [each.seq for each in found if each.seq is not None and each.seq >= 4] == []
    assert found[0].id == "m3"


def test_without_the_embedder_words_are_searched(database: Database, clock: MovedClock) -> None:
    """If the embedder is unavailable or not configured, the search uses only words."""
    import_conversation(database, clock, _TALK, _EMBEDDER)
    for embedder in (UnavailableEmbedder(), None):
        recall = Recall(database, embedder, MemorySettings(), clock)
        assert recall.search(UserKey("ana"), "allergic to peanuts", 1)[0].id == "m7"


@pytest.mark.parametrize(
    "query",
    [
        "",
        "   \n",
        "the of and is",
        "은 는 이 가",
        "'; DROP TABLE messages; --",
        "%(user_id)s %s {} : & | ! <-> * \\ ''",
        "\x00\ud800 peanuts",
        "peanuts " * 1_250,
        "땅콩" * 5_000,
        "a" * 10_000,
        "(" * 10_000,
        "0000-99-99 9999-12-31 in 1900 31st of June 999 years ago",
    ],
)
def test_any_query_is_accepted(query: str, database: Database, clock: MovedClock, recall: Recall) -> None:
    """A search accepts any text as its query. The result may be empty."""
    import_conversation(database, clock, _TALK, _EMBEDDER)
    _know(database, "ana", "The user is allergic to peanuts.")
    found = recall.search(UserKey("ana"), query)
    assert len(found) <= 10
    assert recall.search(UserKey("ana"), "peanuts", 1)


def test_k_counts_results(database: Database, clock: MovedClock, recall: Recall) -> None:
    """A search returns at most `k` results, messages and memories together. An invalid `k` is refused."""
    import_conversation(database, clock, _TALK, _EMBEDDER)
    _know(database, "ana", "The user is allergic to peanuts.")
    for k in (1, 4):
        assert len(recall.search(UserKey("ana"), "peanuts", k)) == k
    for k in (0, -1, 101):
        with pytest.raises(InvalidRequest):
            recall.search(UserKey("ana"), "peanuts", k)


def test_recalls_are_recorded(database: Database, clock: MovedClock, recall: Recall) -> None:
    """A search records one access to each memory that it returns. With `record=False`, it records no access."""
    read = _know(database, "ana", "The user is allergic to peanuts.")
    recall.search(UserKey("ana"), "peanuts", record=False)
    recall.search(UserKey("ana"), "peanuts")
    recall.search(UserKey("ana"), "peanuts")
    engine = engine_of(database.url)
    with engine.connect() as connection:
        row = connection.exec_driver_sql("SELECT access_count, last_accessed_at FROM memories").one()
        accesses = connection.exec_driver_sql("SELECT memory_id FROM memory_accesses").scalars().all()
    engine.dispose()
    assert row.access_count == 2
    assert row.last_accessed_at is not None
    assert accesses == [read, read]
