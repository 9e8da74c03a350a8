"""How well the words of a text fit a question: late interaction, as in ColBERT (Khattab and Zaharia, 2020).

For each word of the question, the most similar word of the text counts; a text fits as well as these similarities, on
average. So "the puppy has been sick" fits "is my dog ill?" word by word, where the vector of a whole message blurs
what else it says. A search by related words (`expansion`) has a short list for each word; this compares all words, and
therefore only a few texts, those that a search has found.

The similarity of two words is the cosine of their vectors in the package's table (`models.embedders.static`), estimated
from the signs of the 128 components: one comparison of two integers. Of a long text, the passage that fits best counts,
since among many words there is always a similar one. Called by `search`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from perdure.memory.recall.expansion import Expansion
from perdure.models.embedders.hashing import words
from perdure.models.embedders.static import MEANING, table

_TEXT_CHARS = 2_000
_PASSAGE_WORDS = 50
_LEAST_KNOWN = 0.5
"""The share of a passage's words that the table must have, or the question."""

_MOST_WORDS = 12
"""Number of the question's words that are compared, the most telling ones."""

_CACHED_WORDS = 4_096
_UNKNOWN_WEIGHT = 1.0
_UNLIKE = MEANING // 2
_COSINES = [max(0.0, math.cos(math.pi * differing / MEANING)) for differing in range(MEANING + 1)]
"""The cosine of two vectors, by the number of components with different signs (Charikar, 2002)."""


def fits(expansion: Expansion, texts: Sequence[str]) -> list[float]:
    """How well each of `texts` fits the question of `expansion`, from 0 to 1.

    A text of which the table knows too few words fits as well as the others do on average: about a name, or a text in
    another language, the table tells nothing. If the question is not expanded, all texts fit equally.

    >>> from perdure.memory.recall.expansion import expand
    >>> puppy, puppet, name = fits(expand("Is my dog ill?", 1.0), ["The puppy is sick", "The puppet is sold", "Kwame"])
    >>> puppy > name > puppet
    True
    """
    question = _Question.of(expansion)
    found = [question.fit(text) for text in texts]
    known = [each for each in found if each is not None]
    average = sum(known) / len(known) if known else 0.0
    return [average if each is None else each for each in found]


@dataclass(frozen=True, slots=True)
class _Question:
    """The question's words with their signs, their weights, and the distances of the words that texts have.

    The weight of a word is the length of its vector, of which `Expansion` has the square root.
    """

    words: dict[str, int | None]
    weights: Sequence[float]
    distances: dict[str, Sequence[int] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, expansion: Expansion) -> _Question:
        weights = dict(zip(expansion.words[: expansion.own], expansion.weights, strict=False))
        weights |= dict.fromkeys(expansion.unknown, _UNKNOWN_WEIGHT)
        telling = sorted(weights, key=lambda word: -weights[word])[:_MOST_WORDS]
        return cls({word: _signs(word) for word in telling}, [weights[word] ** 2 for word in telling])

    def fit(self, text: str) -> float | None:
        """How well the best passage fits; `None` if the table knows too few words of each."""
        said = words(text[:_TEXT_CHARS]) if self.words else []
        passages = [said[at : at + _PASSAGE_WORDS] for at in range(0, len(said), _PASSAGE_WORDS)]
        return max((each for each in map(self._fit, passages) if each is not None), default=None)

    def _fit(self, passage: Sequence[str]) -> float | None:
        known = [each for each in map(self._distances, passage) if each is not None]
        if len(known) < _LEAST_KNOWN * len(passage):
            return None
        nearest = map(min, zip(*known, strict=True))
        fitting = sum(_COSINES[each] * weight for each, weight in zip(nearest, self.weights, strict=True))
        return fitting / sum(self.weights)

    def _distances(self, word: str) -> Sequence[int] | None:
        """To each word of the question, the number of components with another sign. `None` for an unknown word."""
        if word not in self.distances:
            self.distances[word] = self._compared(word, _signs(word))
        return self.distances[word]

    def _compared(self, word: str, signs: int | None) -> Sequence[int] | None:
        if signs is None:
            return [0 if word == each else _UNLIKE for each in self.words] if word in self.words else None
        return [_UNLIKE if other is None else (signs ^ other).bit_count() for other in self.words.values()]


@lru_cache(maxsize=_CACHED_WORDS)
def _signs(word: str) -> int | None:
    """One bit for each component of the word's vector; `None` if the table has no such word."""
    at = table().find(word)
    return None if at is None else table().signs(at)
