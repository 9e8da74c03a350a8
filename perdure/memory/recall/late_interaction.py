"""How well the words of a text fit a question: late interaction, as in ColBERT (Khattab and Zaharia, 2020).

For each word of the question, the most similar word of the text counts; a text fits as well as these similarities, on
average. So "the puppy has been sick" fits "is my dog ill?" word by word, where the vector of a whole message blurs
what else it says. A search by related words (`expansion`) has a short list for each word; this compares all words, and
therefore only a few texts, those that a search has found.

The similarity of two words is the cosine of their vectors in the package's table (`models.embedders.static`), estimated
from the signs of the 128 components: one comparison of two integers. A name, or a word that the table lacks, is similar
to itself only. Of a long text, the passage that fits best counts, since among many words there is always a similar one.
Called by `search`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from perdure.memory.recall.expansion import Expansion
from perdure.models.embedders.hashing import words
from perdure.models.embedders.static import MEANING, singular, table

_HEAD_CHARS = 600
_WINDOW_CHARS = 200
_MOST_WINDOWS = 4
"""Of a text that is longer than `_HEAD_CHARS`, what surrounds so many words of the question is read, too."""

_PASSAGE_WORDS = 50
_LEAST_KNOWN = 0.5
"""The share of a passage's words that the table must have, or the question."""

_MOST_WORDS = 12
"""Number of the question's words that are compared, the most telling ones."""

_CACHED_WORDS = 16_384
_NAME_WEIGHT = 0.5
_UNKNOWN_WEIGHT = 1.0
"""The weights of words that are compared by their spelling: names and dates, and others."""
_DAY_DIGITS = 2
_YEAR_DIGITS = 4
_CENTURIES = frozenset({"19", "20"})

_UNLIKE = MEANING // 2
_COSINES = [max(0.0, math.cos(math.pi * differing / MEANING)) for differing in range(MEANING + 1)]
"""The cosine of two vectors, by the number of components with different signs (Charikar, 2002)."""

_TYPICAL = 0.5
"""How well a text fits if nothing is known about any."""


def fits(
    expansion: Expansion, texts: Sequence[str], scores: Sequence[float], authors: Collection[str] = ()
) -> tuple[list[float], float]:
    """How well each of `texts` fits the question of `expansion`, from 0 to 1, and the average.

    The average is weighted by the squares of `scores`: most of the texts were found by accident. A text of which the
    table knows too few words fits as well as the others do on average: about a text in another language, the table
    tells nothing. A long text, of which not all is read, fits at least as well. The words `authors` are left out, the
    names of those who wrote the texts: people rarely say their own.

    >>> from perdure.memory.recall.expansion import expand
    >>> texts = ["The puppy is sick", "The puppet is sold", "Kwame"]
    >>> (puppy, puppet, name), average = fits(expand("Is my dog ill?", 1.0), texts, [1.0, 0.5, 0.5])
    >>> puppy > name == average > puppet
    True
    """
    question = _Question.of(expansion, authors)
    found = [question.fit(text) for text in texts]
    known = [(fit, score) for fit, score in zip(found, scores, strict=True) if fit is not None]
    total = sum(score**2 for _, score in known)
    average = sum(fit * score**2 for fit, score in known) / total if total else _TYPICAL
    fitting = [average if each is None else each for each in found]
    longer = (len(text) > _HEAD_CHARS for text in texts)
    return [max(each, average) if is_long else each for each, is_long in zip(fitting, longer, strict=True)], average


@dataclass(frozen=True, slots=True)
class _Question:
    """The question's words with their signs, their weights, and the distances of the words that texts have.

    The weight of a word is the length of its vector, of which `Expansion` has the square root.
    """

    words: dict[str, int | None]
    weights: Sequence[float]
    distances: dict[str, Sequence[int] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, expansion: Expansion, authors: Collection[str]) -> _Question:
        own = zip(expansion.words[: expansion.own], expansion.weights, strict=False)
        weights = {word: _NAME_WEIGHT if _is_of_date(word) else _UNKNOWN_WEIGHT for word in expansion.unknown}
        weights |= {name: _UNKNOWN_WEIGHT if name.isdigit() else _NAME_WEIGHT for name in expansion.names}
        weights = {singular(word): weight for word, weight in weights.items() if word not in authors}
        signs: dict[str, int | None] = dict.fromkeys(weights)
        for word, weight in own:
            if word not in authors:
                weights[word], signs[word] = weight**2, _signs(word)
        telling = sorted(weights, key=lambda word: -weights[word])[:_MOST_WORDS]
        return cls({word: signs[word] for word in telling}, [weights[word] for word in telling])

    def fit(self, text: str) -> float | None:
        """How well the best passage fits; `None` if the table knows too few words of each."""
        said = words(self._read(text)) if self.words else []
        passages = [said[at : at + _PASSAGE_WORDS] for at in range(0, len(said), _PASSAGE_WORDS)]
        return max((each for each in map(self._fit, passages) if each is not None), default=None)

    def _read(self, text: str) -> str:
        """The beginning of the text, and what surrounds the most telling words of the question behind it."""
        if len(text) <= _HEAD_CHARS:
            return text
        lower = text.lower()
        places = (lower.find(word, _HEAD_CHARS) for word in self.words)
        found = [max(_HEAD_CHARS, at - _WINDOW_CHARS // 2) for at in places if at >= 0][:_MOST_WINDOWS]
        return " ".join([text[:_HEAD_CHARS], *(text[at : at + _WINDOW_CHARS] for at in found)])

    def _fit(self, passage: Sequence[str]) -> float | None:
        """How well a passage fits, by its distinct words: for each word, the number of components with another sign."""
        said, distances = set(passage), self.distances
        for word in said - distances.keys():
            distances[word] = self._compared(singular(word), _signs(word))
        known = [each for word in said if (each := distances[word]) is not None]
        if len(known) < _LEAST_KNOWN * len(said):
            return None
        nearest = map(min, zip(*known, strict=True))
        fitting = sum(_COSINES[each] * weight for each, weight in zip(nearest, self.weights, strict=True))
        return float(fitting / sum(self.weights))

    def _compared(self, word: str, signs: int | None) -> Sequence[int] | None:
        if signs is None and word not in self.words:
            return None
        return [
            0 if word == own else _UNLIKE if signs is None or other is None else (signs ^ other).bit_count()
            for own, other in self.words.items()
        ]


def _is_of_date(word: str) -> bool:
    """Whether the word is a day or a year, which answers rarely say. "4711" is neither."""
    return word.isdecimal() and (len(word) <= _DAY_DIGITS or (len(word) == _YEAR_DIGITS and word[:2] in _CENTURIES))


@lru_cache(maxsize=_CACHED_WORDS)
def _signs(word: str) -> int | None:
    """One bit for each component of the word's vector; `None` if the table has no such word."""
    at = table().find(word)
    return None if at is None else table().signs(at)
