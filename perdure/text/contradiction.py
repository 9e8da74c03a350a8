"""Detects whether two texts that are close in meaning contradict each other.

Cosine similarity cannot distinguish a contradiction from a paraphrase: "not", or 30 instead of 90, hardly changes a
vector. This module compares numbers, negations, names, and words that exclude each other, in English and Korean. In
doubt, it reports a difference. The caller then keeps both texts, although they may mean the same.

A caller that compares many texts should first compare the integers `fingerprint`, `name_bits` and `word_bits` of
`Features`. These integers decide most pairs.

Called by consolidation, by the tool `remember` and by the CaseBank's search for duplicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from hashlib import blake2b
from operator import or_

from perdure.text.linear import normalized
from perdure.text.names import missing, names_by_position, names_of
from perdure.text.numbers import numbers_in
from perdure.text.words import (
    cached_by_word,
    count_negations,
    forms,
    opposite_group,
    stem,
    tokens,
    without_negative_prefix,
)

MAX_CHARS = 10_000
"""Maximum characters of a normalised text that are analysed. The rest of the text is compared by its hash."""

_BITS = 63
_SHOWN_CHARS = 200
_STRAIGHT_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'"})  # noqa: RUF001 (the characters to replace)


class DifferenceKind(StrEnum):
    """The kind of difference between two texts."""

    NUMBER = "number"
    NEGATION = "negation"
    NAME = "name"
    OPPOSITE = "opposite"
    REST = "passage"


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two texts.

    `left` describes the differing part of the first text, such as its numbers. `right` describes the differing part of
    the second text. One of them may be empty.
    """

    kind: DifferenceKind
    left: str
    right: str

    def __str__(self) -> str:
        article = "an" if self.kind is DifferenceKind.OPPOSITE else "a"
        return f"they differ in {article} {self.kind} ({_shorten(self.left)} / {_shorten(self.right)})"


def _shorten(side: str) -> str:
    return side if 0 < len(side) <= _SHOWN_CHARS else f"{side[: _SHOWN_CHARS - 1]}…" if side else "none"


@dataclass(frozen=True, slots=True)
class Features:
    """The features of one text that `difference` compares.

    `opposites` has one entry for each group of opposed words, such as "on" and "off", that occurs in the text. An entry
    has the group's number and the sides of the group that occur in the text; see `words.opposite_group`. `rest` is a
    hash of the text beyond `MAX_CHARS`, or empty if the text is not longer than `MAX_CHARS`.
    """

    numbers: tuple[str, ...]
    negations: int
    words: frozenset[str]
    names: frozenset[str]
    opposites: tuple[tuple[int, frozenset[int]], ...]
    rest: str = ""

    @property
    def fingerprint(self) -> int:
        """A 63-bit hash of `numbers`, `negations` and `rest`. It is the same on every machine."""
        parts = [str(self.negations), *self.numbers, *([f"rest {self.rest}"] if self.rest else [])]
        return _hash("\x1f".join(parts)) >> 1

    @property
    def name_bits(self) -> int:
        """A 63-bit Bloom filter of the names.

        If the `word_bits` of another text lack one of these bits, the other text lacks one of the names.
        """
        return _bits(map(stem, self.names))

    @property
    def word_bits(self) -> int:
        """A 63-bit Bloom filter of all words and their stems."""
        return _bits(self.words) | _bits(map(stem, self.words))


def difference(left: str, right: str) -> Difference | None:
    """The most significant difference between two texts; `None` if they may mean the same."""
    return compare(features(left), features(right))


def compare(left: Features, right: Features) -> Difference | None:
    """The `difference` of two texts, given their features. The kind does not depend on the order of the texts."""
    if left.rest != right.rest:
        return Difference(
            DifferenceKind.REST, *(f"from character {MAX_CHARS:,}" if each.rest else "" for each in (left, right))
        )
    if left.numbers != right.numbers:
        return Difference(DifferenceKind.NUMBER, _only(left.numbers, right.numbers), _only(right.numbers, left.numbers))
    if left.negations != right.negations:
        return Difference(DifferenceKind.NEGATION, *(("negated" if each.negations else "") for each in (left, right)))
    left_only, right_only = missing(left.names, right.words), missing(right.names, left.words)
    if left_only or right_only:
        return Difference(DifferenceKind.NAME, ", ".join(left_only), ", ".join(right_only))
    return _opposites(left, right)


def features(text: str) -> Features:
    """Analyse one text, in linear time and bounded space (see `MAX_CHARS`)."""
    normal = normalized("NFKC", text[:MAX_CHARS]).translate(_STRAIGHT_APOSTROPHES)
    rest = normal[MAX_CHARS:] + text[MAX_CHARS:]
    normal = normal[:MAX_CHARS]
    found = list(tokens(normal))
    positioned = frozenset(names_by_position(normal))
    words = positioned | {form for token in found for form in forms(token.text)}
    sides: dict[int, set[int]] = {}
    for word in words:
        if (opposite := opposite_group(word)) is not None:
            sides.setdefault(opposite[0], set()).add(opposite[1])
    return Features(
        numbers=tuple(sorted(numbers_in(normal))),
        negations=count_negations(normal, found),
        words=words,
        names=positioned | {name for token in found for name in names_of(token)},
        opposites=tuple(sorted((group, frozenset(used)) for group, used in sides.items())),
        rest=f"{_hash(rest):016x}" if rest else "",
    )


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())


@cached_by_word
def _bit(word: str) -> int:
    return 1 << _hash(word) % _BITS


def _bits(words: Iterable[str]) -> int:
    return reduce(or_, map(_bit, words), 0)


def _only(these: tuple[str, ...], others: tuple[str, ...]) -> str:
    """The numbers in `these` that are not in `others`. If there are no such numbers, all numbers in `these`."""
    known = frozenset(others)
    return ", ".join([number for number in these if number not in known] or these)


def _opposites(left: Features, right: Features) -> Difference | None:
    """The difference if the texts use opposed words: "trust" and "distrust", or two sides of a group of opposites."""
    if found := _negated_by_prefix(left.words, right.words):
        return Difference(DifferenceKind.OPPOSITE, *found)
    if found := _negated_by_prefix(right.words, left.words):
        return Difference(DifferenceKind.OPPOSITE, *reversed(found))
    others = dict(right.opposites)
    for group, sides in left.opposites:
        if (other := others.get(group)) is not None and sides != other:
            return Difference(DifferenceKind.OPPOSITE, _word_of(left, group), _word_of(right, group))
    return None


def _negated_by_prefix(these: frozenset[str], others: frozenset[str]) -> tuple[str, str] | None:
    """A word of `these` with a negative prefix, such as "distrust", and the word of `others` without the prefix."""
    for word in sorted(these - others):
        bare = without_negative_prefix(word)
        if bare is not None and bare in others and bare not in these:
            return word, bare
    return None


def _word_of(features: Features, group: int) -> str:
    """The longest word of `features` that is in `group`. So a whole word is preferred to its stem."""
    words = [word for word in features.words if (found := opposite_group(word)) and found[0] == group]
    return max(words, key=lambda word: (len(word), word))
