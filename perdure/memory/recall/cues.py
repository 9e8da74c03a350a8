"""What a question tells about the message that answers it, besides words: its author, and that it is the first or last.

"Where did Ines first live?" asks for a message of Ines, and for the earliest of those that fit. Recognises words for
first and last in English, German, French, Spanish and Korean, and authors in any language. Called by `search`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from perdure.text.patterns import WORD, compiled

MAX_CHARS = 300
"""A longer text is no question, but a message, in which "first" and "now" mean little."""

_MARKS = frozenset("?\uff1f\u061f")
_LEAST_NAME = 2
_FIRST = frozenset({
    "first", "earliest", "original", "originally", "initially", "zuerst", "erste", "ersten", "erster", "erstes",
    "erstem", "anfangs", "ursprünglich", "premier", "premiers", "première", "premières", "primer", "primero",
    "primera", "primeros", "primeras",
})  # fmt: skip
_LAST = frozenset({
    "last", "latest", "newest", "finally", "now", "current", "currently", "nowadays", "zuletzt", "letzte",
    "letzten", "letzter", "letztes", "neueste", "neuesten", "neuester", "neuestes", "jetzt", "derzeit",
    "dernier", "derniers", "dernière", "dernières", "maintenant", "actuellement", "último", "última", "últimos",
    "últimas", "ahora", "actualmente",
})  # fmt: skip
_KOREAN_FIRST, _KOREAN_LAST = ("처음", "첫"), ("마지막", "최근", "지금")

# "Last week" names a time, which `time_spans` finds.
_TIMES = frozenset({
    "night", "week", "weekend", "month", "year", "spring", "summer", "autumn", "fall", "winter", "monday",
    "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday", "january", "february", "march", "april",
    "may", "june", "july", "august", "september", "october", "november", "december", "nacht", "woche",
    "wochenende", "monat", "jahr", "sommer", "herbst", "frühling", "semaine", "mois", "année", "semana", "mes",
    "año",
})  # fmt: skip
_WORDS = compiled(f"[{WORD}]+")


@dataclass(frozen=True, slots=True)
class Cues:
    """The cues of one question. `order` is -1 if it asks for the first of several, 1 for the last, else 0."""

    order: int = 0
    words: Collection[str] = ()

    def names(self, author: str | None) -> bool:
        """Whether the question contains the author's name, or one word of it."""
        return any(len(each) >= _LEAST_NAME and self._has(each) for each in _words(author or ""))

    def _has(self, name: str) -> bool:
        """Whether the question has the word. A particle may follow a Korean name."""
        return name in self.words or (not name.isascii() and any(each.startswith(name) for each in self.words))


def find_cues(question: str) -> Cues:
    """The cues of `question`. A text without a question mark has none, and a long text has none."""
    if len(question) > MAX_CHARS or _MARKS.isdisjoint(question):
        return Cues()
    words = _words(question)
    plain = {each for each, following in pairwise([*words, ""]) if following not in _TIMES}
    early = not plain.isdisjoint(_FIRST) or any(each in question for each in _KOREAN_FIRST)
    late = not plain.isdisjoint(_LAST) or any(each in question for each in _KOREAN_LAST)
    return Cues(late - early, frozenset(words))


def _words(text: str) -> list[str]:
    return [each[0] for each in _WORDS.finditer(text.casefold())]
