"""`hash:384`: the built-in embedder. Needs neither network nor model, and gives equal vectors on every machine.

Feature hashing (Weinberger et al., 2009): a hash function maps each word, and each n-gram of its characters, to a
component of the vector and to a sign. The weight of the word or n-gram, with this sign, is added to the component.
Texts that share words have similar vectors. Texts that share only parts of words ("consolidated", "consolidation") have
less similar vectors. Korean syllables are decomposed, so that a noun keeps a similar vector when a particle follows it.
Text in scripts without spaces is split into single characters and pairs of characters.

A search with these vectors finds what a search by words and stems finds: synonyms are not similar, and negation is
ignored. Unrelated texts have a cosine of 0 ± 1/sqrt(dimensions). For search by meaning, configure another embedder.
"""

from __future__ import annotations

import functools
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from perdure.models.embedders.protocol import Vector, unit
from perdure.models.protocol import ModelCall
from perdure.text.linear import normalized

FEWEST_DIMENSIONS = 64
"""The fewest dimensions: with fewer, hash collisions make the cosine meaningless."""

MOST_DIMENSIONS = 2_000
"""Maximum dimensions of a `vector` column that pgvector can index."""

_CACHED_WORDS = 2_048
_LONGEST_WORD = 32
_GRAMS = (3, 4, 5)
_GRAMS_WITHOUT_SPACES = (1, 2)
_WHOLE_WORD_WEIGHT = 0.25
_TELLING_LENGTH = 8
_LATIN_ACCENTS = range(0x300, 0x370)
_LAST_KEPT = 0xFFFF
_UNSPACED = (range(0x3040, 0x3100), range(0x3400, 0xA000), range(0xF900, 0xFB00), range(0x20000, 0x32000))
"""Code points of scripts without spaces: kana and ideographs."""

_ASCII = bytes(ord(chr(code).lower()) if chr(code).isalnum() else ord(" ") for code in range(256))
"""What `_spaced` does to each character of an ASCII text, twenty times as fast."""


class HashEmbedder:
    """The built-in embedder."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions

    @property
    def name(self) -> str:
        return f"hash:{self._dimensions}"

    @property
    def dimensions(self) -> int:
        return self._dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text. Raises the errors of `Embedder.embed`."""
        vectors = []
        for text in texts:
            if call is not None:
                call.remaining()
            vectors.append(self._vector(text))
        return vectors

    def _vector(self, text: str) -> Vector:
        vector = [0.0] * self._dimensions
        for word, times in Counter(words(text)).items():
            weight = _salience(word) * (1 + math.log(times))
            for at, value in _features(word, self._dimensions):
                vector[at] += weight * value
        if not any(vector):  # the text has no word, or its features cancel out
            at, sign = _place(f"text {text.strip()}", self._dimensions)
            vector[at] = sign
        return unit(vector)


def words(text: str) -> list[str]:
    """The words of `text`, decomposed (NFKD), in lower case, without accents and punctuation.

    Words longer than `_LONGEST_WORD`, such as a sentence in Thai, a URL or a key, are split into pieces.
    """
    spaced = text.encode().translate(_ASCII).decode() if text.isascii() else _spaced(text)
    runs = spaced.split()
    if max(map(len, runs), default=0) <= _LONGEST_WORD:
        return runs
    return [run[at : at + _LONGEST_WORD] for run in runs for at in range(0, len(run), _LONGEST_WORD)]


def _spaced(text: str) -> str:
    return normalized("NFKD", text).casefold().translate(_SPACED)


class _Spaced(dict[int, str]):
    """What becomes of a character: itself, a space, or nothing. Filled as characters occur."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        # Python does not count vowel signs as letters, but in many scripts they are parts of words.
        in_words = character.isalnum() or unicodedata.category(character)[0] == "M"
        spaced = "" if code in _LATIN_ACCENTS else character if in_words else " "
        if code <= _LAST_KEPT:
            self[code] = spaced
        return spaced


_SPACED = _Spaced()


def _salience(word: str) -> float:
    """The weight of a word, from its length. Short words weigh less, because they occur in almost every sentence."""
    if any(each.isdigit() or _is_unspaced(each) for each in word):
        return 1.0
    return min(len(word), _TELLING_LENGTH) / _TELLING_LENGTH


@functools.lru_cache(maxsize=_CACHED_WORDS)
def _features(word: str, dimensions: int) -> tuple[tuple[int, float], ...]:
    """`(index, value)` for each component of the vector to which the word adds a value.

    The squares of the values sum to 1. The whole word has a quarter of this sum; the word's n-grams share the rest
    equally.
    """
    grams = list(_grams(word))
    share = math.sqrt((1 - _WHOLE_WORD_WEIGHT) / len(grams))
    whole, sign = _place(f"word {word}", dimensions)
    parts = (_place(f"gram {gram}", dimensions) for gram in grams)
    return ((whole, sign * math.sqrt(_WHOLE_WORD_WEIGHT)), *((at, part * share) for at, part in parts))


def _grams(word: str) -> Iterator[str]:
    """The n-grams of `word`, with marks for its beginning and end."""
    unspaced = any(map(_is_unspaced, word))
    text = word if unspaced else f"<{word}>"
    for size in _GRAMS_WITHOUT_SPACES if unspaced else _GRAMS:
        for start in range(max(1, len(text) - size + 1)):
            yield text[start : start + size]


def _is_unspaced(character: str) -> bool:
    return any(ord(character) in block for block in _UNSPACED)


def _place(feature: str, dimensions: int) -> tuple[int, float]:
    """The index of the vector component for a feature, and the sign of the feature's value."""
    digest = int.from_bytes(blake2b(feature.encode("utf-8", "replace"), digest_size=8).digest())
    return (digest >> 1) % dimensions, 1.0 if digest & 1 else -1.0
