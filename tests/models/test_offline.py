"""The rules of the offline model. `test_suite.py` tests the behaviour that all models share."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.memory.consolidation import candidates, extraction
from perdure.models.offline import OfflineModel
from perdure.models.protocol import Message, ModelReply, ModelRequest, Role, ToolCall, ToolSchema
from perdure.sessions import summary
from perdure.testing.suites.models import new_call
from perdure.tools.builtin import calculator, clock

TOOLS = (calculator.schema(), clock.schema())
SYSTEM = "You are a helpful assistant."


def say(*lines: str, system: str = SYSTEM, tools: Sequence[ToolSchema] = TOOLS) -> ModelReply:
    """The reply to a conversation. The first of `lines` is the user's, the second the assistant's, and so on."""
    spoken = [Message(Role.ASSISTANT if at % 2 else Role.USER, line) for at, line in enumerate(lines)]
    return OfflineModel().respond(ModelRequest((Message(Role.SYSTEM, system), *spoken), tuple(tools)), new_call())


def _alone(text: str) -> str:
    """The reply to a request that has one message, and no tools."""
    return OfflineModel().respond(ModelRequest((Message(Role.USER, text),)), new_call()).content


def calls(reply: ModelReply) -> list[tuple[str, str]]:
    """The names and arguments of a reply's calls."""
    return [(call.name, call.arguments) for call in reply.tool_calls]


@pytest.mark.parametrize(
    ("line", "expression"),
    [
        ("what is 12*7+5?", "12*7+5"),
        ("What's 2^10", "2^10"),
        ("(3 + 4) * 2", "(3 + 4) * 2"),
        ("Please calculate max(3, 4) * sqrt(16).", "max(3, 4) * sqrt(16)"),
        ("12 \N{MULTIPLICATION SIGN} 3은 얼마야?", "12 \N{MULTIPLICATION SIGN} 3"),
    ],
)
def test_calculates_with_the_calculator(line: str, expression: str) -> None:
    """The model calls the calculator for a calculation, instead of calculating the result itself."""
    assert calls(say(line)) == [("calculator", json.dumps({"expression": expression}, ensure_ascii=False))]


@pytest.mark.parametrize(
    "line", ["I was born on 1990-05-02.", "My flat is number 12.", "I moved 3 times in 2 years.", "9" * 10_000]
)
def test_takes_no_other_number_for_a_calculation(line: str) -> None:
    """A statement with numbers is not a calculation."""
    assert say(line).tool_calls == ()


def test_says_when_it_cannot_calculate() -> None:
    """Without the calculator, the reply says that the tool is missing."""
    assert "no tool named calculator" in say("what is 12*7+5?", tools=()).content


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("What time is it?", "{}"),
        ("what time is it in Paris?", '{"zone": "Europe/Paris"}'),
        ("Tell me the time in Asia/Seoul", '{"zone": "Asia/Seoul"}'),
        ("지금 몇 시야?", "{}"),
    ],
)
def test_tells_the_time_with_the_clock(line: str, arguments: str) -> None:
    """If the user asks for the time, the model calls the tool `clock`."""
    assert calls(say(line)) == [("clock", arguments)]


def test_calls_any_tool_on_request() -> None:
    """The model calls any tool that the user names, so that authors can try their tools without an API key."""
    mine = ToolSchema("send_mail", "Send a mail.", {"type": "object"})
    reply = say('call send_mail with {"to": "ana", "n": {"a": [1]}} and use the tool clock', tools=[mine, *TOOLS])
    assert calls(reply) == [("send_mail", '{"to": "ana", "n": {"a": [1]}}'), ("clock", "{}")]
    assert len({call.id for call in reply.tool_calls}) == 2


def test_passes_broken_arguments_on() -> None:
    """The model passes malformed arguments to the tool unchanged, and the tool refuses them."""
    assert calls(say('call clock with {"zone": ')) == [("clock", '{"zone": ')]


def test_lists_the_tools_instead_of_an_unknown_one() -> None:
    """An unknown tool is not called; the reply lists the tools."""
    reply = say("use the tool weather")
    assert reply.tool_calls == ()
    assert "no tool named weather" in reply.content
    assert "calculator, clock" in reply.content


@given(st.lists(st.tuples(st.sampled_from(["calculator", "clock", "mine"]), st.text(max_size=30)), min_size=1))
def test_always_answers_once_it_has_results(results: list[tuple[str, str]]) -> None:
    """After any tool results, the model replies without another call, so that every turn ends."""
    requested = tuple(ToolCall(f"call_{at}", name, "{}") for at, (name, _) in enumerate(results))
    messages = [Message(Role.USER, "what is 1+1?"), Message(Role.ASSISTANT, "", requested)]
    messages += [Message(Role.TOOL, text, tool_call_id=f"call_{at}") for at, (_, text) in enumerate(results)]
    reply = OfflineModel().respond(ModelRequest(tuple(messages), TOOLS), new_call())
    assert reply.tool_calls == ()
    assert reply.content
    assert all(text in reply.content for _, text in results)


@pytest.mark.parametrize(
    ("statement", "question", "quoted"),
    [
        ("My name is Ana and I live in Lyon.", "What is my name?", "Ana"),
        ("My name is Ana and I live in Lyon.", "where do I live?", "Lyon"),
        ("My sister's cats are called Tom and Zoe. I work on a ferry.", "What is my cat called?", "Tom"),
        ("My sister's cats are called Tom and Zoe. I work on a ferry.", "Where am I working?", "ferry"),
        ("제 이름은 지수예요. 저는 서울에 살아요.", "제 이름이 뭐야?", "지수"),
        ("제 이름은 지수예요. 저는 서울에 살아요.", "내가 어디 살아?", "서울"),
    ],
)
def test_quotes_the_line_that_a_question_is_about(statement: str, question: str, quoted: str) -> None:
    """The model answers a question with the most relevant earlier line, in English and Korean."""
    assert quoted in say(statement, "Noted.", "What is the weather like?", "I do not know.", question).content


def test_the_latest_of_equally_relevant_lines_is_quoted() -> None:
    """The latest of equally relevant messages is quoted."""
    assert "Ben" in say("My name is Ana.", "Noted.", "My name is Ben.", "Noted.", "What is my name?").content


def test_quotes_what_its_context_holds() -> None:
    """The model quotes memories from the system prompt as it quotes earlier messages."""
    reply = say("What car does Bob drive?", system=f"{SYSTEM}\n\n## Memories\n- Bob drives a red Volvo car\n- Ana: tea")
    assert "red Volvo" in reply.content


def test_says_when_it_finds_nothing() -> None:
    """If no earlier message is relevant, the reply says that the model finds nothing."""
    assert "find nothing" in say("My name is Ana.", "Noted.", "Which planet is the largest?").content


@pytest.mark.parametrize(
    "line", ["who are you?", "What are you", "are you a human?", "what can you do?", "너는 누구야?"]
)
def test_says_what_it_is(line: str) -> None:
    """If the user asks what the model is, the reply names its limits and the setting `PERDURE_MODEL`."""
    content = say(line).content
    assert "offline model" in content
    assert "do not understand language" in content
    assert "PERDURE_MODEL" in content


def test_summarises_by_extract() -> None:
    """A summary consists of sentences from the conversation and is shorter than the conversation."""
    lines = ["We talk about cats.", *[f"Filler number {at} is here." for at in range(20)], "Cats purr, and cats sleep."]
    content = say("\n".join(lines), system=summary.PROMPT, tools=()).content
    assert "Cats purr, and cats sleep." in content
    assert len(content) < len("\n".join(lines))
    assert "Dogs bark." in say("Please summarise: Dogs bark.").content


def test_extracts_memories_as_valid_json() -> None:
    """When asked to extract memories, the model replies with a JSON array of memories.

    Small talk, questions and the assistant's lines give no memories.
    """
    conversation = (
        "user: Hi there! I'm fine.\n"
        "assistant: I am a bot and I like you.\n"
        "user (cli): My name is Ana and I live in Lyon. I prefer tea over coffee.\n"
        "user: We decided to use PostgreSQL. Do I like it?\n"
        "저는 서울에 살아요."
    )
    found = json.loads(say(conversation, system=extraction.PROMPT, tools=()).content)
    assert [(each["content"], each["type"]) for each in found] == [
        ("My name is Ana and I live in Lyon.", "fact"),
        ("I prefer tea over coffee.", "preference"),
        ("We decided to use PostgreSQL.", "insight"),
        ("저는 서울에 살아요.", "fact"),
    ]
    assert all(0 <= each["importance"] <= 1 for each in found)
    assert candidates.parse(json.dumps(found))[1] == [], "the JSON is as strict as the prompt asks for"


@pytest.mark.parametrize(("member", "found"), [("title", "Plan my trip to Rome"), ("tags", []), ("follow_ups", [])])
def test_a_front_end_gets_the_users_sentence_as_title(member: str, found: object) -> None:
    """A front end's request for a title gets the first sentence of the user as JSON, one for tags an empty list."""
    asked = (
        f'### Task:\nGenerate something.\n### Output:\nJSON format: {{ "{member}": "your text here" }}\n'
        "### Chat History:\n<chat_history>\nUSER: Plan my trip to Rome. In May.\nASSISTANT: Noted.\n</chat_history>"
    )
    assert json.loads(_alone(asked)) == {member: found}
    assert _alone("### Task: sing").startswith("Noted")


def test_extracts_the_names_and_relations_of_a_statement() -> None:
    """A memory has its names as entities, and where the user lives or works as a relation."""
    [found] = json.loads(say("I live in New York near Nora.", system=extraction.PROMPT, tools=()).content)
    assert [each["name"] for each in found["entities"]] == ["New York", "Nora"]
    assert found["relations"] == [{"subject": "user", "relation": "live_in", "object": "New York"}]


def test_extracts_nothing_from_small_talk() -> None:
    """When asked to extract memories from small talk, the model replies with an empty JSON array."""
    assert say("Hi! I'm good.", system=extraction.PROMPT, tools=()).content == "[]"


@given(st.lists(st.text(max_size=200), min_size=1, max_size=5), st.sampled_from([SYSTEM, extraction.PROMPT]))
def test_always_gives_the_same_reply(lines: list[str], system: str) -> None:
    """The same conversation always gets the same reply, because tests and benchmarks rely on it."""
    reply = say(*lines, system=system)
    assert reply.content or reply.tool_calls
    assert reply == say(*lines, system=system)
