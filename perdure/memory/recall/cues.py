"""What a question tells about the message that answers it, besides words: its author, and that it is the first or last.

"Where did Ines first live?" asks for a message of Ines, and for the earliest of those that fit. Recognises words for
first and last in English, German, French, Spanish and Korean, and authors in any language. Called by `search`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from perdure.models.embedders import hashing
from perdure.text.patterns import WORD, compiled

MAX_CHARS = 300
"""A longer text is no question, but a message, in which "first" and "now" mean little."""

_MARKS = frozenset("?\uff1f\u061f")
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
_KOREAN_FIRST, _KOREAN_LAST = compiled("처음|첫"), compiled("마지막|최근|지금($|[^까])")

# "Last week" names a time, which `time_spans` finds, and "first name" no order. The noun may stand before the word.
_NOUNS = frozenset({
    "night", "week", "weekend", "month", "year", "spring", "summer", "autumn", "fall", "winter", "monday",
    "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday", "january", "february", "march", "april",
    "may", "june", "july", "august", "september", "october", "november", "december", "name", "names", "aid",
    "floor", "class", "nacht", "woche", "wochenende", "monat", "jahr", "jahres", "frühling", "sommer", "herbst",
    "montag", "dienstag", "mittwoch", "donnerstag", "freitag", "samstag", "sonntag", "januar", "februar", "märz",
    "mai", "juni", "juli", "oktober", "dezember", "nuit", "semaine", "mois", "année", "lundi", "mardi",
    "mercredi", "jeudi", "vendredi", "samedi", "dimanche", "été", "hiver", "noche", "semana", "mes", "año", "lunes",
    "martes", "miércoles", "jueves", "viernes", "sábado", "domingo", "verano", "invierno",
})  # fmt: skip

_NAME_CHARS = 200
_LEAST_NAME = 3
# These are no names in a question, although some people are called May or Will.
_NO_NAMES = frozenset({
    "and", "any", "are", "can", "com", "could", "did", "does", "for", "from", "had", "has", "have", "her", "his", "how",
    "its", "may", "not", "our", "she", "should", "that", "the", "their", "them", "they", "this", "was", "were", "what",
    "when", "where", "which", "who", "whom", "whose", "why", "will", "with", "would", "you", "your",
})  # fmt: skip
_WORDS = compiled(f"[{WORD}]+")
_HANGUL = compiled("^[가-힣]+$")


@dataclass(frozen=True, slots=True)
class Cues:
    """The cues of one question. `order` is -1 if it asks for the first of several, 1 for the last, else 0."""

    order: int = 0
    words: Collection[str] = ()

    def names(self, author: str | None) -> bool:
        """Whether the question contains the author's name, or one word of it."""
        if not author or not self.words:
            return False
        return any(self._has(each) for each in _words(author[:_NAME_CHARS]))

    def _has(self, name: str) -> bool:
        """Whether the question has the word. A particle may follow a Korean name."""
        if not name.isascii() and len(name) > 1 and _HANGUL.search(name):
            return any(each.startswith(name) for each in self.words)
        return len(name) >= _LEAST_NAME and name not in _NO_NAMES and name in self.words


def find_cues(question: str) -> Cues:
    """The cues of `question`. A text without a question mark has none, and a long text has none."""
    if len(question) > MAX_CHARS or _MARKS.isdisjoint(question):
        return Cues()
    words = _words(question)
    beside = zip(["", *words], words, [*words[1:], ""], strict=False)
    plain = {each for before, each, after in beside if _NOUNS.isdisjoint((before, after))}
    if words and words[-1] == "last" and "long" in words:  # "how long does it last"
        plain.discard("last")
    early = not plain.isdisjoint(_FIRST) or _KOREAN_FIRST.search(question) is not None
    late = not plain.isdisjoint(_LAST) or _KOREAN_LAST.search(question) is not None
    return Cues(late - early, frozenset(words))


def names_of(authors: Iterable[str | None]) -> set[str]:
    """The words of the authors' names, as embedders have them, without other words of a question ("May")."""
    found = {word for author in set(authors) for word in hashing.words((author or "")[:_NAME_CHARS])}
    return {word for word in found if len(word) >= _LEAST_NAME and word not in _NO_NAMES}


def _words(text: str) -> list[str]:
    return [each[0] for each in _WORDS.finditer(unicodedata.normalize("NFC", text).casefold())]
