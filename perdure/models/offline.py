"""`offline`: the built-in model, for demonstrations and tests. Deterministic, without network.

Turns call it exactly as they call a language model, so the whole system can be tried, tested and measured offline. It
does not understand language. It follows rules: it calls tools, replies with their results, quotes earlier messages,
writes extractive summaries and extracts memories.
"""

from __future__ import annotations

import functools
import json
import zoneinfo
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, takewhile

from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.models.settings import NAMES
from perdure.text.linear import is_hangul, words
from perdure.text.patterns import ENDS, SPACE, STARTS, WORD, compiled
from perdure.text.titles import title_of
from perdure.text.untrusted import cut
from perdure.text.words import stem, word_list

NAME = "offline"
SELF_DESCRIPTION = (
    "Hello. I am perdure's built-in offline model. I have no network and do not understand language: "
    "I follow rules. I can calculate, tell the time, call tools (say: call NAME with {json}), quote what was said "
    "earlier, and make extracts. For a real model, set PERDURE_MODEL, for instance to openai:NAME, and OPENAI_API_KEY."
)
_REMINDER = "I am the offline model and do not understand language; ask me what I am to see what I can do."

_CHARS_PER_TOKEN = 4
_LONGEST = 400
"""Maximum characters of a quotation, a memory or a calculation, and of a prompt's beginning that may name a task."""

_MOST_CALLS = 20
_SYLLABLES = 2  # Korean words are compared by their first syllables, because endings follow
_PIECE = compiled(rf"[{SPACE}]*[^{SPACE}]+|[{SPACE}]+")
_SENTENCE_END = compiled(rf"[.!?][{SPACE}]|\n|[\x{{3002}}\x{{ff01}}\x{{ff1f}}]")
_SUMMARISE = compiled(rf"(?i){STARTS}(?:summari[sz](?:e|ing)|summary){ENDS}|요약")
_IDENTITY = compiled(
    rf"(?i)^(?:hi|hello|hey)?[{SPACE}!.]*$|(?:너는|넌) 누구"
    rf"|{STARTS}(?:(?:who|what) are you|your name|what can you do|are you an?){ENDS}"
)
_QUESTION = compiled(
    rf"(?i)[?\x{{ff1f}}][\"'\x{{201d}}{SPACE}]*$"
    rf"|^(?:who|what|when|where|why|which|whose|how|do|does|did|is|are|can|tell me){ENDS}"
)
_SIDE_TASK = compiled(r"^### Task:")
_SIDE_FORMAT = compiled(r"JSON format: \{ ?\"([a-z_]+)\"")
_SIDE_HISTORY = compiled(r"(?i)(?:^|\n)USER: ([^\n]+)")
_STOP_WORDS = frozenset(
    word_list("""
    a an and are am at be can could did do does for from had has have he her his how i in is it me my of on or our s she
    so that the their they this to was we were what when where which who why will with would you your
    """)
)
_TOOL = compiled(
    rf"(?i){STARTS}(?:call|use|run|invoke)[{SPACE}]+(?:the[{SPACE}]+)?(?P<before>tool[{SPACE}]+)?"
    rf"(?P<name>[A-Za-z0-9_-]+)(?P<after>[{SPACE}]+tool\b)?(?:[{SPACE}]+with)?"
)
_TIME = compiled(
    rf"(?i){STARTS}(?:(?:what(?:'s| is)|tell me) the (?:current )?(?:time|date)|what (?:time|day|date) is){ENDS}|몇 ?시"
)
_ZONE = compiled(rf"{STARTS}(?:in )?([A-Z][A-Za-z_]+/[A-Za-z_/+-]+)|{STARTS}in ([A-Z][{WORD}]+(?: [A-Z][{WORD}]+)*)")
_FUNCTION = r"(?:sqrt|abs|round|floor|ceil|exp|ln|log|sin|cos|tan|factorial|min|max|gcd|lcm)\("
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\bpi\b)"
_OPERATOR = r"[-+*/%^\x{d7}\x{f7}\x{2212}]"
_EXPRESSION = compiled(rf"(?:{_FUNCTION}|{_NUMBER}|{_OPERATOR}|[(),{SPACE}])+")
_CALCULATION = compiled(rf"(?:{_NUMBER}|\))[{SPACE}]*{_OPERATOR}+[{SPACE}]*(?:{_FUNCTION}|{_NUMBER}|\()|{_FUNCTION}")
_CALCULATE = compiled(rf"(?i)\?|=|{STARTS}(?:what(?:'s| is)|calculate|compute){ENDS}|얼마")

_SPEAKER = compiled(r"(?:\[[^\]]*\] )?(?P<role>user|assistant|tool|system)(?: [^:]*)?: ?(?P<said>.*)")
_KINDS = (
    ("insight", 0.8, compiled(rf"(?i){STARTS}(?:we|i) (?:have )?(?:decided|agreed|chose|learned){ENDS}|결정했")),
    ("preference", 0.6, compiled(rf"(?i){STARTS}(?:i (?:like|love|prefer|enjoy|hate)|my favou?rite){ENDS}|좋아|싫어")),
    (
        "fact",
        0.7,
        compiled(rf"(?i){STARTS}(?:i(?:'m| am) (?:an?|from)|i live|i work|i have|i own|my .* (?:is|are)){ENDS}"),
    ),
    ("fact", 0.7, compiled("(?:저는|나는|제) .*(?:다|요|야)")),
)
_CAPITALISED = rf"[A-Z][{WORD}]+(?: [A-Z][{WORD}]+)*"
_NAMED = compiled(rf"[{WORD}] ({_CAPITALISED})")
_RELATED = compiled(rf"{STARTS}I (live in|work at|work for|come from) ({_CAPITALISED})")


class OfflineModel:
    """A model that follows rules. The same prompt always gets the same reply. It ignores all settings."""

    supported_settings = frozenset(NAMES)

    @property
    def name(self) -> str:
        return NAME

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply from the prompt alone; see `Model.respond`."""
        call.remaining()
        answer = _answer(request)
        text, calls = (answer, ()) if isinstance(answer, str) else ("", answer)
        for piece in _PIECE.findall(text):
            call.delta(piece)
        return ModelReply(
            content=text,
            tool_calls=calls,
            usage=Usage(_tokens(request.messages), _tokens([Message(Role.ASSISTANT, text, calls)])),
            model=NAME,
            stop_reason="tool_calls" if calls else "stop",
        )


def _answer(request: ModelRequest) -> str | tuple[ToolCall, ...]:
    """The reply's text, or the tool calls to make first."""
    messages = request.messages
    task = messages[0].content[:_LONGEST] if messages and messages[0].role is Role.SYSTEM else ""
    if messages and messages[-1].role is Role.TOOL:
        return _from_results(messages)
    if "memory extraction" in task:
        said = next((message.content for message in messages if message.role is Role.USER), "")
        return _memories([said])  # the second message, if any, lists known memories
    if not request.tools and _SUMMARISE.search(task):
        said = _summary(messages)
        wanted = (request.output or {}).get("properties", {})
        return json.dumps({"summary": said}, ensure_ascii=False) if "summary" in wanted else said
    return _to_user(request)


def _to_user(request: ModelRequest) -> str | tuple[ToolCall, ...]:
    """The reply to the newest message of the user, or the calls to make first."""
    messages = request.messages
    alone = messages[0].content if len(messages) == 1 and not request.tools else ""
    if (answer := _side_answer(alone)) is not None:
        return answer
    at = next((at for at in reversed(range(len(messages))) if messages[at].role is Role.USER), None)
    if at is None:
        return SELF_DESCRIPTION
    known = [tool.name for tool in request.tools]
    requested = islice(_requested(messages[at].content, known), _MOST_CALLS)
    calls = tuple(ToolCall(f"call_{number}", *call) for number, call in enumerate(requested, start=1))
    for call in calls:
        if call.name not in known:
            return f"I have no tool named {call.name}. My tools are: {', '.join(known) or 'none'}."
    return calls or _from_text(messages[at].content, messages[:at])


def _side_answer(text: str) -> str | None:
    """The answer to a front end's request about a conversation, in the form of Open WebUI; `None`: it is none.

    The title is the first sentence of the user. Tags, follow-up questions and searches are empty lists.
    """
    wanted = _SIDE_FORMAT.search(text) if _SIDE_TASK.search(text) else None
    if wanted is None:
        return None
    said = _SIDE_HISTORY.search(text.rpartition("<chat_history>")[2])
    titled = title_of(said[1]) if said else ""
    return json.dumps({wanted[1]: titled if wanted[1] == "title" else []}, ensure_ascii=False)


def _requested(text: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """The tools that `text` needs, with their arguments.

    `call weather with {"city": "Lyon"}` needs `weather` if the tool is `known` or the word "tool" stands next to it.
    """
    named = [each for each in _TOOL.finditer(text) if each["name"] in known or each["before"] or each["after"]]
    for each in named:
        arguments = text[each.end() :].lstrip()
        with suppress(ValueError, RecursionError):  # the tool refuses malformed arguments
            arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]] if arguments[:1] == "{" else "{}"
        yield each["name"], arguments
    if not named and (expression := _expression(text)):
        yield "calculator", json.dumps({"expression": expression}, ensure_ascii=False)
    elif not named and _TIME.search(text):
        place = _ZONE.search(text)
        zone = place and (place[1] or _zones_by_city().get(place[2].lower()))
        yield "clock", json.dumps({"zone": zone} if zone else {})


def _expression(text: str) -> str | None:
    """The arithmetic expression that `text` asks to calculate; `None` if there is none."""
    if len(text) > _LONGEST:
        return None
    runs = [run.strip(" ,\t\n") for run in _EXPRESSION.findall(text)]
    found = max((run for run in runs if _CALCULATION.search(run)), key=len, default=None)
    return found if found == text.strip(" .!\t\n") or _CALCULATE.search(text) else None


@functools.cache
def _zones_by_city() -> dict[str, str]:
    zones = sorted(zone for zone in zoneinfo.available_timezones() if "/" in zone and not zone.startswith("Etc/"))
    return {zone.rpartition("/")[2].replace("_", " ").lower(): zone for zone in zones}


def _from_results(messages: Sequence[Message]) -> str:
    """The tools' results as text. Never calls a tool again, to avoid an endless loop."""
    results = [*takewhile(lambda message: message.role is Role.TOOL, reversed(messages))][::-1]
    calls = {call.id: call for message in messages for call in message.tool_calls}
    return " ".join(_result(calls.get(result.tool_call_id or ""), result.content) for result in results)


def _result(call: ToolCall | None, result: str) -> str:
    name = call.name if call else "A tool"
    if call and name == "calculator" and result.replace(".", "").removeprefix("-").isdigit():
        with suppress(ValueError, LookupError, TypeError):
            return f"{json.loads(call.arguments)['expression']} = {result}."
    return f"It is {result}." if name == "clock" and result[:1].isdigit() else f"{name} answered: {result}"


def _from_text(text: str, earlier: Sequence[Message]) -> str:
    """The reply to a message that needs no tool."""
    if _SUMMARISE.search(text[:_LONGEST]):
        given = text.partition(":")[2]
        return _summary([Message(Role.USER, given)] if given.strip() else earlier)
    if _IDENTITY.search(text):
        return SELF_DESCRIPTION
    if _QUESTION.search(text.strip()):
        return _quotation(text, earlier) or f"I find nothing about that in what I can see. {_REMINDER}"
    return f"Noted: “{cut(text.strip(), _LONGEST)}” {_REMINDER}"


def _quotation(question: str, earlier: Sequence[Message]) -> str | None:
    """The earlier line that shares most words with the question; the user's, then the latest of several such lines."""
    wanted, best = _terms(question), (0, False)
    quotation = None
    for message in earlier:
        for line in _sentences(message.content):
            score = len(wanted & _terms(line)), message.role is Role.USER
            if score[0] and score >= best and not _QUESTION.search(line):
                said = {Role.USER: "You said earlier", Role.ASSISTANT: "I said earlier"}
                best = score
                quotation = f"{said.get(message.role, 'I was given this')}: “{cut(line, _LONGEST)}”"
    return quotation


def _terms(text: str) -> frozenset[str]:
    found = (word for word in words(text.lower()) if word not in _STOP_WORDS)
    return frozenset(word[:_SYLLABLES] if is_hangul(word) else stem(word) for word in found)


def _sentences(text: str) -> list[str]:
    parts = _SENTENCE_END.sub(lambda mark: f"{mark[0].strip()}\n", text).split("\n")
    return [part.strip() for part in parts if part.strip()]


def _summary(messages: Iterable[Message]) -> str:
    """An extract: the first and the last sentences."""
    said = [line for each in messages if each.role in (Role.USER, Role.ASSISTANT) for line in _sentences(each.content)]
    return " ".join([*said[:2], *said[2:][-3:]]) or "There is nothing to summarise."


def _memories(texts: Iterable[str]) -> str:
    """A JSON array of memories from the user's statements: the lines after `user:`, and lines before any speaker."""
    speaker, statements = "user", list[str]()
    for line in "\n".join(texts).split("\n"):
        if named := _SPEAKER.fullmatch(line):
            speaker = named["role"]
        if speaker == "user":
            statements += _sentences(named["said"] if named else line)
    return json.dumps(
        [memory for said in dict.fromkeys(statements) if (memory := _memory(said[:_LONGEST]))], ensure_ascii=False
    )


def _memory(sentence: str) -> dict[str, object] | None:
    for kind, importance, pattern in _KINDS if not _QUESTION.search(sentence) else ():
        if pattern.search(sentence):
            entities = [{"name": each[1], "type": "thing"} for each in _NAMED.finditer(sentence)]
            facts = [("user", each[1].replace(" ", "_"), each[2]) for each in _RELATED.finditer(sentence)]
            relations = [dict(zip(("subject", "relation", "object"), fact, strict=True)) for fact in facts]
            memory = {"content": sentence, "type": kind, "importance": importance}
            return memory | {"entities": entities, "relations": relations}
    return None


def _tokens(messages: Iterable[Message]) -> int:
    """An estimate of the tokens: one per four characters."""
    size = sum(len(each.content) + sum(len(call.arguments) for call in each.tool_calls) for each in messages)
    return -(-size // _CHARS_PER_TOKEN)
