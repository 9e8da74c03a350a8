"""Entities and relations of a sentence, recognised by patterns.

A name is a capitalised word that does not begin the sentence.
"""

from __future__ import annotations

from collections.abc import Iterator

from perdure.text.patterns import STARTS, WORD, compiled

_NAME = rf"[A-Z][{WORD}'\x{{2019}}-]*(?: [A-Z][{WORD}'\x{{2019}}-]*)*"
_NAMED = compiled(rf"{STARTS}(?P<before>[{WORD}]+) (?P<name>{_NAME})")
_NO_NAMES = frozenset({"I", "I'm", "I've", "I'd", "I'll", "OK"})
_KINDS = {"in": "place", "from": "place", "at": "organization", "for": "organization"}
_USER = "user"

_OF_USER = compiled(rf"{STARTS}I (?P<how>live in|live at|work at|work for|work in|study at|come from) (?P<who>{_NAME})")
_OF_USERS_RELATIVE = compiled(
    rf"{STARTS}[Mm]y (?P<how>[{WORD}]+)(?:,| is called| is named| is|'s name is)? (?P<who>{_NAME})"
)
_OF_NAMED = compiled(rf"(?P<whose>{_NAME}) (?P<how>lives in|works at|works for|studies at|comes from) (?P<who>{_NAME})")


def entities(sentence: str) -> list[dict[str, str]]:
    """`{"name", "type"}` for each name in the sentence."""
    relatives = {found["who"] for found in _OF_USERS_RELATIVE.finditer(sentence)}
    kinds = {
        found["name"]: "person" if found["name"] in relatives else _KINDS.get(found["before"].lower(), "thing")
        for found in _NAMED.finditer(sentence)
        if found["name"] not in _NO_NAMES
    }
    return [{"name": name, "type": kind} for name, kind in kinds.items()]


def relations(sentence: str) -> list[dict[str, str]]:
    """`{"subject", "relation", "object"}` for each statement about the user or a named person."""
    return [
        {"subject": subject, "relation": how.replace(" ", "_").lower(), "object": other}
        for subject, how, other in dict.fromkeys(_related(sentence))
        if other not in _NO_NAMES
    ]


def _related(sentence: str) -> Iterator[tuple[str, str, str]]:
    for pattern in (_OF_USER, _OF_USERS_RELATIVE):
        yield from ((_USER, found["how"], found["who"]) for found in pattern.finditer(sentence))
    for found in _OF_NAMED.finditer(sentence):
        yield found["whose"].removeprefix("My "), found["how"], found["who"]
