"""Memories from first-person statements, recognised by patterns: facts, preferences and insights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from perdure.models.offline import entities
from perdure.models.offline.language import is_question, sentences
from perdure.text.patterns import ENDS, SPACE, STARTS, WORD, Pattern, compiled

_SPEAKER = compiled(
    rf"(?:.{{0,59}}?[^{WORD}])??(?P<role>user|human|assistant|agent|tool|system)"
    rf"(?:[^{WORD}:\n][^:\n]{{0,59}})?:[{SPACE}]*(?P<said>.*)",
    ignore_case=True,
)
_SMALL_TALK = compiled(
    rf"{STARTS}(i am|i'm)[{SPACE}]+(?:so |very |just |doing )*"
    r"(fine|good|ok|okay|well|great|sorry|glad|happy|tired|back|here|sure|done|ready|not sure|afraid|wondering)"
    rf"{ENDS}",
    ignore_case=True,
)
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class _Memory:
    content: str
    type: str
    importance: float
    entities: list[dict[str, str]]
    relations: list[dict[str, str]]


_PATTERNS: tuple[tuple[str, float, Pattern], ...] = (
    (
        "insight",
        0.8,
        compiled(
            rf"{STARTS}(we|i)(?:'ve| have)? (?:finally |just )?"
            rf"(decided|agreed|chose|concluded|learned|learnt|realised|realized){ENDS}"
            r"|결정했|배웠|깨달",
            ignore_case=True,
        ),
    ),
    (
        "preference",
        0.6,
        compiled(
            rf"{STARTS}(?:i (?:really |also |always |still |do |would )?"
            r"(?:like|love|prefer|enjoy|hate|dislike|can't stand)"
            rf"|i (?:don't|do not) (?:really )?(?:like|want|enjoy)|my favou?rite){ENDS}|좋아하|좋아해|싫어|선호",
            ignore_case=True,
        ),
    ),
    (
        "fact",
        0.7,
        compiled(
            rf"{STARTS}(?:i am|i'm|i live|i work|i study|i have|i've got|i own|i was born|i grew up|i come from|i speak"
            rf"|(?:my|our) (?:[{WORD}'-]+ ){{1,4}}(?:is|are|was|were|lives?|works?)|call me){ENDS}"
            rf"|(?:^|[{SPACE}])(저는|나는|제|내)[{SPACE}].+(입니다|이에요|예요|이야|야|살아요|살아|삽니다|다닙니다|일해요)",
            ignore_case=True,
        ),
    ),
)


def user_lines(text: str) -> Iterator[str]:
    """The user's lines in `text`; all lines if no line names a speaker."""
    speaker: str | None = None
    for line in text.splitlines():
        named = _SPEAKER.fullmatch(line)
        if named:
            speaker = named["role"].lower()
        if speaker in (None, "user", "human"):
            yield named["said"] if named else line


def extract_memories(texts: Iterable[str]) -> str:
    """A JSON array of `{"content", "type", "importance", "entities", "relations"}` from the user's statements."""
    said = [sentence for text in texts for line in user_lines(text) for sentence in sentences(line)]
    found = [memory for sentence in dict.fromkeys(said) if (memory := _memory(sentence))]
    return json.dumps([asdict(memory) for memory in found], ensure_ascii=False)


def _memory(sentence: str) -> _Memory | None:
    if is_question(sentence) or _SMALL_TALK.search(sentence):
        return None
    for kind, importance, pattern in _PATTERNS:
        if pattern.search(sentence):
            content = sentence[:_LONGEST]
            return _Memory(content, kind, importance, entities.entities(content), entities.relations(content))
    return None
