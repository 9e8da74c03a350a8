"""The offline model: its rules for replying to a prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from perdure.models.offline import intents
from perdure.models.offline.language import extract, is_question, most_relevant, sentences, terms
from perdure.models.offline.memories import extract_memories
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.text.patterns import compiled

NAME = "offline"

SELF_DESCRIPTION = (
    "I am perdure's built-in offline model. I am deterministic, I have no network and I do not understand language: "
    "I follow rules. I can calculate, tell the time, call tools (say: call NAME with {json}), quote what was said "
    "earlier, and make extracts. For a real model, set PERDURE_MODEL, for instance to openai:NAME, and OPENAI_API_KEY."
)
_REMINDER = "I am the offline model and do not understand language; ask me what I am to see what I can do."

_CHARS_PER_TOKEN = 4
_LONGEST_QUOTE = 400
_NUMERIC = compiled(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
_WEIGHTS = {Role.USER: 1.0, Role.SYSTEM: 0.8, Role.TOOL: 0.5, Role.ASSISTANT: 0.4}


class OfflineModel:
    """A model that follows rules. The same prompt always gets the same reply."""

    @property
    def name(self) -> str:
        """The name as in `PERDURE_MODEL`."""
        return NAME

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply from the prompt alone; see `Model.respond`."""
        call.remaining()
        answer = _answer(request)
        calls = answer if isinstance(answer, tuple) else ()
        text = answer if isinstance(answer, str) else ""
        for piece in _pieces(text):
            call.delta(piece)
        return ModelReply(
            content=text,
            tool_calls=calls,
            usage=Usage(_tokens(request.messages), _tokens([Message(Role.ASSISTANT, text, calls)])),
            model=NAME,
            stop_reason="tool_calls" if calls else "stop",
        )


def _pieces(text: str) -> Iterator[str]:
    """The words of `text`, each with the whitespace before it; trailing whitespace is a piece of its own."""
    blanks = ""
    for is_blank, characters in groupby(text, key=str.isspace):
        run = "".join(characters)
        if is_blank:
            blanks = run
        else:
            yield blanks + run
            blanks = ""
    if blanks:
        yield blanks


def _answer(request: ModelRequest) -> str | tuple[ToolCall, ...]:
    """The reply's text, or the tool calls to make first."""
    messages = request.messages
    system = "\n".join(message.content for message in messages if message.role is Role.SYSTEM)
    if messages and messages[-1].role is Role.TOOL:
        return _from_results(messages)
    if intents.asks_for_memories(system):
        return extract_memories(message.content for message in messages if message.role is Role.USER)
    if not request.tools and intents.asks_for_summary(system):
        return _summary([message for message in messages if message.role is not Role.SYSTEM])
    at = _last_from_user(messages)
    if at is None:
        return SELF_DESCRIPTION
    known = [tool.name for tool in request.tools]
    return _answer_task(messages[at].content, known) or _answer_line(messages[at].content, messages[:at])


def _answer_task(text: str, known: Sequence[str]) -> str | tuple[ToolCall, ...] | None:
    """The reply to a message that needs a tool; `None` for other messages."""
    if requested := tuple(intents.tool_calls(text, known)):
        missing = [call.name for call in requested if call.name not in known]
        return _no_such_tool(missing[0], known) if missing else requested
    if (expression := intents.calculation(text)) is not None:
        if "calculator" not in known:
            return f"I cannot calculate {expression}: I have no calculator among my tools."
        return (_call("calculator", {"expression": expression}),)
    if (zone := intents.time_zone(text)) is not None:
        if "clock" not in known:
            return "I cannot tell the time: I have no clock among my tools."
        return (_call("clock", {"zone": zone} if zone else {}),)
    return None


def _answer_line(text: str, earlier: Sequence[Message]) -> str:
    """The reply to a message that needs no tool."""
    if intents.asks_identity(text) or not text.strip():
        return SELF_DESCRIPTION
    if intents.is_greeting(text):
        return f"Hello. {SELF_DESCRIPTION}"
    if intents.asks_for_summary(text):
        _, _, given = text.partition(":")
        return _summary([Message(Role.USER, given)] if given.strip() else earlier)
    if intents.asks_something(text):
        return _quotation(text, earlier) or f"I find nothing about that in what I can see. {_REMINDER}"
    return f"Noted: “{_cut(text.strip())}” {_REMINDER}"


def _call(name: str, arguments: dict[str, str]) -> ToolCall:
    return ToolCall("call_1", name, json.dumps(arguments, ensure_ascii=False))


def _no_such_tool(name: str, known: Sequence[str]) -> str:
    listed = f"My tools are: {', '.join(known)}." if known else "I have no tools."
    return f"I have no tool named {name}. {listed}"


def _from_results(messages: Sequence[Message]) -> str:
    """The tools' results as text, in the order of the messages. Never calls a tool again, to avoid an endless loop."""
    calls_by_id: dict[str, ToolCall] = {}
    for message in reversed(messages):
        if message.tool_calls:
            calls_by_id = {call.id: call for call in message.tool_calls}
            break
    first = (
        next(at for at in range(len(messages), 0, -1) if messages[at - 1].role is not Role.TOOL) if calls_by_id else 0
    )
    return " ".join(
        _result(calls_by_id.get(message.tool_call_id or ""), message.content) for message in messages[first:]
    )


def _result(call: ToolCall | None, result: str) -> str:
    if call is None:
        return f"A tool answered: {result}"
    if call.name == "calculator" and _NUMERIC.fullmatch(result):
        return f"{_expression(call)} = {result}."
    if call.name == "clock" and result[:1].isdigit():
        return f"It is {result}."
    return f"{call.name} answered: {result}"


def _expression(call: ToolCall) -> str:
    try:
        return str(json.loads(call.arguments)["expression"])
    except (ValueError, LookupError, TypeError):
        return "The result"


def _summary(messages: Sequence[Message]) -> str:
    text = "\n".join(message.content for message in messages if message.role in (Role.USER, Role.ASSISTANT))
    return extract(text) or "There is nothing to summarise."


def _quotation(question: str, earlier: Sequence[Message]) -> str | None:
    """The earlier line most relevant to the question, quoted; `None` if no line shares a word with the question."""
    if (which := intents.referenced_line(question)) is not None:
        user_messages = [message.content for message in earlier if message.role is Role.USER]
        return f"You said earlier: “{_cut(user_messages[which])}”" if user_messages else None
    lines = list(_lines(earlier))
    if not terms(question):
        said = [line for role, line in lines if role is Role.USER]
        return f"You said earlier: “{_cut(said[-1])}”" if said else None
    best = most_relevant(question, [line for _, line in lines], [_WEIGHTS[role] for role, _ in lines])
    if best is None:
        return None
    role, line = lines[best]
    match role:
        case Role.USER:
            return f"You said earlier: “{_cut(line)}”"
        case Role.ASSISTANT:
            return f"I said earlier: “{_cut(line)}”"
        case _:
            return f"I was given this: “{_cut(line)}”"


def _lines(messages: Sequence[Message]) -> Iterator[tuple[Role, str]]:
    """The sentences of `messages` that are not questions, each with the role of its author."""
    for message in messages:
        for line in sentences(message.content):
            if not is_question(line) and not intents.asks_something(line):
                yield message.role, line


def _last_from_user(messages: Sequence[Message]) -> int | None:
    return next((at for at in reversed(range(len(messages))) if messages[at].role is Role.USER), None)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…"


def _tokens(messages: Sequence[Message]) -> int:
    """An estimate of the tokens: one per four characters."""
    size = sum(len(each.content) + sum(len(call.arguments) for call in each.tool_calls) for each in messages)
    return math.ceil(size / _CHARS_PER_TOKEN)
