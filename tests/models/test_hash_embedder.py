"""The embedder `hash:` gives similar vectors to texts that share words or parts of words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.models.embedders.hashing import HashEmbedder, words
from perdure.testing.suites.embedders import cosine

EMBEDDER = HashEmbedder(384)


def likeness(one: str, other: str) -> float:
    """The cosine similarity of the vectors of two texts."""
    return cosine(*EMBEDDER.embed([one, other]))


@pytest.mark.parametrize(
    ("text", "near", "far"),
    [
        ("My name is Ana and I live in Lyon.", "Ana lives in Lyon", "Deploys happen on Friday at noon"),
        ("The user prefers tea to coffee", "She likes tea more than coffee", "My name is Ana"),
        ("the consolidation of memories", "memories are consolidated", "the weather of tomorrow"),
        ("서울에서 살고 있어요", "저는 서울에 삽니다", "커피보다 차를 좋아해요"),
        ("저는 커피를 좋아합니다", "커피 좋아하세요?", "서울에서 살고 있어요"),
        ("我住在北京", "他在北京住", "今天天气很好"),
        ("東京に住んでいます", "東京に住む", "コーヒーが好きです"),
        ("मुझे हिन्दी में लिखो", "हिन्दी भाषा", "चाय पसंद है"),
        ("Ich wohne in Köln", "Köln, wo ich wohne", "Der Termin ist morgen"),
    ],
)
def test_texts_with_common_words_or_parts_are_nearer(text: str, near: str, far: str) -> None:
    """In any language, texts that share words or parts of words have more similar vectors than unrelated texts."""
    assert likeness(text, near) > 0.15
    assert likeness(text, near) > 2 * likeness(text, far)


def test_case_accents_and_punctuation_do_not_count() -> None:
    """Case, accents and punctuation do not change a vector."""
    assert likeness("Café à Orléans!", "cafe a orleans") == pytest.approx(1.0)
    assert likeness("한국어", "한국어") == pytest.approx(1.0)


def test_a_number_counts_as_much_as_a_long_word() -> None:
    """Numbers distinguish otherwise equal sentences."""
    assert likeness("The meeting is at 10", "The meeting is at 11") < 0.8


@given(st.text(max_size=60))
def test_texts_without_a_word_in_common_are_far(text: str) -> None:
    """Unrelated texts have dissimilar vectors, despite hash collisions."""
    other = "zyqqwvxjk kqjzvwxqy"
    if not set("".join(words(text))) & set(other):
        assert abs(likeness(text, other)) < 0.5


def test_is_the_same_in_every_process_and_release() -> None:
    """A text's vector must never change, because vectors are stored."""
    vector = HashEmbedder(64).embed(["Ana lives in Lyon. 서울에 살아요."])[0]
    largest = {at: round(value, 4) for at, value in enumerate(vector) if abs(value) > 0.2}
    assert largest == {9: -0.2564, 15: 0.4422, 16: 0.3365, 24: -0.2072, 35: -0.344, 40: 0.2318, 58: -0.2243}


def test_a_very_long_word_costs_no_more_than_many_words() -> None:
    """A word is split after every 32 characters. A long word is embedded as fast as ordinary text of equal length."""
    assert {len(each) for each in words("x" * 100_000)} <= {32, 100_000 % 32}
