"""Query expansion: the weights of a question's words, and the words that are related to them.

A search by words finds "my puppy has been sick" for "is my dog ill?" only if it also looks for "puppy" and "sick", and
it should look for "dog" more than for "get". Both are read from the package's table of English words
(`models.embedders.static`), with every embedder: the length of a word's vector tells how telling the word is, and the
direction which words are similar. Of the words that are similar to one word of the question, those are looked for that
fit the question as a whole: "bank" has others beside "river" than beside "money".

A text is expanded only if it seems to be English: it has a function word that few other languages have, and the table
has at least half of its words; or the table has all of them. Words that begin with a capital letter are looked for as
they are, except the first one: they are names. Called by `search`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from perdure.models.embedders.hashing import words
from perdure.models.embedders.static import table

_MOST_RELATED = 5
"""Number of related words that are looked for."""

_MOST_COMPARED = 16
"""Number of related words that are compared with the whole question."""

_MOST_WORDS = 12
"""Number of the question's words whose related words are considered, the most telling ones."""

_TYPICAL_LENGTH = 1.143
"""The median length of the words' vectors. A word of this length has the weight 1."""

_CACHED_WORDS = 2_048

_ENGLISH = frozenset({
    "about", "and", "are", "does", "did", "from", "have", "his", "how", "it", "my", "our", "she", "that", "the",
    "their", "them", "there", "these", "they", "this", "those", "were", "what", "when", "where", "which", "who",
    "whose", "why", "with", "would", "you", "your",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expansion:
    """Words to look for, and the weight of each. The first `own` are words of the question.

    A word of the question that is not among these has the weight 1: `names`, and words that are `unknown` to the table.
    Both are without single letters.
    """

    words: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    own: int = 0
    names: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def expand(question: str, related_weight: float) -> Expansion:
    """The words to look for. Related words weigh at most `related_weight`.

    >>> expansion = expand("Is the dog ill?", 1.0)
    >>> expansion.words[: expansion.own], "pet" in expansion.words, "puppy" in expansion.words
    (('is', 'the', 'dog', 'ill'), True, True)
    """
    said = dict.fromkeys(words(question))
    known = {word: at for word in said if (at := table().find(word)) is not None}
    is_english = len(known) == len(said) or (2 * len(known) >= len(said) and not _ENGLISH.isdisjoint(said))
    if not known or not is_english:
        return Expansion()
    names = _names(question)
    for name in names:
        known.pop(name, None)
    others = [word for word in said if word not in known and len(word) > 1]
    own = {word: math.sqrt(_length(at) / _TYPICAL_LENGTH) for word, at in known.items()}
    related = _related(set(known.values()), related_weight) if related_weight else {}
    return Expansion(
        (*own, *related),
        (*own.values(), *related.values()),
        len(own),
        tuple(word for word in others if word in names),
        tuple(word for word in others if word not in names),
    )


def _names(question: str) -> set[str]:
    """The words that begin with a capital letter, but for the first one. A text in capitals has none."""
    if question.isupper():
        return set()
    runs = question.split()
    capitals = [run for run in runs[1:] if next((each for each in run if each.isalnum()), "").isupper()]
    return {word for run in capitals for word in words(run)} - set(words(runs[0]))


def _related(known: Collection[int], weight: float) -> dict[str, float]:
    """The related words that fit best. Their weights: similarity to their word, times similarity to the question."""
    read = table()
    telling = sorted(known, key=lambda at: (-_length(at), at))[:_MOST_WORDS]
    similar: dict[int, float] = {}
    for word in telling:
        for at, cosine in read.related_to(word).items():
            if at not in known:
                similar[at] = max(cosine, similar.get(at, 0.0))
    nearest = sorted(similar, key=lambda at: (-similar[at], at))[:_MOST_COMPARED]
    meaning = _sum(telling)
    length = math.hypot(*meaning)
    fitting = {at: similar[at] * max(0.0, _inner(at, meaning) / (length * _length(at))) for at in nearest}
    best = sorted(nearest, key=lambda at: -fitting[at])[:_MOST_RELATED]
    return {read.words[at]: weight * fitting[at] for at in best if fitting[at]}


@lru_cache(maxsize=_CACHED_WORDS)
def _length(at: int) -> float:
    """The length of the word's vector."""
    read = table()
    return read.scales[at] * math.hypot(*read.of(at))


def _inner(at: int, meaning: list[float]) -> float:
    """The inner product of the word's vector and `meaning`."""
    read = table()
    product: float = sum(map(mul, meaning, read.of(at)))
    return read.scales[at] * product


def _sum(places: Iterable[int]) -> list[float]:
    """The sum of the words' vectors."""
    read = table()
    total = [0.0] * read.size
    for at in places:
        scale = read.scales[at]
        total = [one + scale * other for one, other in zip(total, read.of(at), strict=True)]
    return total
