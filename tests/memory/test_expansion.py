"""Query expansion: recall looks for a question's telling words first, and for words that are related to them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.memory.recall.expansion import Expansion, expand
from perdure.memory.recall.search import Layer, Recall
from perdure.models.embedders import static
from perdure.models.embedders.hashing import HashEmbedder
from perdure.settings import MemorySettings
from tests.memory.corpus import import_conversation, know

_ANA = UserKey("ana")

_UNRELATED = [f"{what}, part {number}." for number in range(12) for what in ("The report is long", "Nothing of note")]


def _weights(expansion: Expansion) -> dict[str, float]:
    return dict(zip(expansion.words, expansion.weights, strict=True))


def test_telling_words_weigh_more() -> None:
    expansion = expand("Where did the dog get sick?", 1.0)
    assert expansion.words[: expansion.own] == ("where", "did", "the", "dog", "get", "sick")
    weights = _weights(expansion)
    assert min(weights["dog"], weights["sick"]) > max(weights["did"], weights["get"], weights["the"]) + 0.2


@pytest.mark.parametrize(
    ("question", "related"),
    [
        ("Is my dog ill?", {"puppy", "sick"}),
        ("Which car does she drive?", {"vehicle", "automobile"}),
        ("When was the wedding?", {"bride", "marriage", "married"}),
        ("Who are her kids?", {"child", "children"}),
    ],
)
def test_related_words_are_looked_for_with_less_weight(question: str, related: set[str]) -> None:
    expansion = expand(question, 1.0)
    found = expansion.words[expansion.own :]
    assert related & {*found}
    assert len(found) <= 5
    assert 0 < max(expansion.weights[expansion.own :]) < 1


def test_related_words_fit_the_whole_question() -> None:
    """Of the words that are similar to "bank", those fit beside "money" that do not fit beside "river"."""
    money = {*expand("Has she paid the money into the bank?", 1.0).words}
    river = {*expand("Did they fish from the bank of the river?", 1.0).words}
    banking = {"funds", "financially"}
    assert money >= banking
    assert not river & banking


@pytest.mark.parametrize(
    "question",
    [
        "",
        "???",
        "12 34",
        "Wann hat Anna geheiratet und wo war die Feier?",
        "Wann war die Feier?",
        "WANN IST DIE HOCHZEIT?",
        "Hat Anna einen Hund?",
        "Is de hond van Anna in Den Haag?",
        "Dove abita Marco Rossi?",
        "QUEL EST LE NOM DE MON CHAT?",
        "Come si chiama il mio cane?",
        "Quel est le nom de mon docteur?",
        "Por favor, dime el número de mi cuenta",
        "회의실은 어떻게 예약하나요?",
        "mi perro",
    ],
)
def test_a_text_of_mostly_unknown_words_stays_as_it_is(question: str) -> None:
    assert expand(question, 1.0) == Expansion()


def test_names_and_numbers_do_not_keep_a_text_from_being_expanded() -> None:
    expansion = expand("What did Kwame and Adaeze cook in 2024?", 1.0)
    assert not {"kwame", "adaeze"} & {*expansion.words}
    assert "anna" not in expand("What did Anna cook?", 1.0).words  # known to the table, and a name here
    assert {"culinary", "chef"} & {*expansion.words}


def test_a_weight_of_0_adds_no_word() -> None:
    expansion = expand("Is my dog ill?", 0.0)
    assert len(expansion.words) == expansion.own == 4


def test_a_long_text_is_expanded_quickly() -> None:
    text = " ".join(static.table().words[3_000:3_400])
    expand(text, 1.0)
    begun = time.perf_counter()
    expansion = expand(text, 1.0)
    assert time.perf_counter() - begun < 0.25
    assert len(expansion.words) == expansion.own + 5


def test_related_words_are_whole() -> None:
    """Each related word is another one than the word, and similar to it. Stop words have none."""
    read = static.table()
    with_related = 0
    for at in range(len(read.words)):
        found = read.related_to(at)
        assert at not in found
        assert all(other < len(read.words) and cosine >= 0.39 for other, cosine in found.items())
        with_related += bool(found)
    assert with_related > 0.95 * len(read.words)
    for word in ("the", "is", "wouldn"):
        assert read.related_to(read.places[word]) == {}


def test_threads_read_the_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    all_at_once, read = Barrier(8), static._read
    monkeypatch.setattr(static, "_loaded", [])

    def counted(content: bytes) -> static.Table:
        reads.append(len(content))
        return read(content)

    monkeypatch.setattr(static, "_read", counted)

    def load() -> static.Table:
        all_at_once.wait()
        return static.table()

    with ThreadPoolExecutor(8) as threads:
        found = [each.result() for each in [threads.submit(load) for _ in range(8)]]
    assert len(reads) == 1
    assert all(each is found[0] for each in found)


@pytest.mark.parametrize("embedder", [None, HashEmbedder(384)], ids=["by words only", "hash"])
def test_an_answer_in_other_words_is_found(
    database: Database, clock: MovedClock, embedder: HashEmbedder | None
) -> None:
    """Without expansion, no message shares a word with the question."""
    answer = "The puppy has been sick since Monday."
    import_conversation(database, clock, [*_UNRELATED, answer, *_UNRELATED], embedder)
    recall = Recall(database, embedder, MemorySettings(), clock)
    assert recall.search(_ANA, "Is my dog ill?", 1)[0].content == answer
    plain = Recall(database, None, MemorySettings(recall_related=0), clock)
    assert answer not in {each.content for each in plain.search(_ANA, "Is my dog ill?", 5)}


def test_a_related_word_ranks_after_the_word_itself(database: Database, clock: MovedClock) -> None:
    """Even if the word itself is frequent, and the related one is rare."""
    same = [f"On tuesday, part {number}." for number in range(15)]
    related = "On wednesday, part 99."
    import_conversation(database, clock, [*_UNRELATED, related, *_UNRELATED, *same, *_UNRELATED])
    recall = Recall(database, None, MemorySettings(recall_neighbours=0), clock)
    found = [each.content for each in recall.search(_ANA, "and on tuesday", 16)]
    assert {*found[:15]} == {*same}
    assert found[15] == related


@pytest.mark.parametrize("embedder", [None, HashEmbedder(384)], ids=["by words only", "hash"])
def test_a_barely_related_memory_does_not_outrank_the_very_words(
    database: Database, clock: MovedClock, embedder: HashEmbedder | None
) -> None:
    """The best of a layer has the full score of its words only if it has words of the question."""
    said = "My dog is ill since Monday."
    import_conversation(database, clock, [*_UNRELATED, said, *_UNRELATED], embedder)
    know(database, "ana", "The user thinks that the weather is worse in spring.", embedder or HashEmbedder(384))
    first, *_ = Recall(database, embedder, MemorySettings(), clock).search(_ANA, "Is my dog ill?", 3)
    assert first.content == said


def test_a_telling_word_outweighs_another_one(database: Database, clock: MovedClock) -> None:
    """Even in a longer message. Both words are equally rare."""
    telling, others = "Some scarlet umbrella.", "We did get there."
    import_conversation(database, clock, [*_UNRELATED, others, *_UNRELATED, telling, *_UNRELATED])
    recall = Recall(database, None, MemorySettings(recall_neighbours=0), clock)
    assert recall.search(_ANA, "did she get an umbrella", 1)[0].content == telling


def test_older_messages_are_found_by_related_words(database: Database, clock: MovedClock) -> None:
    """Among the messages before the newest 200, which an index finds."""
    answer = "The puppy has been sick since Monday."
    import_conversation(database, clock, [answer, *(f"Nothing of note, part {number}." for number in range(260))])
    recall = Recall(database, None, MemorySettings(), clock)
    assert recall.search(_ANA, "Is my dog ill?", 1)[0].content == answer


def test_memories_are_found_by_related_words(database: Database, clock: MovedClock) -> None:
    import_conversation(database, clock, ["Hello."])
    for content in ("The user owns an automobile.", "The user plays the oboe.", "The user is forty."):
        know(database, "ana", content, HashEmbedder(384))
    recall = Recall(database, None, MemorySettings(), clock)
    assert recall.search(_ANA, "Which car is it?", 1, [Layer.SEMANTIC])[0].content == "The user owns an automobile."


def test_a_rare_name_finds_an_older_message_among_many_known_words(database: Database, clock: MovedClock) -> None:
    """All words of the question are looked up among the older rows, although others weigh more."""
    answer = "Kwame gave me the key."
    import_conversation(database, clock, [answer, *(f"Nothing of note, part {number}." for number in range(260))])
    question = (
        "I am planning a wedding with an orchestra, a magician, sculptures, fireworks, balloons, a photographer, "
        "a violinist and champagne. What did Kwame say?"
    )
    assert Recall(database, None, MemorySettings(), clock).search(_ANA, question, 1)[0].content == answer


def test_an_unknown_word_keeps_its_weight_beside_a_related_word_with_its_stem(
    database: Database, clock: MovedClock
) -> None:
    """The table has "deleted", which is related to "erased", and not "delete"."""
    question, own, other = "How do I delete the erased files?", "Delete it.", "Erased it."
    assert "delete" not in static.table().places
    assert "deleted" in expand(question, 1.0).words
    import_conversation(database, clock, [*_UNRELATED, other, *_UNRELATED, own, *_UNRELATED])
    recall = Recall(database, None, MemorySettings(recall_neighbours=0), clock)
    scores = {each.content: each.score for each in recall.search(_ANA, question, 2)}
    assert scores[own] > 0.8 * scores[other]


def test_the_parts_of_an_address_are_no_words(database: Database, clock: MovedClock) -> None:
    """PostgreSQL finds an address as a whole."""
    import_conversation(database, clock, [*_UNRELATED, "An example of com."])
    found = Recall(database, None, MemorySettings(recall_neighbours=0), clock).search(
        _ANA, "please write to me@example.com", 1
    )
    assert [each.score for each in found] in ([], [0.0])
