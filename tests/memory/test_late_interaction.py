"""Late interaction: of what recall finds, the texts rank higher whose words are similar to the question's."""

from __future__ import annotations

import time

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.memory.recall import search
from perdure.memory.recall.cues import names_of
from perdure.memory.recall.expansion import Expansion, expand
from perdure.memory.recall.late_interaction import _Question, fits
from perdure.memory.recall.search import Layer, Recall
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.static import table
from perdure.settings import MemorySettings
from tests.memory.corpus import BEGIN, import_conversation, imported, know, line

_ANA = UserKey("ana")
_QUESTION = "Which animal does she keep?"
_TEXTS = ["She keeps a secret.", "She keeps a cat.", "She keeps a bicycle."]


def _fits(question: str, *texts: str) -> list[float]:
    return fits(expand(question, 1.0), texts, [1.0] * len(texts))[0]


def test_the_nearest_word_of_a_text_counts() -> None:
    secret, cat, bicycle = _fits(_QUESTION, *_TEXTS)
    assert 0 < max(secret, bicycle) < cat < 1
    assert _fits("Is my dog ill?", "Is my dog ill?") == [1.0]


def test_telling_words_count_more() -> None:
    telling, others = _fits("What did the dog eat?", "A dog and food.", "What did the man see?")
    assert telling > others


def test_single_letters_tell_nothing() -> None:
    """Articles, initials, and what an apostrophe cuts off."""
    for question in ("Does she have a cat?", "What is the dog's name?", "Did Ana M. call?"):
        letters, without = _fits(question, "That's a fact, i see, m.", "That is the fact, we see.")
        assert letters <= without


def test_among_many_words_some_are_always_similar() -> None:
    """So the best passage counts, and not the words of all."""
    words = [word for word in table().words[2_000:9_000:100] if word.isalpha()]
    passages = [" ".join(words[at : at + 50]) for at in range(0, len(words), 50)]
    each = _fits(_QUESTION, *passages)
    assert _fits(_QUESTION, " ".join(words)) == pytest.approx([max(each)])


def test_a_late_passage_of_a_long_text_counts() -> None:
    """What surrounds a word of the question is read, wherever it stands. What is not read is no disadvantage."""
    long = "The weather was nice, so we walked along the river and talked about the film. " * 30
    late, without, cat, bicycle = _fits(_QUESTION, f"{long} She keeps a cat. {long}", long, *_TEXTS[1:])
    assert late >= cat > bicycle
    assert without > _fits(_QUESTION, long[:900])[0]


@pytest.mark.parametrize("unknown", ["강아지를 키워요", "Kwame Adaeze Nkemdilim", "Adaeze keeps Nkemdilim Okonkwo", ""])
def test_a_text_of_unknown_words_fits_as_well_as_the_others_on_average(unknown: str) -> None:
    """The better the others were found, the more they count."""
    texts = [*_TEXTS[:2], unknown]
    (secret, cat, fit), average = fits(expand(_QUESTION, 1.0), texts, [0.2, 0.6, 0.9])
    assert fit == average == pytest.approx((0.04 * secret + 0.36 * cat) / 0.4)


def test_texts_in_another_language_fit_equally() -> None:
    assert len({*_fits(_QUESTION, "망고를 좋아해요", "오페라를 좋아해요", "산책을 좋아해요")}) == 1


@pytest.mark.parametrize(
    ("question", "right", "other"),
    [
        ("How is the zxq81 mounted?", "The zxq81 is on the wall.", "The plate is on the wall."),
        ("What does error ORA-01555 mean?", "ORA-01555: the snapshot is old.", "The error: the snapshot is old."),
        ("Did we pay invoice 4711?", "4711: paid on the phone.", "Did we pay for the phone?"),
        ("What is with the frobnicator?", "The frobnicators are in the shed.", "It is in the shed."),
        ("What did Bluebell eat?", "Bluebell had the hay.", "The horse had the hay."),
    ],
)
def test_a_name_or_an_unknown_word_fits_itself(question: str, right: str, other: str) -> None:
    with_it, without = _fits(question, right, other)
    assert with_it > without


@pytest.mark.parametrize(
    ("question", "author"),
    [
        ("What does Ines keep?", "Ines Duarte"),
        ("what does ines keep?", "Ines Duarte"),
        ("Ines keeps what?", "Ines Duarte"),
        ("What does Adèle keep?", "Adèle Martin"),
        ("what does tom keep?", "Tom"),  # the table knows "tom"
    ],
)
def test_the_names_of_authors_are_left_out(database: Database, clock: MovedClock, question: str, author: str) -> None:
    """A message that addresses an author is not the author's. One who did not write may be the one who is spoken of."""
    name = author.partition(" ")[0]
    texts = [f"Thanks, {name}, for the mail.", "I keep a cat at home."]
    expansion = expand(question, 1.0)
    addressed, own = fits(expansion, texts, [1.0, 1.0], names_of([author, None]))[0]
    assert addressed < own
    assert fits(expansion, texts, [1.0, 1.0], names_of(["Bruno"]))[0][0] > addressed + 0.1
    lines = [line(1, texts[0], author="Bruno"), line(2, texts[1], author=author)]
    imported(database, clock, lines)
    recall = Recall(database, None, MemorySettings(recall_neighbours=0), clock)
    assert recall.search(_ANA, question, 1)[0].content == texts[1]


def test_a_date_tells_less_than_a_verb() -> None:
    year, verb = _fits("When did she move, in 2023?", "The year 2023.", "She moved in March.")
    assert verb > year


@pytest.mark.parametrize("question", ["", "Wann hat Anna geheiratet?", "회의실은 어떻게 예약하나요?"])
def test_a_question_that_is_not_expanded_tells_nothing(question: str) -> None:
    assert expand(question, 1.0) == Expansion()
    assert len({*_fits(question, *_TEXTS)}) == 1


def test_of_a_long_text_only_parts_are_compared() -> None:
    """Also in the slowest scripts. Recall reads up to 8,000 characters of each text."""
    words = table().words
    question = " ".join(words[3_000:3_400])
    texts = [f"{' '.join(words[at : at + 400])} \ufdfa\u2019"[:2_000] * 4 for at in range(0, 16_000, 400)]
    asked = _Question.of(expand(question, 1.0), ())
    assert {len(asked._read(text)) < 1_500 < len(text) for text in texts} == {True}
    begun = time.perf_counter()
    assert len(_fits(question, *texts)) == len(texts)
    assert time.perf_counter() - begun < 1


def test_what_fits_ranks_first(database: Database, clock: MovedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all share the same words with the question."""
    import_conversation(database, clock, _TEXTS)
    recall = Recall(database, None, MemorySettings(recall_neighbours=0), clock)
    assert recall.search(_ANA, _QUESTION, 1)[0].content == _TEXTS[1]
    monkeypatch.setattr(search, "_FIT_WEIGHT", 0.0)
    assert recall.search(_ANA, _QUESTION, 1)[0].content != _TEXTS[1]


def test_memories_are_compared_in_the_same_way(database: Database, clock: MovedClock) -> None:
    """So that a memory that fits precedes a message that does not, and a message that fits precedes such a memory."""
    import_conversation(database, clock, ["She keeps a piano."])
    for content in ("She keeps a cat.", "She keeps a bicycle."):
        know(database, "ana", content, HashEmbedder(384))
    recall = Recall(database, None, MemorySettings(recall_neighbours=0), clock)
    found = recall.search(_ANA, _QUESTION, 3)
    assert (found[0].layer, found[0].content) == (Layer.SEMANTIC, "She keeps a cat.")
    assert recall.search(_ANA, "Which instrument does she keep?", 1)[0].content == "She keeps a piano."


@pytest.mark.parametrize("embedder", [None, HashEmbedder(384)], ids=["by words only", "hash"])
def test_memories_in_another_language_stay_before_messages(
    database: Database, clock: MovedClock, embedder: HashEmbedder | None
) -> None:
    """The table knows no word of them, which must not cost them their score."""
    talk = [f"{what}, part {number}." for number in range(12) for what in ("The report is long", "Nothing of note")]
    import_conversation(database, clock, [*talk, "When is the birthday party?", *talk], embedder)
    for content in ("Adaeze 생일은 5월 3일이에요. (birthday)", "서울에 살아요."):
        know(database, "ana", content, HashEmbedder(384))
    first, *_ = Recall(database, embedder, MemorySettings(), clock).search(_ANA, "When is the birthday of Adaeze?", 3)
    assert first.content == "Adaeze 생일은 5월 3일이에요. (birthday)"


def test_a_memory_of_the_day_stays_before_other_words(database: Database, clock: MovedClock) -> None:
    """What is asked for by its time need not fit by its words."""
    import_conversation(database, clock, ["Did you see that?", "It is fine here."])
    know(database, "ana", "Marta signed the lease.", HashEmbedder(384), valid_from=BEGIN)
    recall = Recall(database, None, MemorySettings(), clock)
    assert recall.search(_ANA, "What did we do on 4 March 2024?", 3)[0].content == "Marta signed the lease."


def test_a_memory_that_fits_may_have_been_found_late(database: Database, clock: MovedClock) -> None:
    import_conversation(database, clock, ["Hello."])
    for number in range(8):
        know(database, "ana", f"She keeps a {'secret' if number % 2 else 'problem'}.", HashEmbedder(384))
    know(database, "ana", "She keeps a cat indoors.", HashEmbedder(384))
    recall = Recall(database, None, MemorySettings(), clock)
    assert "cat" in recall.search(_ANA, _QUESTION, 1, [Layer.SEMANTIC])[0].content
    plain = Recall(database, None, MemorySettings(recall_related=0), clock)
    assert "cat" not in plain.search(_ANA, _QUESTION, 3, [Layer.SEMANTIC])[0].content


def test_the_best_are_the_same_for_each_number_of_results(database: Database, clock: MovedClock) -> None:
    """Up to 30 results: so many are compared with the question even for a single result."""
    contents = [f"She keeps a {word}, on day {number}." for number, word in enumerate(table().words[3_000:3_150])]
    import_conversation(database, clock, contents)
    recall = Recall(database, None, MemorySettings(recall_neighbours=0), clock)
    few, many = (recall.search(_ANA, _QUESTION, k) for k in (1, 20))
    assert [each.id for each in few] == [each.id for each in many[:1]]


def test_long_messages_are_whole(database: Database, clock: MovedClock) -> None:
    """Although only their beginnings are read to compare them."""
    long = [f"She keeps a cat, number {number}. {'Nothing of note. ' * 2_000}".strip() for number in range(3)]
    import_conversation(database, clock, [*long, *_TEXTS])
    found = Recall(database, None, MemorySettings(), clock).search(_ANA, _QUESTION, 6)
    assert {each.content for each in found} == {*long, *_TEXTS}


def test_scores_are_at_most_1_and_descend(database: Database, clock: MovedClock) -> None:
    contents = [f"She keeps a {word}." for word in table().words[3_000:3_060]]
    import_conversation(database, clock, [*contents, _QUESTION])
    for k in (3, 40, 60):
        found = Recall(database, None, MemorySettings(), clock).search(_ANA, _QUESTION, k)
        scores = [each.score for each in found]
        assert len(found) == k
        assert found[0].content == _QUESTION
        assert scores[0] <= 1
        assert scores == sorted(scores, reverse=True)


def test_a_weight_of_0_leaves_the_order_as_it_is(database: Database, clock: MovedClock) -> None:
    import_conversation(database, clock, _TEXTS)
    with_0 = Recall(database, None, MemorySettings(recall_related=0, recall_neighbours=0), clock)
    assert with_0.search(_ANA, _QUESTION, 1)[0].content != _TEXTS[1]
