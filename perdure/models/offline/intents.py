"""Recognises the intent of a user's message by patterns.

Examples of intents are a tool call, a calculation, a question for the time, and a request for a summary.
"""

from __future__ import annotations

import functools
import json
import zoneinfo
from collections.abc import Collection, Iterator
from itertools import islice

from perdure.models.offline.language import is_question
from perdure.models.protocol import ToolCall
from perdure.text.patterns import ENDS, SPACE, STARTS, WORD, Match, compiled

_IDENTITY = compiled(
    rf"{STARTS}(?:(?:who|what) are you|what(?:'s| is) your name|(?:which|what) model|what can you do"
    rf"|are you (?:a|an|the) (?:[{WORD}]+ )?(?:human|person|robot|bot|ai|llm|model|machine)){ENDS}"
    r"|넌 누구|너는 누구|누구세요|누구야|뭘 할 수",
    ignore_case=True,
)
_GREETING = compiled(
    rf"(?:hi|hello|hey|good (?:morning|afternoon|evening)|bonjour|hola|안녕[{WORD}]*)[{SPACE}!.,]*", ignore_case=True
)
_SUMMARISE = compiled(rf"{STARTS}(?:summari[sz](?:e|es|ing|er)|give (?:me )?a summary){ENDS}|요약", ignore_case=True)
_EXTRACT = compiled(rf"{STARTS}extract", ignore_case=True)
_MEMORIES = compiled(rf"{STARTS}(?:memor(?:y|ies)|facts){ENDS}", ignore_case=True)
_JSON = compiled(rf"{STARTS}json{ENDS}", ignore_case=True)
_BEGINNING = 400
"""Number of leading characters that are searched for a prompt's task. The text after them may quote users."""

_ASKS_BY_WORD = compiled(
    r"^(?:who|what|when|where|why|which|whose|how|do|does|did|is|are|can|could|will|would|have|has|tell me)"
    rf"{ENDS}|(?:뭐|무엇|어디|누구|언제|몇|얼마|인가요|나요|니까|까요)[^{SPACE}]*$",
    ignore_case=True,
)
_TIME = compiled(
    rf"{STARTS}(?:what(?:'s| is) the (?:current |exact )?(?:time|date)|what time is it"
    r"|what (?:day|date) is (?:it|today)|what(?:'s| is) today'?s date|tell me the (?:time|date))"
    rf"{ENDS}|몇 ?시|며칠|오늘 날짜",
    ignore_case=True,
)
_SPEECH_VERBS = r"(?:ask|asked|say|said|tell|told|write|wrote)"
_UTTERANCE = r"(?:question|message|line|sentence|thing)"
_WHICH_OF_MINE = compiled(
    rf"{STARTS}(?:I (?:just )?{_SPEECH_VERBS}(?: you| to you)? (?:the )?(?P<after>first|last)"
    rf"|my (?:very )?(?P<mine>first|last|previous) {_UTTERANCE}"
    rf"|(?P<before>first|last) {_UTTERANCE} (?:that )?I {_SPEECH_VERBS}){ENDS}",
    ignore_case=True,
)
_ZONE = compiled(rf"{STARTS}([A-Z][A-Za-z_]+/[A-Za-z_/+-]+)")
_PLACE = compiled(rf"{STARTS}in ([A-Z][{WORD}]+(?: [A-Z][{WORD}]+)*)")

_CALCULATE = compiled(
    rf"\?|=|{STARTS}(?:what(?:'s| is)|calculate|compute|evaluate|solve|how much){ENDS}|계산|얼마", ignore_case=True
)
_FUNCTION = r"(?:sqrt|abs|round|floor|ceil|exp|ln|log2|log10|log|sin|cos|tan|factorial|hypot|min|max|gcd|lcm)"
_NUMBER = r"(?:[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|\.[0-9]+|\bpi\b|\btau\b)"
_OPERATOR = r"[-+*/%^\x{d7}\x{f7}\x{2212}]"
_EXPRESSION = compiled(rf"(?:{_FUNCTION}[{SPACE}]*\(|{_NUMBER}|{_OPERATOR}|[(),{SPACE}])+")
_CALCULATION = compiled(
    rf"(?:{_NUMBER}|\))[{SPACE}]*{_OPERATOR}+[{SPACE}]*(?:{_FUNCTION}|{_NUMBER}|\()|{_FUNCTION}[{SPACE}]*\("
)
_LONGEST_CALCULATION = 500
_DATE = compiled("[0-9]{4}-[0-9]{2}-[0-9]{2}")
_IN_WORDS = compiled(
    rf"[{SPACE}]+(plus|minus|times|multiplied by|x|divided by|over|to the power of)[{SPACE}]+", ignore_case=True
)
_SIGNS = {
    "plus": " + ",
    "minus": " - ",
    "times": " * ",
    "multiplied by": " * ",
    "x": " * ",
    "divided by": " / ",
    "over": " / ",
    "to the power of": " ** ",
}

_TOOL = compiled(
    rf"{STARTS}(?:call|use|run|invoke)[{SPACE}]+(?:the[{SPACE}]+)?(?P<said>tool[{SPACE}]+)?"
    rf"[`\"']?(?P<name>[A-Za-z0-9_-]+)[`\"']?"
    rf"(?P<after>[{SPACE}]+tool\b)?(?:[{SPACE}]+(?:with|on))?",
    ignore_case=True,
)
_MOST_CALLS = 20


def asks_identity(text: str) -> bool:
    """Whether `text` asks who or what the model is."""
    return bool(_IDENTITY.search(text))


def is_greeting(text: str) -> bool:
    """Whether `text` is a greeting and nothing else."""
    return _GREETING.fullmatch(text.strip()) is not None


def asks_for_memories(system: str) -> bool:
    """Whether a system prompt asks to extract memories as JSON."""
    beginning = system[:_BEGINNING]
    return bool(_EXTRACT.search(beginning) and _MEMORIES.search(beginning) and _JSON.search(system))


def asks_for_summary(text: str) -> bool:
    """Whether a message, or the beginning of a system prompt, asks for a summary."""
    return bool(_SUMMARISE.search(text[:_BEGINNING]))


def asks_something(text: str) -> bool:
    """Whether `text` is a question, with or without a question mark."""
    return is_question(text) or bool(_ASKS_BY_WORD.search(text.strip()))


def referenced_line(text: str) -> int | None:
    """Return 0 if `text` asks for the first user message, -1 if it asks for the last one, and `None` otherwise."""
    found = _WHICH_OF_MINE.search(text)
    if found is None:
        return None
    which = found["after"] or found["mine"] or found["before"]
    return 0 if which.lower() == "first" else -1


def time_zone(text: str) -> str | None:
    """The time zone that `text` names, or `""` if `text` asks for the time without naming a zone.

    Returns `None` if `text` does not ask for the time.
    """
    if not _TIME.search(text):
        return None
    if named := _ZONE.search(text):
        return str(named[1])
    place = _PLACE.search(text)
    return _zones_by_city().get(place[1].lower(), "") if place else ""


@functools.cache
def _zones_by_city() -> dict[str, str]:
    return {
        zone.rpartition("/")[2].replace("_", " ").lower(): zone
        for zone in sorted(zoneinfo.available_timezones())
        if "/" in zone and not zone.startswith("Etc/")
    }


def calculation(text: str) -> str | None:
    """The arithmetic expression that `text` asks to calculate; `None` if there is none."""
    if len(text) > _LONGEST_CALCULATION:
        return None
    text = _IN_WORDS.sub(functools.partial(_sign, text), text)
    runs = [run.strip(" ,\t\n") for run in _EXPRESSION.findall(_DATE.sub(lambda _: " ", text))]
    found = max((run for run in runs if _CALCULATION.search(run)), key=len, default=None)
    if found is None:
        return None
    whole = found == text.strip(" .!\t\n")
    return found if whole or _CALCULATE.search(text) else None


def _sign(text: str, words: Match) -> str:
    """The operator that `words` name, if they stand between numbers or parentheses; otherwise the words themselves."""
    before, after = text[words.start() - 1 : words.start()], text[words.end() : words.end() + 1]
    between = (before.isdecimal() or before == ")") and (after.isdecimal() or after == "(")
    return _SIGNS[words[1].lower()] if between else words[0]


def tool_calls(text: str, known: Collection[str]) -> Iterator[ToolCall]:
    """The calls that `text` requests, such as `call weather with {"city": "Lyon"}`, 20 at most.

    A name that is not in `known` counts only if the word "tool" stands directly before or after it.
    """
    for number, requested in enumerate(islice(_TOOL.finditer(text), _MOST_CALLS), start=1):
        name = requested["name"]
        if name in known or requested["said"] or requested["after"]:
            yield ToolCall(
                f"call_{number}", name, _arguments(text[requested.end() :].lstrip().removeprefix(":").lstrip())
            )


def _arguments(text: str) -> str:
    """The JSON object at the beginning of `text`; invalid JSON is returned unchanged, so that the tool refuses it."""
    if not text.startswith("{"):
        return "{}"
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end]
