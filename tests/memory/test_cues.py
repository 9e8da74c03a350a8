"""A question tells who said what it asks for, and whether that was the first or the last time."""

from __future__ import annotations

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.memory.recall.cues import MAX_CHARS, find_cues
from perdure.memory.recall.search import Recall
from perdure.models.embedders.hashing import HashEmbedder
from perdure.settings import MemorySettings
from tests.memory.corpus import import_conversation, imported, line

_TALK = [
    "Today I ran a race in Ghent.",
    "Well done!",
    "The cat sleeps.",
    "As always.",
    "Today I ran a race in Bruges.",
    "Well done!",
    "It rains.",
    "As always.",
    "Today I ran a race in Liège.",
    "Well done!",
]


@pytest.mark.parametrize(
    ("question", "order"),
    [
        ("What was the first race that I ran?", -1),
        ("Where did Tom live originally?", -1),
        ("Which race did I run last?", 1),
        ("Where does she work now?", 1),
        ("Wo wohnte Ines zuerst?", -1),
        ("Wann war das letzte Konzert?", 1),
        ("Quel a été le dernier concert ?", 1),
        ("¿Cuál fue la última carrera?", 1),
        ("처음 산 차는 뭐였지?", -1),
        ("최근에 본 영화는 뭐야\uff1f", 1),
        ("Which was the first, and which the last?", 0),
        ("What did I do last week?", 0),
        ("What happened last March?", 0),
        ("Où étais-je la semaine dernière ?", 0),
        ("Was habe ich letzten Freitag gekauft?", 0),
        ("What is Ines's first name, and what her last name?", 0),
        ("How long does the battery last?", 0),
        ("지금까지 뭐 샀지?", 0),
        ("Das ursprüngliche Haus stand wo, u\u0308berhaupt und urspru\u0308nglich?", -1),
        ("Where was the race?", 0),
        ("First I went to the market, and now I am home.", 0),
        ("What was the first race? " + "So much has happened. " * (MAX_CHARS // 20), 0),
    ],
)
def test_the_order(question: str, order: int) -> None:
    """Only a question has an order, in some languages; "last week" is a time, which `time_spans` finds."""
    assert find_cues(question).order == order


@pytest.mark.parametrize(
    ("question", "author", "named"),
    [
        ("What did Ines buy?", "Ines", True),
        ("What did INES buy?", "ines", True),
        ("Where does Tom's sister live?", "Tom", True),
        ("What did Silva say?", "Ines Silva", True),
        ("Was hat Zoë gekauft?", "Zoë", True),
        ("민수는 어디 살아?", "민수", True),
        ("What did Inessa buy?", "Ines", False),
        ("What did Ines buy?", None, False),
        ("What did Ines buy?", "", False),
        ("What did I buy?", "I", False),
        ("Wo wohnt Zoe\u0308?", "Zoë", True),
        ("Where does Ana's sister live?", "María de la Cruz", False),
        ("Can you tell me what Tom bought?", "me@corp.example", False),
        ("What is the may blossom?", "What Is The", False),
        ("What did the bébé eat?", "Bé", False),
        ("Ines bought a cello.", "Ines", False),
    ],
)
def test_a_named_author(question: str, author: str | None, named: bool) -> None:
    """A question names an author if it has a word of the author's name that is not a word of questions."""
    assert find_cues(question).names(author) is named


@pytest.mark.parametrize(("question", "town"), [("first", "Ghent"), ("last", "Liège")])
@pytest.mark.parametrize("embedder", [None, HashEmbedder(128)], ids=["words", "vectors"])
def test_the_first_or_the_last_of_several_is_found_first(
    question: str, town: str, embedder: HashEmbedder | None, database: Database, clock: MovedClock
) -> None:
    """Of messages that match alike, the earliest or the latest is the best, if the question asks for it."""
    import_conversation(database, clock, _TALK, embedder)
    recall = Recall(database, embedder, MemorySettings(), clock)
    assert town in recall.search(UserKey("ana"), f"Where was the {question} race that I ran?", 1)[0].content


@pytest.mark.parametrize(("author", "other"), [("Ines", "Tom"), ("Tom", "Ines")])
def test_the_messages_of_a_named_author_are_found_first(
    author: str, other: str, database: Database, clock: MovedClock
) -> None:
    """Of messages that match alike, the best is of the author whom the question names."""
    said = [
        ("Tom", "I bought a cello."),
        ("Ines", "Very well, Tom."),
        ("Ines", "I bought a cello."),
        ("Tom", "Oh, Ines!"),
    ]
    lines = [
        line(number, content, author=name, session=f"session {number}")
        for number, (name, content) in enumerate(said, start=1)
    ]
    imported(database, clock, lines, None)
    found = Recall(database, None, MemorySettings(), clock).search(
        UserKey("ana"), f"Which cello has {author} bought?", 4
    )
    assert [each.author for each in found if "cello" in each.content] == [author, other]


@pytest.mark.parametrize(
    ("name", "weight"), [("hash:128", 0.6), ("static:384", 1.2), ("wordllama:128", 1.0), ("openai:small", 1.5)]
)
def test_the_weight_of_vectors_is_that_of_the_embedder(
    name: str, weight: float, database: Database, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `PERDURE_MEMORY__RECALL_VECTOR`, the weight is the one fitted for the embedder."""
    embedder = HashEmbedder(128)
    monkeypatch.setattr(HashEmbedder, "name", name)
    import_conversation(database, clock, _TALK, embedder)

    def scores(given: float | None) -> list[float]:
        recall = Recall(database, embedder, MemorySettings(recall_vector=given), clock)
        return [each.score for each in recall.search(UserKey("ana"), "a race in the rain", 10)]

    assert scores(None) == scores(weight) != scores(weight + 0.2)


def test_a_cue_prefers_no_message_to_a_memory(database: Database, clock: MovedClock) -> None:
    """The scores stay as they were, in another order, and none is above 1."""
    import_conversation(database, clock, _TALK)
    recall = Recall(database, None, MemorySettings(recall_neighbours=0, recall_related=0), clock)
    plain = recall.search(UserKey("ana"), "Where was the race that I ran today", 10)
    cued = recall.search(UserKey("ana"), "Where was the last race that I ran today?", 10)
    assert [each.score for each in cued] == [each.score for each in plain]
    assert cued[0].content == _TALK[8] != plain[0].content
    assert cued[0].score <= 1
