"""Words and sentences, as far as rules go: enough to find the line that a question is about."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)?")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
_HANGUL = re.compile(r"[\uac00-\ud7a3]+")
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
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]


def is_question(sentence: str) -> bool:
    """Whether `sentence` ends as a question does."""
    return sentence.rstrip("\"'\u201d\u2019) ").endswith(_QUESTION_END)


def terms(text: str) -> frozenset[str]:
    """The stems of the words of `text` that carry meaning."""
    return frozenset(_terms(text))


def _terms(text: str) -> Iterator[str]:
    for word in _WORD.findall(text.lower()):
        if word in _STOP_WORDS:
            continue
        if _UNSPACED.search(word):
            yield from (word[at : at + 2] for at in range(max(1, len(word) - 1)))
        elif (stem := _stem(word)) not in _STOP_WORDS:
            yield stem


def _stem(word: str) -> str:
    if _HANGUL.fullmatch(word):
        return next((word[: -len(end)] for end in _PARTICLES if word.endswith(end) and len(word) > len(end)), word)
    word = re.sub(r"['\u2019]s$", "", word)
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            word = word[: -len(ending)]
            break
    if len(word) > _SHORTEST_STEM and word[-1] == word[-2]:
        word = word[:-1]
    return word[:-1] if len(word) > _SHORTEST_STEM and word.endswith("e") else word


def most_relevant(question: str, lines: Sequence[str], weights: Sequence[float]) -> int | None:
    """The index of the line that shares most with `question`; of equals the last one; None if none shares anything.

    A shared term counts by how rare it is among the lines; `weights` scale the lines.
    """
    wanted = terms(question)
    found = [terms(line) & wanted for line in lines]
    frequency = Counter(term for shared in found for term in shared)
    scores = [
        weight * sum(math.log(1 + len(lines) / frequency[term]) for term in shared)
        for shared, weight in zip(found, weights, strict=True)
    ]
    best = max(scores, default=0.0)
    return None if best == 0 else max(at for at, score in enumerate(scores) if score == best)


def extract(text: str, *, sentences_kept: int = 5) -> str:
    """The sentences of `text` that say most of what it is about, in their own order.

    SumBasic (Nenkova and Vanderwende, 2005): again and again the sentence whose terms are
    the most probable on average; then the terms it covered count as the square of what
    they did, so that the next one says something else.
    """
    left = {sentence: terms(sentence) for sentence in sentences(text)}
    order = list(left)
    frequency = Counter(term for own in left.values() for term in own)
    probability = {term: count / frequency.total() for term, count in frequency.items()}
    kept: set[str] = set()
    while left and len(kept) < sentences_kept:
        best = max(left, key=lambda sentence: _mean([probability[term] for term in left[sentence]]))
        kept.add(best)
        for term in left.pop(best):
            probability[term] **= 2
    return " ".join(sentence for sentence in order if sentence in kept)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
