"""Splits text into sentences and terms, finds the line most relevant to a question, and extracts summaries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from perdure.text.linear import is_hangul
from perdure.text.patterns import SPACE, compiled

_SENTENCE_END = compiled(rf"[.!?][{SPACE}]|[\x{{3002}}\x{{ff01}}\x{{ff1f}}]")
_APOSTROPHES = frozenset("'\u2019")
_POSSESSIVES = ("'s", "\u2019s")
_QUESTION_END = ("?", "\uff1f")
_SHORTEST_STEM = 3
_ENDINGS = ("ing", "ies", "ed", "es", "s", "ly")
_PARTICLES = (
    "입니다", "이에요", "습니다", "에서", "으로", "예요", "이야", "아요", "어요", "았어", "었어", "해요", "에게",
    "은", "는", "이", "가", "을", "를", "에", "의", "로", "와", "과", "도", "야", "아", "어", "고", "니",
)  # fmt: skip
_STOP_WORDS = frozenset(
    """
    a an and any are am as at be been but by can could did do does for from had has have he her him his how i if in
    into is it its just let me mine my no not now of on or our please she should so some than that the their them then
    there these they this those to too up us was we were what what's when where which who whom whose why will with
    would yes you your i'm i've it's about again also
    know say said tell told remember recall mention mentioned ask asked earlier before
    저 나 너 내 제 네 우리 그 이 저의 나의 뭐 무엇 무슨 어디 누구 언제 어떻게 왜 뭐야 뭔가요 말 말해 알려 알려줘 기억
    """.split()  # noqa: SIM905 (read as words, not as a list of strings)
)


def sentences(text: str) -> list[str]:
    """The sentences and lines of `text`, without blank ones."""
    return [sentence for line in text.split("\n") if line.strip() for sentence in _sentences(line)]


def _sentences(line: str) -> Iterator[str]:
    start = 0
    for mark in _SENTENCE_END.finditer(line):
        yield line[start : mark.start() + 1].strip()
        start = mark.start() + 1
    if last := line[start:].strip():
        yield last


def is_question(sentence: str) -> bool:
    """Whether `sentence` ends with a question mark."""
    return sentence.rstrip("\"'\u201d\u2019) ").endswith(_QUESTION_END)


def terms(text: str) -> frozenset[str]:
    """The stems of the words of `text`, without stop words."""
    return frozenset(_terms(text))


def _terms(text: str) -> Iterator[str]:
    for word in _words(text.lower()):
        if word in _STOP_WORDS:
            continue
        if any(map(_is_unspaced, word)):
            yield from (word[at : at + 2] for at in range(max(1, len(word) - 1)))
        elif (stem := _stem(word)) not in _STOP_WORDS:
            yield stem


def _words(text: str) -> Iterator[str]:
    """The words of `text`: runs of letters and digits. Two runs with an apostrophe between them are one word."""
    parts: list[str] = []
    gap = ""
    for is_word, characters in groupby(text, key=str.isalnum):
        run = "".join(characters)
        if not is_word:
            gap = run
        elif len(parts) == 1 and gap in _APOSTROPHES:
            parts += [gap, run]
        else:
            if parts:
                yield "".join(parts)
            parts = [run]
    if parts:
        yield "".join(parts)


def _is_unspaced(character: str) -> bool:
    """Whether a character belongs to a script without spaces: kana, ideographs."""
    return "\u3040" <= character <= "\u30ff" or "\u3400" <= character <= "\u9fff"


def _stem(word: str) -> str:
    if is_hangul(word):
        return next((word[: -len(end)] for end in _PARTICLES if word.endswith(end) and len(word) > len(end)), word)
    word = word[:-2] if word.endswith(_POSSESSIVES) else word
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            word = word[: -len(ending)]
            break
    if len(word) > _SHORTEST_STEM and word[-1] == word[-2]:
        word = word[:-1]
    return word[:-1] if len(word) > _SHORTEST_STEM and word.endswith("e") else word


def most_relevant(question: str, lines: Sequence[str], weights: Sequence[float]) -> int | None:
    """The index of the line most relevant to `question`; `None` if no line shares a term with it.

    Of several equally relevant lines, the last one is chosen. A shared term counts more if it is rare among the lines.
    `weights` has a factor for each line.
    """
    wanted = terms(question)
    found = [terms(line) & wanted for line in lines]
    frequency = Counter(term for shared in found for term in shared)
    scores = [
        weight * math.fsum(math.log(1 + len(lines) / frequency[term]) for term in shared)
        for shared, weight in zip(found, weights, strict=True)
    ]
    best = max(scores, default=0.0)
    return None if best == 0 else max(at for at, score in enumerate(scores) if score == best)


def extract(text: str, *, sentences_kept: int = 5) -> str:
    """An extractive summary of `text`: its most representative sentences, in their order.

    SumBasic (Nenkova and Vanderwende, 2005): repeatedly takes the sentence whose terms have the highest mean
    probability. It then squares the probability of these terms, so that the next sentence covers other terms.
    """
    left = {sentence: terms(sentence) for sentence in sentences(text)}
    order = list(left)
    frequency = Counter(term for sentence_terms in left.values() for term in sentence_terms)
    probability = {term: count / frequency.total() for term, count in frequency.items()}
    kept: set[str] = set()
    while left and len(kept) < sentences_kept:
        best = max(left, key=lambda sentence: _mean([probability[term] for term in left[sentence]]))
        kept.add(best)
        for term in left.pop(best):
            probability[term] **= 2
    return " ".join(sentence for sentence in order if sentence in kept)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0  # fsum does not depend on the order of a set
