"""`static:384`, the built-in embedder with learned vectors of English words."""

from __future__ import annotations

import pytest

from perdure.clock import SystemClock
from perdure.errors import SettingsError
from perdure.models.embedders.cache import CachedEmbedder
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Embedder
from perdure.models.embedders.resolve import check, resolve
from perdure.models.embedders.static import StaticEmbedder, table
from perdure.models.protocol import CallAborted, ModelCall
from perdure.settings import Settings
from perdure.testing.suites.embedders import EmbedderSuite


class TestStatic(EmbedderSuite):
    @pytest.fixture
    def embedder(self) -> Embedder:
        return StaticEmbedder()


def _cosine(one: str, other: str, embedder: Embedder | None = None) -> float:
    first, second = (embedder or StaticEmbedder()).embed([one, other])
    return sum(a * b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("one", "other", "unrelated"),
    [
        ("my dog is ill", "the puppy has been sick", "the puppet has been sold"),
        ("which car does she drive?", "her automobile is red", "her autograph is rare"),
        ("what is his job?", "he works as a carpenter", "he walks on a carpet"),
        ("Where do they spend their holidays?", "we stayed at a hotel by the sea", "we saved a note for the meeting"),
    ],
)
def test_synonyms_are_nearer_than_similar_spellings(one: str, other: str, unrelated: str) -> None:
    assert _cosine(one, other) > _cosine(one, unrelated) + 0.05
    assert _cosine(one, other) > _cosine(one, other, HashEmbedder(384)) + 0.1


def test_words_without_a_vector_are_compared_by_their_spelling() -> None:
    """Names and other languages: as with `hash`."""
    for one, other, unrelated in (
        ("회의실 예약", "회의실은 어떻게 예약하나요?", "환불은 어떻게 받나요?"),
        ("Zwischenergebnisse", "das Zwischenergebnis", "der Feierabend"),
    ):
        assert _cosine(one, other) > 0.3 > _cosine(one, unrelated)


def test_one_known_word_does_not_decide_about_a_text() -> None:
    """The fewer words have vectors, the less their meaning weighs."""
    assert _cosine("회의실은 docker 어떻게 예약하나요?", "환불은 docker 언제쯤 받을까요") < 0.5


def test_the_plural_of_a_word_has_its_vector() -> None:
    word = next(each for each in table().places if len(each) > 8 and f"{each}s" not in table().places)
    assert _cosine(word, f"{word}s") > 0.85


def test_a_long_text_is_embedded_quickly_and_within_the_call() -> None:
    call = ModelCall(SystemClock(), 10.0)
    [vector] = StaticEmbedder().embed([" ".join(table().places) * 2], call)
    assert len(vector) == 384
    call.abort()
    with pytest.raises(CallAborted):
        StaticEmbedder().embed(["hello"], call)


def test_the_table_is_whole() -> None:
    read = table()
    assert (len(read.places), len(read.scales), len(read.components), read.size) == (16_490, 16_490, 16_490 * 128, 128)
    assert min(read.scales) > 0


def test_is_the_same_in_every_process_and_release() -> None:
    """A text's vector must never change, because vectors are stored."""
    [vector] = StaticEmbedder().embed(["Ana lives in Lyon, by the sea. 서울에 살아요."])
    assert {at: round(value, 4) for at, value in enumerate(vector) if abs(value) > 0.17} == {
        10: -0.1863,
        203: -0.2055,
        335: 0.2894,
        336: 0.2202,
    }


def test_is_resolved_by_its_name() -> None:
    embedder = resolve("static:384", Settings(), SystemClock())
    assert isinstance(embedder, CachedEmbedder)
    assert (embedder.name, embedder.dimensions) == ("static:384", 384)
    check("static:384", Settings(), SystemClock())
    for wrong in ("static:128", "static:x"):
        with pytest.raises(SettingsError, match=f"PERDURE_EMBEDDER is '{wrong}': accepted: static:384"):
            resolve(wrong, Settings(), SystemClock())
        with pytest.raises(SettingsError, match="accepted: static:384"):
            check(wrong, Settings(), SystemClock())
