"""What a line asks for, recognised by pattern: a tool, a calculation, the time, a task."""

from __future__ import annotations

import functools
import json
import re
import zoneinfo
from collections.abc import Collection, Iterator

from perdure.models.offline.language import is_question
from perdure.models.protocol import ToolCall

_IDENTITY = re.compile(
    r"\b(who|what) are you\b|\bwhat('s| is) your name\b|\b(which|what) model\b|\bwhat can you do\b"
    r"|\bare you (a|an|the) (\w+ )?(human|person|robot|bot|ai|llm|model|machine)\b"
    r"|넌 누구|너는 누구|누구세요|누구야|뭘 할 수",
    re.IGNORECASE,
)
_GREETING = re.compile(
    r"^(hi|hello|hey|good (morning|afternoon|evening)|bonjour|hola|안녕\w*)\b[\s!.,]*$", re.IGNORECASE
)
_SUMMARISE = re.compile(r"\bsummari[sz](e|es|ing|er)\b|\bgive (me )?a summary\b|요약", re.IGNORECASE)
_EXTRACT = re.compile(r"\bextract", re.IGNORECASE)
_MEMORIES = re.compile(r"\bmemor(y|ies)\b|\bfacts\b", re.IGNORECASE)
_JSON = re.compile(r"\bjson\b", re.IGNORECASE)
_BEGINNING = 400
"""Characters of a system prompt in which its task is named; what follows may be anybody's words."""

_ASKS_BY_WORD = re.compile(
    r"^(who|what|when|where|why|which|whose|how|do|does|did|is|are|can|could|will|would|have|has|tell me)\b"
    r"|(뭐|무엇|어디|누구|언제|몇|얼마|인가요|나요|니까|까요)\S*$",
    re.IGNORECASE,
)
_TIME = re.compile(
    r"\bwhat('s| is) the (current |exact )?(time|date)\b|\bwhat time is it\b|\bwhat (day|date) is (it|today)\b"
    r"|\bwhat('s| is) today'?s date\b|\btell me the (time|date)\b|몇 ?시|며칠|오늘 날짜",
    re.IGNORECASE,
)
_SAYING = r"(?:ask|asked|say|said|tell|told|write|wrote)"
_THING = r"(?:question|message|line|sentence|thing)"
_WHICH_OF_MINE = re.compile(
    rf"\bI (?:just )?{_SAYING}(?: you| to you)? (?:the )?(?P<after>first|last)\b"
    rf"|\bmy (?:very )?(?P<mine>first|last|previous) {_THING}\b"
    rf"|\b(?P<before>first|last) {_THING} (?:that )?I {_SAYING}\b",
    re.IGNORECASE,
)
_ZONE = re.compile(r"\b[A-Z][A-Za-z_]+/[A-Za-z_/+-]+")
_PLACE = re.compile(r"\bin ([A-Z]\w+(?: [A-Z]\w+)*)")

_CALCULATE = re.compile(
    r"\?|=|\bwhat('s| is)\b|\b(calculate|compute|evaluate|solve|how much)\b|계산|얼마", re.IGNORECASE
)
_FUNCTION = r"(?:sqrt|abs|round|floor|ceil|exp|ln|log2|log10|log|sin|cos|tan|factorial|hypot|min|max|gcd|lcm)"
_NUMBER = r"(?:\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+|\bpi\b|\btau\b)"
_OPERATOR = r"(?:\*\*|//|[-+*/%^\u00d7\u00f7\u2212])"
_EXPRESSION = re.compile(rf"(?:{_FUNCTION}\s*\(|{_NUMBER}|{_OPERATOR}|[(),\s])+")
_CALCULATION = re.compile(rf"(?:{_NUMBER}|\))\s*{_OPERATOR}+\s*(?:{_FUNCTION}|{_NUMBER}|\()|{_FUNCTION}\s*\(")
_LONGEST_CALCULATION = 500
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_IN_WORDS = (
    (re.compile(r"(?<=[\d)])\s+plus\s+(?=[\d(])", re.IGNORECASE), " + "),
    (re.compile(r"(?<=[\d)])\s+minus\s+(?=[\d(])", re.IGNORECASE), " - "),
    (re.compile(r"(?<=[\d)])\s+(?:times|multiplied by|x)\s+(?=[\d(])", re.IGNORECASE), " * "),
    (re.compile(r"(?<=[\d)])\s+(?:divided by|over)\s+(?=[\d(])", re.IGNORECASE), " / "),
    (re.compile(r"(?<=[\d)])\s+to the power of\s+(?=[\d(])", re.IGNORECASE), " ** "),
)

_TOOL = re.compile(
    r"\b(?:call|use|run|invoke)\s+(?:the\s+)?(?P<said>tool\s+)?[`\"']?(?P<name>[A-Za-z0-9_-]+)[`\"']?"
    r"(?P<after>\s+tool\b)?(?:\s+(?:with|on))?\s*:?\s*",
    re.IGNORECASE,
)


def asks_who(text: str) -> bool:
    """Whether `text` asks what it is talking to."""
    return bool(_IDENTITY.search(text))


def greets(text: str) -> bool:
    """Whether `text` is a greeting and no more."""
    return bool(_GREETING.match(text.strip()))


def asks_for_memories(system: str) -> bool:
    """Whether a system prompt sets the task of extracting memories as JSON."""
    beginning = system[:_BEGINNING]
    return bool(_EXTRACT.search(beginning) and _MEMORIES.search(beginning) and _JSON.search(system))


def asks_for_summary(text: str) -> bool:
    """Whether a line, or the beginning of a system prompt, asks for a summary."""
    return bool(_SUMMARISE.search(text[:_BEGINNING]))


def asks_something(text: str) -> bool:
    """Whether `text` is a question, with or without its mark."""
    return is_question(text) or bool(_ASKS_BY_WORD.search(text.strip()))


def line_of_mine(text: str) -> int | None:
    """The index of the user's earlier line that `text` asks for: 0 for the first, -1 for the last, else None."""
    found = _WHICH_OF_MINE.search(text)
    if found is None:
        return None
    which = found["after"] or found["mine"] or found["before"]
    return 0 if which.lower() == "first" else -1


def time_zone(text: str) -> str | None:
    """The time zone in which `text` asks for the time: a name, `""` for any; None if it does not ask."""
    if not _TIME.search(text):
        return None
    if named := _ZONE.search(text):
        return named[0]
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
    """The arithmetic expression that `text` wants to have calculated; None if there is none."""
    if len(text) > _LONGEST_CALCULATION:
        return None
    for pattern, symbol in _IN_WORDS:
        text = pattern.sub(symbol, text)
    runs = [run.strip(" ,\t\n") for run in _EXPRESSION.findall(_DATE.sub(" ", text))]
    found = max((run for run in runs if _CALCULATION.search(run)), key=len, default=None)
    if found is None:
        return None
    whole = found == text.strip(" .!\t\n")
    return found if whole or _CALCULATE.search(text) else None


def tool_calls(text: str, known: Collection[str]) -> Iterator[ToolCall]:
    """The calls that `text` spells out, such as `call weather with {"city": "Lyon"}`.

    A name that is not `known` counts only if the text says that it is a tool.
    """
    for number, wish in enumerate(_TOOL.finditer(text), start=1):
        name = wish["name"]
        if name in known or wish["said"] or wish["after"]:
            yield ToolCall(f"call_{number}", name, _arguments(text[wish.end() :]))


def _arguments(text: str) -> str:
    """The JSON object at the beginning of `text`; what is no JSON is passed on as it is, for the tool to refuse."""
    if not text.startswith("{"):
        return "{}"
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end]
