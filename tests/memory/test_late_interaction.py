"""Late interaction: of what recall finds, the texts rank higher whose words are similar to the question's."""

from __future__ import annotations

import time

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.memory.recall import search
from perdure.memory.recall.expansion import Expansion, expand
from perdure.memory.recall.late_interaction import fits
from perdure.memory.recall.search import Layer, Recall
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.static import table
from perdure.settings import MemorySettings
from tests.memory.corpus import import_conversation, know

_ANA = UserKey("ana")
_QUESTION = "Which animal does she keep?"
_TEXTS = ["She keeps a secret.", "She keeps a cat.", "She keeps a bicycle."]


def _fits(question: str, *texts: str) -> list[float]:
    return fits(expand(question, 1.0), texts)


def test_the_nearest_word_of_a_text_counts() -> None:
    secret, cat, bicycle = _fits(_QUESTION, *_TEXTS)
    assert 0 < max(secret, bicycle) < cat < 1
    assert _fits("Is my dog ill?", "Is my dog ill?") == [1.0]


def test_telling_words_count_more() -> None:
    telling, others = _fits("What did the dog eat?", "A dog and food.", "What did the man see?")
    assert telling > others


def test_among_many_words_some_are_always_similar() -> None:
    """So the best passage counts, and not the words of all."""
    words = [word for word in table().words[2_000:12_000:50] if word.isalpha()]
    passages = [" ".join(words[at : at + 50]) for at in range(0, len(words), 50)]
    each = _fits(_QUESTION, *passages)
    assert _fits(_QUESTION, " ".join(words)) == pytest.approx([max(each)])
    assert _fits(_QUESTION, " ".join([*words, "She keeps a cat."]))[0] > max(each)


def test_a_text_of_unknown_words_fits_as_well_as_the_others_on_average() -> None:
    secret, cat, unknown, empty = _fits(_QUESTION, *_TEXTS[:2], "Kwame Adaeze Nkemdilim", "")
    assert unknown == empty == pytest.approx((secret + cat) / 2)


def test_texts_in_another_language_fit_equally() -> None:
    assert len({*_fits(_QUESTION, "망고를 좋아해요", "오페라를 좋아해요", "산책을 좋아해요")}) == 1


def test_an_unknown_word_of_the_question_fits_itself() -> None:
    with_it, without = _fits("How is the zxq81 mounted?", "The zxq81 is on the wall.", "The plate is on the wall.")
    assert with_it > without


@pytest.mark.parametrize("question", ["", "Wann hat Anna geheiratet?", "회의실은 어떻게 예약하나요?"])
def test_a_question_that_is_not_expanded_tells_nothing(question: str) -> None:
    assert expand(question, 1.0) == Expansion()
    assert len({*_fits(question, *_TEXTS)}) == 1


def test_long_texts_are_compared_quickly() -> None:
    words = table().words
    question, texts = " ".join(words[3_000:3_400]), [" ".join(words[at : at + 400]) for at in range(0, 16_000, 400)]
    begun = time.perf_counter()
    assert len(_fits(question, *(text * 50 for text in texts))) == len(texts)
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
